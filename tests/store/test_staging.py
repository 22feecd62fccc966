"""Staging against a real store: once, verified, by reference."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import tarfile
import urllib.request
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_tools.agent.job import Job
from kernel_tools.agent.stage import stage_inputs
from kernel_tools.connecting.connections import Connections
from kernel_tools.datasets import DatasetRegistry, input_of, inputs_for, stage
from kernel_tools.datasets.archive import FolderArchive
from kernel_tools.errors import InvalidArgumentError, ObjectNotFoundError, StagingError
from kernel_tools.project import Project
from kernel_tools.results.fetch import Fetched
from kernel_tools.runs.registry import RunRecord
from kernel_tools.session import Session
from kernel_tools.storage import Storage
from kernel_tools.stores.hub import HubStore
from kernel_tools.stores.local import LocalStore
from kernel_tools.stores.multipart import PART_BYTES
from tests.fakes import hub_server


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "coins"
    for split in ("train", "val"):
        for number in range(3):
            image = folder / "images" / split / f"{number:04}.png"
            label = folder / "labels" / split / f"{number:04}.txt"
            for path in (image, label):
                path.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(os.urandom(5_000 + number))
            label.write_text("0 0.5 0.5 0.1 0.1\n")
    (folder / "data.yaml").write_text("names: [coin]\n")
    return folder


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that are sent, in order."""
    sent: list[str] = []
    put = LocalStore.put

    def counting(self: LocalStore, source: Any, key: str, **options: Any) -> Any:
        if not isinstance(source, Path):
            sent.append(key)
        return put(self, source, key, **options)

    put_draft = LocalStore.put_draft

    def counting_drafts(self: LocalStore, *arguments: Any, **options: Any) -> Any:
        sent.append("draft")
        info = put_draft(self, *arguments, **options)
        sent[-1] = info.key
        return info

    monkeypatch.setattr(LocalStore, "put", counting)
    monkeypatch.setattr(LocalStore, "put_draft", counting_drafts)
    return sent


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read()


def test_a_folder_becomes_a_tar_named_by_its_hash_and_a_reference(
    store: LocalStore, project: Path, folder: Path
) -> None:
    reference = stage(folder, store=store, project_dir=project)

    info = store.stat(reference.object)
    assert info is not None
    assert reference.object == f"datasets/coins/{reference.sha256}.tar"
    assert (info.size_bytes, info.sha256) == (reference.size_bytes, reference.sha256)
    assert reference.expected_root == "data/coins"
    assert reference.format == "tar"
    assert reference.file_count == 13
    assert reference.content_bytes == sum(
        p.stat().st_size for p in folder.rglob("*") if p.is_file()
    )
    assert (reference.store, reference.bucket) == ("local", store.bucket)
    assert reference.source_path == str(folder)


def test_the_reference_leads_to_the_bytes(store: LocalStore, project: Path, folder: Path) -> None:
    reference = stage(folder, store=store, project_dir=project)

    described, urls = inputs_for(reference, store=store, expires_seconds=60)

    assert described == input_of(reference)
    assert described == {
        "kind": "dataset",
        "name": "coins",
        "object": reference.object,
        "size_bytes": reference.size_bytes,
        "sha256": reference.sha256,
        "dest": "data/coins",
        "format": "tar",
        "file_count": 13,
        "content_bytes": reference.content_bytes,
    }
    archive = fetch(urls[reference.object])
    assert hashlib.sha256(archive).hexdigest() == reference.sha256
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile("coins/images/val/0002.png")
        assert member is not None
        assert member.read() == (folder / "images/val/0002.png").read_bytes()


def test_the_same_content_is_never_sent_twice(
    store: LocalStore, project: Path, folder: Path, tmp_path: Path, uploads: list[str]
) -> None:
    first = stage(folder, store=store, project_dir=project)
    copy = tmp_path / "elsewhere" / "coins"
    shutil.copytree(folder, copy)
    os.utime(copy / "data.yaml", (1, 1))
    (copy / "data.yaml").chmod(0o600)

    second = stage(copy, store=store, project_dir=project)

    assert uploads == [first.object]
    assert second.sha256 == first.sha256

    (copy / "data.yaml").write_text("names: [penny]\n")
    third = stage(copy, store=store, project_dir=project)
    assert uploads == [first.object, third.object]


