"""One picture of an index into one sample, samples into a batch, and what cannot be read on the way.

Pure functions of (seed, epoch, position). Which samples make a batch, and where they are made, is
`loader`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from detector.data.augment import Sample, Schedule, resize
from detector.data.index import DataError, DataIndex, Image
from detector.targets import Targets

ORDER, PIXELS = 0, 1  # streams of random numbers
EVALUATION: Final = -1  # the epoch of a sample that is not augmented
READ_TRIES: Final = 8  # as many unreadable pictures in a row are a lost disk

Key = tuple[int, int]
"""(epoch, position in the index)."""


class Batch(NamedTuple):
    """What the loop gets.

    Attributes:
        images: `(B, 3, S, S)` uint8 RGB, channels last in memory as pictures are decoded; what layout
            the network wants is for its device to make.
        targets: boxes as fractions of the picture, padded; crowds are not in it.
        image_ids: `(B,)` int64, as in the index.
        original_sizes: `(B, 2)` int64, width and height on disk.
        unreadable: a sentence for each picture that could not be read.
    """

    images: Tensor
    targets: Targets
    image_ids: Tensor
    original_sizes: Tensor
    unreadable: tuple[str, ...] = ()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch with pictures and targets on `device`; ids and sizes stay on the CPU."""
        return self._replace(
            images=self.images.to(device, non_blocking=non_blocking),
            targets=self.targets.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory (called by torch's loader)."""
        return self._replace(
            images=self.images.pin_memory(),
            targets=Targets(*(part.pin_memory() for part in self.targets)),
        )


class Drawn(NamedTuple):
    """A sample on its way into a batch.

    Attributes:
        sample: of the network's size; None where the picture of an evaluation cannot be read.
        position: of its picture in the index.
        unreadable: a sentence for each picture that could not be read on the way.
    """

    sample: Sample | None
    position: int
    unreadable: tuple[str, ...] = ()


class Samples(Dataset[Drawn]):
    """Samples of an index by (epoch, position); decoded pictures are kept where they fit.

    A training picture that cannot be read is replaced by the next in the index that can: the same one
    whenever, wherever and on however many ranks it is tried.
    """

    def __init__(
        self,
        index: DataIndex,
        *,
        size: int,
        seed: int = 0,
        schedule: Schedule | None = None,
        cache: bool = False,
    ) -> None:
        self.index = index
        self.size = size
        self.seed = seed
        self.schedule = schedule
        self._cache: dict[Key, Image] | None = {} if cache and index.images is None else None

    def __getitem__(self, key: Key) -> Drawn:
        """The sample of a (epoch, position)."""
        epoch, position = key
        if self.schedule is None or epoch == EVALUATION:
            return self._evaluated(position)
        unreadable: list[str] = []
        used: list[int] = []

        def read(wanted: int, least: int) -> Sample:
            sample, found = self._read_on(wanted, least, unreadable)
            used.append(found)
            return sample

        rng = np.random.default_rng([self.seed, PIXELS, epoch, position])
        sample = self.schedule.at(epoch)(
            position, rng, read=read, pictures=len(self.index), size=self.size
        )
        return Drawn(sample, used[0], tuple(unreadable))

    def __len__(self) -> int:
        return len(self.index)

    def _evaluated(self, position: int) -> Drawn:
        try:
            sample = self._read(position, reduction=1)
        except DataError as error:
            return Drawn(None, position, (str(error),))
        height, width = sample.image.shape[:2]
        scale = np.array([self.size / width, self.size / height] * 2, np.float32)
        resized = Sample(resize(sample.image, self.size), sample.boxes * scale, sample.labels)
        return Drawn(resized, position)

    def _read_on(self, wanted: int, least: int, unreadable: list[str]) -> tuple[Sample, int]:
        """Picture `wanted`, or the next that can be read, and its position."""
        for tried in range(READ_TRIES):
            position = (wanted + tried) % len(self.index)
            try:
                reduction = self.index.reduction(position, least)
                return self._read(position, reduction=reduction), position
            except DataError as error:
                unreadable.append(str(error))
        raise DataError(
            f"{READ_TRIES} pictures of {self.index.name} in a row cannot be read; the first: "
            f"{unreadable[-READ_TRIES]}"
        )

    def _read(self, position: int, *, reduction: int) -> Sample:
        image = None if self._cache is None else self._cache.get((position, reduction))
        if image is None:
            image = self.index.read_image(position, reduction=reduction)
            if self._cache is not None:
                self._cache[position, reduction] = image
        rows = self.index.rows(position)
        boxes = self.index.boxes[rows]
        if image.shape[1] != self.index.sizes[position, 0]:
            boxes = boxes / np.float32(reduction)
        sample = Sample(image, boxes, self.index.labels[rows])
        return sample.keep(~self.index.iscrowd[rows])

    def batch(self, drawn: Sequence[Drawn]) -> Batch:
        """Pack samples; for the same samples the same bytes."""
        size = self.size
        found = [(item.sample, item.position) for item in drawn if item.sample is not None]
        images = np.empty((len(found), size, size, 3), np.uint8)
        for pixels, (sample, _) in zip(images, found, strict=True):
            pixels[:] = sample.image
        positions = np.array([position for _, position in found], np.int64)
        return Batch(
            images=torch.from_numpy(images).permute(0, 3, 1, 2),
            targets=Targets.pad(
                [torch.from_numpy(_fractions(sample.boxes, size)) for sample, _ in found],
                [torch.from_numpy(sample.labels) for sample, _ in found],
            ),
            image_ids=torch.from_numpy(self.index.image_ids[positions]),
            original_sizes=torch.from_numpy(self.index.sizes[positions]),
            unreadable=tuple(sentence for item in drawn for sentence in item.unreadable),
        )


class Unreadable:
    """Pictures that turned out unreadable after the index was made: each said once, few tolerated."""

    def __init__(self, index: DataIndex, *, share: float, consequence: str) -> None:
        """At most `share` of the pictures, and one where that is none, may be; 0: none may."""
        self._index = index
        self._share = share
        self._limit = max(1, int(share * len(index))) if share else 0
        self._consequence = consequence
        self.sentences: dict[str, None] = {}

    def check(self, batch: Batch) -> Batch:
        """The batch, once what could not be read for it is on record.

        Raises:
            DataError: too many cannot be read.
        """
        for sentence in batch.unreadable:
            if sentence in self.sentences:
                continue
            self.sentences[sentence] = None
            count = len(self.sentences)
            if count > self._limit:
                raise DataError(
                    f"{count} of the {len(self._index)} pictures of {self._index.name} cannot be read, "
                    f"more than data.max_unreadable={self._share:g} allows; the last: {sentence}"
                )
            # Not by the reporter of rank 0: each rank sees other pictures.
            print(f"picture_unreadable={sentence} {self._consequence}", flush=True)
        return batch


def _fractions(boxes: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """`(K, 4)` xyxy pixels to centre, width and height as fractions."""
    low, high = boxes[:, :2] / size, boxes[:, 2:] / size
    return np.concatenate([(low + high) / 2, high - low], axis=1).astype(np.float32)
