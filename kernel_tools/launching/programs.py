"""Programs that are not the detector: a script of the project under torchrun, or any command line.

They run under the same agent; what they write as `status.json` in LibreYOLO's manner is watched with
the same panel. Checked here as far as it can be; nothing is sent.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from kernel_tools.agent.files import clean_relative
from kernel_tools.errors import InvalidArgumentError
from kernel_tools.launching.launch import LaunchOptions, LaunchRequest

if TYPE_CHECKING:
    from kernel_tools.datasets.reference import DatasetReference

# What only a shell understands: then one runs the line.
_SHELL: Final = re.compile(r"[|&;<>`$*?~#\n]|\(|\)")
# Set in the line itself: `OMP_NUM_THREADS=1 python train.py`.
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")


def script_request(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    options: LaunchOptions,
    project_dir: Path,
    references: Sequence[DatasetReference] = (),
    status_dir: str | None = None,
) -> LaunchRequest:
    """Return what launches a Python file of the project under torchrun; its folder travels.

    Raises:
        InvalidArgumentError: it is no file of the project.
    """
    path = Path(script).expanduser()
    path = path if path.is_absolute() else project_dir / path
    if not path.is_file():
        raise InvalidArgumentError(
            f"--script {script}: there is no such file in {project_dir}.",
            hint="Name a Python file of the project, such as tools/train.py.",
        )
    try:
        relative = path.resolve().relative_to(project_dir.resolve()).as_posix()
    except ValueError:
        raise InvalidArgumentError(
            f"--script {script} lies outside the project {project_dir}.",
            hint="Copy it into the project; its folder travels with it.",
        ) from None
    return LaunchRequest(
        argv=(relative, *arguments),
        kind="script",
        options=options,
        references=tuple(references),
        script=relative,
        status_dir=check_status_dir(status_dir),
        name=options.name or PurePosixPath(relative).stem,
    )


def command_request(
    command: str | Sequence[str],
    arguments: Sequence[str] = (),
    *,
    options: LaunchOptions,
    references: Sequence[DatasetReference] = (),
    status_dir: str | None = None,
) -> LaunchRequest:
    """Return what launches a command line once, in the run's work folder.

    A string is split as a shell would; where it holds what only a shell understands, `sh` runs it.

    Raises:
        InvalidArgumentError: it is empty, or its quotes do not close.
    """
    argv = _split(command) if isinstance(command, str) else list(command)
    if not argv:
        raise InvalidArgumentError(
            "--command is empty.",
            hint='For instance --command "libreyolo train data=coco128.yaml".',
        )
    program = next((word for word in argv if not word.startswith("-")), argv[0])
    if argv[:2] == ["sh", "-c"]:
        program = argv[2].split()[0]
    return LaunchRequest(
        argv=(*argv, *arguments),
        kind="command",
        options=options,
        references=tuple(references),
        status_dir=check_status_dir(status_dir),
        name=options.name or PurePosixPath(program).name,
    )


def check_status_dir(status_dir: str | None) -> str | None:
    """Check that `--status-dir` stays in the work folder.

    Raises:
        InvalidArgumentError: it is absolute or escapes.
    """
    if status_dir is not None and clean_relative(status_dir) is None:
        raise InvalidArgumentError(
            f"--status-dir {status_dir!r} must be a relative folder inside the run's work folder.",
            hint="For instance --status-dir runs/train/exp, or a pattern such as 'runs/*/*'.",
        )
    return status_dir


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidArgumentError(
            f"--command cannot be read: {str(error).lower()}.", hint="Close its quotes."
        ) from None
    if words and (_SHELL.search(command) or _ASSIGNMENT.match(words[0])):
        return ["sh", "-c", command]
    return words
