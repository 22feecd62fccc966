"""One pass of a network over held-out pictures, shared by all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from detector.config import Config
from detector.data.index import DataIndex, build_index
from detector.data.loader import Batch, EvalLoader
from detector.data.workers import with_workers
from detector.evaluate import EvalResult, Evaluator
from detector.models.detector import postprocess
from detector.runtime import Runtime, amp_dtype
from detector.stopping import StopWatch

TELL_SECONDS: Final = 20.0
"""How often a long evaluation says how far it is; whoever watches takes silence for a stall."""


@dataclass(frozen=True, slots=True)
class Validation:
    """The figures on every rank; the whole result on rank 0."""

    metrics: Mapping[str, float]
    result: EvalResult | None


class Validator:
    """Holds the evaluation set and judges networks with it. Pictures are dealt out unpadded."""

    def __init__(
        self, config: Config, runtime: Runtime, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises DataError where the set cannot be read."""
        self._clock = clock
        self.index: DataIndex = build_index(config.data, "val")
        self._runtime = runtime
        self._precision = amp_dtype(runtime.device, enabled=config.runtime.amp)
        self._predictions = config.evaluation.predictions
        self._loader = EvalLoader(
            self.index,
            config=with_workers(
                config.data,
                pictures=config.evaluation.batch_size,
                device=runtime.device.type,
                local_ranks=runtime.local_world_size,
            ),
            batch_size=config.evaluation.batch_size,
            rank=runtime.rank,
            world_size=runtime.world_size,
        )
        # Ranks may differ by one batch; all of them take part in every agreement.
        self.batches = max(runtime.all_gather(len(self._loader)))

    def run(
        self,
        model: nn.Module,
        *,
        watch: StopWatch | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> Validation | None:
        """Return the figures of `model`, which is put into evaluation mode; None when stopped."""
        evaluator = self.collect(model, watch=watch, on_batch=on_batch)
        return None if evaluator is None else self.summarize(evaluator)

    def summarize(self, evaluator: Evaluator) -> Validation:
        """Return the figures of what was collected. All ranks must call it."""
        result = None
        if self._runtime.is_main:
            result = evaluator.summarize(predictions=self._predictions)
        metrics = self._runtime.broadcast(dict(result.metrics) if result else {})
        return Validation(metrics, result)

    def collect(
        self,
        model: nn.Module,
        *,
        watch: StopWatch | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> Evaluator | None:
        """Return what `model` finds in all pictures, gathered on every rank; None when stopped.

        Args:
            model: is put into evaluation mode.
            watch: who may ask for an end between two batches.
            on_batch: told how many of this rank's `batches` are done.
        """
        model.eval()
        evaluator = Evaluator(self.index)
        told = self._clock()
        batches: Iterable[Batch | None] = iter(self._loader)
        for done, batch in enumerate(_padded(batches, self.batches), 1):
            if batch is not None:
                evaluator.add(batch.image_ids, self._detect(model, batch))
            asked = watch is not None and watch.requested() is not None
            if watch is not None and self._runtime.any_true(asked):
                return None
            if on_batch is not None:
                on_batch(done)
            if self._runtime.is_main and self._clock() - told >= TELL_SECONDS:
                told = self._clock()
                print(f"eval_batch={done}/{self.batches}", flush=True)
        evaluator.gather(self._runtime)
        return evaluator

    @torch.inference_mode()
    def _detect(self, model: nn.Module, batch: Batch) -> list[tuple[Tensor, Tensor, Tensor]]:
        images = self._runtime.to_input(batch.images)
        with self._runtime.autocast(self._precision):
            logits, boxes = model(images).final
        return postprocess(logits.float(), boxes.float(), batch.original_sizes)


def better(value: float, best: float | None) -> bool:
    """True where `value` is a new best; one that is not a number or -1 (nothing to find) never is."""
    return math.isfinite(value) and value >= 0.0 and (best is None or value > best)


def _padded(batches: Iterable[Batch | None], count: int) -> Iterable[Batch | None]:
    done = 0
    for batch in batches:
        done += 1
        yield batch
    for _ in range(done, count):
        yield None
