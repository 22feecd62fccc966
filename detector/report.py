"""What a run says while it goes on: console tokens, status, rows, tables. Rank 0 only writes.

The loop tells it what happened; it decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch

from detector.config import Config
from detector.console import say
from detector.events import CheckpointEvent, EpochEvent, Listeners, StepEvent
from detector.files import finite, keep_going, write_json, write_text
from detector.models.specs import find_spec
from detector.pace import Pace
from detector.progress import Progress
from detector.rundir import RunDirectory
from detector.runtime import Runtime
from detector.status import StatusWriter
from detector.summary import final_figures, results_table

# What only the clock decides: everything else in a row is computed again, to the bit, by a resume.
CLOCK_FIELDS: Final = frozenset(
    {
        "data_seconds",
        "elapsed_seconds",
        "epoch_seconds",
        "gpu_memory_mb",
        "images_per_second",
        "step_seconds",
    }
)
# An end may wait so long for listeners: for an orderly one, and for one that somebody waits for.
_PATIENCE_SECONDS: Final = 60.0
_HURRY_SECONDS: Final = 5.0


class Reporter:
    """Speaks for rank 0; on the other ranks every method does nothing."""

    def __init__(self, run: RunDirectory, config: Config, runtime: Runtime) -> None:
        self._run = run
        self._config = config
        self._main = runtime.is_main
        self._runtime = runtime
        self._status = StatusWriter(run.status, supervised=run.supervised) if self._main else None
        self._progress: Progress | None = None  # once training has begun
        self._pace = Pace(config.solver.batch_size)
        self._listeners = Listeners()

    def prepare(self) -> None:
        """The run directory is there: from now on the status is alive."""
        if self._status is None:
            return
        family, _, size = find_spec(self._config.model.backbone_name).name.partition("_")
        batch = self._config.solver.batch_size
        self._status.update(
            run_id=self._status.snapshot()["run_id"] or self._run.path.name,
            state="preparing",
            phase="starting",
            save_dir=str(self._run.path),
            model_family=family,
            model_size=size,
            task="detect",
            distributed=self._runtime.distributed,
            world_size=self._runtime.world_size,
            device=self._runtime.device.type,
            batch_size=batch // self._runtime.world_size,
            global_batch_size=batch,
            best_metric_name=self._config.evaluation.best_metric,
            current_metric_name=self._config.evaluation.best_metric,
            total_epochs=self._config.solver.epochs,
        )
        self._status.start()
        write_text(self._run.path / "config.yaml", self._config.to_yaml())
        world = self._runtime.world_size
        self.say(f"distributed={self._runtime.distributed} world_size={world}")
        self.say(f"run_dir={self._run.path}")

    def listen(self, listeners: Listeners) -> None:
        """Tell these from now on what happens."""
        self._listeners = listeners

    def begin(
        self,
        progress: Progress,
        *,
        planned_steps: int,
        steps_per_epoch: int,
        eval_batches: int,
        precision: torch.dtype | None,
        ranks: Sequence[Mapping[str, Any]],
        resumed_from: Path | None,
    ) -> None:
        """Data and network are ready; the first step comes next."""
        self._progress = progress
        self._pace.begin(steps_per_epoch=steps_per_epoch, planned_steps=planned_steps)
        if self._status is None:
            return
        attempt = self._status.snapshot()["attempt"]
        amp = str(precision).removeprefix("torch.") if precision else None
        self.say(
            f"device={self._runtime.device.type} amp={bool(amp)}" + (f" {amp=!s}" if amp else "")
        )
        self.say(f"train_batches={steps_per_epoch} eval_batches={eval_batches}")
        gpu_names = [str(rank["gpu_name"]) for rank in ranks if rank["gpu_name"]]
        self._status.flush(
            state="training",
            phase="train",
            message=None,
            ranks=list(ranks),
            gpu_names=gpu_names,
            steps_per_epoch=steps_per_epoch,
            total_epochs=min(self._config.solver.epochs, -(-planned_steps // steps_per_epoch)),
            start_epoch=progress.epoch + 1,
            current_epoch=progress.epoch + 1,
            completed_epochs=progress.epoch,
            step=progress.step,
            optimizer_steps=progress.optimizer_steps,
            skipped_steps=progress.skipped_steps,
            progress=self._fraction(progress),
            best_metric=progress.best_metric,
            best_epoch=progress.best_epoch,
            attempt=(attempt or 0) + 1 if resumed_from else attempt or 1,
            resumed_from=str(resumed_from) if resumed_from else None,
            checkpoints=self._checkpoints(),
        )

    def step(
        self,
        progress: Progress,
        *,
        loss: float,
        grad_norm: float,
        data_seconds: float,
        step_seconds: float,
        stepped: bool,
    ) -> None:
        """One batch is done. Every `logging.log_interval` optimizer steps it becomes a row.

        `data_seconds` is the mean over the ranks, `step_seconds` this rank's.
        """
        self._pace.step(data_seconds=data_seconds, step_seconds=step_seconds)
        interval = self._config.logging.log_interval
        row_due = stepped and progress.optimizer_steps % interval == 0
        means = progress.window.means()
        memory: list[int] | None = None
        if row_due:
            progress.window.clear()
            memory = self._runtime.gpu_memory_mb()
        if self._status is None:
            return
        if self._pace.images_per_second is None or row_due:
            self._pace.measure()
        self._status.update(
            state="training",
            phase="train",
            current_epoch=progress.epoch + 1,
            step=progress.step,
            optimizer_steps=progress.optimizer_steps,
            skipped_steps=progress.skipped_steps,
            progress=self._fraction(progress),
            lr=progress.lr,
            train_loss=finite(loss),
            images_per_second=self._pace.images_per_second,
            eta_seconds=self._pace.eta(self._fraction(progress)),
        )
        if not stepped:
            self.say(f"step_skipped=non_finite epoch={progress.epoch + 1} step={progress.step}")
        if not row_due:
            return
        pace = self._pace
        row = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "optimizer_steps": progress.optimizer_steps,
            **means,
            "lr": progress.lr,
            "grad_norm": grad_norm,
            "skipped_steps": progress.skipped_steps,
            "images_per_second": pace.images_per_second,
            "data_seconds": pace.data_seconds,
            "step_seconds": pace.step_seconds,
            "gpu_memory_mb": max(memory) if memory else None,
            "elapsed_seconds": pace.elapsed(),
        }
        with keep_going("steps.jsonl"):
            self._run.steps.append(row)
        self._listeners.send(StepEvent(progress.optimizer_steps, finite(row)))
        self.say(
            f"epoch={progress.epoch + 1} step={progress.step}/{pace.steps_per_epoch} "
            f"loss={means['loss']:.4f} lr={progress.lr:.2e} data_time={pace.data_seconds:.3f} "
            f"iter_time={pace.step_seconds:.3f} images_per_second={pace.images_per_second:.2f}"
            + (f" gpu_memory_mb={row['gpu_memory_mb']}" if memory else "")
        )
        if memory:
            ranks = zip(self._status.snapshot()["ranks"], memory, strict=True)
            self._status.update(ranks=[{**rank, "gpu_memory_mb": used} for rank, used in ranks])
        pace.row()

    def saved(
        self, path: Path, *, kind: Literal["last", "best", "epoch"], progress: Progress
    ) -> None:
        """A checkpoint is on disk."""
        if self._status is None:
            return
        self.say(f"checkpoint_saved={path}")
        number, steps = progress.epoch + 1, progress.optimizer_steps
        self._listeners.send(CheckpointEvent(self._run.path, path, kind, number, steps))

    def validating(self) -> None:
        """An evaluation begins."""
        if self._status is not None:
            self._status.flush(state="validating", phase="eval")

    def epoch(self, progress: Progress, *, metrics: Mapping[str, float] | None) -> None:
        """An epoch is done; `metrics` where it was evaluated."""
        seconds = self._pace.epoch()
        if self._status is None:
            return
        number = progress.epoch + 1
        losses = progress.epoch_losses.means()
        row = {
            "epoch": number,
            "optimizer_steps": progress.optimizer_steps,
            "skipped_steps": progress.skipped_steps,
            "lr": progress.lr,
            **{("train_loss" if key == "loss" else key): mean for key, mean in losses.items()},
            "metrics": dict(metrics) if metrics is not None else None,
            "epoch_seconds": round(seconds, 3),
            "elapsed_seconds": self._pace.elapsed(),
        }
        with keep_going("metrics.jsonl and results.csv"):
            self._run.metrics.append(row)
            write_text(self._run.path / "results.csv", results_table(self._run.metrics.rows()))
        self._listeners.send(
            EpochEvent(
                self._run.path,
                number,
                progress.optimizer_steps,
                finite(row),
                None if metrics is None else dict(metrics),
                progress.best_metric,
                progress.best_epoch,
            )
        )
        if progress.epoch_updates == 0:
            self.say("scheduler_step_skipped=no_optimizer_step")
        figures: dict[str, Any] = {}
        if metrics is not None:
            self.say(f"epoch={number} eval={json.dumps(finite(metrics))}")
            name = self._config.evaluation.best_metric
            figures = {"metrics": dict(metrics), "current_metric": metrics.get(name)}
        self._status.flush(
            state="training",
            phase="train",
            current_epoch=number,
            completed_epochs=number,
            epoch_seconds=round(seconds, 3),
            mean_epoch_seconds=round(
                sum(self._pace.epoch_seconds) / len(self._pace.epoch_seconds), 3
            ),
            best_metric=progress.best_metric,
            best_epoch=progress.best_epoch,
            validated=metrics is not None,
            checkpoints=self._checkpoints(),
            **finite(figures),
        )

    def best(self, progress: Progress) -> None:
        """New best weights are on disk."""
        number, steps = progress.epoch + 1, progress.optimizer_steps
        self._listeners.send(CheckpointEvent(self._run.path, self._run.best, "best", number, steps))
        name, value = self._config.evaluation.best_metric, progress.best_metric
        self.say(f"best_checkpoint={self._run.best} metric={name} value={value:.4f}")

    def stopping(self, message: str) -> None:
        """All ranks agreed to stop."""
        self.say(f"stopping={message}")
        if self._status is not None:
            self._status.flush(state="stopping", message=message)

    def begin_judging(self, *, batches: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        """An evaluation without training begins; `batches` on the rank that has most."""
        if self._status is not None:
            gpu_names = [str(rank["gpu_name"]) for rank in ranks if rank["gpu_name"]]
            self._status.flush(
                state="validating",
                phase="eval",
                message=None,
                ranks=list(ranks),
                gpu_names=gpu_names,
                total_epochs=None,
                steps_per_epoch=batches,
                step=0,
            )

    def judging(self, batch: int) -> None:
        """So many batches of an evaluation without training are done."""
        if self._status is not None:
            batches = self._status.snapshot()["steps_per_epoch"] or 1
            self._status.update(step=batch, progress=round(min(1.0, batch / batches), 6))

    def judged(self, metrics: Mapping[str, float]) -> None:
        """An evaluation without training is done."""
        if self._status is not None:
            current = metrics.get(self._config.evaluation.best_metric)
            figures = finite({"metrics": dict(metrics), "current_metric": current})
            self._status.flush(validated=True, progress=1.0, **figures)

    def finish(
        self, state: str, *, exit_code: int, message: str, error: Mapping[str, Any] | None = None
    ) -> None:
        """The end, of whatever kind."""
        if self._status is None:
            return
        patience = _PATIENCE_SECONDS if state == "completed" else _HURRY_SECONDS
        self._listeners.close(timeout_seconds=patience)
        if self._progress is not None:
            self.say(f"optimizer_steps={self._progress.optimizer_steps}")
            self._status.update(checkpoints=self._checkpoints())
            if state == "completed":
                self._status.update(progress=1.0, eta_seconds=0.0)
            self._summarize(state, self._progress)
        self._status.finish(state, exit_code=exit_code, message=message, error=error)

    def say(self, line: str) -> None:
        """Print a line at once, on rank 0."""
        if self._main:
            say(line)

    def _summarize(self, state: str, progress: Progress) -> None:
        figures = final_figures(
            self._run.metrics.rows(),
            state=state,
            config=self._config.source,
            backbone_name=self._config.model.backbone_name,
            optimizer_steps=progress.optimizer_steps,
            skipped_steps=progress.skipped_steps,
            world_size=self._runtime.world_size,
            global_batch_size=self._config.solver.batch_size,
            best_metric_name=self._config.evaluation.best_metric,
            best_metric=progress.best_metric,
            best_epoch=progress.best_epoch,
            elapsed_seconds=self._pace.elapsed(),
            checkpoints=self._checkpoints(),
        )
        write_json(self._run.path / "summary.json", figures, indent=1)

    def _checkpoints(self) -> dict[str, str | None]:
        """Return the paths of best and last relative to the run directory, where they exist."""
        paths = {"best": self._run.best, "last": self._run.last}
        return {
            name: path.relative_to(self._run.path).as_posix() if path.exists() else None
            for name, path in paths.items()
        }

    def _fraction(self, progress: Progress) -> float:
        done = progress.optimizer_steps + progress.skipped_steps
        return round(min(1.0, done / self._pace.planned_steps), 6)
