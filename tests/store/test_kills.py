"""Staging killed at any moment: nothing wrong is ever listed, and the next call sends only what is missing."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernel_tools.datasets import stage
from kernel_tools.errors import StoreError
from kernel_tools.stores import multipart
from kernel_tools.stores.begun import begun
from kernel_tools.stores.drafts import DraftStore
from kernel_tools.stores.local import LocalStore
from kernel_tools.stores.s3 import S3Store
from tests.fakes.relay import Relay, relay_to
from tests.store.conftest import put

ROOT = Path(__file__).resolve().parents[2]
PART_BYTES = 5 << 20  # S3's smallest, so that a small data set has several
DATA_BYTES = 6 * PART_BYTES + 77_777
# A part's head, the listings and the completion.
TALK_BYTES = 64 << 10
STAGE = f"""
import sys
from pathlib import Path
from kernel_tools.datasets import stage
from kernel_tools.settings import load_settings
from kernel_tools.stores import multipart
from kernel_tools.stores.drafts import DraftStore
from kernel_tools.stores.s3 import S3Store
multipart.PART_BYTES = {PART_BYTES}
folder, project = map(Path, sys.argv[1:3])
kind = {{"s3": S3Store, "draft": DraftStore}}[sys.argv[3]]
stage(folder, store=kind.from_settings(load_settings(project)), project_dir=project)
"""
# Whether the hash is made first, or as the bytes are sent.
KINDS = {"s3": S3Store, "draft": DraftStore}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "PART_BYTES", PART_BYTES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "coins"
    folder.mkdir()
    (folder / "all.bin").write_bytes(os.urandom(DATA_BYTES))
    (tmp_path / "project").mkdir()
    return folder


@pytest.fixture
def relay(store: LocalStore) -> Iterator[Relay]:
    with relay_to(store.endpoint) as relay:
        yield relay


def through(relay: Relay, store: LocalStore, kind: str = "s3") -> S3Store:
    keys = store.service.secrets
    return KINDS[kind](
        relay.endpoint,
        access_key=keys["access_key"],
        secret_key=keys["secret_key"],
        bucket=store.bucket,
    )


def kill_at(moment_bytes: int, folder: Path, relay: Relay, store: LocalStore, kind: str) -> None:
    """Stage in a process of its own, and kill it when so much has gone up."""
    keys = store.service.secrets
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MINIO_ENDPOINT": relay.endpoint,
        "MINIO_ACCESS_KEY": keys["access_key"].reveal(),
        "MINIO_SECRET_KEY": keys["secret_key"].reveal(),
        "MINIO_BUCKET": store.bucket,
    }
    words = [sys.executable, "-c", STAGE, str(folder), str(folder.parent / "project"), kind]
    with subprocess.Popen(words, env=environment) as child:
        relay.wait_for_bytes(moment_bytes, or_until=lambda: child.poll() is not None, seconds=60)
        child.kill()


def settled_parts(store: LocalStore) -> int:
    """Bytes of the parts that the store has, once it has seen the killed process's lines end."""
    seen, same, deadline = -1, 0, time.monotonic() + 10
    while same < 3 and time.monotonic() < deadline:
        now = sum(size for _, _, size in store.unfinished())
        same = same + 1 if now == seen else 0
        seen = now
    return seen


def check_kills(
    store: LocalStore, folder: Path, relay: Relay, kind: str, *, seed: int, count: int
) -> None:
    chance = random.Random(seed)
    whole = DATA_BYTES
    for number in range(count):
        moment = chance.randrange(whole + TALK_BYTES)
        relay.up_bytes = 0
        kill_at(moment, folder, relay, store, kind)
        listed = list(store.list())
        held = whole if listed else settled_parts(store)

        relay.up_bytes = 0
        mine = through(relay, store, kind)
        reference = stage(folder, store=mine, project_dir=folder.parent / "project")
        for found in listed:  # before the second call: under the right name only the right bytes
            assert found.size_bytes == reference.size_bytes
            assert found.key == reference.object or found.key.startswith("datasets/coins/draft-")
        told = f"seed {seed}, kill {number} at {moment} bytes, {held} held"
        assert relay.up_bytes <= reference.size_bytes - held + PART_BYTES + TALK_BYTES, told
        data = store.read_range(reference.object, offset=0, length=reference.size_bytes + 1)
        assert hashlib.sha256(data).hexdigest() == reference.sha256, told
        info = store.stat(reference.object)
        assert info is not None
        assert info.sha256 == reference.sha256, told
        assert store.unfinished() == (), told
        assert [found.key for found in store.list()] == [reference.object], told
        store.remove(reference.object)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_anywhere_the_next_call_sends_only_what_is_missing(
    store: LocalStore, folder: Path, relay: Relay, kind: str
) -> None:
    check_kills(store, folder, relay, kind, seed=1, count=3)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_fifty_moments(store: LocalStore, folder: Path, relay: Relay, kind: str) -> None:
    check_kills(store, folder, relay, kind, seed=2, count=50)


