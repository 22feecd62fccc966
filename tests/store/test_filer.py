"""Parts that go to the filer behind the gateway: the same objects, and the gateway where it takes none."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_tools.errors import StoreError
from kernel_tools.settings import Secret
from kernel_tools.stores import filer as filer_module
from kernel_tools.stores.base import SHA256_KEY
from kernel_tools.stores.begun import Unfinished, begun
from kernel_tools.stores.filer import Filer
from kernel_tools.stores.local import FILER_SOCKET, PROBE_BUCKET, LocalStore
from kernel_tools.stores.multipart import PART_BYTES

linux = pytest.mark.skipif(sys.platform != "linux", reason="goes by /proc")
Put = Callable[[Filer, str, Unfinished, int, bytes], "str | None"]


@pytest.fixture(scope="module")
def data() -> bytes:
    """Three whole parts and a piece."""
    return os.urandom(3 * PART_BYTES + 12_345)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that the filer took."""
    numbers: list[int] = []
    put_part: Put = Filer.put_part

    def put(self: Filer, bucket: str, upload: Unfinished, number: int, block: bytes) -> str | None:
        etag = put_part(self, bucket, upload, number, block)
        if etag is not None and bucket != PROBE_BUCKET:
            numbers.append(number)
        return etag

    monkeypatch.setattr(Filer, "put_part", put)
    return numbers


def filer_of(store: LocalStore, signing_key: Secret | None = None) -> Filer:
    return Filer(
        store.service.folder / FILER_SOCKET, signing_key or store.service.secrets["filer_key"]
    )


def upload(store: LocalStore, data: bytes) -> None:
    """Upload, and see that it is there as any other object is."""
    store.put(io.BytesIO(data), "big", size_bytes=len(data), metadata={"who": "me"})

    info = store.stat("big")
    assert info is not None
    assert (info.size_bytes, info.metadata) == (len(data), {"who": "me"})
    assert store.read_range("big", offset=0, length=len(data)) == data
    assert begun(store._client, store.bucket, "") == ()


def test_every_part_goes_to_the_filer_and_s3_has_the_object(
    store: LocalStore, data: bytes, taken: list[int]
) -> None:
    upload(store, data)

    assert sorted(taken) == [1, 2, 3, 4]
    md5s = b"".join(
        hashlib.md5(data[start : start + PART_BYTES]).digest()
        for start in range(0, len(data), PART_BYTES)
    )
    etag = store._client.stat_object(store.bucket, "big").etag
    assert etag.strip('"') == f"{hashlib.md5(md5s).hexdigest()}-4"  # as S3 counts it


def test_names_that_a_url_would_write_otherwise_are_those_of_the_upload(
    store: LocalStore, data: bytes, taken: list[int]
) -> None:
    store.put(io.BytesIO(data), "a b/c+d#e%20f/ż", size_bytes=len(data))

    assert sorted(taken) == [1, 2, 3, 4]
    assert [info.key for info in store.list()] == ["a b/c+d#e%20f/ż"]


def test_what_the_filer_refuses_goes_through_the_gateway(
    store: LocalStore, data: bytes, taken: list[int]
) -> None:
    """As of a store that was started anew, with other keys, since this process learnt of it."""
    secrets = store.service.secrets
    assert isinstance(secrets, dict)
    right = secrets["filer_key"]
    store._filer_takes_parts = True
    secrets["filer_key"] = Secret("another key")
    try:
        upload(store, data)
    finally:
        secrets["filer_key"] = right

    assert taken == []