def test_progress_grows_to_its_end(store: LocalStore, project: Path, folder: Path) -> None:
    for passes in (1, 2):  # hashed as it is sent; hashed, and found
        seen: list[tuple[int, int]] = []
        reference = stage(
            folder,
            store=store,
            project_dir=project,
            on_progress=lambda *step, seen=seen: seen.append(step),
        )
        done = [step[0] for step in seen]
        assert done == sorted(done)
        assert {total for _, total in seen} == {passes * reference.size_bytes}
        assert done[-1] == passes * reference.size_bytes


def test_the_project_remembers_it_by_name(store: LocalStore, project: Path, folder: Path) -> None:
    reference = stage(folder, store=store, project_dir=project, name="pennies")

    registry = DatasetRegistry(project)
    assert registry.names() == ("pennies",)
    assert registry.resolve("pennies") == reference
    assert registry.resolve(f"s3://{store.bucket}/{reference.object}") == reference
    text = registry.path.read_text()
    for secret in store.service.secrets.values():
        assert secret.reveal() not in text
    assert "X-Amz" not in text


def test_a_dry_run_says_all_and_sends_nothing(
    store: LocalStore, project: Path, folder: Path, uploads: list[str]
) -> None:
    planned = stage(folder, store=store, project_dir=project, dry_run=True)
    assert uploads == []
    assert DatasetRegistry(project).names() == ()

    assert stage(folder, store=store, project_dir=project) == planned
    assert stage(folder, store=None, project_dir=project, dry_run=True).sha256 == planned.sha256


@pytest.mark.parametrize("known", [False, True], ids=["first", "another is there"])
def test_content_that_changes_on_its_way_leaves_no_object(
    store: LocalStore,
    project: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
) -> None:
    if known:  # then it is hashed, and read once more to be sent
        stage(folder, store=store, project_dir=project)
        (folder / "data.yaml").write_text("names: [euro]\n")
    there = [found.key for found in store.list()]
    registered = DatasetRegistry(project).names()
    reading = FolderArchive.open
    passes: list[int] = []

    def changing(self: FolderArchive) -> Any:
        passes.append(1)
        if len(passes) == (2 if known else 1):
            (folder / "data.yaml").write_text("names: [cent]\n")  # the same size
        return reading(self)

    monkeypatch.setattr(FolderArchive, "open", changing)
    with pytest.raises(StagingError, match="changed while it was being uploaded"):
        stage(folder, store=store, project_dir=project)

    assert [found.key for found in store.list()] == there
    assert store.unfinished() == ()
    assert DatasetRegistry(project).names() == registered


@pytest.mark.parametrize("name", [".env", "certificate.pem", "id_ed25519", "kaggle.json"])
def test_credentials_stay_here_unless_forced(
    store: LocalStore, project: Path, folder: Path, name: str
) -> None:
    (folder / "images" / name).write_text("MINIO_SECRET_KEY=x")
    with pytest.raises(StagingError, match=name):
        stage(folder, store=store, project_dir=project)
    assert list(store.list()) == []

    assert stage(folder, store=store, project_dir=project, force=True).file_count == 14


def test_a_hash_that_is_not_the_given_one_is_refused(
    store: LocalStore, project: Path, folder: Path
) -> None:
    with pytest.raises(StagingError, match="not the one given"):
        stage(folder, store=store, project_dir=project, sha256="0" * 64)
    with pytest.raises(InvalidArgumentError, match="64 hexadecimal"):
        stage(folder, store=store, project_dir=project, sha256="abc")


def pack(folder: Path, path: Path, *, prefix: str = "coins") -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(p for p in folder.rglob("*") if p.is_file()):
                archive.write(file, f"{prefix}/{file.relative_to(folder)}".lstrip("/"))
    else:
        mode = "w" if path.name.endswith(".tar") else "w:gz"
        with tarfile.open(path, mode) as tar:
            for file in sorted(folder.iterdir()):
                tar.add(file, f"{prefix}/{file.name}".lstrip("/"))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("v2-release.tar", "tar"),
        ("v2-release.tar.gz", "tar.gz"),
        ("v2.tgz", "tar.gz"),
        ("v2.zip", "zip"),
    ],
)
def test_an_archive_goes_as_it_is_and_its_own_top_folder_counts(
    store: LocalStore, project: Path, folder: Path, tmp_path: Path, name: str, kind: str
) -> None:
    archive = pack(folder, tmp_path / name)

    reference = stage(archive, store=store, project_dir=project)

    assert reference.format == kind
    assert reference.sha256 == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert reference.object == f"datasets/{reference.name}/{reference.sha256}.{kind}"
    assert reference.expected_root == "data/coins"  # not data/v2-release
    assert reference.file_count == 13
    assert stage(archive, store=store, project_dir=project) == reference


