"""What an S3 store adds to the conformance suite: signatures, links that end, parts, its settings."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kernel_tools.errors import ConfigurationError, StoreAuthError, StoreUnreachableError
from kernel_tools.settings import Secret, Settings
from kernel_tools.stores.local import LocalStore
from kernel_tools.stores.multipart import PART_BYTES, part_bytes
from kernel_tools.stores.s3 import S3Store
from tests.store.conftest import fetch, put


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


def test_ctrl_c_during_an_upload_leaves_no_object_no_parts_and_no_thread(
    store: LocalStore,
) -> None:
    class Endless(io.RawIOBase):
        parts = 0

        def readinto(self, buffer: bytearray) -> int:
            self.parts += 1
            if self.parts == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return len(buffer)

    put(store, b"x", "makes-the-bucket")
    with pytest.raises(KeyboardInterrupt):
        store.put(Endless(), "half", size_bytes=400 * PART_BYTES)

    names = [thread.name for thread in threading.enumerate()]
    assert not [
        name for name in names if name.startswith(("kernel_tools-upload", "kernel_tools-part"))
    ]
    assert [info.key for info in store.list()] == ["makes-the-bucket"]
    assert store._client._list_multipart_uploads(store.bucket).uploads == []


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
    assert part_bytes(0) == PART_BYTES
    assert part_bytes(10_000 * PART_BYTES) == PART_BYTES
    assert part_bytes(10_000 * (8 << 20) + 1) == 9 << 20
    assert part_bytes(5 << 40) * 10_000 >= 5 << 40