def test_a_filer_that_falls_silent_midway_costs_nothing(
    store: LocalStore, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_part: Put = Filer.put_part
    monkeypatch.setattr(
        Filer,
        "put_part",
        lambda self, bucket, upload, number, block: (
            put_part(self, bucket, upload, number, block)
            if bucket == PROBE_BUCKET or number in {1, 3}
            else None
        ),
    )

    upload(store, data)


def uploads(store: LocalStore) -> list[str]:
    """What the filer has of uploads in parts, whether or not S3 lists it."""
    text = (store.service.folder / "security.toml").read_text()
    found = re.search(r'\[jwt\.filer_signing\.read\]\nkey = "(.+?)"', text)
    assert found is not None
    line = filer_module._Line(store.service.folder / FILER_SOCKET)
    try:
        token = filer_of(store, Secret(found[1]))._token()
        headers = {"Authorization": f"BEARER {token}", "Accept": "application/json"}
        line.request("GET", f"/buckets/{store.bucket}/.uploads/", headers=headers)
        answer = line.getresponse()
        body = answer.read()
    finally:
        line.close()
    if answer.status == 404:
        return []
    assert answer.status == 200, body
    return [entry["FullPath"] for entry in json.loads(body)["Entries"] or ()]


def test_parts_that_come_after_their_upload_ended_elsewhere_do_not_stay(
    store: LocalStore, data: bytes, taken: list[int]
) -> None:
    seen: list[list[str]] = []

    class Aborted(io.BytesIO):
        """A source during which another process gives the upload up."""

        def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
            if self.tell() >= 2 * PART_BYTES and not seen:
                for key, upload_id, _ in store.unfinished():
                    seen.append(uploads(store))
                    store.abort_upload(key, upload_id)
            return super().readinto(buffer)

    store.put(io.BytesIO(b"x"), "makes-the-bucket", size_bytes=1)
    digest = hashlib.sha256(data).hexdigest()
    with pytest.raises(StoreError):
        store.put(
            Aborted(data), f"big-{digest}", size_bytes=len(data), metadata={SHA256_KEY: digest}
        )

    assert [len(found) for found in seen] == [1]
    assert 4 in taken
    assert uploads(store) == []


def test_without_its_socket_nothing_is_asked_of_it(
    store: LocalStore, data: bytes, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_tools.stores.local.FILER_SOCKET", "gone.sock")
    upload(store, data)

    assert taken == []
    assert store._filer_takes_parts is False


@linux
def test_a_state_folder_far_down_is_no_hindrance(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / ("x" * 120)).symlink_to(store.service.folder, target_is_directory=True)
    store.put(io.BytesIO(b"x"), "makes-the-bucket", size_bytes=1)
    far = Filer(tmp_path / ("x" * 120) / FILER_SOCKET, store.service.secrets["filer_key"])

    assert far.takes_parts(store._client, store.bucket)


def test_a_store_of_an_earlier_version_has_no_key_for_it(
    store: LocalStore, data: bytes, taken: list[int]
) -> None:
    secrets = store.service.secrets
    assert isinstance(secrets, dict)
    right = secrets.pop("filer_key")
    try:
        upload(store, data)
    finally:
        secrets["filer_key"] = right

    assert taken == []


def test_it_finds_out_that_parts_lie_elsewhere_now_and_leaves_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(filer_module._Line):
        def request(self, method: str, url: str, *rest: object) -> None:  # type: ignore[override]
            super().request(method, url.replace("/.uploads/", "/.elsewhere/"), *rest)  # type: ignore[arg-type]

    store.put(io.BytesIO(b"x"), "makes-the-bucket", size_bytes=1)
    assert filer_of(store).takes_parts(store._client, store.bucket)
    monkeypatch.setattr(filer_module, "_Line", Elsewhere)

    assert not filer_of(store).takes_parts(store._client, store.bucket)
    assert begun(store._client, store.bucket, "") == ()
    keys = {info.key for info in store.list()}
    assert not {key for key in keys if key.startswith("trial-")}
    for key in keys:
        store.remove(key)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE"])
@pytest.mark.parametrize("token", ["none", "forged", "expired", "unsigned"])
def test_the_socket_refuses_whoever_has_no_token(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, method: str, token: str
) -> None:
    store.put(io.BytesIO(b"the secret content"), "secret", size_bytes=18)
    headers = {}
    if token == "forged":
        headers["Authorization"] = f"BEARER {filer_of(store, Secret('another key'))._token()}"
    if token == "expired":
        monkeypatch.setattr(filer_module, "TOKEN_SECONDS", -5)
        headers["Authorization"] = f"BEARER {filer_of(store)._token()}"
    if token == "unsigned":
        headers["Authorization"] = "BEARER " + filer_of(store)._token().rpartition(".")[0] + "."

    for path in ("/", "/buckets/", f"/buckets/{store.bucket}/secret", "/etc/iam/identity.json"):
        line = filer_module._Line(store.service.folder / FILER_SOCKET)
        try:
            line.request(method, path, headers=headers)
            answer = line.getresponse()
            body = answer.read()
        finally:
            line.close()
        assert answer.status == 401, (path, body)
        assert b"secret content" not in body
    assert store.read_range("secret", offset=0, length=99) == b"the secret content"


def test_the_token_ends_soon_and_says_nothing_of_the_key(store: LocalStore) -> None:
    key = store.service.secrets["filer_key"]
    token = filer_of(store)._token()

    assert key.reveal() not in token
    line = filer_module._Line(store.service.folder / FILER_SOCKET)
    try:
        # One that writes does not read.
        line.request("GET", "/buckets/", headers={"Authorization": f"BEARER {token}"})
        answer: http.client.HTTPResponse = line.getresponse()
        answer.read()
    finally:
        line.close()
    assert answer.status == 401
    assert 0 < filer_module.TOKEN_SECONDS <= 60


def test_a_line_that_is_cut_or_answers_nonsense_is_a_refusal() -> None:
    import socket
    import threading

    for said in (
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 201 Created\r\nContent-MD5: ???\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\n\r\n",
    ):
        with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as server:
            path = Path(short) / "s"
            server.bind(str(path))
            server.listen()

            def answer(server: socket.socket = server, said: bytes = said) -> None:
                line, _ = server.accept()
                with line:
                    line.settimeout(5)
                    line.recv(1 << 16)
                    line.sendall(said)

            thread = threading.Thread(target=answer)
            thread.start()
            begun_at = time.monotonic()
            assert Filer(path, Secret("k")).put_part("b", Unfinished("k", "i"), 1, b"x") is None
            assert time.monotonic() - begun_at < 5
            thread.join()