@pytest.mark.parametrize(
    ("prefix", "root"), [("data/vehicles3", "data/vehicles3"), ("x/y", "data/x")]
)
def test_an_archive_with_the_whole_path_keeps_it(
    store: LocalStore, project: Path, folder: Path, tmp_path: Path, prefix: str, root: str
) -> None:
    archive = pack(folder, tmp_path / "a.tar", prefix=prefix)

    assert stage(archive, store=store, project_dir=project).expected_root == root


def test_an_archive_of_several_tops_needs_its_root_named(
    store: LocalStore, project: Path, folder: Path, tmp_path: Path
) -> None:
    archive = pack(folder, tmp_path / "a.zip", prefix="")

    with pytest.raises(StagingError, match="data.yaml, images, labels.*--expected-root"):
        stage(archive, store=store, project_dir=project)
    reference = stage(archive, store=store, project_dir=project, expected_root="data/coins")
    assert reference.expected_root == "data/coins"


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.zip"])
def test_an_archive_that_is_none_is_refused(
    store: LocalStore, project: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(os.urandom(20_000))

    with pytest.raises(StagingError, match="no sound|is no tar archive"):
        stage(tmp_path / name, store=store, project_dir=project)
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ["o.tar", "o.tar.gz", "o.zip"])
def test_an_object_that_is_there_is_taken_with_its_hash_and_root(
    store: LocalStore, project: Path, folder: Path, tmp_path: Path, name: str
) -> None:
    archive = pack(folder, tmp_path / name)
    store.put(archive, f"there/{name}")  # by someone else: no metadata
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()

    with pytest.raises(StagingError, match="--sha256"):
        stage(store=store, project_dir=project, object_name=f"there/{name}")
    reference = stage(store=store, project_dir=project, object_name=f"there/{name}", sha256=digest)

    assert reference.name == "o"
    assert reference.sha256 == digest
    assert reference.size_bytes == archive.stat().st_size
    assert reference.expected_root == "data/coins"
    assert reference.source_path is None


def test_an_object_of_ours_needs_no_hash(store: LocalStore, project: Path, folder: Path) -> None:
    ours = stage(folder, store=store, project_dir=project)

    again = stage(store=store, project_dir=project, object_name=ours.object, name="again")

    assert (again.sha256, again.file_count, again.expected_root) == (ours.sha256, 13, "data/coins")
    with pytest.raises(StagingError, match="by its metadata"):
        stage(store=store, project_dir=project, object_name=ours.object, sha256="1" * 64)


def test_a_bucket_or_an_object_that_is_not_there_is_named(store: LocalStore, project: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=f"no bucket {store.bucket} at .*MINIO_BUCKET"):
        stage(store=store, project_dir=project, object_name="lost.tar", sha256="0" * 64)
    store.put(io.BytesIO(b"x"), "there", size_bytes=1)
    with pytest.raises(ObjectNotFoundError, match="no object lost.tar in bucket"):
        stage(store=store, project_dir=project, object_name="lost.tar", sha256="0" * 64)


def test_another_object_of_that_name_is_not_overwritten(
    store: LocalStore, project: Path, folder: Path
) -> None:
    store.put(io.BytesIO(b"precious"), "mine.tar", size_bytes=8)

    with pytest.raises(StagingError, match="Another object"):
        stage(folder, store=store, project_dir=project, object_name="mine.tar")
    assert store.read_range("mine.tar", offset=0, length=8) == b"precious"

    reference = stage(folder, store=store, project_dir=project, object_name="mine.tar", force=True)
    info = store.stat("mine.tar")
    assert info is not None
    assert info.sha256 == reference.sha256


def test_a_data_set_that_is_gone_or_elsewhere_is_found_out_before_the_launch(
    store: LocalStore, project: Path, folder: Path
) -> None:
    reference = stage(folder, store=store, project_dir=project)

    with pytest.raises(StagingError, match="no store is connected"):
        inputs_for(reference, store=None)
    with pytest.raises(StagingError, match="was staged to local/"):
        inputs_for(reference, store=LocalStore(store.service, bucket="other"))
    store.put(io.BytesIO(b"x"), reference.object, size_bytes=1)
    with pytest.raises(ObjectNotFoundError, match="was replaced"):
        inputs_for(reference, store=store)
    other = b"y" * reference.size_bytes
    facts = {"sha256": hashlib.sha256(other).hexdigest()}
    store.put(io.BytesIO(other), reference.object, size_bytes=len(other), metadata=facts)
    with pytest.raises(ObjectNotFoundError, match="was replaced since it was staged"):
        inputs_for(reference, store=store)
    store.remove(reference.object)
    with pytest.raises(ObjectNotFoundError, match="is no longer"):
        inputs_for(reference, store=store)


