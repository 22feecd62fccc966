"""A remote kernel over jupyter-kernel-client 1.x (BSD-3): for those who may not use pyrun-jupyter.

The only module that imports it. It composes that library's `KernelWebSocketClient`, and not its
`JupyterKernelClient`, which ends its kernel when it is collected as garbage.
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
    from jupyter_kernel_client.wsclient import KernelWebSocketClient, WSChannel

ABORT_SECONDS: Final = 2.0
# A wait for the next message, or for the opening, is cut into pieces, to notice a line that closed.
PIECE_SECONDS: Final = 0.25
OPENING_PIECE_SECONDS: Final = 0.02


class ClientKernel(HeldKernel):
    """`RemoteKernel` over jupyter-kernel-client; made by `kernels.connect_kernel`."""


class ClientDriver(ServerDriver):
    """Lines of jupyter-kernel-client.

    Raises:
        MissingDependencyError: jupyter-kernel-client is not installed.
    """

    def __init__(self, address: ServerAddress, patience: Patience) -> None:
        super().__init__(address, patience)
        try:
            import jupyter_kernel_client  # noqa: F401 - is it there?
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "jupyter-kernel-client is not installed.",
                hint="pip install 'jupyter-kernel-client>=1.0,<2', or connect with --client pyrun.",
            ) from error

    def open_line(self, kernel_id: str) -> ClientLine:
        """Open a WebSocket to a kernel.

        Called in a daemon thread, so that the library's reader is one too and holds no program up.

        Raises:
            KernelError: the server says why it does not open.
            ConnectionError: it does not.
        """
        from jupyter_kernel_client.wsclient import KernelWebSocketClient

        address, token = self.line_url(kernel_id).partition("?")[0], self.address.token
        client = KernelWebSocketClient(
            address,
            token=None if token is None else token.reveal(),
            timeout=0,
            # The server pings; a client's own made some proxies drop the line.
            ping_interval=0,
            # Its log would name URLs.
            log=logging.Logger("kernel_tools.silent", level=logging.CRITICAL + 1),  # noqa: LOG001
            headers=self.headers(),
        )
        client.start_channels()
        client.timeout = ABORT_SECONDS  # of its thread's end
        deadline = time.monotonic() + self.patience.request
        while not client.connection_ready.wait(OPENING_PIECE_SECONDS):
            thread = client.connection_thread
            if thread is None or not thread.is_alive() or time.monotonic() > deadline:
                break
        line = ClientLine(client)
        if not line.is_alive():
            line.drop()
            self.state_of(kernel_id)  # the library does not say why; 401, 403 and 404 show here
            raise ConnectionError("the WebSocket did not open")
        leave_text_to_the_decoder(getattr(client.kernel_socket, "sock", None))
        return line


class ClientLine:
    """One started `KernelWebSocketClient`."""

    def __init__(self, client: KernelWebSocketClient) -> None:
        self._client = client
        self._asked: str | None = None  # the question that waits for its turn

    def is_alive(self) -> bool:
        """Throw away what came since the last call; false when closed."""
        if not self._client.channels_running or self._is_shut():
            return False
        for channel in (self._client.iopub_channel, self._client.shell_channel):
            for message in channel.get_msgs():
                self._note(message)
        return bool(self._client.channels_running)

    def await_turn(self, timeout_seconds: float) -> None:
        """Wait for the answer to a question that runs nothing."""
        deadline = time.monotonic() + timeout_seconds
        if self._asked is None:
            message = self._client.session.msg("kernel_info_request", {})
            self._asked = message["header"]["msg_id"]
            self._client.shell_channel.send(message)
        while self._asked is not None:
            self._note(self._next(self._client.iopub_channel, deadline))

    def execute(
        self, code: str, timeout_seconds: float, on_output: OnOutput | None = None
    ) -> CellResult:
        """Run a cell, outside the history."""
        said: dict[str, list[str]] = {"stdout": [], "stderr": []}
        error: RemoteErrorInfo | None = None
        deadline = time.monotonic() + timeout_seconds
        request = self._client.execute(code, store_history=False, allow_stdin=False)
        while True:
            message = self._next(self._client.iopub_channel, deadline)
            output = output_of(message, request)
            if output is not None:
                if output.kind in said:
                    said[output.kind].append(output.text)
                if on_output is not None:
                    on_output(output)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["header"]["msg_type"] == "error":
                trace = tuple(content["traceback"])
                error = RemoteErrorInfo(content["ename"], content["evalue"], trace)
            if content.get("execution_state") == "idle":
                break
        return CellResult("".join(said["stdout"]), "".join(said["stderr"]), error)

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
            output_of(message, None)
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
        thread = self._client.connection_thread
        if thread is not None and thread.is_alive():
            # The reader must see the end first: a socket closed under its select wakes it after 10 s.
            thread.join(ABORT_SECONDS)
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

    def _note(self, message: Mapping[str, Any]) -> None:
        if message["parent_header"].get("msg_id") == self._asked:
            self._asked = None

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
