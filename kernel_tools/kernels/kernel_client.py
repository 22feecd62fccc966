"""A remote kernel over jupyter-kernel-client 1.x (BSD-3): for those who may not use pyrun-jupyter.

The only module that imports it. It composes that library's `fetch` (REST) and `KernelWebSocketClient`,
and not `JupyterKernelClient`, which ends its kernel when it is collected as garbage.
"""

from __future__ import annotations

import logging
import queue
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.errors import MissingDependencyError
from kernel_tools.kernels.base import CellResult, RemoteErrorInfo, ServerAddress
from kernel_tools.kernels.held import CellTimeoutError, HeldKernel, hold
from kernel_tools.kernels.transfer import CommMessage
from kernel_tools.settings import Secret

if TYPE_CHECKING:
    from jupyter_kernel_client.wsclient import KernelWebSocketClient, WSChannel

# How long one HTTP request may take, and the opening of a WebSocket.
REQUEST_SECONDS: Final = 30.0
OPEN_SECONDS: Final = 10.0
ABORT_SECONDS: Final = 2.0
# A wait for the next message is cut into pieces of this length, to notice a line that closed.
PIECE_SECONDS: Final = 0.25


class ClientKernel(HeldKernel):
    """`RemoteKernel` over jupyter-kernel-client; made by `connect`."""

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        token: Secret | str | None = None,
        kernel_name: str = "python3",
        attach: str | None = None,
    ) -> ClientKernel:
        """Start a kernel of our own, or attach to the one named; see `held.hold`.

        Raises:
            MissingDependencyError: jupyter-kernel-client is not installed.
        """
        address = ServerAddress.parse(url, token)
        return hold(cls, ClientDriver(address), address, kernel_name=kernel_name, attach=attach)


class ClientDriver:
    """jupyter-kernel-client's REST calls and lines."""

    def __init__(self, address: ServerAddress) -> None:
        try:
            from jupyter_kernel_client.manager import fetch
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "jupyter-kernel-client is not installed.",
                hint="pip install 'jupyter-kernel-client>=1.0,<2', or connect with --client pyrun.",
            ) from error
        import requests
        import websocket

        self.foreign: tuple[type[BaseException], ...] = (
            requests.RequestException,
            websocket.WebSocketException,
        )
        self._fetch = fetch
        self._address = address
        self._token = address.token.reveal() if address.token is not None else None

    def list_kernels(self) -> Sequence[Mapping[str, Any]]:
        """Kernels on the server."""
        kernels: list[dict[str, Any]] = self._request("GET", "api/kernels").json()
        return kernels

    def kernel_names(self) -> Sequence[str]:
        """Specifications that can be started."""
        return list(self._request("GET", "api/kernelspecs").json().get("kernelspecs", {}))

    def start_kernel(self, name: str) -> str:
        """Start a kernel and return its id."""
        return str(self._request("POST", "api/kernels", json={"name": name}).json()["id"])

    def check_kernel(self, kernel_id: str) -> None:
        """Raise if the server does not know the kernel."""
        self._request("GET", f"api/kernels/{kernel_id}")

    def stop_kernel(self, kernel_id: str) -> None:
        """End a kernel."""
        self._request("DELETE", f"api/kernels/{kernel_id}")

    def interrupt_kernel(self, kernel_id: str) -> None:
        """Interrupt a kernel."""
        self._request("POST", f"api/kernels/{kernel_id}/interrupt")

    def open_line(self, kernel_id: str) -> ClientLine:
        """Open a WebSocket to a kernel.

        Raises:
            ConnectionError: it did not open in time. The library does not say why, so what would never
                work (401, 403, 404) is asked for first.
        """
        from jupyter_kernel_client.wsclient import KernelWebSocketClient

        self.check_kernel(kernel_id)
        base_url = self._address.base_url.replace("http", "ws", 1)
        client = KernelWebSocketClient(
            f"{base_url}/api/kernels/{kernel_id}/channels",
            token=self._token,
            timeout=OPEN_SECONDS,
            # The server pings; a client's own made some proxies drop the line.
            ping_interval=0,
            # Its log would name URLs.
            log=logging.Logger("kernel_tools.silent", level=logging.CRITICAL + 1),  # noqa: LOG001
        )
        client.start_channels()
        line = ClientLine(client)
        if not line.is_alive():
            line.drop()
            raise ConnectionError("the WebSocket did not open")
        return line

    def _request(self, method: str, path: str, **arguments: Any) -> Any:
        # Some proxies accept the token only as a query parameter, so it is sent both ways.
        return self._fetch(
            f"{self._address.base_url}/{path}",
            token=self._token,
            method=method,
            params={"token": self._token} if self._token else {},
            timeout=REQUEST_SECONDS,
            **arguments,
        )


