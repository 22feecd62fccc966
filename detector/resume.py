"""From a running training to a checkpoint and back, bit for bit.

The order of pictures, augmentation, denoising noise and learning rate are pure functions of counters,
so the counters stand for them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detector.checkpoint import (
    Architecture,
    CheckpointError,
    check_architecture,
    header,
    load_or_fall_back,
    newest_checkpoint,
    previous_of,
    save_checkpoint,
)
from detector.config import Config
from detector.ema import WeightAverage
from detector.files import RowLog, replacing
from detector.progress import Progress
from detector.rundir import DEFAULT_OUTPUT_DIR, RunDirectory
from detector.runtime import Runtime


@dataclass(slots=True)
class TrainingState:
    """Everything that changes while training."""

    architecture: Architecture
    class_names: tuple[str, ...]
    data_fingerprint: str
    model: nn.Module  # not wrapped
    ema: WeightAverage
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    progress: Progress
    saved_batches: int | None = None  # where the last save of this process was

    def save_last(self, run: RunDirectory, config: Config, runtime: Runtime) -> None:
        """Write `weights/last.pt` from rank 0; called by all ranks, whose generators it holds."""
        if self.saved_batches == self.progress.batches:
            return  # nothing has changed since
        self.saved_batches = self.progress.batches
        generators = runtime.all_gather(_generator_states())
        if runtime.is_main:
            state = {
                **header("training", self.architecture, self.model, class_names=self.class_names),
                "model": self.model.state_dict(),
                "ema": self.ema.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "progress": self.progress.as_dict(),
                "generators": generators,
                "world_size": runtime.world_size,
                "global_batch": config.solver.batch_size,
                "data_fingerprint": self.data_fingerprint,
                "epoch": self.progress.epoch,
                "optimizer_steps": self.progress.optimizer_steps,
                "config": config.as_dict(),
            }
            save_checkpoint(run.last, state, previous=previous_of(run.last))
        runtime.barrier()  # nobody goes on before it is on disk

    def save_weights(
        self,
        path: Path,
        config: Config,
        runtime: Runtime,
        *,
        epoch: int,
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Write the averaged weights alone to `path`, from rank 0. `epoch` counts from 1."""
        if runtime.is_main:
            state = {
                **header("weights", self.architecture, self.model, class_names=self.class_names),
                "model": self.ema.model.state_dict(),
                "epoch": epoch,
                "optimizer_steps": self.progress.optimizer_steps,
                "metrics": dict(metrics or {}),
                "config": config.as_dict(),
            }
            save_checkpoint(path, state)
        runtime.barrier()

    def restore(
        self, state: Mapping[str, Any], config: Config, runtime: Runtime, *, path: Path
    ) -> None:
        """Take up where `state` was saved.

        Raises:
            CheckpointError: another network, weights only, or another global batch in mid-epoch.
        """
        check_resumable(state, config, path=path)
        check_architecture(state, self.model, self.architecture, path=path)
        progress = Progress.from_dict(state["progress"])
        if state["data_fingerprint"] != self.data_fingerprint and runtime.is_main:
            print("resume_warning=the data set is not the one that the checkpoint saw", flush=True)
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        base_rates = [group["base_lr"] for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointError(
                f"{path} was saved with other parts of the network held fixed; resume with its "
                "model.freeze, model.weights and model.backbone_weights."
            ) from error
        for group, rate in zip(self.optimizer.param_groups, base_rates, strict=True):
            group["base_lr"] = rate  # the configuration's, should it have changed
        self.scaler.load_state_dict(state["scaler"])
        self.progress = progress
        if state["world_size"] == runtime.world_size:
            _set_generator_states(state["generators"][runtime.rank])


def check_resumable(state: Mapping[str, Any], config: Config, *, path: Path) -> None:
    """Refuse what the configuration alone shows not to go on from `state`.

    Raises:
        CheckpointError: another model, weights only, or another global batch in mid-epoch.
    """
    theirs = Architecture(**state["architecture"])
    model = config.model
    ours = Architecture(
        model.backbone_name, theirs.num_classes, model.num_queries, model.num_denoising
    )
    if theirs != ours:
        raise CheckpointError(f"{path} holds {theirs}, but the configuration asks for {ours}.")
    if state["kind"] != "training":
        raise CheckpointError(
            f"{path} holds weights only and cannot be resumed; resume from last.pt of its run."
        )
    batch = config.solver.batch_size
    if state["global_batch"] != batch and Progress.from_dict(state["progress"]).step:
        raise CheckpointError(
            f"{path} was saved in the middle of an epoch with solver.batch_size="
            f"{state['global_batch']}; resume with that, not {batch}."
        )


def find_checkpoint(resume: str | None, config: Config) -> Path | None:
    """Return what `--resume` means: a file, a run's folder, or with `auto` the newest run's last.

    Raises:
        CheckpointError: a path with nothing to resume.
    """
    if resume is None:
        return None
    if resume == "auto":
        run_dir = os.environ.get("RUN_DIR")
        if run_dir:
            own = RunDirectory(Path(run_dir)).last
            if own.is_file() or previous_of(own).is_file():
                return own
        return newest_checkpoint(Path(config.runtime.output_dir or DEFAULT_OUTPUT_DIR))
    path = Path(resume)
    if path.is_dir():
        path = RunDirectory(path).last
    if not path.is_file() and not previous_of(path).is_file():
        raise CheckpointError(f"There is no checkpoint {path} to resume from.")
    return path


def read_checkpoint(path: Path, runtime: Runtime) -> tuple[dict[str, Any], Path]:
    """Return the state and the file it is from: `path`, or the one before where it is damaged."""
    state, used = load_or_fall_back(path, previous_of(path))
    if runtime.is_main:
        if used != path:
            print(f"resume_fallback={used} reason=damaged_or_missing path={path}", flush=True)
        print(f"resumed_from={used}", flush=True)
    return state, used


def carry_over(run: RunDirectory, source: Path, progress: Progress) -> None:
    """Bring rows and best weights of the resumed run along; drop rows past the checkpoint."""
    origin = RunDirectory(source.parent.parent)
    if origin.path.resolve() != run.path.resolve():
        for old, new in ((origin.metrics, run.metrics), (origin.steps, run.steps)):
            _copy_rows(old, new)
        if progress.best_epoch is not None and origin.best.is_file() and not run.best.exists():
            for name in (origin.best, origin.best.with_name("best.pt.sha256")):
                if name.is_file():
                    with open(name, "rb") as old_file, replacing(run.weights / name.name) as file:
                        shutil.copyfileobj(old_file, file)
    run.metrics.keep(lambda row: row["epoch"] <= progress.epoch)
    run.steps.keep(lambda row: row["optimizer_steps"] <= progress.optimizer_steps)


def _copy_rows(old: RowLog, new: RowLog) -> None:
    if not new.path.exists():
        for row in old.rows():
            new.append(row)


def _generator_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