def test_the_list_of_the_project_is_plain_json(
    store: LocalStore, project: Path, folder: Path
) -> None:
    stage(folder, store=store, project_dir=project)

    document = json.loads((project / ".kernel_tools" / "datasets.json").read_text())
    assert document["schema_version"] == 1
    assert set(document["datasets"]["coins"]) == {
        "name", "object", "size_bytes", "sha256", "expected_root", "format", "file_count",
        "content_bytes", "store", "bucket", "source_path",
    }  # fmt: skip
    assert os.listdir(project / ".kernel_tools") == ["datasets.json"]


def test_a_data_set_repository_takes_one_tar_a_data_set(
    hub: hub_server.Hub, hub_store: HubStore, project: Path, folder: Path
) -> None:
    first = stage(folder, store=hub_store, project_dir=project)

    assert (first.object, first.place) == ("coins.tar", "hf://org/data/coins.tar")
    assert hub.repositories["org/data"].private
    described, urls = inputs_for(first, store=hub_store)
    assert hashlib.sha256(fetch(urls["coins.tar"])).hexdigest() == described["sha256"]
    asked = len(hub.asked)
    assert stage(folder, store=hub_store, project_dir=project) == first
    assert not [one for one in hub.asked[asked:] if one.startswith("PUT ")]
    assert DatasetRegistry(project).resolve("hf://org/data/coins.tar") == first

    (folder / "data.yaml").write_text("names: [penny]\n")
    second = stage(folder, store=hub_store, project_dir=project)
    assert second.object == "coins.tar"
    with pytest.raises(ObjectNotFoundError, match="was replaced since it was staged"):
        inputs_for(first, store=hub_store)
    inputs_for(second, store=hub_store)


def test_a_file_of_a_repository_is_a_reference_at_once(
    hub: hub_server.Hub,
    hub_store: HubStore,
    project: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archive = pack(folder, tmp_path / "coins.tar")
    hub.repositories["org/data"] = hub_server.Repository(private=True)
    hub.repositories["org/data"].files["sets/coins.tar"] = hub_server.File(
        archive.read_bytes(), lfs=True
    )
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    hub.blobs[digest] = archive.read_bytes()
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)

    (reference,) = Storage(Project(project), Connections()).references(
        ["hf://org/data/sets/coins.tar"]
    )

    assert (reference.name, reference.sha256, reference.expected_root) == (
        "coins", digest, "data/coins",
    )  # fmt: skip
    assert hub_server.TOKEN not in DatasetRegistry(project).path.read_text()


