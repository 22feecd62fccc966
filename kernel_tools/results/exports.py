"""Turn weights that came back into a file for elsewhere, by the trainer's own command.

It runs as a process of its own, so that a notebook never imports torch.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kernel_tools.errors import InvalidArgumentError, KernelToolsError, MissingDependencyError

FORMATS: Final = {"onnx": ".onnx", "safetensors": ".safetensors"}
PACKAGES: Final = {"onnx": ("torch", "onnx"), "safetensors": ("torch", "safetensors")}


class ExportError(KernelToolsError):
    """The trainer refused to export the weights; its sentence is the message."""


def export_weights(
    weights: Path, *, to: Path, kind: str, options: Sequence[str] = ()
) -> tuple[Path, str]:
    """Run `python -m detector export` on a file that is here.

    Args:
        weights: the checkpoint.
        to: the file to write.
        kind: `onnx` or `safetensors`.
        options: further words for the command, such as `--half`.

    Returns:
        The file, and what the command said about it.

    Raises:
        InvalidArgumentError: there is no such format.
        MissingDependencyError: what it takes is not installed here; the sentence says what to type.
        ExportError: the command refused.
    """
    check_kind(kind)
    command = [
        *("-m", "detector", "export", "--checkpoint", str(weights), "--to", str(to)),
        *options,
    ]
    absent = [name for name in PACKAGES[kind] if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingDependencyError(
            f"exporting to {kind} needs {' and '.join(absent)}, not installed here; the weights are "
            f"{weights}.",
            hint="pip install 'remote-kernel-tools[detector,export]', or where the trainer is "
            f"installed: python {' '.join(command)}",
        )
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": _path_of_the_trainer()},
        check=False,
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        told = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        raise ExportError((told or said or ["the export ended without a word."])[-1])
    return to, done.stdout.strip()


def _path_of_the_trainer() -> str:
    """Where this process would import `detector` from comes first."""
    found = importlib.util.find_spec("detector")
    own = [str(Path(found.origin).parent.parent)] if found and found.origin else []
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def check_kind(kind: str) -> None:
    """Refuse a format that there is none of.

    Raises:
        InvalidArgumentError: in one sentence.
    """
    if kind not in FORMATS:
        raise InvalidArgumentError(
            f"there is no export to {kind!r}.", hint=f"There are {' and '.join(FORMATS)}."
        )
