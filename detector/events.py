"""What a run tells whoever listens: frozen events, and one thread with a bounded queue a listener.

A listener that raises is logged, one that hangs is left behind, one that is slow loses events and is
told how many: none of them ever stops or ends the training.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from detector.console import say

QUEUE_EVENTS: Final = 1000
THREAD_PREFIX: Final = "listener-"
_FAILURES: Final = 10  # in a row, then a listener is left alone


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A row of `steps.jsonl` was written. For sinks; callbacks are not called with it."""

    optimizer_steps: int
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EpochEvent:
    """An epoch is done, its evaluation included where there was one.

    Attributes:
        run_dir: the run directory.
        epoch: from 1.
        optimizer_steps: updates that changed weights, over the whole run.
        row: the row of `metrics.jsonl`: rate, losses, times.
        metrics: of this epoch's evaluation; None where it was not evaluated.
        best_metric: the highest `evaluation.best_metric` so far, this epoch included.
        best_epoch: the epoch that had it.
    """

    run_dir: Path
    epoch: int
    optimizer_steps: int
    row: Mapping[str, Any]
    metrics: Mapping[str, float] | None
    best_metric: float | None
    best_epoch: int | None


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """A checkpoint is on disk, whole.

    Attributes:
        run_dir: the run directory.
        path: the file; `last` and `best` are replaced by the next one of their kind.
        kind: `last` (resumable), `best` or `epoch` (averaged weights).
        epoch: the one in progress or just done, from 1.
        optimizer_steps: updates that changed weights, over the whole run.
    """

    run_dir: Path
    path: Path
    kind: Literal["last", "best", "epoch"]
    epoch: int
    optimizer_steps: int


Event = StepEvent | EpochEvent | CheckpointEvent


class Handler(Protocol):
    """What a listener does with events, in its own thread."""

    def __call__(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """No more will come."""


class Listener:
    """A handler in a thread of its own."""

    def __init__(
        self, name: str, open_handler: Callable[[], Handler], *, capacity: int = QUEUE_EVENTS
    ) -> None:
        """`open_handler` is called in the thread too: it may import, connect, and hang."""
        self.name = name
        self.dropped = 0
        self._open = open_handler
        self._events: queue.Queue[Event | None] = queue.Queue(capacity)
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_PREFIX + name, daemon=True)
        self._thread.start()

    def send(self, event: Event) -> None:
        """Hand over an event, or drop it where the queue is full. Never waits."""
        if self._off.is_set():
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:
            if not self.dropped:
                say(f"listener={self.name} is too slow: events are dropped")
            self.dropped += 1

    def close(self, *, timeout_seconds: float) -> None:
        """Let it finish what is queued, for so long at most; then leave it behind."""
        try:
            self._events.put(None, timeout=timeout_seconds if not self._off.is_set() else 0)
        except queue.Full:
            pass
        else:
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            say(f"listener={self.name} hangs and is left behind, unsent={self._events.qsize()}")
        if self.dropped:
            say(f"listener={self.name} dropped={self.dropped}")

    def _run(self) -> None:
        try:
            handler = self._open()
        except BaseException as error:  # noqa: BLE001 - whatever a foreign package throws
            say(f"listener={self.name} is off: {_sentence(error)}")
            self._off.set()
            return
        failures = 0
        while (event := self._events.get()) is not None:
            try:
                handler(event)
                failures = 0
            except BaseException as error:  # noqa: BLE001 - as above
                failures += 1
                say(f"listener={self.name} failed: {_sentence(error)}")
                if not isinstance(error, ListenerError):
                    traceback.print_exception(error)
                if failures == _FAILURES:
                    say(f"listener={self.name} is off after {failures} failures in a row")
                    self._off.set()
                    return
        try:
            handler.close()
        except BaseException as error:  # noqa: BLE001 - as above
            say(f"listener={self.name} failed at its end: {_sentence(error)}")


class ListenerError(RuntimeError):
    """A listener cannot work; `str(error)` is one sentence."""


class Listeners:
    """All of them; without any, every method does nothing."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = listeners

    def send(self, event: Event) -> None:
        """Hand an event to each."""
        for listener in self._listeners:
            listener.send(event)

    def close(self, *, timeout_seconds: float) -> None:
        """End each; see `Listener.close`."""
        for listener in self._listeners:
            listener.close(timeout_seconds=timeout_seconds)
        self._listeners = ()


def left_behind() -> bool:
    """True where a listener hangs: an orderly exit might then wait for what it has started."""
    return any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate())


def _sentence(error: BaseException) -> str:
    if isinstance(error, ListenerError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())
