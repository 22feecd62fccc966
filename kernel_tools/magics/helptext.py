"""What `%magic?` shows: what it does, examples, then its options in groups; from the parser itself.

argparse's own page begins with a usage of a dozen lines. Nothing here knows what a magic does.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Iterator
from typing import Final

WIDTH: Final = 88  # columns; Jupyter's pager and a terminal show as many unwrapped
COLUMN: Final = 28  # where the explanations begin
# argparse's own titles, and what they are called here.
TITLES: Final = {"positional arguments": "Arguments", "options": "Options", "optional arguments": "Options"}  # fmt: skip


def help_page(parser: argparse.ArgumentParser, *, cell: bool = False) -> str:
    """Return the help of a magic: call, text and examples, arguments, options group by group."""
    sigil = "%%" if cell else "%"
    positionals = [_invocation(action) for action in parser._get_positional_actions()]  # noqa: SLF001
    call = " ".join([f"{sigil}{parser.prog.lstrip('%')}", *positionals, "[OPTIONS]"])
    parts = [call, inspect.cleandoc(parser.description or "").replace("::\n", ":\n")]
    for group in parser._action_groups:  # noqa: SLF001 - argparse has no public list
        actions = [a for a in group._group_actions if a.help is not argparse.SUPPRESS]  # noqa: SLF001
        if actions:
            title = TITLES.get(group.title or "", group.title or "")
            parts.append("\n".join([f"{title}:", *_table(actions)]))
    return "\n\n".join(parts) + "\n"


def _table(actions: list[argparse.Action]) -> Iterator[str]:
    for action in actions:
        name = f"  {_invocation(action)}"
        text = (action.help or "") % {"default": action.default}
        lines = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False)
        if len(name) > COLUMN - 2:
            yield name
            name = ""
        yield f"{name:{COLUMN}}{lines[0] if lines else ''}".rstrip()
        yield from (" " * COLUMN + line for line in lines[1:])


def _invocation(action: argparse.Action) -> str:
    """`--set SECTION.KEY=VALUE`, `-n N, --lines N`, `[CONFIG]`, `[GLOB ...]`."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        optional = {"?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
        return optional.get(str(action.nargs), "{}").format(value)
    names = sorted(action.option_strings, key=len)
    return ", ".join(names) + (f" {value}" if action.nargs != 0 else "")
