"""Train an object detector on a remote GPU without leaving the notebook.

In a notebook: `%load_ext kernel_tools`, then `%remote_connect`, `%stage_dataset`, `%remote_train`.
`kernel_tools.help()` shows what there is. In a script: `kernel_tools.default_session()` has the same
as methods. Importing this imports neither torch nor minio nor matplotlib, opens no connection and
prints nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_tools._version import __version__

if TYPE_CHECKING:
    from kernel_tools.errors import KernelToolsError, RunFailed
    from kernel_tools.guide import show as help  # noqa: A004 - it is `kernel_tools.help`
    from kernel_tools.run import Run
    from kernel_tools.session import Session, default_session
    from kernel_tools.state import RunSnapshot, RunState

__all__ = [
    "KernelToolsError",
    "Run",
    "RunFailed",
    "RunSnapshot",
    "RunState",
    "Session",
    "__version__",
    "default_session",
    "help",
    "load_ipython_extension",
    "unload_ipython_extension",
]

_HOMES = {
    "KernelToolsError": "errors:KernelToolsError",
    "Run": "run:Run",
    "RunFailed": "errors:RunFailed",
    "RunSnapshot": "state:RunSnapshot",
    "RunState": "state:RunState",
    "Session": "session:Session",
    "default_session": "session:default_session",
    "help": "guide:show",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name in _HOMES:
        module, _, item = _HOMES[name].partition(":")
        return getattr(importlib.import_module(f"kernel_tools.{module}"), item)
    raise AttributeError(f"module 'kernel_tools' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics: `%load_ext kernel_tools`."""
    from kernel_tools.magics import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove what loading added; runs and connections stay: `%unload_ext kernel_tools`."""
    from kernel_tools.magics import unload

    unload(ipython)
