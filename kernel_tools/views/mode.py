"""How to show things here: one function decides, everybody else asks it."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any, Final

from kernel_tools.errors import ConfigurationError

MODE_VARIABLE: Final = "KERNEL_TOOLS_MODE"


class Mode(str, enum.Enum):
    """Who looks on.

    INTERACTIVE: a person in a notebook. Live panels; launching returns at once.
    BATCH: nbconvert, papermill, nbclient. No widgets; launching blocks and raises on failure.
    PLAIN: a terminal or a script. Lines of text.
    """

    INTERACTIVE = "interactive"
    BATCH = "batch"
    PLAIN = "plain"


def current_mode(
    explicit: str | None = None,
    *,
    shell: Any = None,
    environ: Mapping[str, str] | None = None,
) -> Mode:
    """Return the mode: `explicit`, then `KERNEL_TOOLS_MODE`, then what the shell tells.

    Without IPython or in a terminal it is plain. A kernel whose client takes no input (`allow_stdin`
    False in the request, as nbclient sends it) is executed by a program: batch.

    Args:
        explicit: a mode by name, None to find out.
        shell: the IPython shell; None asks `get_ipython()`.
        environ: None reads `os.environ`.

    Raises:
        ConfigurationError: the name is none of the three.
    """
    environ = os.environ if environ is None else environ
    named, source = (explicit, "mode") if explicit else (environ.get(MODE_VARIABLE), MODE_VARIABLE)
    if named:
        try:
            return Mode(named.strip().lower())
        except ValueError:
            known = ", ".join(mode.value for mode in Mode)
            raise ConfigurationError(f"{source}={named} is not one of {known}.") from None
    shell = _running_shell() if shell is None else shell
    if shell is None or not hasattr(shell, "kernel"):
        return Mode.PLAIN
    return Mode.INTERACTIVE if _client_takes_input(shell) else Mode.BATCH


def _running_shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _client_takes_input(shell: Any) -> bool:
    try:
        request = shell.get_parent()
    except (AttributeError, LookupError):
        return True
    content = (request or {}).get("content") or {}
    return bool(content.get("allow_stdin", True))
