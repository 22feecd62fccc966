"""A kernel as we hold it, whatever library carries the line: turns, reconnecting, and manners.

One call at a time. A dropped line is opened again before a cell is sent, never after: a cell runs at
most once. A kernel that we did not start is never interrupted, restarted or ended. An adapter brings a
`Driver`, which may raise what its library raises; here it becomes one of `kernel_tools.errors`.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from kernel_tools.errors import (
    FetchError,
    InvalidArgumentError,
    KernelAuthError,
    KernelConnectionError,
    KernelError,
    KernelLostError,
    KernelTimeoutError,
    KernelToolsError,
)
from kernel_tools.kernels.base import (
    CellResult,
    ForeignError,
    Progress,
    ServerAddress,
    backoff_seconds,
    error_of_status,
)
from kernel_tools.kernels.cells import QUIET_CELL
from kernel_tools.kernels.transfer import (
    CommLine,
    Download,
    RemoteFileError,
    Upload,
    register_cell,
)

T = TypeVar("T")

# How long a server may take to give a line back, retries included.
CONNECT_SECONDS: Final = 20.0
# The same for the very first answer, where the likeliest cause is a wrong URL.
FIRST_ANSWER_SECONDS: Final = 3.0
# A kernel's start: imports from a cold disk, measured up to 15 s on a busy Kaggle session.
START_SECONDS: Final = 60.0
# How long a call waits for its turn behind a file that travels.
TRANSFER_TURN_SECONDS: Final = 600.0
TRANSFER_ATTEMPTS: Final = 5

_NETWORK_ERRNOS: Final = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENOTCONN, errno.EBADF}
)


class CellTimeoutError(Exception):
    """A line's own sign that no reply came in time."""


class Line(CommLine, Protocol):
    """An open WebSocket to one kernel, used by one thread at a time except for `drop`.

    Raises CellTimeoutError where no answer comes in time.
    """

    def is_alive(self) -> bool:
        """Read away what came since the last call; false when it is closed."""

    def drop(self) -> None:
        """Close the socket at once, waking a thread that waits on it."""


class Driver(Protocol):
    """A client library, reduced to what is asked of it. May raise anything that is foreign."""

    # The library's exceptions, beyond those of the network.
    foreign: tuple[type[BaseException], ...]

    def list_kernels(self) -> Sequence[Mapping[str, Any]]:
        """Kernels on the server: `id`, `name`, `execution_state`."""

    def kernel_names(self) -> Sequence[str]:
        """Specifications that can be started."""

    def start_kernel(self, name: str) -> str:
        """Start a kernel and return its id."""

    def check_kernel(self, kernel_id: str) -> None:
        """Raise if the server does not know the kernel."""

    def stop_kernel(self, kernel_id: str) -> None:
        """End a kernel."""

    def interrupt_kernel(self, kernel_id: str) -> None:
        """Interrupt a kernel."""

    def open_line(self, kernel_id: str) -> Line:
        """Open a WebSocket to a kernel."""


