"""From the index to batches: uint8 pictures and padded targets, the same on every world size.

The order of an epoch is a pure function of (seed, epoch), the pixels of a sample of (seed, epoch,
picture): a run that was killed goes on with the very batches it would have had, on any number of
ranks. Pictures leave as uint8; the device divides by 255.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from detector.data.augment import Augmentation, Sample, resize
from detector.data.index import DataError, DataIndex, Image
from detector.targets import Targets

if TYPE_CHECKING:
    from detector.config import DataConfig

CACHE_BYTES: Final = 1 << 30
"""Decoded pictures kept in memory by all loader processes of all ranks together (`data.cache: auto`)."""

ORDER, PIXELS = 0, 1  # streams of random numbers
EVALUATION: Final = -1  # the epoch of a sample that is not augmented

Key = tuple[int, int]
"""(epoch, position in the index)."""


class Batch(NamedTuple):
    """What the loop gets.

    Attributes:
        images: `(B, 3, S, S)` uint8 RGB.
        targets: boxes as fractions of the picture, padded; crowds are not in it.
        image_ids: `(B,)` int64, as in the index.
        original_sizes: `(B, 2)` int64, width and height on disk.
    """

    images: Tensor
    targets: Targets
    image_ids: Tensor
    original_sizes: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch with pictures and targets on `device`; ids and sizes stay on the CPU."""
        return Batch(
            self.images.to(device, non_blocking=non_blocking),
            self.targets.to(device, non_blocking=non_blocking),
            self.image_ids,
            self.original_sizes,
        )

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory (called by torch's loader)."""
        return Batch(
            self.images.pin_memory(),
            Targets(*(part.pin_memory() for part in self.targets)),
            self.image_ids,
            self.original_sizes,
        )


class Samples(Dataset[tuple[Sample, int]]):
    """Samples of an index by (epoch, position); decoded pictures are kept where they fit."""

    def __init__(
        self,
        index: DataIndex,
        *,
        size: int,
        seed: int = 0,
        augmentation: Augmentation | None = None,
        cache: bool = False,
    ) -> None:
        self.index = index
        self.size = size
        self.seed = seed
        self.augmentation = augmentation
        self._cache: dict[int, Image] | None = {} if cache and index.images is None else None

    def __getitem__(self, key: Key) -> tuple[Sample, int]:
        """The sample, of the network's size, and its position."""
        epoch, position = key
        sample = self._read(position)
        if self.augmentation is not None and epoch != EVALUATION:
            rng = np.random.default_rng([self.seed, PIXELS, epoch, position])
            return self.augmentation(sample, rng, size=self.size), position
        height, width = sample.image.shape[:2]
        scale = np.array([self.size / width, self.size / height] * 2, np.float32)
        return Sample(
            resize(sample.image, self.size), sample.boxes * scale, sample.labels
        ), position

    def __len__(self) -> int:
        return len(self.index)

    def _read(self, position: int) -> Sample:
        image = None if self._cache is None else self._cache.get(position)
        if image is None:
            image = self.index.read_image(position)
            if self._cache is not None:
                self._cache[position] = image
        rows = self.index.rows(position)
        sample = Sample(image, self.index.boxes[rows], self.index.labels[rows])
        return sample.keep(~self.index.iscrowd[rows])

    def batch(self, samples: Sequence[tuple[Sample, int]]) -> Batch:
        """Pack samples; for the same samples the same bytes."""
        size = self.size
        images = np.empty((len(samples), 3, size, size), np.uint8)
        for row, (sample, _) in enumerate(samples):
            images[row] = sample.image.transpose(2, 0, 1)
        positions = np.array([position for _, position in samples], np.int64)
        return Batch(
            images=torch.from_numpy(images),
            targets=Targets.pad(
                [torch.from_numpy(_fractions(sample.boxes, size)) for sample, _ in samples],
                [torch.from_numpy(sample.labels) for sample, _ in samples],
            ),
            image_ids=torch.from_numpy(self.index.image_ids[positions]),
            original_sizes=torch.from_numpy(self.index.sizes[positions]),
        )


class TrainLoader:
    """Shuffled batches; every rank makes the same number of steps, the last short one is dropped.

    A step's global batch is a stretch of the epoch's order, and rank r takes the r-th of
    `world_size` equal parts of it: another world size trains on the same pictures in the same steps.
    """

    def __init__(
        self,
        index: DataIndex,
        *,
        config: DataConfig,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        """See the class.

        Raises:
            ValueError: the global batch cannot be divided over the ranks.
            DataError: there are fewer pictures than one batch, or no box at all.
        """
        if global_batch % world_size:
            raise ValueError(f"a batch of {global_batch} cannot be divided over {world_size} ranks")
        self.steps_per_epoch = len(index) // global_batch
        if not self.steps_per_epoch:
            raise DataError(
                f"{index.name} has {len(index)} pictures, fewer than one batch of {global_batch}; "
                f"lower solver.batch_size to {len(index)} or less."
            )
        if not len(index.boxes):
            raise DataError(f"{index.name} has no box in any of its {len(index)} pictures.")
        self.index = index
        self.seed = seed
        self._share = global_batch // world_size
        self._global_batch = global_batch
        self._rank = rank
        self._source = _Source(
            Samples(
                index,
                size=config.image_size,
                seed=seed,
                augmentation=Augmentation.from_config(config),
                cache=_cache_fits(index, config, world_size),
            ),
            workers=config.workers,
        )

    def order(self, epoch: int) -> NDArray[np.int64]:
        """`(N,)` positions in the order of this epoch."""
        rng = np.random.default_rng([self.seed, ORDER, epoch])
        return rng.permutation(len(self.index)).astype(np.int64)

    def positions(self, epoch: int, step: int) -> NDArray[np.int64]:
        """What this rank trains on in a step, `(global_batch / world_size,)`."""
        first = step * self._global_batch + self._rank * self._share
        return self.order(epoch)[first : first + self._share]

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch from `start_step` on."""
        order = self.order(epoch)
        plan = []
        for step in range(start_step, self.steps_per_epoch):
            first = step * self._global_batch + self._rank * self._share
            plan.append([(epoch, int(p)) for p in order[first : first + self._share]])
        return self._source.batches(plan)

    def close(self) -> None:
        """End the worker processes; the next epoch would start new ones."""
        self._source.close()


class EvalLoader:
    """Every picture once over all ranks, in order, never padded: ranks may differ in steps."""

    def __init__(
        self,
        index: DataIndex,
        *,
        config: DataConfig,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """`batch_size` is a rank's; pictures rank, rank + world_size, ... are this rank's."""
        self.index = index
        mine = range(rank, len(index), world_size)
        self._plan = [
            [(EVALUATION, position) for position in mine[first : first + batch_size]]
            for first in range(0, len(mine), batch_size)
        ]
        self._source = _Source(
            Samples(index, size=config.image_size, cache=_cache_fits(index, config, world_size)),
            workers=config.workers,
        )

    def __len__(self) -> int:
        """This rank's batches."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        return self._source.batches(self._plan)

    def close(self) -> None:
        """End the worker processes; the next pass would start new ones."""
        self._source.close()


class _Plan:
    """A batch sampler whose batches are set before each pass (torch's loader keeps its workers)."""

    def __init__(self) -> None:
        self.batches: list[list[Key]] = []

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Source:
    """Turns a plan into batches: here, or in worker processes that live as long as the loader."""

    def __init__(self, samples: Samples, *, workers: int) -> None:
        self.samples = samples
        self.workers = workers
        self._plan = _Plan()
        self._loader: Any = None

    def batches(self, plan: list[list[Key]]) -> Iterator[Batch]:
        if not self.workers:
            # one thread: ranks and the network's own threads already fill the cores
            cv2.setNumThreads(1)
            return (self.samples.batch([self.samples[key] for key in keys]) for keys in plan)
        if self._loader is None:
            self._loader = DataLoader(
                self.samples,
                batch_sampler=self._plan,
                collate_fn=self.samples.batch,
                num_workers=self.workers,
                persistent_workers=True,
                prefetch_factor=4,
                pin_memory=torch.cuda.is_available(),
                multiprocessing_context=_process_context(),
                worker_init_fn=_single_threaded,
            )
        self._plan.batches = plan
        return self._from_workers()

    def _from_workers(self) -> Iterator[Batch]:
        try:
            yield from self._loader
        except DataError as error:  # torch wraps the worker's traceback around the sentence
            raise DataError(str(error).rstrip().rsplit("DataError: ", 1)[-1]) from error

    def close(self) -> None:
        self._loader = None


def _process_context() -> BaseContext:
    """How workers start: not by a fork of this process, whose CUDA and gloo threads may hang it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not once a worker
    return context


def _single_threaded(worker: int) -> None:  # noqa: ARG001
    cv2.setNumThreads(0)


def _cache_fits(index: DataIndex, config: DataConfig, world_size: int) -> bool:
    if config.cache != "auto":
        return config.cache == "ram"
    copies = max(1, config.workers) * world_size
    return int(index.sizes.prod(1).sum()) * 3 * copies <= CACHE_BYTES


def _fractions(boxes: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """`(K, 4)` xyxy pixels to centre, width and height as fractions."""
    low, high = boxes[:, :2] / size, boxes[:, 2:] / size
    return np.concatenate([(low + high) / 2, high - low], axis=1).astype(np.float32)
