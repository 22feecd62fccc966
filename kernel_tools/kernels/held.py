"""A kernel as we hold it, whatever library carries the line: turns, reconnecting, and manners.

One call at a time. A dropped line is opened again before a cell is sent, never after: a cell runs at
most once. A kernel that we did not start is never interrupted, restarted or ended. How it was found is
in `opening`; an adapter brings a `ServerDriver`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from kernel_tools.errors import (
    FetchError,
    InvalidArgumentError,
    KernelConnectionError,
    KernelError,
    KernelLostError,
    KernelTimeoutError,
    KernelToolsError,
)
from kernel_tools.kernels.base import CellResult, OnOutput, Progress, backoff_seconds
from kernel_tools.kernels.bounded import LateError, within
from kernel_tools.kernels.cells import QUIET_CELL
from kernel_tools.kernels.driver import CellTimeoutError, Line, ServerDriver
from kernel_tools.kernels.transfer import Download, RemoteFileError, Upload, register_cell

T = TypeVar("T")

# How long a call that is over may still ask whether the kernel is there at all.
CHECK_SECONDS: Final = 2.0
STOP_SECONDS: Final = 5.0


class HeldKernel:
    """`RemoteKernel` over a driver; made by `opening.open_kernel`.

    Args:
        mark: the name of the session that it was started in; None where it is not ours.
        notice: what a person should know about how it was found.
    """

    def __init__(
        self,
        driver: ServerDriver,
        kernel_id: str,
        *,
        kernel_name: str,
        mark: str | None = None,
        notice: str = "",
    ) -> None:
        self._driver = driver
        self._patience = driver.patience
        self._kernel_id = kernel_id
        self._kernel_name = kernel_name
        self._mark = mark
        self._line: Line | None = None
        self._turns = threading.RLock()
        self._closed = False
        self._unanswered = False  # a cell of ours may still run there
        self._asked_line: Line | None = None  # where its end was asked for, and since when
        self._asked_at = 0.0
        self.notice = notice

    @property
    def kernel_id(self) -> str:
        """The server's id of the kernel."""
        return self._kernel_id

    @property
    def owned(self) -> bool:
        """True where we started it."""
        return self._mark is not None

    @property
    def description(self) -> str:
        """One redacted line for people."""
        whose = "ours" if self.owned else "not ours"
        shown = self._driver.address.shown
        return f"kernel {self._kernel_id[:8]} ({self._kernel_name}, {whose}) at {shown}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.description}>"

    # Calls ----------------------------------------------------------------------------------

    def execute(
        self, code: str, *, timeout_seconds: float = 60.0, on_output: OnOutput | None = None
    ) -> CellResult:
        """Run a cell once.

        Raises:
            KernelTimeoutError: no reply in time; the cell may still run.
            KernelConnectionError: the line broke, before or after the cell was received.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._turn(deadline):
            self._await_the_last_cell(deadline)
            line = self._open_line(deadline)
            with self._losing_the_line("a cell"):
                self._unanswered = True
                result = line.execute(code, max(0.01, deadline - time.monotonic()), on_output)
                self._unanswered = False
                return result

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
        upload = Upload(source, remote_path, mode, self._patience.answer)
        self._transfer(upload, on_progress, f"the upload of {remote_path}", KernelError)

    def get_file(
        self, remote_path: str, destination: Path, *, on_progress: Progress | None = None
    ) -> None:
        """Bring a file in chunks; hashed at both ends, renamed when whole; goes on if the line breaks.

        Raises:
            FetchError: the remote cannot read it, or it changed on the way.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        download = Download(remote_path, destination, self._patience.answer)
        try:
            self._transfer(download, on_progress, f"the download of {remote_path}", FetchError)
        finally:
            download.discard()

    def state(self) -> str:
        """Return what the server says of the kernel: `idle`, `busy`, `starting`, ..."""
        return self._driver.state_of(self._kernel_id)

    def interrupt(self) -> None:
        """Interrupt what runs in our own kernel, also while another thread waits for it.

        Raises:
            KernelError: the kernel is not ours.
        """
        if not self.owned:
            raise KernelError(
                f"{self.description} is never interrupted from here.",
                hint="Interrupt it where it was started.",
            )
        self._driver.interrupt_kernel(self._kernel_id)

    def hang_up(self) -> None:
        """Drop the line: a call that waits on it ends with `KernelConnectionError`; the kernel lives."""
        self._drop_line()

    def close(self, *, stop_kernel: bool) -> None:
        """Close the line, at once even while a call waits; stop the kernel if asked and it is ours."""
        self._closed = True
        self._drop_line()
        if not stop_kernel or self._mark is None:
            return
        # A start whose reply was lost may have left a second one under our mark.
        for kernel_id in dict.fromkeys((self._kernel_id, *self._others_of_ours())):
            with contextlib.suppress(KernelLostError):
                # A kernel that is being restarted answers 500; a server that is down need not be awaited.
                retried(
                    functools.partial(self._driver.stop_kernel, kernel_id),
                    STOP_SECONDS,
                    unanswered_seconds=0,
                )

    def greet(self) -> None:
        """Open the line; in a kernel of ours switch off the history and switch on file transfer."""
        if not self.owned:
            # Someone else's kernel may be busy for hours; that shows with the first call.
            deadline = time.monotonic() + self._patience.connect
            with self._turn(deadline):
                self._open_line(deadline)
            return
        deadline = time.monotonic() + self._patience.start
        for wait in backoff_seconds():
            try:
                cell = QUIET_CELL + register_cell()  # the same when it runs twice
                self.execute(cell, timeout_seconds=deadline - time.monotonic()).check()
            except KernelConnectionError:
                if time.monotonic() + wait > deadline:
                    raise
            else:
                return
            time.sleep(wait)

    # The line -------------------------------------------------------------------------------

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
            with self._driver.named(what):
                yield
        except CellTimeoutError:
            self._drop_line()
            with contextlib.suppress(KernelConnectionError, LateError):
                within(
                    CHECK_SECONDS, self.state
                )  # a line to a kernel that is gone just falls silent
            raise KernelTimeoutError(
                f"No reply from {self.description} in time; what was sent may still run."
            ) from None
        except BaseException:
            self._drop_line()
            raise

    def _await_the_last_cell(self, deadline: float) -> None:
        """Send nothing behind a cell that was given up and still runs: repeats would pile up there.

        Raises:
            KernelTimeoutError: it runs on.
        """
        if not self._unanswered:
            return
        for wait in backoff_seconds():
            left = deadline - time.monotonic()
            try:
                state = within(max(CHECK_SECONDS, left), self.state)
            except LateError:
                state = "busy"  # as far as anyone can tell
            except KernelConnectionError:
                break  # opening the line tells what is wrong
            if state != "busy":
                break
            if deadline - time.monotonic() <= wait:
                raise self._busy_error()
            time.sleep(wait)
        # Older servers say "idle" of a kernel whose control channel answered, whatever its cells do.
        line = self._open_line(deadline)
        if self._asked_line is not line:
            self._asked_line, self._asked_at = line, time.monotonic()
        with self._losing_the_line("the last cell"):
            try:
                line.await_turn(max(0.01, deadline - time.monotonic()))
            except CellTimeoutError:
                # The question stays open with its line, unless that has been silent for too long.
                if time.monotonic() - self._asked_at > self._patience.answer:
                    self._drop_line()
            else:
                self._unanswered, self._asked_line = False, None
        if self._unanswered:
            raise self._busy_error()

    def _busy_error(self) -> KernelTimeoutError:
        return KernelTimeoutError(
            f"{self.description} is busy with a cell, so nothing more was sent."
        )

    def _open_line(self, deadline: float) -> Line:
        """Return a line that was alive just now, opening it with retries if need be."""
        if self._line is not None and self._line.is_alive():
            return self._line
        self._drop_line()
        remaining = max(1.0, deadline - time.monotonic())
        line = retried(self._new_line, min(remaining, self._patience.connect))
        self._line = line
        if self._closed:  # by another thread, while this one opened it
            self._drop_line()
            raise self._closed_error()
        return line

    def _new_line(self) -> Line:
        if self._closed:
            raise self._closed_error()
        what = f"a line to kernel {self._kernel_id[:8]}"
        try:
            with self._driver.named(what):
                return within(
                    self._patience.request,
                    lambda: self._driver.open_line(self._kernel_id),
                    discard=lambda line: line.drop(),
                )
        except KernelLostError:
            self.state()  # raises the same unless the server knows the kernel after all
            raise KernelConnectionError(f"The server refused {what} (404), and has it.") from None

    def _closed_error(self) -> KernelLostError:
        return KernelLostError(f"The connection to {self.description} was closed from here.")

    def _drop_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.drop()

    def _others_of_ours(self) -> tuple[str, ...]:
        assert self._mark is not None
        try:
            return self._driver.kernels_of(self._mark)
        except KernelError:
            return ()

    def _transfer(
        self,
        transfer: Upload | Download,
        on_progress: Progress | None,
        what: str,
        refusal: type[KernelToolsError],
    ) -> None:
        waits = backoff_seconds()
        moved, most = time.monotonic(), -1

        def note(done: int, total: int) -> None:
            nonlocal moved, most, waits
            if done > most:
                moved, most, waits = time.monotonic(), done, backoff_seconds()
            if on_progress is not None:
                on_progress(done, total)

        while True:
            try:
                with self._turn(time.monotonic() + self._patience.turn):
                    line = self._open_line(time.monotonic() + self._patience.connect)
                    with self._losing_the_line(what):
                        transfer.run(line, note)
                        return
            except RemoteFileError as error:
                raise refusal(f"{what} failed: {error}") from None
            except (KernelConnectionError, KernelTimeoutError):
                if time.monotonic() - moved > self._patience.stall:
                    raise
            time.sleep(next(waits))

    def __del__(self) -> None:
        """Close the line of a kernel that was forgotten; the kernel itself is left as it is."""
        with contextlib.suppress(Exception):  # at the interpreter's end anything may be gone
            self._drop_line()


def retried(
    attempt: Callable[[], T], seconds: float, *, unanswered_seconds: float | None = None
) -> T:
    """Try until it works, while only the connection is at fault.

    Args:
        attempt: raises KernelConnectionError where trying again may help.
        seconds: for so long at most.
        unanswered_seconds: the same where nobody answers, not even a proxy (default: `seconds`).
    """
    started = time.monotonic()
    for wait in backoff_seconds():
        try:
            return attempt()
        except KernelConnectionError as error:
            most = seconds
            if unanswered_seconds is not None and error.status is None:
                most = unanswered_seconds
            if time.monotonic() + wait > started + most:
                raise
        time.sleep(wait)
    raise AssertionError  # pragma: no cover - the waits never end
