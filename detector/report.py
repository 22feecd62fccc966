"""What a run says while it goes on: console tokens, status, rows, tables. Rank 0 only writes.

The loop tells it what happened; it decides nothing.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from detector.config import Config
from detector.files import finite, write_json, write_text
from detector.models.specs import find_spec
from detector.progress import Progress
from detector.rundir import RunDirectory
from detector.runtime import Runtime
from detector.status import StatusWriter


class Reporter:
    """Speaks for rank 0; on the other ranks every method does nothing."""

    def __init__(self, run: RunDirectory, config: Config, runtime: Runtime) -> None:
        self._run = run
        self._config = config
        self._main = runtime.is_main
        self._runtime = runtime
        self._status = StatusWriter(run.status, supervised=run.supervised) if self._main else None
        self._progress: Progress | None = None  # once training has begun
        self._planned_steps = 1
        self._steps_per_epoch = 1
        self._started = time.monotonic()
        self._epoch_started = self._started
        self._epoch_seconds: list[float] = []
        self._window_started = self._started
        self._window_batches = 0
        self._rate: float | None = None
        self._lr: float | None = None

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
        self._planned_steps = planned_steps
        self._steps_per_epoch = steps_per_epoch
        self._window_started = self._epoch_started = time.monotonic()
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
        lr: float,
        grad_norm: float,
        data_seconds: float,
        step_seconds: float,
        stepped: bool,
    ) -> None:
        """One batch is done. Every `logging.log_interval` optimizer steps it becomes a row."""
        self._window_batches += 1
        self._lr = lr
        interval = self._config.logging.log_interval
        row_due = stepped and progress.optimizer_steps % interval == 0
        means = progress.window.means()
        if row_due:
            progress.window.clear()
        if self._status is None:
            return
        if self._rate is None or row_due:
            self._rate = self._throughput()
        self._status.update(
            state="training",
            phase="train",
            current_epoch=progress.epoch + 1,
            step=progress.step,
            optimizer_steps=progress.optimizer_steps,
            skipped_steps=progress.skipped_steps,
            progress=self._fraction(progress),
            lr=lr,
            train_loss=finite(loss),
            images_per_second=self._rate,
            eta_seconds=self._eta(progress),
        )
        if not stepped:
            self.say(f"step_skipped=non_finite epoch={progress.epoch + 1} step={progress.step}")
        if not row_due:
            return
        self._run.steps.append(
            {
                "epoch": progress.epoch + 1,
                "step": progress.step,
                "optimizer_steps": progress.optimizer_steps,
                **means,
                "lr": lr,
                "grad_norm": grad_norm,
                "skipped_steps": progress.skipped_steps,
                "images_per_second": self._rate,
                "data_seconds": round(data_seconds, 6),
                "step_seconds": round(step_seconds, 6),
                "elapsed_seconds": round(time.monotonic() - self._started, 3),
            }
        )
        self.say(
            f"epoch={progress.epoch + 1} step={progress.step}/{self._steps_per_epoch} "
            f"loss={means['loss']:.4f} lr={lr:.2e} data_time={data_seconds:.3f} "
            f"iter_time={step_seconds:.3f} images_per_second={self._rate:.2f}"
        )
        self._window_started = time.monotonic()
        self._window_batches = 0

    def validating(self) -> None:
        """An evaluation begins."""
        if self._status is not None:
            self._status.flush(state="validating", phase="eval")

    def epoch(self, progress: Progress, *, metrics: Mapping[str, float] | None) -> None:
        """An epoch is done; `metrics` where it was evaluated."""
        seconds = time.monotonic() - self._epoch_started
        self._epoch_started = self._window_started = time.monotonic()
        self._window_batches = 0
        self._epoch_seconds.append(seconds)
        if self._status is None:
            return
        number = progress.epoch + 1
        losses = progress.epoch_losses.means()
        self._run.metrics.append(
            {
                "epoch": number,
                "optimizer_steps": progress.optimizer_steps,
                "skipped_steps": progress.skipped_steps,
                "lr": self._lr,
                **{("train_loss" if key == "loss" else key): mean for key, mean in losses.items()},
                "metrics": dict(metrics) if metrics is not None else None,
                "epoch_seconds": round(seconds, 3),
                "elapsed_seconds": round(time.monotonic() - self._started, 3),
            }
        )
        write_text(self._run.path / "results.csv", results_table(self._run.metrics.rows()))
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
            mean_epoch_seconds=round(sum(self._epoch_seconds) / len(self._epoch_seconds), 3),
            best_metric=progress.best_metric,
            best_epoch=progress.best_epoch,
            validated=metrics is not None,
            checkpoints=self._checkpoints(),
            **finite(figures),
        )

    def best(self, progress: Progress) -> None:
        """New best weights are on disk."""
        name, value = self._config.evaluation.best_metric, progress.best_metric
        self.say(f"best_checkpoint={self._run.best} metric={name} value={value:.4f}")

    def stopping(self, message: str) -> None:
        """All ranks agreed to stop."""
        self.say(f"stopping={message}")
        if self._status is not None:
            self._status.flush(state="stopping", message=message)

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
            print(line, flush=True)

    def _summarize(self, state: str, progress: Progress) -> None:
        rows = self._run.metrics.rows()
        judged = [row for row in rows if row["metrics"]]
        write_json(
            self._run.path / "summary.json",
            {
                "state": state,
                "config": self._config.source,
                "backbone_name": self._config.model.backbone_name,
                "epochs": len(rows),
                "optimizer_steps": progress.optimizer_steps,
                "skipped_steps": progress.skipped_steps,
                "world_size": self._runtime.world_size,
                "global_batch_size": self._config.solver.batch_size,
                "metrics": judged[-1]["metrics"] if judged else {},
                "best_metric_name": self._config.evaluation.best_metric,
                "best_metric": progress.best_metric,
                "best_epoch": progress.best_epoch,
                "elapsed_seconds": round(time.monotonic() - self._started, 3),
                "checkpoints": self._checkpoints(),
            },
            indent=1,
        )

    def _checkpoints(self) -> dict[str, str | None]:
        """Return the paths of best and last relative to the run directory, where they exist."""
        paths = {"best": self._run.best, "last": self._run.last}
        return {
            name: path.relative_to(self._run.path).as_posix() if path.exists() else None
            for name, path in paths.items()
        }

    def _fraction(self, progress: Progress) -> float:
        done = progress.optimizer_steps + progress.skipped_steps
        return round(min(1.0, done / self._planned_steps), 6)

    def _throughput(self) -> float:
        seconds = max(time.monotonic() - self._window_started, 1e-9)
        return round(self._window_batches * self._config.solver.batch_size / seconds, 3)

    def _eta(self, progress: Progress) -> float | None:
        """Return seconds to go: the mean pace so far, evaluations included."""
        done = self._fraction(progress)
        here = time.monotonic() - self._started
        if not self._rate or done <= 0.0:
            return None
        if self._epoch_seconds:
            pace = sum(self._epoch_seconds) / (len(self._epoch_seconds) * self._steps_per_epoch)
        else:
            pace = self._config.solver.batch_size / self._rate
        return round(min(pace * self._planned_steps * (1.0 - done), 1e9), 1) if here else None


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV: one line an epoch, metrics as columns of their own."""
    flat = [{**row, **(row["metrics"] or {})} for row in rows]
    columns: list[str] = []
    for row in flat:
        columns += [key for key in row if key not in columns and key != "metrics"]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()
