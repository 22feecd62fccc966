"""The commands as one rank runs them: join the others, do it, and record how it ended.

Whatever ends a rank (completed, stopped, an error) is written to the run directory before it leaves,
since torchrun returns 1 for everything.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from detector.checkpoint import (
    CheckpointError,
    load_detector,
    load_or_fall_back,
    newest_checkpoint,
    previous_of,
)
from detector.config import Config, ConfigError, RuntimeConfig, load_config
from detector.data.index import DataError
from detector.files import finite
from detector.models.weights import WeightsError
from detector.predict import Predictor, draw_found
from detector.report import Reporter
from detector.resume import check_resumable, find_checkpoint
from detector.rundir import (
    DEFAULT_OUTPUT_DIR,
    RunDirectory,
    create_run_directory,
    plan_run_path,
)
from detector.runtime import Runtime, start_runtime
from detector.stopping import EXIT_RESUMABLE, StopWatch
from detector.train import Ending, TrainingDivergedError, train
from detector.validate import Validation, Validator
from detector.visualize import draw_predictions, png_name

EXIT_FAILED = 1
_STOPPED_WHILE_JUDGING = Ending("stopped", "stopped during the evaluation", EXIT_RESUMABLE)
# Said in one sentence; a traceback would only hide it.
EXPECTED_ERRORS = (ConfigError, DataError, CheckpointError, WeightsError, TrainingDivergedError)


@dataclass(slots=True)
class _Rank:
    """What is known of this rank when it ends, however early that is."""

    rank: int
    run: RunDirectory | None
    report: Reporter | None = None


def train_command(
    config_name: str,
    overrides: Sequence[str],
    *,
    watch: StopWatch,
    output: Path | None = None,
    resume: str | None = None,
) -> int:
    """Train on this rank; return its exit code."""

    def body(me: _Rank) -> Ending:
        started = time.monotonic()
        config = load_config(config_name, overrides)
        _check_file(output)
        with start_runtime(config.runtime) as runtime:
            checkpoint = runtime.broadcast(find_checkpoint(resume, config))
            run = me.run = _open_run(config, runtime, checkpoint)
            report = me.report = Reporter(run, config, runtime)
            report.prepare()
            watch.watch(run.stop_request, max_hours=config.runtime.max_hours, started=started)
            return train(
                config,
                runtime=runtime,
                run=run,
                report=report,
                watch=watch,
                checkpoint=checkpoint,
                output=output,
            )

    return _guarded(body)


def eval_command(
    config_name: str,
    overrides: Sequence[str],
    *,
    watch: StopWatch,
    checkpoint: Path | None = None,
    output: Path | None = None,
) -> int:
    """Judge weights on this rank's share of the held-out pictures; return its exit code.

    Figures go to `output`, else to the run directory's `evaluation/` where a supervisor made one, else
    beside the weights.
    """

    def body(me: _Rank) -> Ending:
        config = load_config(config_name, overrides)
        _check_folder(output)
        with start_runtime(config.runtime) as runtime:
            path, _, validation = _judge(me, config, runtime, watch, checkpoint)
            if validation is None:
                return _STOPPED_WHILE_JUDGING
            folder = output or (me.run or RunDirectory(path.parent.parent)).evaluation
            if validation.result is not None:
                validation.result.write(folder)
                print(f"eval={json.dumps(finite(validation.metrics))}")
                print(f"saved={folder}", flush=True)
            return Ending("completed", "completed", 0)

    return _guarded(body)


def visualize_command(
    config_name: str,
    overrides: Sequence[str],
    *,
    watch: StopWatch,
    checkpoint: Path | None = None,
    output: Path | None = None,
    count: int = 8,
    min_score: float = 0.5,
) -> int:
    """Draw ground truth and predictions of the first `count` held-out pictures as PNG files.

    They go to `output`, else to `visualizations/` of the run directory, else beside the weights.
    """

    def body(me: _Rank) -> Ending:
        config = load_config(config_name, [f"data.eval_samples={count}", *overrides])
        _check_folder(output)
        with start_runtime(config.runtime) as runtime:
            path, validator, validation = _judge(me, config, runtime, watch, checkpoint)
            if validation is None:
                return _STOPPED_WHILE_JUDGING
            folder = output or (me.run.path if me.run else path.parent.parent) / "visualizations"
            if validation.result is not None:
                document = validation.result.predictions
                for drawn in draw_predictions(
                    validator.index, document, to=folder, count=count, min_score=min_score
                ):
                    print(f"saved={drawn}", flush=True)
            return Ending("completed", "completed", 0)

    return _guarded(body)


def predict_command(
    checkpoint: Path,
    images: Sequence[str],
    *,
    min_score: float = 0.5,
    to: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> int:
    """Print what is found in each picture, one JSON object a line; draw it into the folder `to`.

    A line is `{"file", "width", "height", "predictions"}`, a prediction `{"box", "score", "label",
    "name"}` with the box xyxy in the picture's pixels; best first, from `min_score` on.
    """

    def body(me: _Rank) -> Ending:
        del me
        _check_folder(to, option="--to")
        twice = [name for name, many in Counter(map(png_name, images)).items() if many > 1]
        if to is not None and twice:
            raise ConfigError(f"Two of the pictures would be drawn as {to / twice[0]}.")
        with start_runtime(RuntimeConfig(device=device)) as runtime:
            predictor = Predictor(checkpoint, device=runtime.device)
            for found in predictor(images):
                sure = found.above(min_score)
                print(json.dumps(sure.as_dict()), flush=True)
                if to is not None:
                    print(f"saved={draw_found(sure, to=to)}", file=sys.stderr)
            return Ending("completed", "completed", 0)

    return _guarded(body)


def _judge(
    me: _Rank, config: Config, runtime: Runtime, watch: StopWatch, checkpoint: Path | None
) -> tuple[Path, Validator, Validation | None]:
    """Return the weights used, the validator and what it found; None where a stop was asked for."""
    path = runtime.broadcast(checkpoint or weights_of_newest_run(config))
    if os.environ.get("RUN_DIR"):
        run = me.run = _open_run(config, runtime, None)
        me.report = Reporter(run, config, runtime)
        me.report.prepare()
        me.report.validating()
        watch.watch(run.stop_request, max_hours=None, started=time.monotonic())
    loaded = load_detector(path, device=runtime.device)
    if runtime.is_main:
        print(f"checkpoint={path}", flush=True)
    validator = Validator(config, runtime)
    theirs, ours = loaded.class_names, tuple(validator.index.class_names)
    if theirs != ours:
        raise CheckpointError(
            f"{path} tells apart {', '.join(theirs)}, but the data set has {', '.join(ours)}."
        )
    validation = validator.run(loaded.model, watch=watch)
    if validation is not None and me.report is not None:
        me.report.judged(validation.metrics)
    return path, validator, validation


def weights_of_newest_run(config: Config) -> Path:
    """Return `best.pt` of the newest run under `runtime.output_dir`, else its `last.pt`.

    Raises:
        CheckpointError: there is no run with weights.
    """
    parent = Path(config.runtime.output_dir or DEFAULT_OUTPUT_DIR)
    last = newest_checkpoint(parent)
    if last is None:
        raise CheckpointError(f"There are no weights under {parent}; give --checkpoint PATH.")
    best = last.with_name("best.pt")
    return best if best.is_file() else last


def _check_file(output: Path | None) -> None:
    """Refuse at the start what would be found out after hours: a file that cannot be written."""
    if output is None:
        return
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; give a file, such as {output}/final.pt.")
    _check_folder(output.parent)


def _check_folder(folder: Path | None, *, option: str = "--output") -> None:
    """Make the folder, or say why it cannot be one."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: {folder} cannot be a folder: {error.strerror}.") from error


