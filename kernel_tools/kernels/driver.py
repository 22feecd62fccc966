"""What every adapter shares: the Jupyter server's REST calls, and the names of what goes wrong.

An adapter brings a library for the line to a kernel (`open_line`); the server is asked by `requests` for
all of them alike, with one deadline, one way to be let in (`door`), and the status where it refuses.
"""

from __future__ import annotations

import errno
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kernel_tools.errors import (
    KernelConnectionError,
    KernelError,
    KernelLostError,
)
from kernel_tools.kernels.base import (
    CellOutput,
    CellResult,
    ForeignError,
    OnOutput,
    Patience,
    ServerAddress,
    error_of_status,
)
from kernel_tools.kernels.bounded import within
from kernel_tools.kernels.door import Door, reach_loopback_directly
from kernel_tools.kernels.transfer import CommLine

if TYPE_CHECKING:
    from requests import Response

_NETWORK_ERRNOS: Final = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENOTCONN, errno.EBADF}
)
# How our kernels are called in the server's list of sessions, before something random.
SESSION_PREFIX: Final = "kernel_tools-"


class CellTimeoutError(Exception):
    """A line's own sign that no reply came in time."""


class KernelDiedError(ConnectionError):
    """The server says that the kernel ended or was restarted while a cell ran: no reply will come."""


class Line(CommLine, Protocol):
    """An open WebSocket to one kernel, used by one thread at a time except for `drop`.

    Raises CellTimeoutError where no answer comes in time.
    """

    def execute(
        self, code: str, timeout_seconds: float, on_output: OnOutput | None = None
    ) -> CellResult:
        """Run a cell; `on_output` is told what it prints and shows, as it comes."""

    def await_turn(self, timeout_seconds: float) -> None:
        """Wait until the kernel comes to what is sent now, behind all that was sent before.

        Asked again after a CellTimeoutError, the same question is still open: nothing piles up there.
        """

    def is_alive(self) -> bool:
        """Read away what came since the last call; false when it is closed."""

    def drop(self) -> None:
        """Close the socket at once, waking a thread that waits on it."""


def leave_text_to_the_decoder(line: Any) -> None:
    """Switch off websocket-client's own check of text, which walks over every byte in Python.

    Half of what a poll cost the notebook; decoding finds what is no UTF-8 as well.
    """
    for part in (getattr(line, "frame_buffer", None), getattr(line, "cont_frame", None)):
        if part is not None:
            part.skip_utf8_validation = True


def output_of(message: Mapping[str, Any], request: str | None) -> CellOutput | None:
    """Return what an IOPub message adds to the output of the cell that `request` started, if anything.

    Raises:
        KernelDiedError: the server reports the kernel's end.
    """
    kind, content = message["header"]["msg_type"], message["content"]
    if kind == "status" and content["execution_state"] in {"restarting", "autorestarting", "dead"}:
        raise KernelDiedError
    if message["parent_header"].get("msg_id") != request:
        return None
    if kind == "stream":
        return CellOutput(content["name"], content["text"])
    if kind in {"display_data", "execute_result", "update_display_data"}:
        return CellOutput("display", data=content["data"], metadata=content["metadata"])
    return CellOutput("clear") if kind == "clear_output" else None


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel in the server's list."""

    id: str
    name: str
    state: str


