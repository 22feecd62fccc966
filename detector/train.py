"""The training loop, top to bottom.

Rate, forward, losses, backward, clip, step, average: in that order, in sight. Everything that is not
the loop (ranks, files, what is said) is behind one call each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from detector.checkpoint import Architecture
from detector.config import Config, ConfigError
from detector.data.index import DataIndex, build_index
from detector.data.loader import TrainLoader
from detector.ema import WeightAverage
from detector.losses import Criterion
from detector.optim import build_optimizer, count_steps, lr_factor, set_lr
from detector.pretrained import start_from_weights
from detector.progress import Progress
from detector.report import Reporter
from detector.resume import TrainingState, carry_over, read_checkpoint
from detector.rundir import RunDirectory
from detector.runtime import Runtime, amp_dtype, make_scaler, step_generator
from detector.stopping import EXIT_RESUMABLE, StopRequest, StopWatch
from detector.validate import Validator, better


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ended, the same on every rank. `reason`: completed, stopped or timed_out."""

    reason: str
    message: str
    exit_code: int


def train(
    config: Config,
    *,
    runtime: Runtime,
    run: RunDirectory,
    report: Reporter,
    watch: StopWatch,
    checkpoint: Path | None = None,
    output: Path | None = None,
) -> Ending:
    """Train to the end, or until all ranks agree to stop at a step boundary.

    Args:
        config: what to train on what.
        runtime: this rank.
        run: where files go.
        report: what is told of it.
        watch: asked at every step whether to stop.
        checkpoint: take up from this file.
        output: copy the final averaged weights there.

    Raises:
        ConfigError, DataError, CheckpointError, WeightsError: before the first step, in one sentence.
        TrainingDivergedError: `solver.max_skipped_steps` in a row were not finite.
    """
    solver = config.solver
    check_batch_size(solver.batch_size, runtime.world_size)
    index = build_index(config.data, "train")
    loader = TrainLoader(
        index,
        config=config.data,
        global_batch=solver.batch_size,
        rank=runtime.rank,
        world_size=runtime.world_size,
        seed=config.runtime.seed,
    )
    validator = Validator(config, runtime)
    for part in (index, validator.index):
        for note in part.notes:
            report.say(f"data_note={part.name}: {note}")
    if not len(validator.index.boxes):
        report.say(f"data_note={validator.index.name}: no box to find, so no best checkpoint")
    total_steps = solver.epochs * loader.steps_per_epoch
    if solver.max_steps is not None:
        total_steps = min(total_steps, solver.max_steps)

    state = build_state(config, index, runtime, resuming=checkpoint is not None)
    network = runtime.wrap(state.model)
    criterion = Criterion(index.num_classes, loss=solver.loss)
    resumed_from = None
    if checkpoint is not None:
        saved, resumed_from = read_checkpoint(checkpoint, runtime)
        state.restore(saved, config, runtime, path=resumed_from)
        if runtime.is_main:
            carry_over(run, resumed_from, state.progress)
    progress = state.progress
    report.begin(
        progress,
        planned_steps=total_steps,
        steps_per_epoch=loader.steps_per_epoch,
        eval_batches=validator.batches,
        precision=amp_dtype(runtime.device, enabled=config.runtime.amp),
        ranks=runtime.all_gather(runtime.describe()),
        resumed_from=resumed_from,
    )

    def finished() -> bool:
        return progress.epoch >= solver.epochs or (
            progress.optimizer_steps >= total_steps and progress.step == 0
        )

    metrics: Mapping[str, float] | None = None
    while not finished():
        stop = train_epoch(
            config,
            state,
            network,
            criterion,
            loader,
            total_steps=total_steps,
            runtime=runtime,
            run=run,
            report=report,
            watch=watch,
        )
        if stop is not None:
            report.stopping(stop.message)
        # Before the evaluation: an end in the middle of that loses nothing but the evaluation.
        state.save_last(run, config, runtime)
        report.say(f"checkpoint_saved={run.last}")
        if stop is not None:
            return Ending(stop.reason, stop.message, EXIT_RESUMABLE)

        number = progress.epoch + 1
        last = number >= solver.epochs or progress.optimizer_steps >= total_steps
        metrics = None
        if last or number % config.evaluation.interval == 0:
            report.validating()
            runtime.synchronize_buffers(state.ema.model)
            validation = validator.run(state.ema.model, watch=watch)
            if validation is None:
                stop = settle(runtime, watch.requested())
                report.stopping(stop.message)
                return Ending(stop.reason, stop.message, EXIT_RESUMABLE)
            metrics = validation.metrics
            if validation.result is not None:
                validation.result.write(run.evaluation, epoch=number)
            score = metrics[config.evaluation.best_metric]
            if better(score, progress.best_metric):
                progress.best_metric, progress.best_epoch = score, number
                state.save_weights(run.best, config, runtime, epoch=number, metrics=metrics)
        if solver.save_interval and number % solver.save_interval == 0:
            path = run.weights / f"epoch_{number}.pt"
            state.save_weights(path, config, runtime, epoch=number, metrics=metrics)
        report.epoch(progress, metrics=metrics)
        if progress.best_epoch == number:
            report.best(progress)
        progress.next_epoch()

    loader.close()
    if output is not None:
        state.save_weights(output, config, runtime, epoch=progress.epoch, metrics=metrics)
        report.say(f"checkpoint_saved={output}")
    return Ending("completed", "completed", 0)