class ClientLine:
    """One started `KernelWebSocketClient`."""

    def __init__(self, client: KernelWebSocketClient) -> None:
        self._client = client

    def is_alive(self) -> bool:
        """Throw away what came since the last call; false when closed."""
        if not self._client.channels_running or self._is_shut():
            return False
        for channel in (self._client.iopub_channel, self._client.shell_channel):
            channel.get_msgs()
        return bool(self._client.channels_running)

    def execute(self, code: str, timeout_seconds: float) -> CellResult:
        """Run a cell, outside the history."""
        out: list[str] = []
        err: list[str] = []
        error: RemoteErrorInfo | None = None

        def hear(message: Mapping[str, Any]) -> None:
            nonlocal error
            content = message["content"]
            if message["header"]["msg_type"] == "stream":
                (out if content["name"] == "stdout" else err).append(content["text"])
            elif message["header"]["msg_type"] == "error":
                error = RemoteErrorInfo(
                    content["ename"], content["evalue"], tuple(content["traceback"])
                )

        deadline = time.monotonic() + timeout_seconds
        request = self._client.execute(code, store_history=False, allow_stdin=False)
        while True:
            message = self._next(self._client.iopub_channel, deadline)
            if message["parent_header"].get("msg_id") != request:
                continue
            hear(message)
            if message["content"].get("execution_state") == "idle":
                break
        return CellResult("".join(out), "".join(err), error)

    def send_comm(
        self, kind: str, content: Mapping[str, Any], buffers: Sequence[bytes] = ()
    ) -> None:
        """Send a comm message on the shell channel."""
        message = self._client.session.msg(kind, dict(content))
        message["buffers"] = list(buffers)
        self._client.shell_channel.send(message)

    def receive_comm(self, timeout_seconds: float) -> CommMessage:
        """Return the next comm message."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            message = self._next(self._client.iopub_channel, deadline)
            kind, content = message["header"]["msg_type"], message["content"]
            if kind in {"comm_msg", "comm_close"}:
                return CommMessage(
                    kind, content["comm_id"], content["data"], message.get("buffers", ())
                )

    def drop(self) -> None:
        """Close the socket at once."""
        line = getattr(self._client.kernel_socket, "sock", None)
        if line is not None:
            line.abort()
        if self._client.connection_thread is not None:
            # The reader must see the end first: a socket closed under its select wakes it after 10 s.
            self._client.connection_thread.join(ABORT_SECONDS)
        self._client.stop_channels()

    def _is_shut(self) -> bool:
        """Look past the library's reader, which may not have noticed yet."""
        line = getattr(self._client.kernel_socket, "sock", None)
        raw = getattr(line, "sock", None)
        if raw is None:
            return True
        dont_wait = getattr(socket, "MSG_DONTWAIT", None)
        if dont_wait is None or isinstance(raw, ssl.SSLSocket):
            return False  # Windows and TLS cannot peek without waiting; the next cell's error tells
        try:
            return not raw.recv(1, socket.MSG_PEEK | dont_wait)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _next(self, channel: WSChannel, deadline: float) -> Mapping[str, Any]:
        while True:
            remaining = deadline - time.monotonic()
            try:
                message: Mapping[str, Any] = channel.get_msg(
                    timeout=max(0.0, min(PIECE_SECONDS, remaining))
                )
            except queue.Empty:
                if not self._client.channels_running:
                    raise ConnectionError("the line was closed") from None
                if remaining <= 0:
                    raise CellTimeoutError from None
                continue
            return message
