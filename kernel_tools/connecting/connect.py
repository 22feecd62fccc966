"""From what a user typed to a `Connection`: which server, whose token, which kernel, which adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kernel_tools.connecting.connection import DEFAULT_REMOTE_DIR, Connection, idle_seconds
from kernel_tools.errors import ConfigurationError
from kernel_tools.settings import Secret, Settings, state_dir

if TYPE_CHECKING:
    from kernel_tools.kernels.base import RemoteKernel
    from kernel_tools.kernels.local import LocalServer

LOCAL: Final = "local"
URL_NAMES: Final = ("KAGGLE_PROXY_URL", "PYRUN_JUPYTER_URL")


def open_connection(
    target: str | None,
    *,
    settings: Settings,
    token_env: str | None,
    kernel_name: str,
    attach: str | None,
    client: str | None,
    remote_dir: str | None,
    name: str | None,
    password_env: str | None = None,
    keep_alive_minutes: float | None = None,
) -> Connection:
    """Connect as `Session.connect` says; see there.

    Raises:
        InvalidArgumentError: the client or address is none.
        ConfigurationError: no address or no token is set.
        KernelError: the server does not answer, refuses, or has no such kernel.
    """
    server: LocalServer | None = None
    runs_dir: Path | None = None
    token: Secret | None
    password: Secret | None = None
    if target == LOCAL:
        from kernel_tools.kernels.local import LocalServer

        server = LocalServer.ensure(state_dir=state_dir(), idle_seconds=idle_seconds(settings))
        url, token = server.url, server.token
        name = name or LOCAL
        folder = server.root_dir / Path(remote_dir or DEFAULT_REMOTE_DIR).expanduser()
        remote_dir, runs_dir = str(folder), folder / "runs"
        server.watch_runs(runs_dir)
    else:
        url = _find_url(target, settings)
        token = settings.require_secret(token_env) if token_env else None
        password = settings.require_secret(password_env) if password_env else None
        name = name or urlsplit(url).hostname or "remote"
        remote_dir = remote_dir or DEFAULT_REMOTE_DIR

    def open_kernel(attach: str | None = None) -> RemoteKernel:
        from kernel_tools.kernels import connect_kernel

        return connect_kernel(
            url,
            token=token,
            password=password,
            kernel_name=kernel_name,
            attach=attach,
            client=client,
        )

    def reopen() -> Connection:
        return open_connection(
            target,
            settings=settings,
            token_env=token_env,
            kernel_name=kernel_name,
            attach=None,
            client=client,
            remote_dir=remote_dir,
            name=name,
            keep_alive_minutes=keep_alive_minutes,
        )

    from kernel_tools.kernels.rpc import AgentClient

    kernel = open_kernel(attach)
    connection = Connection(
        name=name,
        target=LOCAL if server else "url",
        kernel=kernel,
        client=AgentClient(kernel, remote_dir),
        reconnect=open_kernel,
        server=server,
        runs_dir=runs_dir,
        reopen=reopen if server is not None and attach is None else None,
        attached=attach is not None,
    )
    if keep_alive_minutes is not None:
        from kernel_tools.kernels.keep_alive import KeepAlive

        connection.keep_alive = KeepAlive(connection, 60 * keep_alive_minutes)
    return connection


def _find_url(target: str | None, settings: Settings) -> str:
    """Return the server's URL as it was given; it may hold the token."""
    url = target or next((value for n in URL_NAMES if (value := settings.get(n))), None)
    if url is None:
        raise ConfigurationError(
            f"no URL was given, and {' and '.join(URL_NAMES)} are not set.",
            hint="%remote_connect local starts a server here; for Kaggle put its "
            "'VSCode Compatible URL' into .env as KAGGLE_PROXY_URL.",
        )
    return url
