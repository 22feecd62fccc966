"""The limits of a run's time: where one is reached, the end is asked for as a person would."""

from __future__ import annotations

import time
from typing import Optional

from . import control
from .control import StopRequest
from .job import Limits


class Deadlines:
    """Counts from its making on, and from the trainer's first start."""

    def __init__(self, run_dir: str, limits: Limits) -> None:
        self._run_dir = run_dir
        self._limits = limits
        self._began = time.monotonic()
        self._trainer_began: Optional[float] = None

    def trainer_starts(self) -> None:
        """The first start counts; later attempts share its time."""
        if self._trainer_began is None:
            self._trainer_began = time.monotonic()

    def enforce(self) -> None:
        """Ask for the end where a limit is reached."""
        limits, now = self._limits, time.monotonic()
        trained = 0.0 if self._trainer_began is None else now - self._trainer_began
        reached = None
        if limits.timeout_seconds is not None and trained >= limits.timeout_seconds:
            reached = f"the time limit of {limits.timeout_seconds:g} s (--timeout) was reached"
        elif limits.max_hours is not None and now - self._began >= limits.max_hours * 3600:
            reached = f"the limit of {limits.max_hours:g} h (--max-hours) was reached"
        if reached is not None:
            control.ask_stop(self._run_dir, StopRequest(control.TIMED_OUT, reached))
