"""From the index to batches: uint8 pictures and padded targets, the same on every world size.

The order of an epoch is a pure function of (seed, epoch), the pixels of a sample of (seed, epoch,
picture): a run that was killed goes on with the very batches it would have had, on any number of
ranks. Pictures leave as uint8; the device divides by 255.

What cannot be read when the index is made stops the run before it starts. A file that is broken behind
its header, or vanishes later, does not end a night: the next picture takes its place, it is said and
counted, and only more than `data.max_unreadable` of them end the run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from detector.data.augment import Augmentation, Schedule, mosaic_side, training_side
from detector.data.index import DataError, DataIndex
from detector.data.samples import EVALUATION, ORDER, Batch, Key, Samples, Unreadable
from detector.data.workers import PREFETCH

if TYPE_CHECKING:
    from detector.config import DataConfig

__all__ = ["Batch", "EvalLoader", "TrainLoader"]

CACHE_BYTES: Final = 1 << 30
"""Decoded pictures kept in memory by all loader processes of all ranks together (`data.cache: auto`)."""


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
        epochs: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        """See the class; `epochs` and `max_steps` are the run's, which end the strong augmentation.

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
        if epochs is not None and max_steps is not None:
            epochs = min(epochs, -(-max_steps // self.steps_per_epoch))
        self.index = index
        self.seed = seed
        self.schedule = Schedule.from_config(config, epochs=epochs)
        self._config = config
        self._share = global_batch // world_size
        self._global_batch = global_batch
        self._rank = rank
        self._unreadable = Unreadable(
            index, share=config.max_unreadable, consequence="The next one takes its place."
        )
        self._source = _Source(
            Samples(
                index,
                size=config.image_size,
                seed=seed,
                schedule=self.schedule,
                cache=_cache_fits(
                    index, config, world_size * max(1, config.workers or 0), self.schedule.full
                ),
            ),
            workers=config.workers or 0,
        )

    @property
    def unreadable(self) -> tuple[str, ...]:
        """A sentence for each picture that this rank could not read so far."""
        return tuple(self._unreadable.sentences)

    def side(self, epoch: int, step: int) -> int:
        """The side that the pictures of a step are to be resized to on the device, on every rank."""
        config = self._config
        if not config.multi_scale or not self.schedule.is_strong(epoch):
            return config.image_size
        return training_side(
            self.seed,
            epoch=epoch,
            step=step,
            image_size=config.image_size,
            spread=config.multi_scale,
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
        """This rank's batches of an epoch from `start_step` on.

        Raises:
            DataError: while iterating, too many pictures cannot be read.
        """
        order = self.order(epoch)
        plan = []
        for step in range(start_step, self.steps_per_epoch):
            first = step * self._global_batch + self._rank * self._share
            plan.append([(epoch, int(p)) for p in order[first : first + self._share]])
        return map(self._unreadable.check, self._source.batches(plan))

    def close(self) -> None:
        """End the worker processes; the next epoch would start new ones."""
        self._source.close()


class EvalLoader:
    """Every picture once over all ranks, in order, never padded: ranks may differ in steps.

    A picture that cannot be read is left out, and so counts as one in which nothing was found.
    """

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
        self._unreadable = Unreadable(
            index, share=config.max_unreadable, consequence="Nothing counts as found in it."
        )
        self._source = _Source(
            Samples(
                index,
                size=config.image_size,
                cache=_cache_fits(index, config, world_size * max(1, config.workers or 0), None),
            ),
            workers=config.workers or 0,
        )

    def __len__(self) -> int:
        """This rank's batches, where all pictures can be read."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        for batch in map(self._unreadable.check, self._source.batches(self._plan)):
            if len(batch.images):
                yield batch

    @property
    def unreadable(self) -> tuple[str, ...]:
        """A sentence for each picture that this rank could not read so far."""
        return tuple(self._unreadable.sentences)

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
                prefetch_factor=PREFETCH,
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


def _cache_fits(
    index: DataIndex, config: DataConfig, copies: int, augmentation: Augmentation | None
) -> bool:
    """True where all pictures, as large as they are decoded, fit into memory (or must be kept)."""
    if config.cache != "auto":
        return config.cache == "ram"
    size = config.image_size
    sides = set()
    if augmentation is not None:
        sides.add(augmentation.least_side(size))
        if augmentation.mosaic:
            sides.add(mosaic_side(size))
    pixels = 0.0
    for position, area in enumerate(index.sizes.prod(1).tolist()):
        reductions = {index.reduction(position, side) for side in sides} or {1}
        pixels += sum(area / reduction**2 for reduction in reductions)
    return pixels * 3 * copies <= CACHE_BYTES
