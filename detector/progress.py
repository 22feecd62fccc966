"""Where a run stands: plain counters that a checkpoint holds and a resume takes up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Meter:
    """Means of named values over some steps."""

    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> None:
        """Count one step."""
        self.steps += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Return the mean of each value; empty before the first step."""
        return {name: total / self.steps for name, total in self.sums.items()}

    def clear(self) -> None:
        """Start over."""
        self.steps = 0
        self.sums = {}


@dataclass(slots=True)
class Progress:
    """Counters over the whole run, resumes included. `epoch` counts from 0; people see 1 more."""

    epoch: int = 0  # the one in progress
    step: int = 0  # batches of it that are done
    batches: int = 0  # done over the run, skipped ones included
    optimizer_steps: int = 0  # updates that changed weights
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    epoch_updates: int = 0  # optimizer steps of the epoch in progress
    best_metric: float | None = None
    best_epoch: int | None = None  # as people see it, from 1
    judged_in_vain: int = 0  # evaluations since the best one
    lr: float | None = None  # of the last batch
    epoch_losses: Meter = field(default_factory=Meter)
    window: Meter = field(default_factory=Meter)  # since the last row of steps.jsonl

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Progress:
        """Return the progress that `as_dict` described."""
        values = dict(plain)
        for name in ("epoch_losses", "window"):
            values[name] = Meter(**values[name])
        return cls(**values)

    def count(self, losses: Mapping[str, float], *, lr: float, stepped: bool) -> None:
        """Count one batch that is done."""
        self.lr = lr
        self.step += 1
        self.batches += 1
        if stepped:
            self.optimizer_steps += 1
            self.epoch_updates += 1
            self.skipped_in_a_row = 0
            self.epoch_losses.add(losses)
            self.window.add(losses)
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1

    def judge(self, score: float, *, epoch: int, is_better: bool) -> None:
        """Take the result of an evaluation; one that found nothing to judge by (-1, NaN) says nothing."""
        if is_better:
            self.best_metric, self.best_epoch = score, epoch
            self.judged_in_vain = 0
        elif score >= 0.0:
            self.judged_in_vain += 1

    def next_epoch(self) -> None:
        """Go on to the first batch of the next epoch."""
        self.epoch += 1
        self.step = 0
        self.epoch_updates = 0
        self.epoch_losses.clear()
