"""What every object store promises, asked of a real one."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

import pytest

from kernel_tools.errors import (
    ConfigurationError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StoreAuthError,
    StoreError,
    StoreUnreachableError,
)
from kernel_tools.settings import Secret, Settings
from kernel_tools.stores.base import ObjectStore
from kernel_tools.stores.local import LocalStore
from kernel_tools.stores.s3 import PART_BYTES, S3Store, part_bytes

ODD_NAMES = ["a b/c d.tar", "plus+and#and%.tar", "żółw/日本.tar", "tilde~and&=?.tar"]


def put(store: ObjectStore, data: bytes, key: str, **metadata: str) -> None:
    store.put(io.BytesIO(data), key, size_bytes=len(data), metadata=metadata)


def fetch(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as reply:
        return reply.read()


def test_it_is_an_object_store(store: LocalStore) -> None:
    assert isinstance(store, ObjectStore)


def test_an_object_comes_back_as_it_went_with_its_facts(store: LocalStore, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    digest = hashlib.sha256(data).hexdigest()

    info = store.put(
        io.BytesIO(data), "x/y.bin", size_bytes=len(data), metadata={"sha256": digest, "top": "y"}
    )

    assert (info.key, info.size_bytes, info.sha256) == ("x/y.bin", len(data), digest)
    assert info.metadata == {"sha256": digest, "top": "y"}
    assert info.modified is not None
    assert abs((datetime.now(timezone.utc) - info.modified).total_seconds()) < 60
    assert store.get("x/y.bin", tmp_path / "out" / "y.bin") == info
    assert (tmp_path / "out" / "y.bin").read_bytes() == data


def test_a_file_of_several_parts_comes_back_and_is_counted(
    store: LocalStore, tmp_path: Path
) -> None:
    data = os.urandom(2 * PART_BYTES + 12_345)
    (tmp_path / "big").write_bytes(data)
    seen: list[tuple[int, int]] = []

    store.put(tmp_path / "big", "big", on_progress=lambda done, total: seen.append((done, total)))

    assert hashlib.sha256(fetch(store.presign_get("big", expires_seconds=60))).digest() == (
        hashlib.sha256(data).digest()
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(data), len(data))
    assert len({done for done, _ in seen}) >= 3


def test_an_empty_object_is_an_object(store: LocalStore, tmp_path: Path) -> None:
    put(store, b"", "empty")

    assert store.get("empty", tmp_path / "empty").size_bytes == 0
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.parametrize("key", ODD_NAMES)
def test_odd_names_work_everywhere(store: LocalStore, tmp_path: Path, key: str) -> None:
    put(store, key.encode(), key)

    assert [info.key for info in store.list()] == [key]
    assert fetch(store.presign_get(key, expires_seconds=60)) == key.encode()
    store.remove(key)
    assert store.stat(key) is None


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b", "a\nb", "x" * 1025]
)
def test_names_that_something_on_the_way_would_rewrite_are_refused_up_front(
    store: LocalStore, key: str
) -> None:
    for call in (
        lambda: put(store, b"x", key),
        lambda: store.stat(key),
        lambda: store.presign_get(key, expires_seconds=60),
    ):
        with pytest.raises(InvalidArgumentError, match="object name"):
            call()


def test_list_goes_below_a_prefix_in_order(store: LocalStore) -> None:
    for key in ("b/2", "a/1", "b/1", "bc"):
        put(store, b"x", key)

    assert [info.key for info in store.list("b/")] == ["b/1", "b/2"]
    assert [info.key for info in store.list()] == ["a/1", "b/1", "b/2", "bc"]


def test_remove_is_silent_where_there_is_nothing(store: LocalStore) -> None:
    put(store, b"x", "a")
    store.remove("a")
    store.remove("a")

    assert store.stat("a") is None


def test_a_range_is_what_was_asked_for(store: LocalStore) -> None:
    put(store, bytes(range(256)), "r")

    assert store.read_range("r", offset=10, length=5) == bytes(range(10, 15))
    assert store.read_range("r", offset=250, length=100) == bytes(range(250, 256))


def test_a_presigned_get_honours_ranges(store: LocalStore) -> None:
    put(store, bytes(range(256)), "r")
    url = store.presign_get("r", expires_seconds=60)

    assert fetch(url, Range="bytes=200-209") == bytes(range(200, 210))


def test_a_presigned_put_uploads_even_into_a_bucket_that_was_not_there(store: LocalStore) -> None:
    url = store.presign_put("p", expires_seconds=60)
    with urllib.request.urlopen(urllib.request.Request(url, b"hello", method="PUT")) as reply:
        assert reply.status == 200

    info = store.stat("p")
    assert info is not None
    assert info.size_bytes == 5


def test_a_presigned_url_is_refused_after_its_end(store: LocalStore) -> None:
    put(store, b"x", "p")
    url = store.presign_get("p", expires_seconds=1)
    deadline = time.monotonic() + 10

    status = 200
    while status == 200 and time.monotonic() < deadline:
        try:
            fetch(url)
        except urllib.error.HTTPError as error:
            error.close()
            status = error.code

    assert status == 403


def test_a_presigned_url_is_for_that_object_and_that_method_only(store: LocalStore) -> None:
    put(store, b"x", "p")
    put(store, b"y", "q")
    url = store.presign_get("p", expires_seconds=60)

    for request in (
        urllib.request.Request(url.replace("/p?", "/q?")),
        urllib.request.Request(url, b"z", method="PUT"),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        caught.value.close()
        assert caught.value.code == 403


@pytest.mark.parametrize("seconds", [0, -5, 7 * 24 * 3600 + 1])
def test_a_life_that_no_store_accepts_is_refused(store: LocalStore, seconds: int) -> None:
    with pytest.raises(InvalidArgumentError, match="7 days"):
        store.presign_get("p", expires_seconds=seconds)


def test_a_missing_object_is_none_to_stat_and_an_error_to_read(
    store: LocalStore, tmp_path: Path
) -> None:
    assert store.stat("nowhere") is None  # nor is the bucket there
    put(store, b"x", "somewhere")
    assert store.stat("nowhere") is None
    with pytest.raises(ObjectNotFoundError, match="no object nowhere in bucket"):
        store.get("nowhere", tmp_path / "out")
    with pytest.raises(ObjectNotFoundError):
        store.read_range("nowhere", offset=0, length=1)
    assert list(tmp_path.iterdir()) == []


class Failing(io.RawIOBase):
    """Fails once `good` bytes have been read."""

    def __init__(self, good: int) -> None:
        self.left = good

    def read(self, size: int = -1) -> bytes:
        if self.left <= 0:
            raise OSError("the cable is out")
        self.left -= size
        return bytes(size)


@pytest.mark.parametrize("good", [0, PART_BYTES, 2 * PART_BYTES])
def test_an_upload_whose_source_fails_leaves_no_object(store: LocalStore, good: int) -> None:
    with pytest.raises(OSError, match="the cable is out"):
        store.put(Failing(good), "half", size_bytes=3 * PART_BYTES)

    assert store.stat("half") is None
    assert list(store.list()) == []


def test_an_upload_whose_source_fails_leaves_the_object_of_before(store: LocalStore) -> None:
    put(store, b"before", "kept")
    with pytest.raises(OSError, match="the cable is out"):
        store.put(Failing(PART_BYTES), "kept", size_bytes=3 * PART_BYTES)

    assert store.read_range("kept", offset=0, length=10) == b"before"


def test_ctrl_c_during_an_upload_leaves_no_object_and_no_parts(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    third_part = threading.Event()

    class Endless(io.RawIOBase):
        parts = 0

        def read(self, size: int = -1) -> bytes:
            self.parts += 1
            if self.parts == 3:
                third_part.set()
            return bytes(size)

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if self.name == "kernel_tools-upload" and third_part.wait(0.02):
                third_part.clear()
                raise KeyboardInterrupt
            super().join(timeout)

    put(store, b"x", "makes-the-bucket")
    monkeypatch.setattr("kernel_tools.stores.s3.threading.Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(Endless(), "half", size_bytes=400 * PART_BYTES)

    assert [info.key for info in store.list()] == ["makes-the-bucket"]
    assert store._client._list_multipart_uploads(store.bucket).uploads == []


def test_what_does_not_match_its_own_hash_is_not_handed_out(
    store: LocalStore, tmp_path: Path
) -> None:
    put(store, b"tampered", "t", sha256=hashlib.sha256(b"original").hexdigest())

    with pytest.raises(StoreError, match="damaged"):
        store.get("t", tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def other_keys(store: LocalStore, **changed: Secret) -> S3Store:
    keys = {name: store.service.secrets[name] for name in ("access_key", "secret_key")}
    return S3Store(store.endpoint, bucket=store.bucket, **(keys | changed))


def test_a_wrong_access_key_says_so(store: LocalStore) -> None:
    with pytest.raises(StoreAuthError, match="does not know the access key.*MINIO_ACCESS_KEY"):
        put(other_keys(store, access_key=Secret("SOMEBODYELSE")), b"x", "a")


def test_a_wrong_secret_key_says_so_and_shows_nothing(store: LocalStore) -> None:
    with pytest.raises(StoreAuthError, match="refused the signature") as caught:
        put(other_keys(store, secret_key=Secret("this-is-not-the-secret")), b"x", "a")
    assert "this-is-not" not in str(caught.value)
    assert store.service.secrets["access_key"].reveal() not in str(caught.value)


def test_a_store_that_does_not_answer_says_where(tmp_path: Path) -> None:
    with socket.socket() as bound:  # bound, never listening: refuses
        bound.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{bound.getsockname()[1]}"
        store = S3Store(endpoint, access_key=Secret("someone"), secret_key=Secret("something"))
        with pytest.raises(StoreUnreachableError, match=f"{endpoint} does not answer .*refused"):
            store.stat("x")


def test_what_is_no_s3_store_says_so(store: LocalStore) -> None:
    import http.server

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<html>a console</html>"
            self.send_response(404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            page = S3Store(
                f"http://127.0.0.1:{server.server_port}",
                access_key=Secret("someone"),
                secret_key=Secret("something"),
            )
            with pytest.raises(StoreUnreachableError, match="does not speak S3"):
                list(page.list())
        finally:
            server.shutdown()
            thread.join()


def settings(**dotenv: str) -> Settings:
    return Settings({}, dotenv, Path("/project"))


def test_settings_open_the_store_and_a_public_endpoint_signs(store: LocalStore) -> None:
    put(store, b"x", "a")
    opened = S3Store.from_settings(
        settings(
            MINIO_ENDPOINT=store.endpoint,
            MINIO_ACCESS_KEY=store.service.secrets["access_key"].reveal(),
            MINIO_SECRET_KEY=store.service.secrets["secret_key"].reveal(),
            MINIO_BUCKET=store.bucket,
            MINIO_PUBLIC_ENDPOINT="https://store.example.org:8443",
        )
    )

    assert opened.stat("a") is not None
    url = opened.presign_get("a", expires_seconds=3600)
    assert url.startswith(f"https://store.example.org:8443/{store.bucket}/a?")
    assert "X-Amz-SignedHeaders=host" in url


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ("https://minio.example.org:9000/", "https://minio.example.org:9000"),
        ("minio.example.org:9000", "https://minio.example.org:9000"),
        ("127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("localhost:9000", "http://localhost:9000"),
    ],
)
def test_an_endpoint_is_taken_with_or_without_its_scheme(given: str, endpoint: str) -> None:
    assert S3Store(given, access_key=Secret("a"), secret_key=Secret("b")).endpoint == endpoint


@pytest.mark.parametrize(
    "given", ["ftp://x", "https://x/path", "https://user:pw@x", "https://", ""]
)
def test_a_malformed_endpoint_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="MINIO_ENDPOINT") as caught:
        S3Store(given, access_key=Secret("a"), secret_key=Secret("b"))
    assert "pw" not in str(caught.value)


def test_a_store_without_an_endpoint_or_a_key_names_what_to_set() -> None:
    with pytest.raises(ConfigurationError, match="MINIO_ENDPOINT"):
        S3Store.from_settings(settings())
    with pytest.raises(ConfigurationError, match="MINIO_SECRET_KEY"):
        S3Store.from_settings(settings(MINIO_ENDPOINT="http://x:1", MINIO_ACCESS_KEY="abc"))


def test_parts_grow_so_that_ten_thousand_do() -> None:
    assert part_bytes(0) == 8 << 20
    assert part_bytes(10_000 * (8 << 20)) == 8 << 20
    assert part_bytes(10_000 * (8 << 20) + 1) == 9 << 20
    assert part_bytes(5 << 40) * 10_000 >= 5 << 40
