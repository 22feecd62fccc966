"""Tab completion of the magics: options and values, from the parsers themselves.

It never opens a connection: values come from the project's files and from the session as it is.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

# `%magic ...` at the start of a line, or behind `name =`; or `%%magic ...`.
_LINE: Final = re.compile(r"^\s*(?:[\w.,\s]+=\s*)?%{1,2}(\w+)\s(.*)$", re.DOTALL)


# Names of variables that may hold a token or a password; their values are never looked at.
_CREDENTIAL: Final = re.compile(r"TOKEN|PASSWORD|SECRET|KEY", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that may stand there.

    Attributes:
        text: what is typed in.
        kind: what a front end writes beside it: a magic's part, or a key's type and default.
    """

    text: str
    kind: str = "magic"


def candidates(parser: argparse.ArgumentParser, text: str) -> list[Candidate]:
    """Return what may stand at the end of `text`, the line behind the magic's name."""
    words = text.split()
    token = "" if not text or text[-1].isspace() else words.pop()
    actions: dict[str, argparse.Action] = parser._option_string_actions  # noqa: SLF001 - the only list
    previous = actions.get(words[-1]) if words else None
    if previous is not None and previous.nargs != 0:
        return _starting(_values(previous, token), token)
    if token.startswith("-"):
        option, sign, value = token.partition("=")
        if sign and option in actions:
            inside = _starting(_values(actions[option], value), value)
            return [Candidate(f"{option}={one.text}", one.kind) for one in inside]
        names = sorted(name for name in actions if name.startswith("--"))
        return _starting([Candidate(name, _argument(actions[name])) for name in names], token)
    positional = _next_positional(parser, words)
    return [] if positional is None else _starting(_values(positional, token), token)


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
            SimpleCompletion(one.text[inside:], type=one.kind)
            for one in candidates(function.parser, text)
        ]
        return {"completions": offered, "suppress": bool(offered)}

    matcher: Callable[[Any], Any] = context_matcher(identifier="kernel_tools.magics")(
        kernel_tools_matcher
    )
    return matcher


def _starting(values: Iterable[Candidate], token: str) -> list[Candidate]:
    return [value for value in values if value.text.startswith(token)]


def _argument(action: argparse.Action) -> str:
    """What an option takes, for the front end to write beside it."""
    return str(action.metavar) if action.nargs != 0 and action.metavar else "option"


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


def _values(action: argparse.Action, token: str) -> list[Candidate]:
    if action.choices:
        return [Candidate(str(choice), "choice") for choice in action.choices]
    try:
        if action.dest == "overrides":
            return _overrides(token)
        source, kind = _SOURCES[action.dest]
        return [Candidate(value, kind) for value in source()]
    except Exception:  # noqa: BLE001 - Tab offers nothing rather than raise
        return []


def _overrides(token: str) -> list[Candidate]:
    """Keys with their type and default; behind `key=` what it may be."""
    from detector.options import list_options

    options = list_options()
    key, sign, _ = token.partition("=")
    if not sign:
        return [Candidate(f"{one.key}=", f"{one.type} = {one.default}") for one in options]
    found = [one for one in options if one.key == key]
    values = [v for one in found for v in dict.fromkeys((one.default, *one.choices))]
    defaults = {one.default for one in found}
    return [
        Candidate(f"{key}={value}", "default" if value in defaults else "choice")
        for value in values
    ]


def _configs() -> Iterable[str]:
    from detector.config import list_configs
    from kernel_tools.session import default_session

    return list_configs(default_session().project_dir)


def _runs() -> Iterable[str]:
    """The newest first: the one that is meant is mostly one of these."""
    from kernel_tools.session import default_session

    return sorted(default_session().registry.run_ids(), reverse=True)


def _datasets() -> Iterable[str]:
    from kernel_tools.datasets.reference import DatasetRegistry
    from kernel_tools.session import default_session

    return DatasetRegistry(default_session().project_dir).names()


def _stored() -> Iterable[str]:
    """What the store may hold of this project, without asking it."""
    return [*_datasets(), *_runs()]


def _connections() -> Iterable[str]:
    from kernel_tools.session import default_session

    return [connection.name for connection in default_session().connections]


def _credential_names() -> Iterable[str]:
    from kernel_tools.session import default_session

    names = {*os.environ, *default_session().settings().dotenv}
    return sorted(name for name in names if _CREDENTIAL.search(name))


def _variables() -> Iterable[str]:
    """The notebook's own variables, as far as a person made them."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    known = {} if shell is None else shell.user_ns
    hidden = {"In", "Out", "exit", "quit", "get_ipython", "open"}
    return sorted(name for name in known if not name.startswith("_") and name not in hidden)


# What an argument's values come from, by its name in the parser, and what kind of thing they are.
_SOURCES: Final[dict[str, tuple[Callable[[], Iterable[str]], str]]] = {
    "config": (_configs, "configuration"),
    "run": (_runs, "run"),
    "runs": (_runs, "run"),
    "words": (_runs, "run"),
    "resume": (_runs, "run"),
    "from_receipt": (_runs, "run"),
    "calibration": (_runs, "run"),
    "dataset": (_datasets, "data set"),
    "prefix": (_stored, "in the store"),
    "names": (_stored, "in the store"),
    "on": (_connections, "connection"),
    "push": (_variables, "variable"),
    "checkpoint": (lambda: ("best", "last"), "weights"),
    "target": (lambda: ("local",), "server"),
    "device": (lambda: ("auto", "cpu", "cuda"), "device"),
    "nproc_per_node": (lambda: ("auto", "1", "2"), "ranks"),
    "token_env": (_credential_names, "variable"),
    "password_env": (_credential_names, "variable"),
}
