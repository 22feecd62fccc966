"""How fast a run goes and what is left of it. Clocks only: nothing here is part of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pace:
    """Seconds and pictures since the last row, and of the epochs so far."""

    global_batch: int
    steps_per_epoch: int = 1
    planned_steps: int = 1
    clock: Callable[[], float] = time.monotonic
    images_per_second: float | None = None
    data_seconds: float | None = (
        None  # mean a step and rank of the last window: waiting for pictures
    )
    step_seconds: float | None = None  # mean a step: everything after
    epoch_seconds: list[float] = field(default_factory=list)
    _started: float = 0.0
    _epoch_started: float = 0.0
    _window_started: float = 0.0
    _batches: int = 0
    _data: float = 0.0
    _step: float = 0.0

    def __post_init__(self) -> None:
        self._started = self.clock()
        self.begin(steps_per_epoch=1, planned_steps=1)

    def begin(self, *, steps_per_epoch: int, planned_steps: int) -> None:
        """The first step comes next."""
        self.steps_per_epoch, self.planned_steps = steps_per_epoch, planned_steps
        self._epoch_started = self.clock()
        self._open_window()

    def step(self, *, data_seconds: float, step_seconds: float) -> None:
        """One batch is done."""
        self._batches += 1
        self._data += data_seconds
        self._step += step_seconds

    def measure(self) -> None:
        """Take the figures of the window so far."""
        seconds = max(self.clock() - self._window_started, 1e-9)
        self.images_per_second = round(self._batches * self.global_batch / seconds, 3)
        self.data_seconds = round(self._data / max(1, self._batches), 6)
        self.step_seconds = round(self._step / max(1, self._batches), 6)

    def row(self) -> None:
        """A row was written: the next window begins."""
        self._open_window()

    def epoch(self) -> float:
        """An epoch is done, its evaluation included; return its seconds."""
        seconds = self.clock() - self._epoch_started
        self.epoch_seconds.append(seconds)
        self._epoch_started = self.clock()
        self._open_window()
        return seconds

    def elapsed(self) -> float:
        """Return the seconds of this process's part of the run."""
        return round(self.clock() - self._started, 3)

    def eta(self, done: float) -> float | None:
        """Return seconds to go from the fraction `done`: the mean pace so far, evaluations included."""
        if not self.images_per_second or done <= 0.0:
            return None
        if self.epoch_seconds:
            a_step = sum(self.epoch_seconds) / (len(self.epoch_seconds) * self.steps_per_epoch)
        else:
            a_step = self.global_batch / self.images_per_second
        return round(min(a_step * self.planned_steps * (1.0 - done), 1e9), 1)

    def _open_window(self) -> None:
        self._window_started = self.clock()
        self._batches = 0
        self._data = self._step = 0.0
