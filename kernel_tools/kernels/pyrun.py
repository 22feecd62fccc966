"""A remote kernel over pyrun-jupyter 0.7: the only module that imports it.

It composes that library's `KernelManager` (REST) and `KernelWebSocket` (cells, binary transfer), and
not its `JupyterRunner`: a runner interrupts the kernel when a timeout passes, or when remote code
raises TimeoutError, and prints download failures instead of raising them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_tools.errors import MissingDependencyError
from kernel_tools.kernels.base import CellResult, RemoteErrorInfo, ServerAddress
from kernel_tools.kernels.held import CellTimeoutError, HeldKernel, hold
from kernel_tools.kernels.transfer import ANSWER_SECONDS, CommMessage
from kernel_tools.settings import Secret

if TYPE_CHECKING:
    from pyrun_jupyter.websocket import KernelWebSocket
    from websocket import WebSocket


class PyrunKernel(HeldKernel):
    """`RemoteKernel` over pyrun-jupyter; made by `connect`."""

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        token: Secret | str | None = None,
        kernel_name: str = "python3",
        attach: str | None = None,
    ) -> PyrunKernel:
        """Start a kernel of our own, or attach to the one named; see `held.hold`.

        Raises:
            MissingDependencyError: pyrun-jupyter is not installed.
        """
        address = ServerAddress.parse(url, token)
        return hold(cls, PyrunDriver(address), address, kernel_name=kernel_name, attach=attach)


class PyrunDriver:
    """pyrun-jupyter's REST calls and lines."""

    def __init__(self, address: ServerAddress) -> None:
        try:
            from pyrun_jupyter.exceptions import PyrunJupyterError
            from pyrun_jupyter.kernel import KernelManager
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "pyrun-jupyter is not installed.",
                hint="pip install 'pyrun-jupyter>=0.7.1,<0.8', or connect with --client jupyter.",
            ) from error
        import websocket

        self.foreign: tuple[type[BaseException], ...] = (
            PyrunJupyterError,
            websocket.WebSocketException,
        )
        token = address.token.reveal() if address.token is not None else None
        self._manager = KernelManager(address.base_url, token)

    def list_kernels(self) -> Sequence[Mapping[str, Any]]:
        """Kernels on the server."""
        kernels: list[dict[str, Any]] = self._manager.list_kernels()
        return kernels

    def kernel_names(self) -> Sequence[str]:
        """Specifications that can be started."""
        return list(self._manager.list_kernelspecs().get("kernelspecs", {}))

    def start_kernel(self, name: str) -> str:
        """Start a kernel and return its id."""
        return str(self._manager.start_kernel(name)["id"])

    def check_kernel(self, kernel_id: str) -> None:
        """Raise if the server does not know the kernel."""
        self._manager.get_kernel_info(kernel_id)

    def stop_kernel(self, kernel_id: str) -> None:
        """End a kernel."""
        self._manager.stop_kernel(kernel_id)

    def interrupt_kernel(self, kernel_id: str) -> None:
        """Interrupt a kernel."""
        self._manager.interrupt_kernel(kernel_id)

    def open_line(self, kernel_id: str) -> PyrunLine:
        """Open a WebSocket to a kernel."""
        from pyrun_jupyter.websocket import KernelWebSocket

        socket = KernelWebSocket(self._manager.get_websocket_url(kernel_id))
        socket.connect()
        return PyrunLine(socket)


class PyrunLine:
    """One `KernelWebSocket`."""

    def __init__(self, socket: KernelWebSocket) -> None:
        self._socket = socket
        self._session = uuid.uuid4().hex

    def is_alive(self) -> bool:
        """Read away what came since the last call (pings are answered by that); false when closed."""
        import websocket

        line = self._socket.ws
        if line is None:
            return False
        deadline = time.monotonic() + 1.0
        try:
            line.settimeout(0.001)
            while time.monotonic() < deadline:
                if not line.recv():
                    return False
        except websocket.WebSocketTimeoutException:
            return True
        except (websocket.WebSocketException, OSError):
            return False
        return True

    def execute(self, code: str, timeout_seconds: float) -> CellResult:
        """Run a cell."""
        result = self._socket.execute(code, timeout=timeout_seconds)
        if not result.has_error:
            return CellResult(result.stdout, result.stderr)
        # A TimeoutError that the remote code raised has a traceback; pyrun's own has none.
        if result.error_name == "TimeoutError" and not result.error_traceback:
            raise CellTimeoutError
        error = RemoteErrorInfo(
            str(result.error_name), str(result.error), tuple(result.error_traceback)
        )
        return CellResult(result.stdout, result.stderr, error)

    def send_comm(
        self, kind: str, content: Mapping[str, Any], buffers: Sequence[bytes] = ()
    ) -> None:
        """Send a comm message on the shell channel."""
        message = {
            "header": {
                "msg_id": uuid.uuid4().hex,
                "msg_type": kind,
                "username": "kernel_tools",
                "session": self._session,
                "version": "5.3",
            },
            "parent_header": {},
            "metadata": {},
            "content": dict(content),
            "channel": "shell",
        }
        line = self._opened()
        # The library leaves its last cell's timeout on the socket, which may be a millisecond.
        line.settimeout(ANSWER_SECONDS)
        if buffers:
            line.send_binary(self._socket.serialize_binary_message(message, list(buffers)))
        else:
            line.send(json.dumps(message))

    def receive_comm(self, timeout_seconds: float) -> CommMessage:
        """Return the next comm message."""
        import websocket

        deadline = time.monotonic() + timeout_seconds
        line = self._opened()
        while True:
            line.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                text = line.recv()
            except websocket.WebSocketTimeoutException:
                raise CellTimeoutError from None
            if not text:
                raise ConnectionError("the server closed the line")
            message = (
                self._socket.deserialize_binary_message(text)
                if isinstance(text, bytes)
                else json.loads(text)
            )
            kind = message["header"]["msg_type"]
            if kind in {"comm_msg", "comm_close"}:
                content = message["content"]
                return CommMessage(
                    kind, content["comm_id"], content["data"], message.get("buffers", ())
                )
            if time.monotonic() > deadline:
                raise CellTimeoutError

    def _opened(self) -> WebSocket:
        if self._socket.ws is None:
            raise ConnectionError("the line is closed")
        return self._socket.ws

    def drop(self) -> None:
        """Close the socket at once, without the closing handshake that a half-open line never ends."""
        line = self._socket.ws
        if line is not None:
            line.abort()
            line.shutdown()
