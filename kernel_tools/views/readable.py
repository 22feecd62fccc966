"""What a status says, kept to what its keys can hold: another trainer's file may say anything.

A view that stumbles over one value would show nothing at all, for hours. What is of the wrong kind
counts as not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

# Counts, shares and seconds: without a finite value they say nothing.
_COUNTS: Final = frozenset(
    (
        "attempt", "best_epoch", "completed_epochs", "current_epoch", "elapsed_seconds", "eta_seconds",
        "images_per_second", "optimizer_steps", "progress", "skipped_steps", "step", "steps_per_epoch",
        "total_epochs", "world_size",
    )
)  # fmt: skip
# A loss that is not finite is worth seeing.
_FIGURES: Final = frozenset(("best_metric", "current_metric", "lr", "train_loss"))
_MAPPINGS: Final = frozenset(("error", "metrics"))


def readable(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status without what no view could draw."""
    return {key: value for key, value in status.items() if _fits(key, value)}


def is_number(value: object) -> TypeGuard[float]:
    """True for what a float can hold, not a number and infinity among it; a boolean is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_finite(value: object) -> TypeGuard[float]:
    """True for a number that can be drawn."""
    return is_number(value) and math.isfinite(value)


def _fits(key: str, value: object) -> bool:
    if key in _COUNTS:
        return is_finite(value)
    if key in _FIGURES:
        return is_number(value)
    if key in _MAPPINGS:
        return isinstance(value, Mapping)
    return key != "gpu_names" or isinstance(value, list | tuple)
