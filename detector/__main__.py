"""`python -m detector train|eval|visualize|calibrate|predict|export|prepare`; the first four also under torchrun.

The signal handler is in place before torch is imported. What a rank dies of is recorded in the run
directory before it leaves.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from detector.stopping import EXIT_RESUMABLE, StopWatch


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m detector",
        description="Train and use detectors. train, eval, visualize and calibrate also run under torchrun.",
        epilog="Exit codes: 0 done, 1 failed (one sentence says why), 2 wrong usage, "
        f"{EXIT_RESUMABLE} stopped and resumable with --resume.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, what in (
        ("train", "train a detector"),
        ("eval", "judge weights on the held-out pictures"),
        ("visualize", "draw ground truth and predictions"),
        ("calibrate", "count on the held-out pictures what scores are worth"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument(
            "--config", required=True, help="a YAML file, or a name: coins/hgnetv2_n"
        )
        command.add_argument(
            "--set",
            dest="overrides",
            metavar="KEY=VALUE",
            action="extend",
            nargs="+",
            default=[],
            help="override a value, such as solver.epochs=5",
        )
        if name == "train":
            command.add_argument(
                "--output", type=Path, help="copy the final averaged weights there"
            )
            command.add_argument(
                "--resume",
                help="a checkpoint, a run's folder, or auto: the newest run under "
                "runtime.output_dir, a fresh start where there is none",
            )
        else:
            command.add_argument(
                "--checkpoint", type=Path, help="weights (default: the newest run's)"
            )
            command.add_argument(
                "--output",
                type=Path,
                help="the JSON file" if name == "calibrate" else "folder for what is written",
            )
        if name == "eval":
            command.add_argument(
                "--calibrate", action="store_true", help="also write a calibration.json"
            )
        if name == "visualize":
            command.add_argument(
                "--count", type=_count, default=8, help="how many pictures (default: 8)"
            )
            _add_min_score(command)
            command.add_argument(
                "--calibration", type=Path, help="what calibrate saved: also write p=<precision>"
            )
    predict = commands.add_parser("predict", help="find objects in pictures: one JSON line each")
    predict.add_argument(
        "images", nargs="+", metavar="IMAGE", help="a picture, a folder of them, or a pattern"
    )
    predict.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="weights of a run, or an exported .safetensors",
    )
    predict.add_argument("--to", type=Path, help="folder for the pictures with boxes drawn")
    predict.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto"
    )
    predict.add_argument(
        "--batch-size", type=_count, default=8, help="pictures at once (default: 8)"
    )
    _add_min_score(predict)
    export = commands.add_parser("export", help="write weights as one ONNX or safetensors file")
    export.add_argument("--checkpoint", type=Path, required=True, help="weights of a run")
    export.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="FILE.onnx or FILE.safetensors"
    )
    export.add_argument("--opset", type=int, default=17, help="of ONNX, 17 to 20 (default: 17)")
    export.add_argument("--half", action="store_true", help="store weights in half precision")
    export.add_argument(
        "--image-size",
        type=_size,
        metavar="SIDE|HEIGHTxWIDTH",
        help="the ONNX input, pixels (default: as trained)",
    )
    export.add_argument(
        "--top-k", type=_count, default=300, help="detections a picture (default: 300)"
    )
    export.add_argument(
        "--check",
        nargs="+",
        default=[],
        metavar="IMAGE",
        help="pictures to hold the ONNX file against the network on (default: drawn ones)",
    )
    export.add_argument(
        "--licence", metavar="TEXT", help="of the weights that the run started from"
    )
    prepare = commands.add_parser("prepare", help="write a built-in set as a YOLO folder")
    prepare.add_argument("name", help="coins, digits or synthetic")
    prepare.add_argument("--to", type=Path, required=True, help="the folder, new or empty")
    prepare.add_argument("--train", type=_count, help="training pictures")
    prepare.add_argument("--val", type=_count, help="held-out pictures")
    prepare.add_argument("--seed", type=_seed, default=0, help="another seed, another set")
    return parser


def _add_min_score(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--min-score", type=_score, default=0.5, help="least score shown, 0 to 1 (default: 0.5)"
    )


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _size(text: str) -> int | tuple[int, int]:
    height, by, width = text.partition("x")
    return (_count(height), _count(width)) if by else _count(height)


def _seed(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {value}")
    return value


def _score(text: str) -> float:
    if not 0.0 <= (value := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, not {value}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    watch = StopWatch()
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    if arguments.command == "train":
        watch.catch_signals()
        from detector.commands import train_command

        return train_command(
            arguments.config,
            arguments.overrides,
            output=arguments.output,
            resume=arguments.resume,
            watch=watch,
        )
    if arguments.command == "prepare":
        return prepare(arguments)
    if arguments.command == "predict":
        from detector.commands import predict_command

        return predict_command(
            arguments.checkpoint,
            arguments.images,
            min_score=arguments.min_score,
            to=arguments.to,
            device=arguments.device,
            batch_size=arguments.batch_size,
        )
    if arguments.command == "export":
        from detector.commands import export_command

        return export_command(
            arguments.checkpoint,
            to=arguments.to,
            opset=arguments.opset,
            half=arguments.half,
            image_size=arguments.image_size,
            top_k=arguments.top_k,
            pictures=arguments.check,
            licence=arguments.licence,
        )
    watch.catch_signals()
    from detector.commands import calibrate_command, eval_command, visualize_command

    if arguments.command == "calibrate":
        return calibrate_command(
            arguments.config,
            arguments.overrides,
            watch=watch,
            checkpoint=arguments.checkpoint,
            output=arguments.output,
        )
    if arguments.command == "eval":
        return eval_command(
            arguments.config,
            arguments.overrides,
            watch=watch,
            checkpoint=arguments.checkpoint,
            output=arguments.output,
            calibrate=arguments.calibrate,
        )
    return visualize_command(
        arguments.config,
        arguments.overrides,
        watch=watch,
        checkpoint=arguments.checkpoint,
        output=arguments.output,
        count=arguments.count,
        min_score=arguments.min_score,
        calibration=arguments.calibration,
    )


def prepare(arguments: argparse.Namespace) -> int:
    """Write a built-in set to a folder."""
    from detector.data.index import DataError
    from detector.data.prepare import prepare as write

    try:
        path = write(
            arguments.name,
            to=arguments.to,
            train=arguments.train,
            val=arguments.val,
            seed=arguments.seed,
        )
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"saved={path}")
    return 0


def _leave(code: int) -> NoReturn:
    """Exit; at once after a failure or where a listener hangs: an orderly end could be held up."""
    events = sys.modules.get("detector.events")
    sys.stdout.flush()
    sys.stderr.flush()
    if code == EXIT_RESUMABLE and os.environ.get("RUN_SUPERVISED") == "1":
        code = 0  # the supervisor reads the reason that was left; torchrun would report a failure
    if code == 1 or (events is not None and events.left_behind()):
        os._exit(code)
    gc.freeze()  # collecting torch's thousands of objects at the very end takes seconds, measured
    sys.exit(code)


if __name__ == "__main__":
    faulthandler.enable()
    if hasattr(faulthandler, "register"):  # not on Windows; a supervisor asks so for the stacks
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    _leave(main())