class ServerDriver(ABC):
    """One Jupyter server. Raises nothing foreign, except from a line (see `named`)."""

    # What the line's library raises, beyond what the network does.
    foreign: tuple[type[BaseException], ...] = ()

    def __init__(self, address: ServerAddress, patience: Patience) -> None:
        self.address = address
        self.patience = patience
        reach_loopback_directly(address)
        self._door: Door | None = None
        self._known = False  # the server has let us in at least once

    @abstractmethod
    def open_line(self, kernel_id: str) -> Line:
        """Open a WebSocket to a kernel. May raise what its library raises."""

    # The server's kernels -------------------------------------------------------------------

    def kernels(self) -> tuple[KernelRow, ...]:
        """Every kernel on the server."""
        rows = self._json("GET", "api/kernels", "a list of kernels")
        return tuple(
            KernelRow(str(row["id"]), str(row.get("name", "")), str(row.get("execution_state", "")))
            for row in rows
        )

    def kernel_names(self) -> Sequence[str]:
        """Specifications that can be started."""
        specs = self._json("GET", "api/kernelspecs", "a list of kernel specifications")
        return sorted(specs.get("kernelspecs", {}))

    def state_of(self, kernel_id: str) -> str:
        """Return `idle`, `busy`, `starting`, ... as the server sees it.

        Raises:
            KernelLostError: the server does not know the kernel.
        """
        try:
            row = self._json("GET", f"api/kernels/{kernel_id}", f"kernel {kernel_id[:8]}")
        except KernelLostError:
            # A proxy that finds its server again says 404 for a while: is ours in the list?
            for known in self.kernels():
                if known.id == kernel_id:
                    return known.state
            raise
        return str(row.get("execution_state", ""))

    def start_kernel(self, name: str, mark: str) -> str:
        """Start a kernel in a session called `mark`, and return its id; again is the same kernel.

        A server without sessions (404) is asked for a bare kernel instead.
        """
        what = "the start of a kernel"
        body = {
            "path": mark, "name": "kernel_tools", "type": "console", "kernel": {"name": name},
        }  # fmt: skip
        try:
            session = self._json("POST", "api/sessions", what, body)
        except KernelLostError:
            return str(self._json("POST", "api/kernels", what, {"name": name})["id"])
        return str(session["kernel"]["id"])

    def kernels_of(self, mark: str) -> tuple[str, ...]:
        """Return the ids of the kernels that were started under this mark."""
        try:
            sessions = self._json("GET", "api/sessions", "a list of sessions")
        except KernelLostError:
            return ()
        return tuple(
            str(session["kernel"]["id"])
            for session in sessions
            if session.get("path") == mark and session.get("kernel")
        )

    def stop_kernel(self, kernel_id: str) -> None:
        """End a kernel."""
        self._request("DELETE", f"api/kernels/{kernel_id}", "the end of our kernel")

    def interrupt_kernel(self, kernel_id: str) -> None:
        """Interrupt a kernel."""
        self._request("POST", f"api/kernels/{kernel_id}/interrupt", "an interrupt")

    # For the adapters -----------------------------------------------------------------------

    def line_url(self, kernel_id: str) -> str:
        """Return the WebSocket's URL, with the token as browsers send it."""
        return self._let_in().url(f"api/kernels/{kernel_id}/channels", socket=True)

    def headers(self) -> dict[str, str]:
        """Return what a WebSocket's opening must carry to be let in."""
        return self._let_in().headers()

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Turn a foreign exception into one of ours, named after what was asked."""
        try:
            yield
        except KeyboardInterrupt:
            # A new one: `%xmode Verbose` shows the variables of the frames below, and the URL is one.
            raise KeyboardInterrupt from None
        except BaseException as error:
            if not self._is_foreign(error):
                raise
            raise self._translated(error, what) from ForeignError.of(error)

    # Inside ---------------------------------------------------------------------------------

    def _json(self, method: str, path: str, what: str, body: Any = None) -> Any:
        response = self._request(method, path, what, body)
        try:
            return response.json()
        except ValueError:
            raise KernelConnectionError(
                f"{self.address.shown} answered {what} with a page that is not Jupyter's.",
                hint="Is the URL whole, and is a login or a proxy's page in between?",
            ) from None

    def _request(self, method: str, path: str, what: str, body: Any = None) -> Response:
        # The URL, a credential, stands only in the frames of the other thread: `%xmode Verbose` shows
        # the variables of these ones when Ctrl-C comes.
        with self.named(what):
            response = within(
                self.patience.request, lambda: self._let_in().send(method, path, json=body)
            )
        if response.status_code >= 400:
            if response.status_code in {401, 403}:
                self._door = None  # a login may have run out; the next request logs in anew
            raise error_of_status(
                response.status_code, f"{what} at {self.address.shown}", known=self._known
            )
        self._known = True
        return response

    def _let_in(self) -> Door:
        if self._door is None:
            self._door = Door.opened(self.address, self.patience.request)
        return self._door

    def _is_foreign(self, error: BaseException) -> bool:
        """True for what a client library and the network raise, false for a local file's trouble."""
        import requests
        import websocket

        libraries = (*self.foreign, requests.RequestException, websocket.WebSocketException)
        # ValueError: a proxy's page where JSON was expected.
        network = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError, ValueError)
        if isinstance(error, (*libraries, *network)):
            return True
        return type(error) is OSError and error.errno in _NETWORK_ERRNOS

    def _translated(self, error: BaseException, what: str) -> KernelError:
        if isinstance(error, KernelDiedError):
            return KernelConnectionError(
                f"The kernel at {self.address.shown} ended or was restarted during {what}; its "
                "variables are gone.",
                hint="Too little memory is the usual cause. Runs are processes of their own and go on.",
            )
        status = _status_of(error)
        if status is not None:
            return error_of_status(status, f"{what} at {self.address.shown}", known=self._known)
        return KernelConnectionError(
            f"The line broke or nothing answered: {what} at {self.address.shown} "
            f"({type(error).__name__}).",
            hint="Is the server running, and the URL whole?",
        )


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a refused WebSocket, wherever in the chain a library has left it."""
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(seen, "status_code", None)
        if isinstance(status, int):
            return status
        seen = seen.__cause__ or seen.__context__
    return None
