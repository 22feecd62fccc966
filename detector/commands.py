"""The commands as one rank runs them: join the others, do it, and record how it ended.

Whatever ends a rank (completed, stopped, an error) is written to the run directory before it leaves,
since torchrun returns 1 for everything.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from torch import nn

from detector.calibrate import Calibration, CalibrationError, fit
from detector.checkpoint import (
    CheckpointError,
    file_sha256,
    load_detector,
    load_or_fall_back,
    newest_checkpoint,
    previous_of,
)
from detector.config import Config, ConfigError, RuntimeConfig, load_config
from detector.evaluate import Evaluator
from detector.export import export
from detector.files import finite
from detector.guard import Rank, guarded
from detector.pictures import find_pictures
from detector.predict import BATCH, Predictor, draw_found
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
from detector.train import Ending, train
from detector.validate import Validation, Validator
from detector.visualize import draw_predictions, png_name

_STOPPED_WHILE_JUDGING = Ending("stopped", "stopped during the evaluation", EXIT_RESUMABLE)


def train_command(
    config_name: str,
    overrides: Sequence[str],
    *,
    watch: StopWatch,
    output: Path | None = None,
    resume: str | None = None,
) -> int:
    """Train on this rank; return its exit code."""

    def body(me: Rank) -> Ending:
        started = time.monotonic()
        config = load_config(config_name, overrides)
        _check_file(output)
        with start_runtime(config.runtime) as runtime:
            checkpoint = runtime.broadcast(find_checkpoint(resume, config))
            run = me.run = _open_run(config, runtime, checkpoint)
            report = me.report = Reporter(run, config, runtime)
            report.prepare()
            if runtime.distributed:
                me.watch_peers()
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

    return guarded(body)


def eval_command(
    config_name: str,
    overrides: Sequence[str],
    *,
    watch: StopWatch,
    checkpoint: Path | None = None,
    output: Path | None = None,
    calibrate: bool = False,
) -> int:
    """Judge weights on this rank's share of the held-out pictures; return its exit code.

    Figures go to `output`, else to the run directory's `evaluation/` where a supervisor made one, else
    beside the weights; with `calibrate` a calibration.json goes with them.
    """

    def body(me: Rank) -> Ending:
        config = load_config(config_name, overrides)
        _check_folder(output)
        with start_runtime(config.runtime) as runtime:
            path, model, validator = _judge(me, config, runtime, watch, checkpoint)
            evaluator = validator.collect(model, watch=watch, on_batch=_telling(me))
            if evaluator is None:
                return _STOPPED_WHILE_JUDGING
            validation = validator.summarize(evaluator)
            _told(me, validation)
            folder = output or (me.run or RunDirectory(path.parent.parent)).evaluation
            if validation.result is not None:
                validation.result.write(folder)
                print(f"eval={json.dumps(finite(validation.metrics))}")
                print(f"saved={folder}", flush=True)
            if calibrate:
                _calibrate(evaluator, path, runtime, to=folder / "calibration.json")
            return Ending("completed", "completed", 0)

    return guarded(body)


def visualize_command(
    config_name: str,
    overrides: Sequence[str],
    *,
    watch: StopWatch,
    checkpoint: Path | None = None,
    output: Path | None = None,
    count: int = 8,
    min_score: float = 0.5,
    calibration: Path | None = None,
) -> int:
    """Draw ground truth and predictions of the first `count` held-out pictures as PNG files.

    They go to `output`, else to `visualizations/` of the run directory, else beside the weights. The
    file `calibration` says what precision to write at each score.
    """

    def body(me: Rank) -> Ending:
        wanted = [f"data.eval_samples={count}", f"evaluation.predictions={count}"]
        config = load_config(config_name, [*wanted, *overrides])
        _check_folder(output)
        curves = None if calibration is None else Calibration.load(calibration)
        with start_runtime(config.runtime) as runtime:
            path, model, validator = _judge(me, config, runtime, watch, checkpoint)
            if curves is not None:
                _check_calibration(curves, path, validator, runtime, where=str(calibration))
            validation = validator.run(model, watch=watch, on_batch=_telling(me))
            if validation is None:
                return _STOPPED_WHILE_JUDGING
            _told(me, validation)
            folder = output or (me.run.path if me.run else path.parent.parent) / "visualizations"
            if validation.result is not None:
                document = validation.result.predictions
                for drawn in draw_predictions(
                    validator.index,
                    document,
                    to=folder,
                    count=count,
                    min_score=min_score,
                    calibration=curves,
                ):
                    print(f"saved={drawn}", flush=True)
            return Ending("completed", "completed", 0)

    return guarded(body)


def calibrate_command(
    config_name: str,
    overrides: Sequence[str],
    *,
    watch: StopWatch,
    checkpoint: Path | None = None,
    output: Path | None = None,
) -> int:
    """Fit what scores are worth on the held-out pictures and save it as JSON; return the exit code.

    The file is `output`, else `evaluation/calibration.json` of the run directory, else beside the weights.
    """

    def body(me: Rank) -> Ending:
        config = load_config(config_name, overrides)
        _check_file(output)
        with start_runtime(config.runtime) as runtime:
            path, model, validator = _judge(me, config, runtime, watch, checkpoint)
            evaluator = validator.collect(model, watch=watch, on_batch=_telling(me))
            if evaluator is None:
                return _STOPPED_WHILE_JUDGING
            folder = (me.run or RunDirectory(path.parent.parent)).evaluation
            _calibrate(evaluator, path, runtime, to=output or folder / "calibration.json")
            return Ending("completed", "completed", 0)

    return guarded(body)


def predict_command(
    checkpoint: Path,
    images: Sequence[str],
    *,
    min_score: float = 0.5,
    to: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    batch_size: int = BATCH,
) -> int:
    """Print what is found in each picture, one JSON object a line; draw it into the folder `to`.

    An image is a picture, a folder of pictures or a pattern. A line is `{"file", "width", "height", "predictions"}`, a prediction `{"box", "score", "label",
    "name"}` with the box xyxy in the picture's pixels; best first, from `min_score` on.
    """

    def body(me: Rank) -> Ending:
        del me
        _check_folder(to, option="--to")
        pictures = find_pictures(images)
        twice = [name for name, many in Counter(map(png_name, pictures)).items() if many > 1]
        if to is not None and twice:
            raise ConfigError(f"Two of the pictures would be drawn as {to / twice[0]}.")
        with start_runtime(RuntimeConfig(device=device)) as runtime:
            predictor = Predictor(checkpoint, device=runtime.device)
            for sure in predictor(pictures, min_score=min_score, batch_size=batch_size):
                print(json.dumps(sure.as_dict()), flush=True)
                if to is not None:
                    print(f"saved={draw_found(sure, to=to)}", file=sys.stderr)
            return Ending("completed", "completed", 0)

    return guarded(body)


def export_command(
    checkpoint: Path,
    *,
    to: Path,
    opset: int = 17,
    half: bool = False,
    image_size: int | tuple[int, int] | None = None,
    top_k: int = 300,
    pictures: Sequence[str] = (),
    licence: str | None = None,
) -> int:
    """Write weights as one ONNX or safetensors file; see `export`. Return the exit code."""

    def body(me: Rank) -> Ending:
        del me
        done = export(
            checkpoint,
            to=to,
            opset=opset,
            half=half,
            image_size=image_size,
            top_k=top_k,
            pictures=find_pictures(pictures),
            licence=licence,
        )
        if done.agreement is not None:
            print(f"checked=onnxruntime {done.agreement}")
        elif to.suffix == ".onnx":
            print("checked=no: onnxruntime is not installed (pip install onnxruntime)")
        print(
            f"saved={done.path} size_mb={done.size_bytes / 1e6:.2f} sha256={done.sha256}",
            flush=True,
        )
        return Ending("completed", "completed", 0)

    return guarded(body)


def _judge(
    me: Rank, config: Config, runtime: Runtime, watch: StopWatch, checkpoint: Path | None
) -> tuple[Path, nn.Module, Validator]:
    """Return the weights' path, the network and the held-out pictures to judge it with."""
    path = runtime.broadcast(checkpoint or weights_of_newest_run(config))
    if os.environ.get("RUN_DIR"):
        run = me.run = _open_run(config, runtime, None)
        me.report = Reporter(run, config, runtime)
        me.report.prepare()
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
    ranks = runtime.all_gather(runtime.describe())
    if me.report is not None:
        me.report.begin_judging(batches=validator.batches, ranks=ranks)
    return path, loaded.model, validator


