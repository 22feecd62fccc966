"""How much disk a data set and a run need on the remote. Arithmetic only."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# Room for logs, caches and a file system that is never filled to its end.
HEADROOM: Final = 0.30
# Weights, their moving average and AdamW's two moments, float32 each.
BYTES_PER_PARAMETER: Final = 4 * 4
# D-FINE N has 3.8 million parameters; last, best and two epochs are kept.
DEFAULT_PARAMETERS: Final = 3_800_000
DEFAULT_CHECKPOINTS: Final = 4


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """What a run takes on the remote's disk, in bytes.

    Attributes:
        staged_bytes: the archive as it arrives.
        extracted_bytes: what is unpacked from it.
        checkpoints_bytes: the weights that the run writes.
    """

    staged_bytes: int
    extracted_bytes: int
    checkpoints_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum, and 30 % on top."""
        used = self.staged_bytes + self.extracted_bytes + self.checkpoints_bytes
        return round(used * (1 + HEADROOM))

    def __add__(self, other: DiskNeed) -> DiskNeed:
        """The disk for both data sets and one run on them."""
        return DiskNeed(
            self.staged_bytes + other.staged_bytes,
            self.extracted_bytes + other.extracted_bytes,
            max(self.checkpoints_bytes, other.checkpoints_bytes),
        )


def disk_to_rent(needs: Iterable[DiskNeed]) -> DiskNeed:
    """Return what one run on all of these data sets needs.

    Raises:
        ValueError: there is none.
    """
    return functools.reduce(operator.add, needs)


def disk_need(
    *,
    staged_bytes: int,
    extracted_bytes: int | None = None,
    parameters: int = DEFAULT_PARAMETERS,
    checkpoints: int = DEFAULT_CHECKPOINTS,
) -> DiskNeed:
    """Return the disk to rent.

    Args:
        staged_bytes: size of the archives.
        extracted_bytes: size unpacked; where it is not known, that of the archives.
        parameters: of the model.
        checkpoints: how many are kept at a time.
    """
    extracted = staged_bytes if extracted_bytes is None else extracted_bytes
    return DiskNeed(staged_bytes, extracted, parameters * BYTES_PER_PARAMETER * checkpoints)