def _open_run(config: Config, runtime: Runtime, checkpoint: Path | None) -> RunDirectory:
    """Return the run directory, made by rank 0. A resume without a supervisor goes on in its own."""
    path = plan_run_path(config)
    if checkpoint is not None and not os.environ.get("RUN_DIR"):
        home = checkpoint.resolve().parent.parent
        if (home / "status.json").is_file():
            # Before anything of a run is written over that may have ended well.
            state, used = load_or_fall_back(checkpoint, previous_of(checkpoint))
            check_resumable(state, config, path=used)
            path = home
    path = runtime.broadcast(path)
    failure = None
    if runtime.is_main:
        try:
            create_run_directory(path, config)
        except OSError as error:
            failure = (
                f"The run directory {path} cannot be made: {error.strerror}; "
                "set runtime.output_dir to a folder that can be written."
            )
    failure = runtime.broadcast(failure)  # nobody goes on before it is there
    if failure is not None:
        raise ConfigError(failure)
    return RunDirectory(path, supervised=os.environ.get("RUN_SUPERVISED") == "1")


def _guarded(body: Callable[[_Rank], Ending]) -> int:
    """Run `body`; record its end and return the exit code."""
    run_dir = os.environ.get("RUN_DIR")
    supervised = os.environ.get("RUN_SUPERVISED") == "1"
    me = _Rank(
        rank=int(os.environ.get("RANK", "0")),
        run=RunDirectory(Path(run_dir), supervised=supervised) if run_dir else None,
    )
    try:
        ending = body(me)
    except Exception as error:  # noqa: BLE001 - recorded and said, whatever it is
        return _failed(me, error)
    if me.run is not None:
        me.run.record_end(
            me.rank, reason=ending.reason, exit_code=ending.exit_code, message=ending.message
        )
    if me.report is not None:
        me.report.finish(ending.reason, exit_code=ending.exit_code, message=ending.message)
    return ending.exit_code


def _failed(me: _Rank, error: Exception) -> int:
    """Say and record what happened; a full disk must not hide it."""
    if isinstance(error, EXPECTED_ERRORS):
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        print(f"rank {me.rank} failed:", file=sys.stderr)
        traceback.print_exception(error)
    try:
        get_error_handler().record_exception(error)  # for torchrun's own report
        cause: Mapping[str, Any] | None = None
        if me.run is not None:
            cause = me.run.record_error(me.rank, error)
            cause = me.run.first_error() or cause
        if me.report is not None and cause is not None:
            message = f"{cause['type']}: {cause['message']}"
            if me.rank != cause["rank"]:
                message = f"rank {cause['rank']}: {message}"
            me.report.finish("failed", exit_code=EXIT_FAILED, message=message, error=cause)
    except OSError as also:
        print(f"not recorded in the run directory: {also}", file=sys.stderr)
    sys.stderr.flush()
    return EXIT_FAILED
