"""How the magics read a line: one parser's rules, shared sets of options, errors of one line.

`IPython.core.magic_arguments` declares the options, so that help (`%magic?`) and completion come from
the same parser. Nothing here knows what a magic does.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic as ipython_cell_magic
from IPython.core.magic import line_magic, output_can_be_silenced
from IPython.core.magic_arguments import argument, argument_group, magic_arguments

from kernel_tools.errors import InvalidArgumentError, KernelToolsError
from kernel_tools.magics.helptext import help_page

Function = TypeVar("Function", bound=Callable[..., Any])

# A secret in a cell stays in the notebook, in its history and in its outputs: refused before parsing.
# Option -> (the option that takes the variable's name instead, the variable's usual name).
REFUSED: Final = {
    "--minio-secret-key": ("--minio-secret-key-env", "MINIO_SECRET_KEY"),
    "--minio-secret": ("--minio-secret-key-env", "MINIO_SECRET_KEY"),
    "--secret-key": ("--minio-secret-key-env", "MINIO_SECRET_KEY"),
    "--token": ("--token-env", "JUPYTER_TOKEN"),
    "--password": ("--token-env", "JUPYTER_TOKEN"),
    "--hf-token": ("", "HF_TOKEN"),
}

# Words may hold quoted parts; IPython's own splitting differs between Windows and the rest.
_WORD: Final = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*'|["'])+""")
# `{name}` that IPython could not expand; `${NAME}` is an environment variable of a configuration.
_UNEXPANDED: Final = re.compile(r"(?<!\$)\{\s*([A-Za-z_][^{}]*)\}")


def parse(method: Callable[..., Any], line: str) -> argparse.Namespace:
    """Read the line of a magic declared with `magic_arguments`.

    One pair of quotes round a value and a trailing `;` are dropped.

    Raises:
        InvalidArgumentError: whatever is wrong with it, in one line; never IPython's UsageError,
            which tools that execute notebooks take for a success.
    """
    return _parse_words(method, split(line))


def parse_with_rest(
    method: Callable[..., Any], line: str
) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Like `parse`, for a magic that hands what follows ` -- ` to a program; returns that beside it."""
    words = split(line)
    end = words.index("--") if "--" in words else len(words)
    rest = tuple(words[end + 1 :])
    _refuse_unexpanded(list(rest))
    return _parse_words(method, words[:end]), rest


def _parse_words(method: Callable[..., Any], words: list[str]) -> argparse.Namespace:
    parser: argparse.ArgumentParser = method.parser  # type: ignore[attr-defined]
    _refuse_secrets(words, parser)
    _refuse_unexpanded(words)
    parser.allow_abbrev = False
    try:
        return parser.parse_args(words)
    except UsageError as error:
        name = f"%{parser.prog.lstrip('%')}"
        nearest = _nearest_option(parser, str(error))
        raise InvalidArgumentError(
            f"{name}: {error}{nearest}.", hint=f"{name}? shows its options."
        ) from None


def split(line: str) -> list[str]:
    """Return the words of a line without their outer quotes and without a final `;`."""
    line = line.strip()
    while line.endswith(";"):
        line = line[:-1].rstrip()
    return [_unquote(word) for word in _WORD.findall(line)]


def _nearest_option(parser: argparse.ArgumentParser, error: str) -> str:
    unknown = re.search(r"unrecognized arguments: (--[\w-]+)", error)
    known = list(parser._option_string_actions)  # noqa: SLF001 - argparse has no public list
    near = difflib.get_close_matches(unknown.group(1), known, n=1) if unknown else []
    return f" (did you mean {near[0]}?)" if near else ""


def _unquote(word: str) -> str:
    """`'a b'` -> `a b`, and the same behind `--option=` or `key=`."""
    name, sign, value = word.partition("=")
    if sign and _quoted(value) and not _quoted(word):
        return f"{name}={value[1:-1]}"
    return word[1:-1] if _quoted(word) else word


def _quoted(word: str) -> bool:
    return len(word) >= 2 and word[0] == word[-1] and word[0] in "'\""


def _refuse_secrets(words: list[str], parser: argparse.ArgumentParser) -> None:
    for word in words:
        name = word.partition("=")[0]
        if name in REFUSED:
            option, variable = REFUSED[name]
            known = option in parser._option_string_actions  # noqa: SLF001 - no public list
            then = f"name it: {option} {variable}" if known else "it is read from there"
            raise InvalidArgumentError(
                f"{name} is not taken: a secret in a cell stays in the notebook and its history.",
                hint=f"Put it into the environment or .env as {variable}; {then}.",
            )


def _refuse_unexpanded(words: list[str]) -> None:
    for word in words:
        found = _UNEXPANDED.search(word)
        if found:
            raise InvalidArgumentError(
                f"{found.group(0)} in {word!r} was not expanded: nothing in braces on the line is,"
                " unless every name is defined.",
                hint="Define the variable first; for literal braces write {{ and }}.",
            )


def compose(*decorators: Any) -> Any:
    """Return one decorator for a set of arguments, in the order of help."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def _in_one_line(method: Callable[..., Any]) -> Callable[..., Any]:
    """Show what the file system refuses (a read-only project, a full disk) in one line too."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            raise KernelToolsError(
                f"%{method.__name__}: {error.strerror or type(error).__name__}{where}."
            ) from error

    return call


def magic(*arguments: Any) -> Callable[[Function], Function]:
    """Declare a method as a line magic with these arguments; a final `;` silences its value."""

    def decorate(method: Function) -> Function:
        declare = compose(output_can_be_silenced, line_magic, magic_arguments(), *arguments)
        declared: Function = declare(_in_one_line(method))
        declared.__doc__ = help_page(declared.parser)  # type: ignore[attr-defined]
        return declared

    return decorate


def cell_magic(*arguments: Any) -> Callable[[Function], Function]:
    """Declare a method `(line, cell)` as a cell magic with these arguments."""

    def decorate(method: Function) -> Function:
        declare = compose(ipython_cell_magic, magic_arguments(), *arguments)
        declared: Function = declare(_in_one_line(method))
        declared.__doc__ = help_page(declared.parser, cell=True)  # type: ignore[attr-defined]
        return declared

    return decorate


def positive_number(text: str) -> float:
    """Parse a number above 0 (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def count(text: str) -> int:
    """Parse a whole number from 1 (an argparse type)."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def count_from_zero(text: str) -> int:
    """Parse a whole number from 0 (an argparse type)."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def processes(text: str) -> str:
    """Check a number of ranks or `auto` (an argparse type)."""
    if text != "auto":
        count(text)
    return text


on_argument = argument("--on", metavar="NAME", help="which connection (default: the last one made)")

run_argument = argument(
    "run",
    nargs="?",
    metavar="RUN",
    help="run id, or a part that fits one run (default: the last run)",
)

sync_arguments = compose(
    argument(
        "--sync-path",
        action="append",
        default=[],
        metavar="PATH",
        help="a further file or folder of the project that travels (repeatable)",
    ),
    argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="what stays here although its folder travels (repeatable)",
    ),
    argument("--allow-large", action="store_true", help="let more than 16 MB of code travel"),
)