class HeldKernel:
    """`RemoteKernel` over a driver; made by `hold`."""

    def __init__(
        self,
        driver: Driver,
        address: ServerAddress,
        kernel_id: str,
        *,
        owned: bool,
        kernel_name: str,
        notice: str = "",
    ) -> None:
        self._driver = driver
        self._address = address
        self._kernel_id = kernel_id
        self._owned = owned
        self._kernel_name = kernel_name
        self._line: Line | None = None
        self._turns = threading.RLock()
        self._closed = False
        self.notice = notice

    @property
    def kernel_id(self) -> str:
        """The server's id of the kernel."""
        return self._kernel_id

    @property
    def owned(self) -> bool:
        """True where we started it."""
        return self._owned

    @property
    def description(self) -> str:
        """One redacted line for people."""
        whose = "ours" if self._owned else "not ours"
        return (
            f"kernel {self._kernel_id[:8]} ({self._kernel_name}, {whose}) at {self._address.shown}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.description}>"

    def execute(self, code: str, *, timeout_seconds: float = 60.0) -> CellResult:
        """Run a cell once.

        Raises:
            KernelTimeoutError: no reply in time; the cell may still run.
            KernelConnectionError: the line broke, before or after the cell was received.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._turn(deadline):
            line = self._open_line(deadline)
            with self._losing_the_line("a cell"):
                return line.execute(code, max(0.01, deadline - time.monotonic()))

    def put_file(
        self,
        source: Path | bytes,
        remote_path: str,
        *,
        mode: int = 0o644,
        on_progress: Progress | None = None,
    ) -> None:
        """Send a file in chunks; hashed at both ends, renamed when whole; goes on if the line breaks.

        Raises:
            InvalidArgumentError: there is no such local file.
            KernelError: the remote cannot write it, or the line.
        """
        if isinstance(source, Path) and not source.is_file():
            raise InvalidArgumentError(f"There is no file {source} to send.")
        upload = Upload(source, remote_path, mode, on_progress)
        self._transfer(upload.run, f"the upload of {remote_path}", KernelError)

    def get_file(
        self, remote_path: str, destination: Path, *, on_progress: Progress | None = None
    ) -> None:
        """Bring a file in chunks; hashed at both ends, renamed when whole; goes on if the line breaks.

        Raises:
            FetchError: the remote cannot read it, or it changed on the way.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        download = Download(remote_path, destination, on_progress)
        try:
            self._transfer(download.run, f"the download of {remote_path}", FetchError)
        finally:
            download.discard()

    def interrupt(self) -> None:
        """Interrupt what runs in our own kernel, also while another thread waits for it.

        Raises:
            KernelError: the kernel is not ours.
        """
        if not self._owned:
            raise KernelError(
                f"{self.description} is never interrupted from here.",
                hint="Interrupt it where it was started.",
            )
        with named("an interrupt", self._address, self._driver):
            self._driver.interrupt_kernel(self._kernel_id)

    def close(self, *, stop_kernel: bool) -> None:
        """Close the line, at once even while a call waits; stop the kernel if asked and it is ours."""
        self._closed = True
        self._drop_line()
        if not (stop_kernel and self._owned):
            return
        try:
            with named("the end of our kernel", self._address, self._driver):
                self._driver.stop_kernel(self._kernel_id)
        except KernelLostError:
            return

    def greet(self) -> None:
        """Open the line; in a kernel of ours switch off the history and switch on file transfer."""
        if self._owned:
            self.execute(QUIET_CELL + register_cell(), timeout_seconds=START_SECONDS).check()
            return
        # Someone else's kernel may be busy for hours; that shows with the first call.
        deadline = time.monotonic() + CONNECT_SECONDS
        with self._turn(deadline):
            self._open_line(deadline)

    @contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        if not self._turns.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise KernelTimeoutError(
                f"Another call to {self.description} has not ended yet.",
                hint="Try again when it has.",
            )
        try:
            yield
        finally:
            self._turns.release()

    @contextmanager
    def _losing_the_line(self, what: str) -> Iterator[None]:
        """Drop the line on anything, Ctrl-C included, so that no late reply meets the next call."""
        try:
            with named(what, self._address, self._driver):
                yield
        except CellTimeoutError:
            self._drop_line()
            self._check_kernel()
            raise KernelTimeoutError(
                f"No reply from {self.description} in time; what was sent may still run."
            ) from None
        except BaseException:
            self._drop_line()
            raise

    def _open_line(self, deadline: float) -> Line:
        """Return a line that was alive just now, opening it with retries if need be."""
        if self._line is not None and self._line.is_alive():
            return self._line
        self._drop_line()
        remaining = max(1.0, deadline - time.monotonic())
        line = retried(self._new_line, min(remaining, CONNECT_SECONDS))
        self._line = line
        if self._closed:  # by another thread, while this one opened it
            self._drop_line()
            raise KernelLostError(f"The connection to {self.description} was closed from here.")
        return line

    def _new_line(self) -> Line:
        if self._closed:
            raise KernelLostError(f"The connection to {self.description} was closed from here.")
        with named(f"a line to kernel {self._kernel_id[:8]}", self._address, self._driver):
            return self._driver.open_line(self._kernel_id)

    def _check_kernel(self) -> None:
        """Raise KernelLostError where the server has let go of the kernel: a line to it just falls silent."""
        try:
            with named(f"kernel {self._kernel_id[:8]}", self._address, self._driver):
                self._driver.check_kernel(self._kernel_id)
        except KernelConnectionError:
            return

    def __del__(self) -> None:
        """Close the line of a kernel that was forgotten; the kernel itself is left as it is."""
        with contextlib.suppress(Exception):  # at the interpreter's end anything may be gone
            self._drop_line()

    def _drop_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.drop()

    def _transfer(
        self, attempt: Callable[[Line], None], what: str, refusal: type[KernelToolsError]
    ) -> None:
        waits = backoff_seconds()
        for number in range(1, TRANSFER_ATTEMPTS + 1):
            try:
                with self._turn(time.monotonic() + TRANSFER_TURN_SECONDS):
                    line = self._open_line(time.monotonic() + CONNECT_SECONDS)
                    with self._losing_the_line(what):
                        attempt(line)
                        return
            except RemoteFileError as error:
                raise refusal(f"{what} failed: {error}") from None
            except (KernelConnectionError, KernelTimeoutError):
                if number == TRANSFER_ATTEMPTS:
                    raise
            time.sleep(next(waits))


K = TypeVar("K", bound=HeldKernel)


def hold(
    kind: type[K],
    driver: Driver,
    address: ServerAddress,
    *,
    kernel_name: str,
    attach: str | None,
) -> K:
    """Start a kernel of our own, or attach to the one named; `kind` is the adapter's class.

    Where the server refuses to start one (403, 405), its only idle kernel is borrowed, and `notice`
    says so.

    Raises:
        InvalidArgumentError: no such kernel specification.
        KernelAuthError, KernelConnectionError, KernelLostError: as their names say.
    """

    def first_answer() -> Sequence[Mapping[str, Any]]:
        with named("a list of kernels", address, driver):
            return driver.list_kernels()

    kernels = retried(first_answer, FIRST_ANSWER_SECONDS)
    if attach is None:
        kernel = _started(kind, driver, address, kernel_name, kernels)
    else:
        with named(f"kernel {attach}", address, driver):
            driver.check_kernel(attach)
        kernel = kind(driver, address, attach, owned=False, kernel_name=kernel_name)
    try:
        kernel.greet()
    except BaseException:
        kernel.close(stop_kernel=True)
        raise
    return kernel


def _started(
    kind: type[K],
    driver: Driver,
    address: ServerAddress,
    kernel_name: str,
    kernels: Sequence[Mapping[str, Any]],
) -> K:
    try:
        # Not retried: a lost reply would leave a kernel behind that nobody knows.
        kernel_id = driver.start_kernel(kernel_name)
    except BaseException as error:
        if not _is_foreign(error, driver):
            raise
        status = _status_of(error)
        if status in {403, 405}:
            return _borrowed(kind, driver, address, kernels, status)
        failure = _translated(error, "the start of a kernel", address)
        cause = ForeignError.of(error)
    else:
        return kind(driver, address, kernel_id, owned=True, kernel_name=kernel_name)
    with named("a list of kernel specifications", address, driver):
        names = sorted(driver.kernel_names())
    if names and kernel_name not in names:
        raise InvalidArgumentError(
            f"The server has no kernel named {kernel_name!r}.", hint=f"It has: {', '.join(names)}."
        )
    raise failure from cause


def _borrowed(
    kind: type[K],
    driver: Driver,
    address: ServerAddress,
    kernels: Sequence[Mapping[str, Any]],
    status: int | None,
) -> K:
    idle = [kernel for kernel in kernels if kernel.get("execution_state") == "idle"]
    if len(idle) != 1:
        raise KernelAuthError(
            f"The server at {address.shown} does not let us start a kernel ({status}), and has "
            f"{len(idle)} idle ones to choose from.",
            hint="Name the one to use: %remote_connect URL --attach KERNEL_ID.",
        )
    notice = (
        f"The server does not let us start a kernel ({status}); its only idle one is used and will "
        "never be interrupted, restarted or ended from here."
    )
    name = str(idle[0].get("name", ""))
    return kind(driver, address, str(idle[0]["id"]), owned=False, kernel_name=name, notice=notice)


@contextmanager
def named(what: str, address: ServerAddress, driver: Driver) -> Iterator[None]:
    """Turn a foreign exception into one of ours, named after what was asked."""
    try:
        yield
    except KeyboardInterrupt:
        # A new one: `%xmode Verbose` shows the variables of the frames below, and the URL is one.
        raise KeyboardInterrupt from None
    except BaseException as error:
        if not _is_foreign(error, driver):
            raise
        raise _translated(error, what, address) from ForeignError.of(error)


def retried(attempt: Callable[[], T], seconds: float) -> T:
    """Try until it works, while only the connection is at fault, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    for wait in backoff_seconds():
        try:
            return attempt()
        except KernelConnectionError:
            if time.monotonic() + wait > deadline:
                raise
        time.sleep(wait)
    raise AssertionError  # pragma: no cover - the waits never end


def _is_foreign(error: BaseException, driver: Driver) -> bool:
    """True for what the client library and the network raise, false for a local file's trouble."""
    # ValueError: a proxy's login page where JSON was expected.
    network = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError, ValueError)
    if isinstance(error, (*driver.foreign, *network)):
        return True
    return type(error) is OSError and error.errno in _NETWORK_ERRNOS


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an exception.

    pyrun-jupyter tells statuses apart in its text alone, yet the response stands in the context.
    """
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        status = getattr(response, "status_code", None) or getattr(seen, "status_code", None)
        if isinstance(status, int):
            return status
        seen = seen.__cause__ or seen.__context__
    return None


def _translated(error: BaseException, what: str, address: ServerAddress) -> KernelError:
    status = _status_of(error)
    if status is not None:
        return error_of_status(status, f"{what} at {address.shown}")
    return KernelConnectionError(
        f"The line broke or nothing answered: {what} at {address.shown} ({type(error).__name__}).",
        hint="Is the server running, and the URL whole?",
    )
