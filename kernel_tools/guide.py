"""`kernel_tools.help()`: what there is, on one screen, from the magics themselves."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 88  # columns
COLUMN: Final = 22  # where the explanations begin
HEAD: Final = """\
Train an object detector on a remote GPU from this notebook. The shortest way:
    %load_ext kernel_tools
    %remote_connect local          # or a URL; nothing: KAGGLE_PROXY_URL from .env
    run = %remote_train synthetic/hgnetv2_s --nproc-per-node 2
"""
FOOT: Final = """\
%remote_train? shows a magic's options; Tab completes them, and values too.
Without magics: kernel_tools.default_session().train(...). Pages: docs/README.md"""


@dataclass(frozen=True, slots=True)
class MagicLine:
    """A magic and what it does.

    Attributes:
        name: with its `%`, or `%%`.
        does: the first sentence of its help.
    """

    name: str
    does: str


def magic_lines() -> Iterator[MagicLine]:
    """Return every magic in the order in which a person meets them."""
    from kernel_tools.magics import families

    for family in families():
        for name, function in vars(family).items():
            if hasattr(function, "parser"):
                sigil = "%%" if name in family.magics["cell"] else "%"
                yield MagicLine(f"{sigil}{name}", _first_sentence(function))


def page() -> str:
    """Return the page: at most 30 lines of at most 88 columns."""
    lines = [f"  {one.name:{COLUMN - 2}}{_fitting(one.does)}" for one in magic_lines()]
    return "\n".join([HEAD, *lines, "", FOOT])


def show() -> None:
    """Print what there is, on one screen."""
    print(page())


def _fitting(sentence: str) -> str:
    """Leave clauses at the end out until it fits, then words."""
    while len(sentence) > WIDTH - COLUMN and ", " in sentence:
        sentence = sentence.rpartition(", ")[0]
    return textwrap.shorten(sentence, WIDTH - COLUMN, placeholder=" ...")


def _first_sentence(function: Any) -> str:
    text = inspect.cleandoc(function.parser.description or "").partition("\n\n")[0]
    sentence = " ".join(text.split()).split(". ")[0]
    return sentence.split("; ")[0].split(": ")[0].removesuffix(".")