overrides_argument = argument(
    "--set",
    action="append",
    default=[],
    dest="overrides",
    metavar="SECTION.KEY=VALUE",
    help="override one value of the configuration (repeatable)",
)

# For whatever is launched; the detector's own commands take overrides besides.
program_arguments = compose(
    argument_group("Where it runs and on what"),
    argument(
        "--nproc-per-node",
        type=processes,
        default="auto",
        metavar="N|auto",
        help="ranks; auto is one a visible card, one on CPU (default: auto)",
    ),
    argument(
        "--device",
        default="auto",
        metavar="auto|cpu|cuda|0,2",
        help="what to train on; a list sets CUDA_VISIBLE_DEVICES (default: auto)",
    ),
    argument(
        "--dataset",
        action="append",
        default=[],
        metavar="REF",
        help="a staged data set; the first becomes data.root (repeatable)",
    ),
    argument_group("What comes back"),
    argument(
        "--artifact",
        action="append",
        default=[],
        metavar="GLOB",
        help="further files to bring back, relative to the work folder (repeatable)",
    ),
    argument(
        "--artifact-dir",
        default="artifacts/remote",
        metavar="DIR",
        help="where fetched files go (default: artifacts/remote)",
    ),
    argument(
        "--push",
        action="store_true",
        default=None,
        help="send weights, figures and log to the store at milestones and at the end (the default"
        " where a store is configured, or data comes from one)",
    ),
    argument(
        "--no-push",
        action="store_false",
        dest="push",
        help="send nothing to the store; what is not fetched goes with the machine",
    ),
    argument(
        "--push-epochs",
        type=count,
        default=1,
        metavar="N",
        help="a milestone every so many epochs, besides every best (default: 1)",
    ),
    argument(
        "--push-minutes",
        type=positive_number,
        default=10.0,
        metavar="M",
        help="a milestone every so many minutes (default: 10)",
    ),
    argument(
        "--push-to",
        metavar="hf://ORG/REPO",
        help="put the weights into this model repository of the hub, private where it is made: every"
        " half hour (or --push-minutes, where longer) and at the end from a remote that has"
        " huggingface_hub and HF_TOKEN, else with the next %%remote_fetch",
    ),
    argument_group("What travels"),
    sync_arguments,
    argument_group("Limits"),
    argument(
        "--timeout", type=positive_number, metavar="SECONDS", help="end the run after so long"
    ),
    argument(
        "--max-hours", type=positive_number, metavar="H", help="end the run after so many hours"
    ),
    argument(
        "--stall-minutes",
        type=positive_number,
        default=30.0,
        metavar="M",
        help="fail a run that shows no sign of progress for so long (default: 30)",
    ),
    argument(
        "--max-restarts",
        type=count_from_zero,
        default=0,
        metavar="N",
        help="start a trainer that crashed again, so often, from its last checkpoint (default: 0)",
    ),
    argument_group("How it is launched"),
    argument("--name", metavar="NAME", help="the run's name (default: from what is launched)"),
    argument("--wait", action="store_true", default=None, help="block until the run has ended"),
    argument(
        "--no-wait",
        action="store_false",
        dest="wait",
        help="return at once (the default where a person looks on; batch notebooks wait)",
    ),
    argument("--dry-run", action="store_true", help="check everything and show what would travel"),
    on_argument,
)

launch_arguments = compose(overrides_argument, program_arguments)


def launch_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords that every launching function of the session takes, from `program_arguments`."""
    return {
        "nproc_per_node": args.nproc_per_node,
        "device": args.device,
        "datasets": args.dataset,
        "artifacts": args.artifact,
        "artifact_dir": args.artifact_dir,
        "sync_paths": args.sync_path,
        "exclude": args.exclude,
        "allow_large": args.allow_large,
        "timeout": args.timeout,
        "max_hours": args.max_hours,
        "stall_minutes": args.stall_minutes,
        "max_restarts": args.max_restarts,
        "push": args.push,
        "push_epochs": args.push_epochs,
        "push_minutes": args.push_minutes,
        "push_to": args.push_to,
        "name": args.name,
        "dry_run": args.dry_run,
        "on": args.on,
    }
