"""When a trainer is to be ended, and by what: the ladder of signals, and what counts as progress."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, FrozenSet, Optional, Tuple

from .files import file_size, read_json, read_slice
from .outcome import read_reasons

# Between SIGTERM and SIGKILL once the grace is over; torchrun needs a moment to end its workers.
# Never more than the grace itself: who grants little wants an end.
_TERM_SECONDS = 5.0
_LEAST_TERM_SECONDS = 1.0
# torchrun gives its workers 30 s after the first has died; a rank that hangs in a collective needs them all.
_PEER_SECONDS = 10.0
_TORCHRUN_ENDS = b"closing signal SIGTERM"
_LOG_TAIL_BYTES = 64 << 10


class Ending:
    """The ladder: ask, then SIGTERM after the grace, then SIGKILL."""

    def __init__(self, grace_seconds: float) -> None:
        self.step = ""
        self._grace = grace_seconds
        self._term = min(_TERM_SECONDS, max(_LEAST_TERM_SECONDS, grace_seconds))
        self._since: Optional[float] = None

    def skip_grace(self) -> None:
        """Go to SIGTERM at once: nothing listens any more."""
        self._grace = 0.0

    def next(self, *, now: bool) -> str:
        """Return the step that is due at this moment, "" where it is to be waited."""
        clock = time.monotonic()
        if self._since is None:
            self._since = clock
        if self.step != "SIGKILL" and now:
            self.step = "SIGKILL"
            return self.step
        if self.step == "" and clock - self._since >= self._grace:
            self.step, self._since = "SIGTERM", clock
            return self.step
        if self.step == "SIGTERM" and clock - self._since >= self._term:
            self.step, self._since = "SIGKILL", clock
            return self.step
        return ""


class Progress:
    """Whether anything moved: step, epoch, or the size of a log."""

    _KEYS = ("state", "phase", "current_epoch", "completed_epochs", "step", "optimizer_steps")
    _FILES = ("train.log", "metrics.jsonl", "steps.jsonl")
    _EVERY_SECONDS = 0.5

    def __init__(self, run_dir: str, limit_seconds: Optional[float]) -> None:
        self._run_dir = run_dir
        self._limit = limit_seconds
        self._seen: Tuple[Any, ...] = ()
        self._moved = time.monotonic()
        self._looked = 0.0

    def stalled(self) -> bool:
        """Return whether nothing moved for as long as the limit allows."""
        now = time.monotonic()
        if self._limit is None or now - self._looked < self._EVERY_SECONDS:
            return False
        self._looked = now
        status = read_json(os.path.join(self._run_dir, "status.json")) or {}
        sizes = [file_size(os.path.join(self._run_dir, name)) for name in self._FILES]
        seen = (*(status.get(key) for key in self._KEYS), *sizes)
        if seen != self._seen:
            self._seen, self._moved = seen, now
        return now - self._moved >= self._limit


class LostPeers:
    """Whether a rank has died without a word and the others outlive it for too long."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._since: Optional[float] = None

    def overdue(self, ranks: Dict[int, int], alive: FrozenSet[int]) -> bool:
        """Return whether what is left of the ranks is to be killed.

        Args:
            ranks: pid of every rank that was seen, by rank.
            alive: pids of the run that live.
        """
        gone = {rank for rank, pid in ranks.items() if pid not in alive}
        if not gone or len(gone) == len(ranks) or not self._died(gone):
            self._since = None
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return now - self._since >= _PEER_SECONDS

    def _died(self, gone: Any) -> bool:
        """A rank may end before the others; torchrun's own words, or its lack of any, tell a death."""
        told = {reason.rank for reason in read_reasons(self._run_dir)}
        if told:
            return bool(gone - told)
        log = os.path.join(self._run_dir, "train.log")
        start = max(0, file_size(log) - _LOG_TAIL_BYTES)
        return _TORCHRUN_ENDS in read_slice(log, start, _LOG_TAIL_BYTES)
