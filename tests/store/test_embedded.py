"""The embedded store: on loopback, closed without its keys, quick to come and go, and durable."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import signal
import socket
import ssl
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kernel_tools.errors import MissingDependencyError
from kernel_tools.services import keeper
from kernel_tools.stores import local
from kernel_tools.stores.local import GRPC_OFFSET, LISTENERS, LocalStore
from kernel_tools.stores.multipart import PART_BYTES
from tests.services.conftest import is_gone, wait_for
from tests.services.listening import listeners

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def ports_of(store: LocalStore) -> dict[str, int]:
    known = keeper.read_json(store.service.folder / "identity.json")
    assert known is not None
    return known["ports"]


def closed_ports(store: LocalStore) -> list[int]:
    """Every port but that of S3 itself."""
    ports = ports_of(store)
    http_ports = [port for name, port in ports.items() if name != "s3"]
    return http_ports + [port + GRPC_OFFSET for port in ports.values()]


@linux
def test_it_listens_on_loopback_only_and_on_the_expected_ports_only(embedded: LocalStore) -> None:
    found = listeners(embedded.service.service_pid)

    assert {address for address, _ in found} == {"127.0.0.1"}
    ports = ports_of(embedded).values()
    assert [port for _, port in found] == sorted([*ports, *(p + GRPC_OFFSET for p in ports)])
    assert listeners(embedded.service.keeper_pid) == []


@linux
def test_a_scan_from_another_address_finds_no_open_port(embedded: LocalStore) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        with contextlib.suppress(OSError):
            line.connect(("192.0.2.1", 9))  # sends nothing; says by which address one would go out
        own = line.getsockname()[0]
    found = []
    for address in {"127.0.0.2", own} - {"0.0.0.0", "127.0.0.1"}:  # noqa: S104
        for port in (*ports_of(embedded).values(), *closed_ports(embedded)):
            with socket.socket() as line:
                line.settimeout(2)
                if line.connect_ex((address, port)) == 0:
                    found.append((address, port))
    assert found == []


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/{bucket}",
        "/{bucket}/secret",
        "/{bucket}/?list-type=2",
        "/buckets",
        "/?Action=ListUsers",
    ],
)
def test_s3_refuses_a_request_without_keys(store: LocalStore, tmp_path: Path, path: str) -> None:
    (tmp_path / "f").write_bytes(b"the secret content")
    store.put(tmp_path / "f", "secret")
    host = store.endpoint.removeprefix("http://")

    for method in ("GET", "PUT", "DELETE", "POST"):
        connection = http.client.HTTPConnection(host, timeout=5)
        connection.request(method, path.format(bucket=store.bucket), body=b"x")
        reply = connection.getresponse()
        body = reply.read()
        connection.close()
        # 400: a POST to the root is read as a call of IAM or STS, and ours has no sense there.
        assert reply.status in ({400, 403, 405} if method == "POST" else {403, 405}), (method, path)
        assert b"the secret content" not in body
    assert store.read_range("secret", offset=0, length=99) == b"the secret content"


@pytest.mark.parametrize(
    "action",
    [
        "ListUsers",
        "CreateUser&UserName=x",
        "CreateAccessKey&UserName=admin",
        "GetCallerIdentity",
        "GetSessionToken",
    ],
)
def test_identity_calls_are_refused_without_keys(embedded: LocalStore, action: str) -> None:
    connection = http.client.HTTPConnection(embedded.endpoint.removeprefix("http://"), timeout=5)
    connection.request(
        "POST", "/", f"Action={action}&Version=2010-05-08",
        {"Content-Type": "application/x-www-form-urlencoded"},
    )  # fmt: skip
    reply = connection.getresponse()
    body = reply.read()
    connection.close()

    assert reply.status in {400, 403}, body
    assert b"AccessKeyId" not in body


def test_s3_says_no_more_than_that_it_lives_without_keys(embedded: LocalStore) -> None:
    for path in ("/healthz", "/status"):
        with urllib.request.urlopen(embedded.endpoint + path, timeout=5) as reply:
            assert reply.read() == b""


def test_every_other_port_refuses_plain_http_whatever_is_asked(embedded: LocalStore) -> None:
    paths = [
        "/",
        "/status",
        "/dir/status",
        "/dir/assign",
        "/cluster/status",
        "/buckets/",
        "/metrics",
        "/healthz",
    ]
    for port in closed_ports(embedded):
        for path in paths:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", path)
                reply = connection.getresponse()
                answer = (reply.status, reply.read())
            except (http.client.HTTPException, OSError):
                answer = None  # a gRPC port: the line is cut
            finally:
                connection.close()
            assert answer in (
                None,
                (400, b"Client sent an HTTP request to an HTTPS server.\n"),
            ), (port, path)


def test_every_other_port_refuses_plain_http2(embedded: LocalStore) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    for port in closed_ports(embedded):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
            line.sendall(preface)
            try:
                answer = line.recv(1000)
            except ConnectionError:
                answer = b""
        # Nothing, or a TLS alert (record type 21), or the HTTP/1 sentence; never an HTTP/2 frame.
        assert answer == b"" or answer[0] == 21 or answer.startswith(b"HTTP/1.0 400"), port


def test_every_other_port_refuses_tls_without_the_stores_own_certificate(
    embedded: LocalStore, tmp_path: Path
) -> None:
    from kernel_tools.stores.certificate import self_signed

    certificate, key = self_signed("kernel_tools embedded store")
    (tmp_path / "forged.crt").write_text(certificate)
    (tmp_path / "forged.key").write_text(key)
    for forged in (False, True):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])
        if forged:
            context.load_cert_chain(tmp_path / "forged.crt", tmp_path / "forged.key")
        for port in closed_ports(embedded):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                converse(port, context)


def converse(port: int, context: ssl.SSLContext) -> bytes:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as line,
        context.wrap_socket(line) as wrapped,
    ):
        wrapped.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return wrapped.recv(1000)  # with TLS 1.3 the refusal of our certificate comes here


def test_the_stores_own_certificate_would_be_let_in(embedded: LocalStore) -> None:
    """Else the test above would pass against a port that refuses everyone."""
    folder = embedded.service.folder
    context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    connection = http.client.HTTPSConnection(
        "127.0.0.1", ports_of(embedded)["master"], context=context, timeout=5
    )
    connection.request("GET", "/cluster/status")
    reply = connection.getresponse()
    assert (reply.status, b"IsLeader" in reply.read()) == (200, True)
    connection.close()


@linux
def test_unix_sockets_are_for_their_owner_only(embedded: LocalStore) -> None:
    pid = embedded.service.service_pid
    paths = [
        line.split()[-1]
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
        if "seaweedfs-" in line or line.endswith(("filer.sock", "s3.sock"))
    ]
    own = {
        p
        for p in paths
        if any(f"-{port + GRPC_OFFSET}." in p for port in ports_of(embedded).values())
    }
    assert len(own) == len(LISTENERS)
    for path in [
        *map(Path, own),
        embedded.service.folder / "filer.sock",
        embedded.service.folder / "s3.sock",
    ]:
        assert path.stat().st_mode & 0o077 == 0, path


@linux
def test_the_keys_are_on_no_command_line_and_in_no_log(embedded: LocalStore) -> None:
    embedded.put(io.BytesIO(bytes(PART_BYTES + 1)), "in parts", size_bytes=PART_BYTES + 1)
    embedded.remove("in parts")
    for name in ("secret_key", "filer_key"):
        secret = embedded.service.secrets[name].reveal().encode()
        for pid in (embedded.service.keeper_pid, embedded.service.service_pid):
            assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert secret not in (embedded.service.folder / "service.log").read_bytes()
        assert secret.decode() not in repr(embedded)
    for path in embedded.service.folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


@linux
def test_it_reports_nothing_to_anyone(embedded: LocalStore) -> None:
    command = Path(f"/proc/{embedded.service.service_pid}/cmdline").read_bytes().split(b"\0")
    assert b"-master.telemetry=false" in command
    environ = Path(f"/proc/{embedded.service.service_pid}/environ").read_bytes().split(b"\0")
    names = {item.partition(b"=")[0] for item in environ if item}
    assert names == {
        b"PATH",
        b"HOME",
        b"TMPDIR",
        b"GODEBUG",
        b"AWS_ACCESS_KEY_ID",
        b"AWS_SECRET_ACCESS_KEY",
    }


def test_it_starts_and_stops_within_seconds_and_loses_nothing(tmp_path: Path) -> None:
    begun = time.monotonic()
    store = LocalStore.ensure(state_dir=tmp_path, idle_seconds=60)
    assert time.monotonic() - begun < 20  # 1.8 s on an idle machine
    (tmp_path / "f").write_bytes(os.urandom(3 << 20))
    store.put(tmp_path / "f", "kept")
    url = store.presign_get("kept", expires_seconds=600)
    sockets = [Path(p) for p in keeper_leftovers(store)]
    assert all(path.exists() for path in sockets)

    begun = time.monotonic()
    store.stop()
    assert time.monotonic() - begun < 5
    assert is_gone(store.service.service_pid)
    assert not any(path.exists() for path in sockets)

    again = LocalStore.ensure(state_dir=tmp_path, idle_seconds=60)
    try:
        assert again.service.service_pid != store.service.service_pid
        with urllib.request.urlopen(url, timeout=10) as reply:  # the same keys, the same port
            assert reply.read() == (tmp_path / "f").read_bytes()
    finally:
        again.stop()


def keeper_leftovers(store: LocalStore) -> list[str]:
    record = keeper.read_json(store.service.state_dir / "services" / "store.json")
    assert record is not None
    return record["leftovers"]


def test_a_kill_loses_no_object_and_leaves_no_socket(tmp_path: Path) -> None:
    store = LocalStore.ensure(state_dir=tmp_path, idle_seconds=60)
    (tmp_path / "f").write_bytes(os.urandom(20 << 20))
    store.put(tmp_path / "f", "kept")
    sockets = [Path(p) for p in keeper_leftovers(store)]

    os.kill(store.service.service_pid, signal.SIGKILL)
    assert wait_for(lambda: is_gone(store.service.keeper_pid))
    assert not any(path.exists() for path in sockets)

    again = LocalStore.ensure(state_dir=tmp_path, idle_seconds=60)
    try:
        again.get("kept", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == (tmp_path / "f").read_bytes()
    finally:
        again.stop()


def test_a_port_taken_in_the_meantime_is_replaced(tmp_path: Path) -> None:
    keys, ports = local._identity(tmp_path / "identity.json")
    assert local._identity(tmp_path / "identity.json") == (keys, ports)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports["filer"] + GRPC_OFFSET))
        same_keys, others = local._identity(tmp_path / "identity.json")

    assert same_keys == keys
    assert ports["filer"] not in others.values()


def test_without_the_program_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)

    with pytest.raises(MissingDependencyError, match="pip install"):
        local.find_weed()


def test_the_program_is_found_through_its_package_where_it_is_not_beside_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))

    assert local.find_weed().name == "weed"
