"""The keys of a configuration as a table: type, default, limits and choices, read from `schema`.

For completion and for the reference in the documentation; imports no torch.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import yaml

from detector.models.specs import ALIASES, SPECS
from detector.schema import LIMITS, SECTIONS

_NAMES: Final[dict[Any, str]] = {int: "int", float: "float", bool: "bool", str: "text"}


@dataclass(frozen=True, slots=True)
class Option:
    """One key.

    Attributes:
        key: `section.key`.
        type: `int`, `float`, `bool`, `text`, `choice`, or `list of` one of them; `or null` behind it
            where no value may be given.
        default: as it would stand in YAML.
        choices: what it may be, where that is a short list.
        least: least allowed number, None for no bound.
        greatest: greatest allowed number, None for no bound.
    """

    key: str
    type: str
    default: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    greatest: float | None = None


def list_options() -> tuple[Option, ...]:
    """Return every key in declaration order."""
    return tuple(_options())


def _options() -> Iterator[Option]:
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            key = f"{section}.{item.name}"
            name, choices = _described(hints[item.name])
            if key == "model.backbone_name":
                choices = (*ALIASES, *SPECS)
            least, greatest = LIMITS.get(key, (None, None))
            yield Option(key, name, _as_yaml(item.default), choices, least, greatest)


def _described(hint: Any) -> tuple[str, tuple[str, ...]]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (kind for kind in arguments if kind is not types.NoneType)
        name, choices = _described(inner)
        return f"{name} or null", choices
    if origin is tuple:
        name, choices = _described(arguments[0])
        return f"list of {name}", choices
    if origin is Literal:
        return "choice", tuple(map(str, arguments))
    return _NAMES[hint], ("true", "false") if hint is bool else ()


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, float):
        return f"{value:g}"
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
