"""`python kernel_tools_agent supervise RUN_DIR`, or `-m`: the processes that own a run.

As a folder given to the interpreter it has no package, so it makes one of itself first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any, List

_NAME = "kernel_tools_agent"


def _module(name: str) -> Any:
    if __package__:
        return importlib.import_module("." + name, __package__)
    folder = os.path.dirname(os.path.abspath(__file__))
    # The folder itself must not shadow the standard library.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != folder]
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _NAME, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        if spec is None or spec.loader is None:
            raise ImportError(folder)
        package = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = package
        spec.loader.exec_module(package)
    return importlib.import_module(_NAME + "." + name)


def main(arguments: List[str]) -> int:
    """Run one of the long-lived processes of a run."""
    if len(arguments) >= 2 and arguments[0] == "supervise":
        token = arguments[3] if arguments[2:3] == ["--token"] and len(arguments) > 3 else ""
        if not _module("launch").detach():
            os._exit(0)
        return int(_module("supervise").supervise(arguments[1], token))
    if len(arguments) == 4 and arguments[0] == "watch":
        return int(_module("watchdog").watch(arguments[1], int(arguments[2]), arguments[3]))
    if len(arguments) == 2 and arguments[0] == "bury":
        if not _module("launch").detach():
            os._exit(0)
        return int(_module("watchdog").bury(arguments[1]))
    sys.stderr.write("usage: python kernel_tools_agent supervise RUN_DIR\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
