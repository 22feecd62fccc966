"""Tab completion of the magics: options and values, from the parsers themselves.

It never opens a connection: values come from the project's files and from the session as it is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

# `%magic ...` at the start of a line, or behind `name =`; or `%%magic ...`.
_LINE: Final = re.compile(r"^\s*(?:[\w.,\s]+=\s*)?%{1,2}(\w+)\s(.*)$", re.DOTALL)


def candidates(parser: argparse.ArgumentParser, text: str) -> list[str]:
    """Return what may stand at the end of `text`, the line behind the magic's name."""
    words = text.split()
    token = "" if not text or text[-1].isspace() else words.pop()
    actions: dict[str, argparse.Action] = parser._option_string_actions  # noqa: SLF001 - the only list
    previous = actions.get(words[-1]) if words else None
    if previous is not None and previous.nargs != 0:
        return _starting(_values(previous), token)
    if token.startswith("-"):
        option, sign, value = token.partition("=")
        if sign and option in actions:
            return [f"{option}={v}" for v in _starting(_values(actions[option]), value)]
        return _starting(sorted(name for name in actions if name.startswith("--")), token)
    positional = _next_positional(parser, words)
    return [] if positional is None else _starting(_values(positional), token)


def matcher_for(magics: Callable[[], dict[str, Any]]) -> Callable[[Any], Any]:
    """Return a completer matcher for the line magics in `magics()` (name -> function)."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    def kernel_tools_matcher(context: Any) -> Any:
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        found = _LINE.match(line)
        function = magics().get(found.group(1)) if found else None
        if found is None or function is None:
            return {"completions": [], "suppress": False}
        # IPython replaces its own token, which may begin inside of ours (behind `=` or `-`).
        text = found.group(2)
        start = len(text) - len(text.split()[-1]) if text and not text[-1].isspace() else len(text)
        inside = len(text) - start - len(context.token)
        offered = [
            SimpleCompletion(c[inside:], type="magic") for c in candidates(function.parser, text)
        ]
        return {"completions": offered, "suppress": bool(offered)}

    matcher: Callable[[Any], Any] = context_matcher(identifier="kernel_tools.magics")(
        kernel_tools_matcher
    )
    return matcher


def _starting(values: Iterable[str], token: str) -> list[str]:
    return [value for value in values if value.startswith(token)]


def _next_positional(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Action | None:
    """The positional that the next word fills; options and their values are passed over."""
    actions = parser._option_string_actions  # noqa: SLF001
    filled, takes_value = 0, False
    for word in words:
        if takes_value:
            takes_value = False
        elif word.startswith("-"):
            action = actions.get(word)
            takes_value = action is not None and action.nargs != 0
        else:
            filled += 1
    positionals = parser._get_positional_actions()  # noqa: SLF001
    if filled < len(positionals):
        return positionals[filled]
    return positionals[-1] if positionals and positionals[-1].nargs == "*" else None


def _values(action: argparse.Action) -> list[str]:
    if action.choices:
        return [str(choice) for choice in action.choices]
    source = _SOURCES.get(action.dest)
    try:
        return [] if source is None else source()
    except Exception:  # noqa: BLE001 - Tab offers nothing rather than raise
        return []


def _configs() -> list[str]:
    from detector.config import list_configs
    from kernel_tools.session import default_session

    return list(list_configs(default_session().project_dir))


def _overrides() -> list[str]:
    from detector.config import option_names

    return [f"{name}=" for name in option_names()]


def _runs() -> list[str]:
    from kernel_tools.session import default_session

    return list(default_session().registry.run_ids())


def _datasets() -> list[str]:
    from kernel_tools.datasets.reference import DatasetRegistry
    from kernel_tools.session import default_session

    return list(DatasetRegistry(default_session().project_dir).names())


def _connections() -> list[str]:
    from kernel_tools.session import default_session

    return [connection.name for connection in default_session().connections]


_SOURCES: Final[dict[str, Callable[[], list[str]]]] = {
    "config": _configs,
    "overrides": _overrides,
    "run": _runs,
    "words": _runs,
    "dataset": _datasets,
    "on": _connections,
    "checkpoint": lambda: ["best", "last"],
    "calibration": _runs,
    "target": lambda: ["local"],
    "device": lambda: ["auto", "cpu", "cuda"],
    "nproc_per_node": lambda: ["auto", "1", "2"],
    "token_env": lambda: ["JUPYTER_TOKEN"],
}