@pytest.mark.parametrize("changed", [False, True], ids=["same", "changed"])
def test_a_draft_that_never_got_its_name_is_used_where_it_is_right(
    store: LocalStore, folder: Path, relay: Relay, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    class KilledError(BaseException):
        pass

    def killed(*_: object, **__: object) -> bool:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(DraftStore, "_rename", killed)
        with pytest.raises(KilledError):
            stage(folder, store=store, project_dir=folder.parent / "project")
    (draft,) = store.list()
    if changed:  # with the size and the time that it had
        path = folder / "all.bin"
        before = path.stat()
        with path.open("r+b") as file:
            file.write(b"other")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    mine = through(relay, store, "draft")
    reference = stage(folder, store=mine, project_dir=folder.parent / "project")

    assert draft.key.startswith("datasets/coins/draft-")
    assert [found.key for found in store.list()] == [reference.object]
    assert (relay.up_bytes < TALK_BYTES) is not changed
    data = store.read_range(reference.object, offset=0, length=reference.size_bytes)
    assert hashlib.sha256(data).hexdigest() == reference.sha256


def test_a_name_that_was_given_meanwhile_stays_with_its_object(
    store: LocalStore, folder: Path
) -> None:
    first = stage(folder, store=store, project_dir=folder.parent / "project")
    info = store.stat(first.object)
    assert info is not None

    with (folder / "all.bin").open("rb") as source:
        again = store.put_draft(
            source, "datasets/coins/draft-1.tar", size_bytes=DATA_BYTES, metadata={},
            name=lambda _: first.object,
        )  # fmt: skip

    assert again == info
    assert [found.key for found in store.list()] == [first.object]


def test_a_cut_line_leaves_what_was_sent_for_the_next_call(
    store: LocalStore,
    folder: Path,
    relay: Relay,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    send = multipart.Upload._send_part
    sent: list[int] = []

    def cut_at_four(self: multipart.Upload, upload: object, number: int, block: bytes) -> str:
        if number == 4:
            relay.close()
        sent.append(number)
        return send(self, upload, number, block)  # type: ignore[arg-type]

    monkeypatch.setattr(multipart.Upload, "_send_part", cut_at_four)
    with pytest.raises(StoreError, match="does not answer"):
        stage(folder, store=through(relay, store), project_dir=folder.parent / "project")
    assert list(store.list()) == []
    settled_parts(store)
    (left,) = begun(store._client, store.bucket, "")
    sent.clear()
    monkeypatch.setattr(
        multipart.Upload,
        "_send_part",
        lambda self, upload, number, block: (
            sent.append(number) or send(self, upload, number, block)
        ),
    )

    reference = stage(folder, store=store, project_dir=folder.parent / "project")

    assert "Signature" not in caplog.text  # what the HTTP library warned of
    assert set(sent) == set(range(1, 8)) - set(left.parts)
    assert store.stat(reference.object) is not None


def test_two_at_once_end_with_one_object(store: LocalStore, folder: Path) -> None:
    def once(number: int) -> str:
        project = folder.parent / f"project{number}"
        project.mkdir()
        return stage(
            folder, store=LocalStore(store.service, bucket=store.bucket), project_dir=project
        ).object

    store._ensure_bucket()
    with ThreadPoolExecutor(2) as both:
        names = list(both.map(once, range(2)))

    assert names[0] == names[1]
    assert [found.key for found in store.list()] == names[:1]
    data = store.read_range(names[0], offset=0, length=DATA_BYTES + 10_000)
    assert hashlib.sha256(data).hexdigest() in names[0]
    for _, upload_id, _ in store.unfinished():
        store.abort_upload(names[0], upload_id)


def test_parts_of_another_content_are_not_taken_for_ones_own(
    store: LocalStore, folder: Path
) -> None:
    planned = stage(folder, store=store, project_dir=folder.parent / "project", dry_run=True)
    store._ensure_bucket()
    client = store._client
    upload_id = client._create_multipart_upload(
        store.bucket, planned.object, {"x-amz-meta-sha256": planned.sha256}
    )
    client._upload_part(store.bucket, planned.object, bytes(PART_BYTES), None, upload_id, 1)

    reference = stage(folder, store=store, project_dir=folder.parent / "project")

    data = store.read_range(reference.object, offset=0, length=reference.size_bytes)
    assert hashlib.sha256(data).hexdigest() == reference.sha256


def test_what_was_begun_is_listed_under_its_own_name_however_many_there_are(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_tools.stores.begun._LISTED_AT_ONCE", 2)
    names = ["a%20b.tar", "a b.tar", "a+b.tar", "żółw#1.tar", "żółw#1.tar", "100%25.tar", "z.tar"]
    put(store, b"x", "a b.tar")
    uploads = sorted((name, store.begin_upload(name), 0) for name in names)
    assert sorted(store.unfinished()) == uploads
    assert store.unfinished("a+") == tuple(row for row in uploads if row[0] == "a+b.tar")
    for name, upload_id, _ in uploads:
        store.abort_upload(name, upload_id)
    assert store.unfinished() == ()


def test_what_was_begun_and_never_ended_is_listed_and_can_be_removed(store: LocalStore) -> None:
    store._ensure_bucket()
    key = f"datasets/coins/{'0' * 64}.tar"
    client = store._client
    upload_id = client._create_multipart_upload(store.bucket, key, {})
    client._upload_part(store.bucket, key, bytes(PART_BYTES), None, upload_id, 1)

    assert store.unfinished() == ((key, upload_id, PART_BYTES),)
    assert store.unfinished("runs/") == ()
    store.abort_upload(key, upload_id)
    store.abort_upload(key, upload_id)
    assert store.unfinished() == ()
