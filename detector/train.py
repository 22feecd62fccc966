"""The training loop, top to bottom.

Rate, forward, losses, backward, clip, step, average: in that order, in sight. Everything that is not
the loop (ranks, micro-batches, files, what is said) is behind one call each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from detector.config import Config
from detector.data.index import build_index, check_same_classes
from detector.data.loader import TrainLoader
from detector.data.workers import with_workers
from detector.files import keep_going
from detector.listeners import open_listeners
from detector.losses import Criterion
from detector.microbatches import MicroBatch, averaging, check_batch_size, split
from detector.models.detector import DetectorOutput
from detector.optim import lr_factor, set_lr
from detector.report import Reporter
from detector.resume import carry_over, read_checkpoint
from detector.rundir import RunDirectory
from detector.runtime import Runtime, amp_dtype
from detector.state import TrainingState, build_state
from detector.stopping import EXIT_RESUMABLE, StopRequest, StopWatch
from detector.targets import Targets
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
    check_batch_size(solver.batch_size, world_size=runtime.world_size, accumulate=solver.accumulate)
    index = build_index(config.data, "train")
    loader = TrainLoader(
        index,
        config=with_workers(
            config.data,
            pictures=solver.batch_size // runtime.world_size,
            device=runtime.device.type,
            local_ranks=runtime.local_world_size,
        ),
        global_batch=solver.batch_size,
        rank=runtime.rank,
        world_size=runtime.world_size,
        seed=config.runtime.seed,
        epochs=solver.epochs,
        max_steps=solver.max_steps,
    )
    validator = Validator(config, runtime)
    check_same_classes(index, validator.index)
    for part in (index, validator.index):
        for note in part.notes:
            report.say(f"data_note={part.name}: {note}")
    if not len(validator.index.boxes):
        report.say(f"data_note={validator.index.name}: no box to find, so no best checkpoint")
    total_steps = solver.epochs * loader.steps_per_epoch
    if solver.max_steps is not None:
        total_steps = min(total_steps, solver.max_steps)

    state = build_state(config, index, runtime, resuming=checkpoint is not None)
    share = solver.batch_size // (runtime.world_size * solver.accumulate)
    network = runtime.wrap(state.model, batch=share)
    criterion = Criterion(index.num_classes, loss=solver.loss)
    resumed_from = None
    if checkpoint is not None:
        saved, resumed_from = read_checkpoint(checkpoint, runtime)
        state.restore(saved, config, runtime, path=resumed_from)
        if runtime.is_main:
            carry_over(run, resumed_from, state.progress)
    progress = state.progress
    report.listen(open_listeners(config, run, runtime, progress))
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

    message = "completed"
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
        if state.save_last(run, config, runtime):
            report.saved(run.last, kind="last", progress=progress)
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
                with keep_going("evaluation/*.json"):
                    validation.result.write(run.evaluation, epoch=number)
            score = metrics[config.evaluation.best_metric]
            progress.judge(score, epoch=number, is_better=better(score, progress.best_metric))
            if progress.best_epoch == number:
                state.save_weights(run.best, config, runtime, epoch=number, metrics=metrics)
        if solver.save_interval and number % solver.save_interval == 0:
            path = run.weights / f"epoch_{number}.pt"
            state.save_weights(path, config, runtime, epoch=number, metrics=metrics)
            report.saved(path, kind="epoch", progress=progress)
        report.epoch(progress, metrics=metrics)
        if progress.best_epoch == number:
            report.best(progress)
        progress.next_epoch()
        if solver.patience and progress.judged_in_vain >= solver.patience:
            message = (
                f"ended early after epoch {number}: no better {config.evaluation.best_metric} in "
                f"{progress.judged_in_vain} evaluations"
            )
            report.say(f"early_stop={message}")
            break

    loader.close()
    if output is not None:
        state.save_weights(output, config, runtime, epoch=progress.epoch, metrics=metrics)
        report.say(f"checkpoint_saved={output}")
    return Ending("completed", message, 0)


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

    def forward(part: MicroBatch) -> tuple[DetectorOutput, Targets]:
        targets = part.targets.to(runtime.device)
        images = runtime.to_input(part.images, side=loader.side(progress.epoch, progress.step))
        noise = part.noise(config.runtime.seed, epoch=progress.epoch)
        with runtime.autocast(precision):
            return network(images, targets, noise), targets

    network.train()
    batches = loader.epoch(progress.epoch, start_step=progress.step)
    while progress.step < loader.steps_per_epoch and progress.optimizer_steps < total_steps:
        waiting = time.monotonic()
        batch = next(batches)
        began = time.monotonic()
        factor = lr_factor(progress.optimizer_steps, total_steps=total_steps, solver=solver)
        lr = set_lr(optimizer, factor)

        parts = split(batch, parts=solver.accumulate, step=progress.step, runtime=runtime)
        over = averaging(
            parts,
            forward=forward,
            network=network,
            spec=state.model.spec,
            criterion=criterion,
            runtime=runtime,
        )
        optimizer.zero_grad(set_to_none=True)
        terms = []
        for part, matches in zip(parts, over.matches, strict=True):
            with runtime.gradients_stay(network, not part.last):
                output, targets = forward(part)
                losses = criterion(
                    output, targets, matches=matches, total=over.total, shares=runtime.world_size
                )
                scaler.scale(losses["total"]).backward()  # type: ignore[no-untyped-call]
            terms.append({name: value.detach() for name, value in losses.items()})
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(state.model.parameters(), solver.clip_norm or math.inf)

        # One exchange a step: does anyone want to stop, is everything finite, what are the means?
        asked = watch.requested()
        names, values, grad_norm = reported(terms, norm)
        finite = all(map(math.isfinite, values)) and (
            math.isfinite(grad_norm) or scaler.is_enabled()  # which looks for itself
        )
        told = [asked is not None, not finite, began - waiting, *values]
        stopping, broken, waited, *sums = runtime.sum(told)
        means = {name: total / runtime.world_size for name, total in zip(names, sums, strict=True)}

        steps_before = state.updates.count
        if not broken:
            scaler.step(optimizer)
        scaler.update(scaler.get_scale() if broken else None)  # the scale is not to blame
        stepped = state.updates.count > steps_before
        if stepped:
            state.ema.update(state.model)

        progress.count(means, lr=lr, stepped=stepped)
        report.step(
            progress,
            loss=means["loss"],
            grad_norm=grad_norm,
            data_seconds=waited / runtime.world_size,
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
            report.saved(run.last, kind="last", progress=progress)
    return None


def reported(
    terms: Sequence[Mapping[str, Tensor]], norm: Tensor
) -> tuple[list[str], list[float], float]:
    """Return names and values of the losses, summed over micro-batches, and the gradient's norm.

    `loss` is the total. The denoising queries' terms are left out. One copy to the CPU.
    """
    names = ["total", *sorted(n for n in terms[0] if n != "total" and not n.endswith("_dn"))]
    rows = [torch.stack([losses[name].float() for name in names]) for losses in terms]
    values = torch.cat((torch.stack(rows).sum(0), norm.float()[None])).tolist()
    return ["loss", *names[1:]], values[:-1], values[-1]


def settle(runtime: Runtime, asked: StopRequest | None) -> StopRequest:
    """Return the same request on every rank: a limit's before a person's, the lowest rank's first."""
    requests = [request for request in runtime.all_gather(asked) if request is not None]
    return min(requests, key=lambda request: request.reason != "timed_out")
