"""The boxes a batch is to find, as padded tensors: what loader, model and criterion hand each other.

Owns the layout only. Nothing here reads files, augments, or knows a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Targets"]


class Targets(NamedTuple):
    """Padded ground truth of one batch.

    Pad to the fullest image of the (global) batch: M sets the number of denoising queries.

    Attributes:
        boxes: (B, M, 4) float32, centre x, centre y, width, height as fractions of the image.
        labels: (B, M) int64 class indices; 0 where padded.
        counts: (B,) int64, how many of the M rows are real; they come first.
    """

    boxes: Tensor
    labels: Tensor
    counts: Tensor

    @property
    def mask(self) -> Tensor:
        """(B, M) bool, true where the row is a real box."""
        rows = torch.arange(self.boxes.shape[1], device=self.counts.device)
        return rows[None, :] < self.counts[:, None]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Targets:
        """The same targets on another device."""
        return Targets(*(part.to(device, non_blocking=non_blocking) for part in self))

    def padded_to(self, rows: int) -> Targets:
        """The same boxes in at least `rows` rows an image."""
        missing = rows - self.boxes.shape[1]
        if missing <= 0:
            return self
        boxes = torch.nn.functional.pad(self.boxes, (0, 0, 0, missing))
        return Targets(boxes, torch.nn.functional.pad(self.labels, (0, missing)), self.counts)

    @classmethod
    def pad(cls, boxes: Sequence[Tensor], labels: Sequence[Tensor]) -> Targets:
        """Pack one (n, 4) and one (n,) tensor an image into a batch.

        Raises:
            ValueError: the two sequences differ in length, or an image's rows do.
        """
        if len(boxes) != len(labels):
            raise ValueError(f"{len(boxes)} sets of boxes but {len(labels)} sets of labels")
        counts = [len(rows) for rows in boxes]
        if counts != [len(rows) for rows in labels]:
            raise ValueError("an image has not as many labels as boxes")
        width = max(counts, default=0)
        packed = torch.zeros(len(boxes), width, 4)
        classes = torch.zeros(len(boxes), width, dtype=torch.int64)
        for image, (rows, ids) in enumerate(zip(boxes, labels, strict=True)):
            packed[image, : len(rows)] = rows.reshape(-1, 4)
            classes[image, : len(ids)] = ids
        return cls(packed, classes, torch.tensor(counts, dtype=torch.int64))