def train_epoch(
    config: Config,
    state: TrainingState,
    network: nn.Module,
    criterion: Criterion,
    loader: TrainLoader,
    *,
    total_steps: int,
    runtime: Runtime,
    run: RunDirectory,
    report: Reporter,
    watch: StopWatch,
) -> StopRequest | None:
    """Train from where `state.progress` stands to the end of its epoch or of the run.

    Returns the request on which all ranks agreed to stop, None where there was none.
    """
    solver, progress, optimizer, scaler = (
        config.solver,
        state.progress,
        state.optimizer,
        state.scaler,
    )
    precision = amp_dtype(runtime.device, enabled=config.runtime.amp)
    updates = count_steps(optimizer)
    network.train()
    batches = loader.epoch(progress.epoch, start_step=progress.step)
    while progress.step < loader.steps_per_epoch and progress.optimizer_steps < total_steps:
        waiting = time.monotonic()
        batch = next(batches)
        began = time.monotonic()
        images, targets = runtime.to_input(batch.images), batch.targets.to(runtime.device)
        noise = step_generator(
            config.runtime.seed, epoch=progress.epoch, step=progress.step, rank=runtime.rank
        )
        factor = lr_factor(progress.optimizer_steps, total_steps=total_steps, solver=solver)
        lr = set_lr(optimizer, factor)

        with runtime.autocast(precision):
            output = network(images, targets, noise)
        losses = criterion(output, targets, reduce_mean=runtime.reduce_mean)

        # One exchange a step: does anyone want to stop, is every loss finite, what are the means?
        asked = watch.requested()
        names, values = reported(losses)
        finite = all(map(math.isfinite, values))
        stopping, broken, *sums = runtime.sum([asked is not None, not finite, *values])
        means = {name: total / runtime.world_size for name, total in zip(names, sums, strict=True)}

        steps_before, grad_norm = updates.count, math.nan
        if not broken:
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(losses["total"]).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(state.model.parameters(), solver.clip_norm or math.inf)
            grad_norm = float(norm)
            if scaler.is_enabled() or math.isfinite(grad_norm):  # a scaler looks for itself
                scaler.step(optimizer)
            scaler.update()
        stepped = updates.count > steps_before
        if stepped:
            state.ema.update(state.model)

        progress.count(means, stepped=stepped)
        report.step(
            progress,
            loss=means["loss"],
            lr=lr,
            grad_norm=grad_norm,
            data_seconds=began - waiting,
            step_seconds=time.monotonic() - began,
            stepped=stepped,
        )
        if progress.skipped_in_a_row >= solver.max_skipped_steps:
            raise TrainingDivergedError(
                f"{progress.skipped_in_a_row} steps in a row had a loss or gradient that is not "
                "finite; lower solver.lr or runtime.amp_init_scale, or set runtime.amp=false."
            )
        if stopping:
            return settle(runtime, asked)
        every = solver.checkpoint_steps
        if every and stepped and progress.optimizer_steps % every == 0:
            state.save_last(run, config, runtime)
    return None


def build_state(
    config: Config, index: DataIndex, runtime: Runtime, *, resuming: bool = False
) -> TrainingState:
    """Return network, average, optimizer and scaler at the start of a run, alike on every rank.

    Raises:
        WeightsError: the file that `model.weights` names cannot be used; not read where a checkpoint
            is about to replace everything.
    """
    torch.manual_seed(config.runtime.seed)
    architecture = Architecture(
        backbone_name=config.model.backbone_name,
        num_classes=index.num_classes,
        num_queries=config.model.num_queries,
        num_denoising=config.model.num_denoising,
    )
    network = architecture.build()
    start_from_weights(network, config.model, runtime, resuming=resuming)
    model = runtime.place(network)
    precision = amp_dtype(runtime.device, enabled=config.runtime.amp)
    return TrainingState(
        architecture=architecture,
        class_names=tuple(index.class_names),
        data_fingerprint=index.fingerprint(),
        model=model,
        ema=WeightAverage(model, decay=config.solver.ema_decay, warmup=config.solver.ema_warmup),
        optimizer=build_optimizer(model, config.solver),
        scaler=make_scaler(runtime.device, precision, init_scale=config.runtime.amp_init_scale),
        progress=Progress(),
    )


def reported(losses: Mapping[str, Tensor]) -> tuple[list[str], list[float]]:
    """Return names and values of the terms that every rank has at every step; `loss` is the total.

    The terms of the denoising queries are left out: a rank without a box has none. One copy to the CPU.
    """
    names = ["total", *sorted(n for n in losses if n != "total" and not n.endswith("_dn"))]
    values = torch.stack([losses[name].detach().float() for name in names]).tolist()
    return ["loss", *names[1:]], values


def settle(runtime: Runtime, asked: StopRequest | None) -> StopRequest:
    """Return the same request on every rank: a limit's before a person's, the lowest rank's first."""
    requests = [request for request in runtime.all_gather(asked) if request is not None]
    return min(requests, key=lambda request: request.reason != "timed_out")


def check_batch_size(global_batch: int, world_size: int) -> None:
    """Raise ConfigError with two values that work where the ranks cannot share the batch evenly."""
    if global_batch % world_size:
        lower = global_batch // world_size * world_size
        works = (lower, lower + world_size) if lower else (world_size, 2 * world_size)
        raise ConfigError(
            f"solver.batch_size={global_batch} cannot be divided over {world_size} ranks; "
            f"{works[0]} and {works[1]} can."
        )