def test_a_configuration_says_object_hash_and_root(
    store: LocalStore, project: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(folder, tmp_path / "release-2.tar.gz", prefix="vehicles")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    (project / "configs").mkdir()
    data = {"root": "data/vehicles3", "classes": ["car"], "archive_object": "sets/release-2.tar.gz"}
    config = {"model": {"backbone_name": "hgnetv2_n"}, "data": data | {"archive_sha256": digest}}
    (project / "configs" / "v.yaml").write_text(json.dumps(config))
    session = Session(project)
    monkeypatch.setattr(session._storage, "store", lambda _on: store)

    sent = session.stage_dataset(archive, config="v")
    found = session.stage_dataset(config="v")

    for reference in (sent, found):
        assert (reference.name, reference.object, reference.sha256, reference.expected_root) == (
            "vehicles3", "sets/release-2.tar.gz", digest, "data/vehicles3",
        )  # fmt: skip
    archive.write_bytes(archive.read_bytes() + b"\0" * 512)
    with pytest.raises(StagingError, match="not the one given"):
        session.stage_dataset(archive, config="v")


def test_what_a_live_run_needs_stays_and_the_rest_may_go(
    store: LocalStore, project: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(project)
    monkeypatch.setattr(session._storage, "store", lambda _on: store)
    used = session.stage_dataset(folder)
    (folder / "data.yaml").write_text("names: [penny]\n")
    idle = session.stage_dataset(folder, name="pennies")
    begun = datetime.now(timezone.utc).isoformat()
    for run_id, state in (("run-1", None), ("run-2", "completed")):
        record = RunRecord(
            run_id, run_id, begun, "gone", "there", str(project), inputs=(used.object,)
        )
        session.registry.save(record)
        if state is not None:
            status = session.registry.folder(run_id) / "status.json"
            status.write_text(json.dumps({"state": state}))
        for name in ("a/weights/last.pt", "manifest.json"):
            store.put(io.BytesIO(b"x" * 1000), f"runs/{run_id}/{name}", size_bytes=1000)

    everything = session.store_objects()
    assert {row.key: (row.owner, row.needed_by) for row in everything.rows} == {
        used.object: ("coins", "run-1"),
        idle.object: ("pennies", None),
        "runs/run-1/a/weights/last.pt": ("run-1", "run-1"),
        "runs/run-1/manifest.json": ("run-1", "run-1"),
        "runs/run-2/a/weights/last.pt": ("run-2", None),
        "runs/run-2/manifest.json": ("run-2", None),
    }
    assert everything.by_owner()["run-2"] == 2000
    for name in ("coins", "run-1", "runs/"):
        with pytest.raises(StagingError, match="needed by the run run-1.*nothing was removed"):
            session.remove_objects([name], dry_run=False)
    with pytest.raises(ObjectNotFoundError, match="Nothing in .* is called nobody"):
        session.remove_objects(["nobody"])
    assert not session.remove_objects(["run-2", "pennies"]).removed
    assert session.store_objects().rows == everything.rows
    gone = session.remove_objects(["run-2", "pennies"], dry_run=False)

    assert gone.removed
    assert len(gone.rows) == 3
    assert {row.owner for row in session.store_objects().rows} == {"coins", "run-1"}


def test_weights_go_into_a_private_model_repository(
    hub: hub_server.Hub, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "best.pt").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    fetched = Fetched(tmp_path / "best.pt", 7, digest)
    run = SimpleNamespace(
        id="run-1", fetch=lambda pattern: {"weights/best.pt": (fetched,)}[pattern]
    )
    session = Session(project)
    monkeypatch.setattr(session, "run", lambda _run_id, on: run)
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)

    assert session.push_weights(to="hf://org/coins") == "hf://org/coins/best.pt"

    assert hub.repositories["org/coins"].private
    assert hub.repositories["org/coins"].files["best.pt"].data == b"weights"
    assert "POST /api/models/org/coins/commit/main" in hub.asked
    with pytest.raises(InvalidArgumentError, match="no place on the hub"):
        session.push_weights(to="org/coins")


def test_no_key_token_or_signature_stands_in_a_log_or_a_file(
    store: LocalStore,
    hub_store: HubStore,
    project: Path,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (folder / "large.bin").write_bytes(os.urandom(PART_BYTES))  # more than one part
    caplog.set_level(logging.DEBUG)
    for where in (store, hub_store):
        reference = stage(folder, store=where, project_dir=project, name=where.name)
        inputs_for(reference, store=where)
        where.get(reference.object, folder.parent / "back")

    told = caplog.text + DatasetRegistry(project).path.read_text() + repr(store) + repr(hub_store)
    secrets = [secret.reveal() for secret in store.service.secrets.values()]
    for secret in (*secrets, hub_server.TOKEN, "X-Amz-Signature", "Bearer"):
        assert secret not in told


@pytest.mark.parametrize("kind", ["s3", "hub"])
def test_the_remote_unpacks_what_was_staged(
    store: LocalStore, hub_store: HubStore, project: Path, folder: Path, tmp_path: Path, kind: str
) -> None:
    where = {"s3": store, "hub": hub_store}[kind]
    described, urls = inputs_for(stage(folder, store=where, project_dir=project), store=where)
    run_dir = tmp_path / "there" / "runs" / "one"
    (run_dir / "work").mkdir(parents=True)
    job = Job.from_json(
        {
            "run_id": "one", "name": "one", "argv": ["x.py"], "inputs": [described],
            "created_at": "2026-01-01T00:00:00+00:00",
        }
    )  # fmt: skip

    stage_inputs(
        str(run_dir), job, urls=urls, log=lambda _: None, progress=lambda _: None,
        should_stop=lambda: False, stall_seconds=None,
    )  # fmt: skip

    for file in folder.rglob("*"):
        if file.is_file():
            there = run_dir / "work" / "data" / "coins" / file.relative_to(folder)
            assert there.read_bytes() == file.read_bytes()
