"""RunWatcher: asks the agent about one run and turns its answers into snapshots.

It keeps the local mirror and judges nothing itself (`state.reduce` does). One daemon thread polls while
somebody holds the watcher; losing contact only ages the contact. Of a log that is far ahead the newest
lines are shown at once, and what lies before them comes compressed, piece by piece, in a second thread.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from kernel_tools.errors import (
    KernelAuthError,
    KernelError,
    KernelTimeoutError,
    KernelToolsError,
    WaitTimeoutError,
)
from kernel_tools.redact import redact, redact_all
from kernel_tools.runs.mirror import METRICS, STEPS, Offsets, RunMirror, unpack
from kernel_tools.runs.registry import RunRecord, write_json
from kernel_tools.state import ContactLost, Polled, RunSnapshot, RunState, reduce, thinned

POLL_SECONDS: Final = 1.0
STOPPING_POLL_SECONDS: Final = 0.25  # somebody has asked for the end and waits for it
SLOWEST_POLL_SECONDS: Final = 15.0  # after lost contact the pause doubles up to this
POLL_BYTES: Final = 256 * 1024
ASK_SECONDS: Final = 10.0  # how long somebody who asks for figures waits for fresh ones
STOP_SECONDS: Final = 30.0  # how long a stop is tried before it is kept for when contact is back
# A log that is further ahead than this is shown from its end, and filled in from behind.
FAR_BYTES: Final = 4 << 20
VIEW_BYTES: Final = 64 * 1024
PIECE_BYTES: Final = 16 << 20
SIGNAL_SECONDS: Final = 0.5  # a wait is cut into these, so that Ctrl-C is seen on every platform

Subscriber = Callable[[RunSnapshot], None]


class CallsAgent(Protocol):
    """The way to the agent of the machine that a run is on; a `Connection` is one."""

    @property
    def where(self) -> str:
        """The connection in words, without credentials."""

    def call(self, function: str, *, timeout_seconds: float = 60.0, **arguments: Any) -> Any:
        """Call a function of the agent's API."""

    def get_file(self, remote_path: str, destination: Path) -> None:
        """Bring one file here, verified and whole."""


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A stop that could not be said yet."""

    message: str
    now: bool


class RunWatcher:
    """The newest snapshot of one run, and who wants to know."""

    def __init__(
        self,
        record: RunRecord,
        *,
        link: CallsAgent,
        mirror: RunMirror,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._link = link
        self._mirror = mirror
        self._clock = clock
        self._changed = threading.Condition()
        self._polling = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._subscribers: list[Subscriber] = []
        self._last_answer = clock()
        self._trouble: KernelToolsError | None = None
        self._caught_up = False
        self._stop_wanted: StopWanted | None = None
        self._view: int | None = None  # how far the log was shown, where the mirror is behind that
        self._filling: threading.Thread | None = None
        self._key = secrets.token_hex(6)
        # How far this watcher has read. The mirror may be ahead: another notebook writes to it too.
        self._have = mirror.offsets()
        tail = mirror.log_tail(self._have.log)
        self._snapshot = RunSnapshot(
            run_id=record.run_id,
            name=record.name,
            sync=record.sync or None,
            where=link.where,
            local_dir=mirror.folder,
            metrics=mirror.rows(METRICS, self._have.metrics),
            steps=thinned(mirror.rows(STEPS, self._have.steps)),
            log_tail=tuple(tail.split("\n")) if tail else (),
            log_size=self._have.log,
        )

    @property
    def snapshot(self) -> RunSnapshot:
        """Everything as last seen; frozen."""
        with self._changed:
            return self._snapshot

    @property
    def finished(self) -> bool:
        """True once the run has ended and its whole log is here."""
        return self._snapshot.terminal and self._caught_up

    @property
    def behind(self) -> bool:
        """True while the log here lacks what is shown of it."""
        with self._changed:
            return self._view is not None

    def start(self) -> None:
        """Start polling in the background, unless that is going on or the run has ended."""
        with self._changed:
            self._closed = False
            if self._thread is None and not self.finished:
                self._trouble = None  # that of an earlier watch
                self._thread = threading.Thread(
                    target=_watch,
                    args=(weakref.ref(self), self._wake),
                    name=f"watch {self._record.run_id}",
                    daemon=True,
                )
                self._thread.start()

    def close(self) -> None:
        """Stop polling."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake.set()

    def hurry(self) -> None:
        """Poll at once instead of after the pause."""
        self._wake.set()

    def stop(self, wanted: StopWanted) -> bool:
        """Ask the run to end; return whether it heard. If not, it is told as soon as contact is back.

        Raises:
            KernelAuthError, AgentError, RunNotFoundError: the remote answers, and refuses.
        """
        try:
            self._say_stop(wanted)
        except KernelError as error:
            if not _may_pass(error):
                raise
            with self._changed:
                self._stop_wanted = wanted
            self._note_silence(error)
            self.start()
            return False
        self.hurry()
        return True

    def _say_stop(self, wanted: StopWanted) -> None:
        self._link.call(
            "stop",
            remote_dir=self._record.remote_dir,
            run_id=self._record.run_id,
            message=wanted.message,
            now=wanted.now,
            timeout_seconds=STOP_SECONDS,
        )

    def reconnected(self) -> None:
        """Watch on over a new line: what went wrong on the old one says nothing any more."""
        with self._changed:
            self._trouble = None
        self.start()
        self.hurry()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Hand every new snapshot to `subscriber`, from the polling thread; returns the way out."""
        with self._changed:
            self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            with self._changed:
                if subscriber in self._subscribers:
                    self._subscribers.remove(subscriber)

        return unsubscribe

    def refresh(self) -> RunSnapshot:
        """Ask now, until nothing more is to be read; return the new snapshot.

        Raises:
            KernelError, AgentError: the remote does not answer, or does not know the run.
        """
        with self._polling:
            while self._poll():
                pass
            return self.snapshot

    def refresh_or_age(self) -> RunSnapshot:
        """Like `refresh`, but a line that is down only shows in `contact`, after `ASK_SECONDS`."""
        if self.finished:
            return self.snapshot
        until = time.monotonic() + ASK_SECONDS
        # The background's poll may be waiting for an answer that never comes.
        if not self._polling.acquire(timeout=ASK_SECONDS):
            self._note_silence(KernelTimeoutError("the remote has not answered the last poll yet."))
            return self.snapshot
        try:
            while self._poll(timeout_seconds=max(1.0, until - time.monotonic())):
                pass
        except KernelToolsError as error:
            self._note_silence(error)
        finally:
            self._polling.release()
        return self.snapshot

    def wait(self, timeout: float | None) -> None:
        """Block until the run has ended and its log is here.

        Raises:
            WaitTimeoutError: it goes on after `timeout` seconds.
            KernelAuthError, AgentError, RunNotFoundError: the remote answers, and will never tell.
        """
        self.start()
        deadline = None if timeout is None else self._clock() + timeout
        with self._changed:
            while not self.finished:
                if self._trouble is not None and not _may_pass(self._trouble):
                    raise self._trouble
                left = SIGNAL_SECONDS if deadline is None else deadline - self._clock()
                if left <= 0:
                    run_id, state = self._record.run_id, self._snapshot.state.value
                    raise WaitTimeoutError(
                        f"{run_id} goes on ({state}) after {timeout:g} s.",
                        hint=f"%remote_wait {run_id} waits again, %remote_stop {run_id} ends it.",
                    )
                self._changed.wait(min(SIGNAL_SECONDS, left))

    # Inside ----------------------------------------------------------------------------------

    def _poll(self, *, timeout_seconds: float = 60.0) -> bool:
        """Poll once; return True while there is more to read at once."""
        have, view = self._have, self._view
        answer = self._link.call(
            "poll",
            remote_dir=self._record.remote_dir,
            run_id=self._record.run_id,
            log_offset=have.log if view is None else view,
            metrics_offset=have.metrics,
            steps_offset=have.steps,
            max_bytes=POLL_BYTES,
            timeout_seconds=timeout_seconds,
        )
        size = int(answer["log"]["size"])
        data = unpack(answer["log"]) if view is not None else self._mirror.write_log(answer["log"])
        shown = int(answer["log"]["offset"]) + len(data)
        if view is not None:
            self._see(shown)
        metrics = self._mirror.write_rows(METRICS, answer["metrics"])
        steps = self._mirror.write_rows(STEPS, answer["steps"])
        read = {
            part: 0
            if rows is None
            else int(answer[part]["offset"]) + len(answer[part]["data"].encode())
            for part, rows in (("metrics", metrics), ("steps", steps))
        }
        self._have = Offsets(shown, read["metrics"], read["steps"])
        more = shown < size or any(read[part] < int(answer[part]["size"]) for part in read)
        event = Polled(
            status=redact_all(answer["status"]),
            agent=answer["agent"],
            agent_alive=bool(answer["agent_alive"]),
            boot_id=str(answer["boot_id"]),
            agent_heartbeat_age_seconds=answer.get("agent_heartbeat_age_seconds"),
            log_text=redact(data.decode("utf-8", "replace")),
            log_size=size,
            metrics=metrics or (),
            steps=steps or (),
            artifacts=answer["artifacts"],
            run_dir=str(answer["run_dir"]),
            status_whole=bool(answer.get("status_whole", True)),
            log_skipped=view is not None and view < 0,
        )
        far = size - shown > FAR_BYTES
        if far:
            self._see(-VIEW_BYTES)
        caught_up = not more and self._view is None
        self._accept(event, caught_up=caught_up, cut=(metrics is None, steps is None))
        self._fill()
        return more

    def _see(self, view: int) -> None:
        """Note how far the log is shown; negative: from so many bytes before its end on."""
        with self._changed:
            # The other thread may have come up to it meanwhile: then it is the mirror that is shown.
            self._view = None if 0 <= view <= self._mirror.offsets().log else view

    def _fill(self) -> None:
        """Start the thread that brings what lies before the view, unless it is at work."""
        with self._changed:
            if self._view is None or self._view < 0 or self._filling is not None or self._closed:
                return
            self._filling = threading.Thread(
                target=_fill_log,
                args=(weakref.ref(self),),
                name=f"log of {self._record.run_id}",
                daemon=True,
            )
            self._filling.start()

    def _fill_piece(self) -> bool:
        """Bring one piece of the log; return False once the mirror has come up to the view."""
        have = self._mirror.offsets().log
        with self._changed:
            view = self._view
            if self._closed or view is None or view < 0:
                self._filling = None
                return False
            if have >= view:
                self._view = self._filling = None
                self._wake.set()
                return False
        piece = self._piece(have, min(PIECE_BYTES, view - have))
        arriving = self._mirror.folder / f".{self._key}.piece"
        try:
            self._link.get_file(str(piece["path"]), arriving)
            self._mirror.write_piece(have, arriving)
        finally:
            arriving.unlink(missing_ok=True)
        if have + int(piece["length"]) >= view:
            with contextlib.suppress(KernelToolsError):
                self._piece(view, 0)  # nothing is left lying there
        return True

    def _piece(self, offset: int, length: int) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._link.call(
            "pack_log",
            remote_dir=self._record.remote_dir,
            run_id=self._record.run_id,
            key=self._key,
            offset=offset,
            length=length,
        )
        return answer

    def _accept(self, event: Polled, *, caught_up: bool, cut: tuple[bool, bool]) -> None:
        with self._changed:
            before = self._snapshot
            if cut[0]:
                before = replace(before, metrics=())
            if cut[1]:
                before = replace(before, steps=())
            self._snapshot = reduce(before, event)
            self._last_answer = self._clock()
            self._trouble = None
            self._caught_up = caught_up
            self._changed.notify_all()
        if self.finished:
            write_json(self._mirror.folder / "status.json", dict(self.snapshot.status))
        self._publish()

    def _note_silence(self, error: KernelToolsError) -> None:
        with self._changed:
            age = self._clock() - self._last_answer
            self._snapshot = reduce(self._snapshot, ContactLost(age))
            self._trouble = error
            self._changed.notify_all()
        self._publish()

    def _publish(self) -> None:
        with self._changed:
            subscribers, snapshot = tuple(self._subscribers), self._snapshot
        for subscriber in subscribers:
            subscriber(snapshot)

    def _poll_for_thread(self) -> bool:
        """One round of the thread; return whether the remote answered."""
        try:
            if self._stop_wanted is not None:
                self._say_stop(self._stop_wanted)
                self._stop_wanted = None
            self.refresh()
        except KernelToolsError as error:
            self._note_silence(error)
            return False
        except Exception as error:  # noqa: BLE001 - a thread's error is seen by nobody: `wait` raises it
            trouble = KernelToolsError(f"watching failed: {type(error).__name__}: {error}")
            trouble.__cause__ = error
            self._note_silence(trouble)
            return False
        return True

    def _thread_may_end(self) -> bool:
        with self._changed:
            if self._closed or self.finished:
                self._thread = None
                return True
            return False


def _fill_log(reference: weakref.ref[RunWatcher]) -> None:
    """Bring the log piece by piece; a line that is down is tried again, as the polls are."""
    pause = POLL_SECONDS
    while True:
        watcher = reference()
        if watcher is None:
            return
        try:
            if not watcher._fill_piece():  # noqa: SLF001 - the thread is its own
                return
            pause = 0.0
        except (KernelToolsError, ValueError, OSError):
            pause = min(SLOWEST_POLL_SECONDS, 2 * max(pause, POLL_SECONDS))
        del watcher
        time.sleep(pause)


def _may_pass(trouble: KernelToolsError) -> bool:
    """True for a line that may come back; an expired URL, an unknown run or a defect will not."""
    return isinstance(trouble, KernelError) and not isinstance(trouble, KernelAuthError)


def _watch(reference: weakref.ref[RunWatcher], wake: threading.Event) -> None:
    """Poll until the run has ended, the watcher is closed, or nobody holds it any more."""
    pause = POLL_SECONDS
    while True:
        watcher = reference()
        if watcher is None or watcher._thread_may_end():  # noqa: SLF001 - the thread is its own
            return
        answered = watcher._poll_for_thread()  # noqa: SLF001
        if watcher._thread_may_end():  # noqa: SLF001
            return
        stopping = watcher.snapshot.state is RunState.STOPPING
        del watcher  # held only while it polls, so that a forgotten run is let go
        calm = STOPPING_POLL_SECONDS if stopping else POLL_SECONDS
        pause = calm if answered else min(SLOWEST_POLL_SECONDS, 2 * max(pause, POLL_SECONDS))
        wake.wait(pause)
        wake.clear()
