"""Everything that changes while training, and how it goes into a checkpoint and comes back, bit for bit.

The order of pictures, augmentation, denoising noise and learning rate are pure functions of counters,
so the counters stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from detector.checkpoint import (
    Architecture,
    CheckpointError,
    check_architecture,
    header,
    previous_of,
    save_checkpoint,
)
from detector.config import Config
from detector.console import say
from detector.data.index import DataIndex
from detector.ema import WeightAverage
from detector.models.detector import Detector
from detector.optim import StepCounter, build_optimizer, count_steps
from detector.pretrained import start_from_weights
from detector.progress import Progress
from detector.resume import check_resumable
from detector.rundir import RunDirectory
from detector.runtime import Runtime, amp_dtype, make_scaler


@dataclass(slots=True)
class TrainingState:
    """Network, average, optimizer, scaler and counters."""

    architecture: Architecture
    class_names: tuple[str, ...]
    data_fingerprint: str
    model: Detector  # not wrapped
    ema: WeightAverage
    optimizer: torch.optim.Optimizer
    updates: StepCounter  # of this process
    scaler: torch.amp.GradScaler
    progress: Progress
    saved_batches: int | None = None  # where the last save of this process was

    def save_last(self, run: RunDirectory, config: Config, runtime: Runtime) -> bool:
        """Write `weights/last.pt` from rank 0; called by all ranks, whose generators it holds.

        Returns False where nothing has changed since the last save.
        """
        if self.saved_batches == self.progress.batches:
            return False
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
        return True

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
            say("resume_warning=the data set is not the one that the checkpoint saw")
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        ours = self.optimizer.param_groups
        theirs = state["optimizer"]["param_groups"]
        rates = [group["base_lr"] for group in ours]
        # Group by group: two ways to hold parts fixed may leave the same number of weights.
        if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
            raise CheckpointError(
                f"{path} was saved with other parts of the network held fixed; resume with its "
                "model.freeze, model.weights, model.backbone_weights and solver.stage_lr_decay."
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["base_lr"] = rate  # the configuration's, should it have changed
        self.scaler.load_state_dict(state["scaler"])
        self.progress = progress
        if state["world_size"] == runtime.world_size:
            _set_generator_states(state["generators"][runtime.rank])


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
    model = architecture.build()
    start_from_weights(model, config.model, runtime, resuming=resuming)
    runtime.place(model)
    precision = amp_dtype(runtime.device, enabled=config.runtime.amp)
    optimizer = build_optimizer(model, config.solver)
    return TrainingState(
        architecture=architecture,
        class_names=tuple(index.class_names),
        data_fingerprint=index.fingerprint(),
        model=model,
        ema=WeightAverage(model, decay=config.solver.ema_decay, warmup=config.solver.ema_warmup),
        optimizer=optimizer,
        updates=count_steps(optimizer),
        scaler=make_scaler(runtime.device, precision, init_scale=config.runtime.amp_init_scale),
        progress=Progress(),
    )


def _generator_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
