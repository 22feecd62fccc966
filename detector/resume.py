"""What `--resume` means: which checkpoint, whether it fits, and what of the old run comes along.

A damaged file gives way to the one before it. Nothing of a run is written over before it is sure that
it can go on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detector.checkpoint import (
    Architecture,
    CheckpointError,
    load_or_fall_back,
    newest_checkpoint,
    previous_of,
)
from detector.config import Config
from detector.console import say
from detector.files import RowLog, replacing
from detector.progress import Progress
from detector.rundir import DEFAULT_OUTPUT_DIR, RunDirectory
from detector.runtime import Runtime


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
            say(f"resume_fallback={used} reason=damaged_or_missing path={path}")
        say(f"resumed_from={used}")
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
