"""Connection: one remote kernel under a name, with the agent behind it and the store beside it.

It is the `AgentLink` that runs are watched through. It owns the kernel only if it started it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kernel_tools.errors import (
    ConfigurationError,
    KernelAuthError,
    KernelConnectionError,
    KernelError,
    KernelLostError,
    NotConnectedError,
)
from kernel_tools.settings import Settings, state_dir

if TYPE_CHECKING:
    from kernel_tools.kernels.base import Progress, RemoteKernel
    from kernel_tools.kernels.keep_alive import KeepAlive
    from kernel_tools.kernels.local import LocalServer
    from kernel_tools.kernels.rpc import AgentClient
    from kernel_tools.stores.base import ObjectStore
    from kernel_tools.sync import SyncPlan, SyncReport

T = TypeVar("T")

DEFAULT_REMOTE_DIR: Final = "remote_kernel_tools"


@dataclass
class Connection:
    """A connected kernel. `where` names it in words; its URL and token are shown nowhere."""

    name: str
    target: str  # "local" or "url"
    kernel: RemoteKernel
    client: AgentClient
    reconnect: Callable[[], RemoteKernel]
    server: LocalServer | None = None
    runs_dir: Path | None = None  # where the runs are, if on this machine
    closed: bool = False
    reopen: Callable[[], Connection] | None = None  # starts our own server again, if it may be
    attached: bool = False  # to a kernel that was named: no other one will do
    keep_alive: KeepAlive | None = None
    _refused: str | None = None  # what was said when the server let us in no more
    _store: ObjectStore | None = None
    _reviving: threading.Lock = field(default_factory=threading.Lock)
    _restarting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def where(self) -> str:
        """The connection in words."""
        return self.kernel.description

    @property
    def notice(self) -> str:
        """What a person should know about how the kernel was found; empty when all went as asked."""
        return self.kernel.notice

    @property
    def remote_dir(self) -> str:
        """The folder of everything of ours on the remote; absolute once it was reached."""
        return self.client.remote_dir

    @property
    def local(self) -> bool:
        """True for the embedded server on this machine."""
        return self.target == "local"

    def __repr__(self) -> str:
        return f"<Connection {self.name}: {self.where}>"

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        from kernel_tools.views.answers import connection_view

        return connection_view(self)._repr_mimebundle_(include, exclude)

    def call(self, function: str, *, timeout_seconds: float = 60.0, **arguments: Any) -> Any:
        """Call the agent. A kernel or local server of ours that is gone is replaced once; the runs
        never need it.

        Raises:
            NotConnectedError: the connection was closed; nothing is started behind the user's back.
            KernelAuthError: the URL or token has expired; nothing more is asked until a new one comes.
            KernelError, AgentError: what the name says.
        """
        return self._again_if_lost(
            lambda: self.client.call(function, timeout_seconds=timeout_seconds, **arguments)
        )

    def get_file(
        self, remote_path: str, destination: Path, *, on_progress: Progress | None = None
    ) -> None:
        """Bring one file here, verified and whole."""
        self._again_if_lost(
            lambda: self.kernel.get_file(remote_path, destination, on_progress=on_progress)
        )

    def put_file(self, source: Path | bytes, remote_path: str, *, mode: int = 0o644) -> None:
        """Send one file, verified and whole."""
        self._again_if_lost(lambda: self.kernel.put_file(source, remote_path, mode=mode))

    def sync(self, plan: SyncPlan) -> SyncReport:
        """Bring the plan's contents and the agent there, as far as they are missing."""
        from kernel_tools.sync import sync

        return self._again_if_lost(lambda: sync(self.client, plan))

    def call_module(self, module: str, function: str, **arguments: Any) -> Any:
        """Call a function of a module beside `kernels/rpc.py` that travels by itself."""
        return self._again_if_lost(lambda: self.client.call_module(module, function, **arguments))

    def usable_kernel(self) -> RemoteKernel:
        """Return the kernel, for what must not be repeated.

        Raises:
            NotConnectedError, KernelAuthError, KernelConnectionError: as `call` does.
        """
        self._make_usable()
        return self.kernel

    def put_secrets(self, run_id: str, payload: dict[str, Any]) -> str:
        """Write a run's secrets into the remote's private folder; return their path there."""
        return self._again_if_lost(lambda: self.client.put_secrets(run_id, payload))

    def store(self, settings: Settings) -> ObjectStore:
        """Return the store: the one configured, else the embedded one where the kernel is local.

        Raises:
            ConfigurationError: none is configured, and the kernel is elsewhere.
        """
        from kernel_tools.stores.local import LocalStore

        if isinstance(self._store, LocalStore) and not self._store.service.alive:
            self._store.release()  # it died; the next one has its ports, keys and objects
            self._store = None
        if self._store is None:
            self._store = open_store(settings, local=self.local)
            if isinstance(self._store, LocalStore) and self.runs_dir is not None:
                self._store.watch_runs(self.runs_dir)
        return self._store

    def close(self) -> bool:
        """Let go of kernel, server and store; return whether an embedded service was ended.

        A kernel we started is stopped (no run lives in it), embedded services are ended unless another
        client or a live run needs them; what is not ours is left as it is.
        """
        with self._restarting:
            self.closed = True
        self._end_keep_alive()
        # A server that is down has no kernel left to stop.
        with contextlib.suppress(KernelError):
            self.kernel.close(stop_kernel=self.kernel.owned)
        ended = self.server is not None and self.server.release_or_stop()
        if self._store is not None:
            from kernel_tools.stores.local import LocalStore

            if isinstance(self._store, LocalStore):
                ended = self._store.release_or_stop() or ended
            self._store = None
        return ended

    def take_over(self, new: Connection) -> None:
        """Go on as `new`, so that runs watched through this one need not be attached again.

        It may have been closed before.
        """
        old_kernel, old_server = self.kernel, self.server
        old_store = self._store if self.target != new.target else None  # elsewhere, another store
        with self._reviving:
            self.target, self.kernel, self.client = new.target, new.kernel, new.client
            self.reconnect, self.server = new.reconnect, new.server
            self.runs_dir, self.reopen = new.runs_dir, new.reopen
            self.attached, self._refused = new.attached, None
            self._end_keep_alive()
            self.keep_alive, new.keep_alive = new.keep_alive, None
            closed, self.closed = self.closed, False
        if closed:
            return  # kernel, server and store were let go of then
        with contextlib.suppress(KernelError):
            old_kernel.close(stop_kernel=old_kernel.owned)
        if old_server is not None:
            old_server.release()
        if old_store is not None:
            from kernel_tools.stores.local import LocalStore

            self._store = None
            if isinstance(old_store, LocalStore):
                old_store.release()

    def _again_if_lost(self, action: Callable[[], T]) -> T:
        """Act once more where the kernel was gone and one is there again. Only for what may be repeated."""
        self._make_usable()
        kernel = self.kernel
        try:
            return action()
        except KernelLostError:
            self.revive(kernel)
            return action()
        except KernelAuthError as error:
            if kernel is self.kernel:
                self._refused = str(error)
            raise

    def _end_keep_alive(self) -> None:
        if self.keep_alive is not None:
            self.keep_alive.end()
            self.keep_alive = None

    def _make_usable(self) -> None:
        """Refuse what was closed or has expired; start a local server that died again, in which no run lives."""
        again = "%remote_connect local" if self.local else "%remote_connect"
        if self._refused is not None and not self.closed:
            raise KernelAuthError(self._refused)
        if not self.closed and (self.server is None or self.server.service.alive):
            return
        with self._restarting:  # whoever comes second finds it done, or closed meanwhile
            if self.closed:
                raise NotConnectedError(
                    f"{self.name} was disconnected; its runs go on.", hint=f"{again} comes back."
                )
            if self.server is None or self.server.service.alive:
                return
            if self.reopen is None:
                raise KernelConnectionError(
                    "the local Jupyter server has ended, and with it the kernel that was attached;"
                    " the runs go on.",
                    hint=f"{again} starts a server again.",
                )
            self.take_over(self.reopen())

    def revive(self, lost: RemoteKernel) -> None:
        """Have a kernel again where this one is gone.

        Raises:
            NotConnectedError: it was attached to by name, so no other one will do.
            KernelError: there is none to be had.
        """
        with self._reviving:
            if self.kernel is not lost:
                return
            if self.attached:
                raise NotConnectedError(
                    "the kernel that was attached is gone.",
                    hint="%remote_connect again; the runs go on without it.",
                )
            self.kernel = self.reconnect()
            self.client = self.client.on(self.kernel)
            lost.close(stop_kernel=False)


def open_store(settings: Settings, *, local: bool) -> ObjectStore:
    """Return the configured S3 store, or the embedded one for a local kernel.

    Raises:
        ConfigurationError: none is configured, and the kernel is elsewhere.
    """
    if settings.get("MINIO_ENDPOINT"):
        from kernel_tools.stores.s3 import S3Store

        return S3Store.from_settings(settings)
    if not local:
        raise ConfigurationError(
            "no object store is configured, and the embedded one is only for the local kernel.",
            hint="Set MINIO_ENDPOINT, MINIO_ACCESS_KEY, MINIO_SECRET_KEY and MINIO_BUCKET "
            "in the environment or in .env.",
        )
    from kernel_tools.stores.local import LocalStore

    return LocalStore.ensure(state_dir=state_dir(), idle_seconds=idle_seconds(settings))


def idle_seconds(settings: Settings) -> float:
    """Return how long an embedded server or store that nobody needs stays up.

    Raises:
        ConfigurationError: `KERNEL_TOOLS_IDLE_SECONDS` is no number above 0.
    """
    from kernel_tools.services.service import idle_seconds_from

    name = "KERNEL_TOOLS_IDLE_SECONDS"
    return idle_seconds_from({name: settings.get(name) or ""})
