"""One optimizer step's batch as this rank sees it: micro-batches, and what they are averaged over.

However the global batch is dealt out over ranks and micro-batches, its gradients are the same: boxes
are padded alike everywhere, a picture's noise follows its place, and losses are sums over the part
divided by the counts of the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from detector.config import ConfigError
from detector.data.loader import Batch
from detector.losses import Criterion, Matches
from detector.models.detector import DetectorOutput
from detector.models.specs import DetectorSpec
from detector.runtime import Runtime, picture_generators
from detector.targets import Targets


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Pictures that go through the network together.

    Attributes:
        images: (B, 3, S, S) uint8, where the loader left them.
        targets: as many rows in every part of the global batch; on the CPU.
        places: of the pictures in the epoch's order.
        last: no other follows in this step.
    """

    images: Tensor
    targets: Targets
    places: range
    last: bool

    def noise(self, seed: int, *, epoch: int) -> list[torch.Generator]:
        """Return fresh generators, one a picture: each call's draw the same numbers."""
        return picture_generators(seed, epoch=epoch, places=self.places)


def split(batch: Batch, *, parts: int, step: int, runtime: Runtime) -> list[MicroBatch]:
    """Cut this rank's share of a step's batch into `parts`, padded as all ranks agree.

    Args:
        batch: this rank's share.
        parts: `solver.accumulate`.
        step: of the epoch, from 0.
        runtime: all ranks take part.
    """
    share = len(batch.images)
    size = share // parts
    targets = batch.targets.padded_to(runtime.max(batch.targets.boxes.shape[1]))
    first = (step * runtime.world_size + runtime.rank) * share
    cuts = []
    for start in range(0, share, size):
        rows = slice(start, start + size)
        cuts.append(
            MicroBatch(
                images=batch.images[rows],
                targets=Targets(*(values[rows] for values in targets)),
                places=range(first + start, first + start + size),
                last=start + size == share,
            )
        )
    return cuts


@dataclass(frozen=True, slots=True)
class Averaging:
    """What the losses of a step are divided by.

    Attributes:
        total: from a micro-batch's counts to the global batch's (see `Criterion`).
        matches: of each micro-batch, where they had to be known beforehand.
    """

    total: Callable[[Tensor], Tensor]
    matches: Sequence[Matches | None]


def averaging(
    parts: Sequence[MicroBatch],
    *,
    network: nn.Module,
    spec: DetectorSpec,
    criterion: Criterion,
    runtime: Runtime,
    forward: Callable[[MicroBatch], tuple[DetectorOutput, Targets]],
) -> Averaging:
    """Return what the whole global batch counts, before the first gradient is taken.

    One micro-batch is counted by the criterion itself. With more of them, boxes are known from the
    targets; but D-FINE averages over matches, known only from the network's answers: it looks at every
    micro-batch once without gradients, which costs another forward pass.
    """
    if len(parts) == 1:
        return Averaging(runtime.total, [None])
    matches: list[Matches | None] = [None] * len(parts)
    boxes, merged, pictures = 0, 0, 0
    if criterion.shares_matches(spec):
        with torch.no_grad(), statistics_held(network):
            for number, part in enumerate(parts):
                matches[number] = criterion.match(*forward(part))
    for part, found in zip(parts, matches, strict=True):
        boxes += int(part.targets.counts.sum())
        merged += 0 if found is None or found.merged is None else len(found.merged)
        pictures += len(part.images)
    counts = torch.tensor([boxes, merged, pictures], dtype=torch.float32, device=runtime.device)
    total = runtime.total(counts)
    return Averaging(lambda _: total, matches)


@contextlib.contextmanager
def statistics_held(model: nn.Module) -> Iterator[None]:
    """Put back every buffer (batch-norm statistics) as it was."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def check_batch_size(global_batch: int, *, world_size: int, accumulate: int = 1) -> None:
    """Raise ConfigError with two values that work where the batch cannot be dealt out evenly."""
    parts = world_size * accumulate
    if global_batch % parts == 0:
        return
    lower = global_batch // parts * parts
    works = (lower, lower + parts) if lower else (parts, 2 * parts)
    over = f"{world_size} ranks"
    if accumulate > 1:
        over += f" with solver.accumulate={accumulate} micro-batches each"
    raise ConfigError(
        f"solver.batch_size={global_batch} cannot be divided over {over}; "
        f"{works[0]} and {works[1]} can."
    )
