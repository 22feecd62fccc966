"""The same API for shells: `python -m kernel_tools quickstart`.

Each subcommand calls what a magic calls; there is no logic here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kernel_tools.errors import KernelToolsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit status (2 for a wrong call, 1 for a failure)."""
    parser = argparse.ArgumentParser(prog="python -m kernel_tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    quickstart = commands.add_parser(
        "quickstart",
        help="execute notebooks/quickstart.ipynb and leave it and an HTML page in a folder",
    )
    quickstart.add_argument("--to", type=Path, default=Path("out"), help="folder (default: out)")
    quickstart.add_argument(
        "--set",
        dest="parameters",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the notebook, such as seed=1 (repeatable)",
    )
    options = parser.parse_args(arguments)
    from kernel_tools.batch import run_notebook

    try:
        run_notebook("quickstart", to=options.to, parameters=options.parameters)
    except KernelToolsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