def _telling(me: Rank) -> Callable[[int], None] | None:
    """Where a status is kept, it says how many batches are done."""
    return None if me.report is None else me.report.judging


def _told(me: Rank, validation: Validation) -> None:
    if me.report is not None:
        me.report.judged(validation.metrics)


def _calibrate(evaluator: Evaluator, weights: Path, runtime: Runtime, *, to: Path) -> None:
    """Fit and save a calibration. All ranks must call it; where it cannot be, all raise alike."""
    failure = None
    if runtime.is_main:
        try:
            curves = fit(evaluator.index, evaluator.found, weights=file_sha256(weights))
        except CalibrationError as error:
            failure = str(error)
        else:
            curves.save(to)
            print(curves.summary())
            print(f"saved={to}", flush=True)
    failure = runtime.broadcast(failure)
    if failure is not None:
        raise CalibrationError(failure)


def _check_calibration(
    curves: Calibration, weights: Path, validator: Validator, runtime: Runtime, *, where: str
) -> None:
    """Refuse a calibration of other classes; say where it is one of other weights."""
    curves.check_classes(validator.index.class_names, where=where)
    if runtime.is_main and curves.weights and curves.weights != file_sha256(weights):
        print(f"warning: {where} was made with other weights than {weights}", flush=True)


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
