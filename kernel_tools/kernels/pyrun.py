"""A remote kernel over pyrun-jupyter 0.7: the only module that imports it.

It composes that library's `KernelWebSocket` (cells, binary framing) and not its `JupyterRunner`: a runner
interrupts the kernel when a timeout passes, deletes it when its `with` block ends, and prints download
failures instead of raising them. Nor its `KernelManager`, whose requests know no deadline and no login.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_tools.errors import MissingDependencyError
from kernel_tools.kernels.base import (
    CellResult,
    OnOutput,
    Patience,
    RemoteErrorInfo,
    ServerAddress,
)
from kernel_tools.kernels.driver import (
    CellTimeoutError,
    ServerDriver,
    leave_text_to_the_decoder,
    output_of,
)
from kernel_tools.kernels.held import HeldKernel
from kernel_tools.kernels.transfer import CommMessage

if TYPE_CHECKING:
    from pyrun_jupyter.websocket import KernelWebSocket
    from websocket import WebSocket


class PyrunKernel(HeldKernel):
    """`RemoteKernel` over pyrun-jupyter; made by `kernels.connect_kernel`."""


class PyrunDriver(ServerDriver):
    """Lines of pyrun-jupyter.

    Raises:
        MissingDependencyError: pyrun-jupyter is not installed.
    """

    def __init__(self, address: ServerAddress, patience: Patience) -> None:
        super().__init__(address, patience)
        try:
            from pyrun_jupyter.exceptions import PyrunJupyterError
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "pyrun-jupyter is not installed.",
                hint="pip install 'pyrun-jupyter>=0.7.1,<0.8', or connect with --client jupyter.",
            ) from error
        self.foreign = (PyrunJupyterError,)

    def open_line(self, kernel_id: str) -> PyrunLine:
        """Open a WebSocket to a kernel."""
        from pyrun_jupyter.websocket import KernelWebSocket

        socket = KernelWebSocket(self.line_url(kernel_id), self.headers())
        socket.connect()
        leave_text_to_the_decoder(socket.ws)
        return PyrunLine(socket, self.patience.answer)


class PyrunLine:
    """One `KernelWebSocket`."""

    def __init__(self, socket: KernelWebSocket, answer_seconds: float) -> None:
        self._socket = socket
        self._answer_seconds = answer_seconds
        self._session = uuid.uuid4().hex
        self._asked: str | None = None  # the question that waits for its turn

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
                text = line.recv()
                if not text:
                    return False
                self._note(_decoded(self._socket, text))
        except websocket.WebSocketTimeoutException:
            return True
        except (websocket.WebSocketException, OSError):
            return False
        return True

    def await_turn(self, timeout_seconds: float) -> None:
        """Wait for the answer to a question that runs nothing."""
        deadline = time.monotonic() + timeout_seconds
        if self._asked is None:
            self._asked = self._send("kernel_info_request", {})
        while self._asked is not None:
            self._note(self._next(deadline))

    def execute(
        self, code: str, timeout_seconds: float, on_output: OnOutput | None = None
    ) -> CellResult:
        """Run a cell."""
        line = self._opened()
        self._socket.ws = _Overheard(line, self._socket, on_output)
        try:
            result = self._socket.execute(code, timeout=timeout_seconds)
        finally:
            self._socket.ws = line
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
        self._send(kind, content, buffers)

    def _send(self, kind: str, content: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> str:
        name = uuid.uuid4().hex
        message = {
            "header": {
                "msg_id": name,
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
        line.settimeout(self._answer_seconds)
        if buffers:
            line.send_binary(self._socket.serialize_binary_message(message, list(buffers)))
        else:
            line.send(json.dumps(message))
        return name

    def receive_comm(self, timeout_seconds: float) -> CommMessage:
        """Return the next comm message."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            message = self._next(deadline)
            kind = message["header"]["msg_type"]
            if kind in {"comm_msg", "comm_close"}:
                content = message["content"]
                return CommMessage(
                    kind, content["comm_id"], content["data"], message.get("buffers", ())
                )

    def _next(self, deadline: float) -> Mapping[str, Any]:
        import websocket

        line = self._opened()
        if time.monotonic() > deadline:
            raise CellTimeoutError
        line.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            text = line.recv()
        except websocket.WebSocketTimeoutException:
            raise CellTimeoutError from None
        message = _decoded(self._socket, text)
        output_of(message, None)
        return message

    def _note(self, message: Mapping[str, Any]) -> None:
        if message["parent_header"].get("msg_id") == self._asked:
            self._asked = None

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


class _Overheard:
    """The socket under a running cell: the library collects output, here it is told as it comes."""

    def __init__(
        self, line: WebSocket, socket: KernelWebSocket, on_output: OnOutput | None
    ) -> None:
        self._line = line
        self._socket = socket
        self._on_output = on_output
        self._request: str | None = None

    def send(self, text: str) -> None:
        message = json.loads(text)
        self._request = message["header"]["msg_id"]
        # The library always asks for history; ipython 7 knows no other way to keep a cell out of it.
        message["content"]["store_history"] = False
        self._line.send(json.dumps(message))

    def recv(self) -> str | bytes:
        text: str | bytes = self._line.recv()
        output = output_of(_decoded(self._socket, text), self._request)
        if output is not None and self._on_output is not None:
            self._on_output(output)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)


def _decoded(socket: KernelWebSocket, text: str | bytes) -> Mapping[str, Any]:
    if not text:
        raise ConnectionError("the server closed the line")
    message: Mapping[str, Any] = (
        socket.deserialize_binary_message(text) if isinstance(text, bytes) else json.loads(text)
    )
    return message
