"""Write the pages that follow from the code: `configuration.md` and `magics.md`.

    python docs/generate.py            # after a change of detector/schema.py or of a magic's options
    python docs/generate.py --check    # exit 1 if a page is not what it would be

A key's meaning is its comment in `detector/schema.py`; a magic's page is what `%magic?` shows.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from detector import schema
from detector.options import Option, list_options
from kernel_tools.magics import families

HERE: Final = Path(__file__).resolve().parent
ABOVE: Final = """\
# Configuration

<!-- Written by docs/generate.py; change detector/schema.py instead. -->

A run is one YAML file; what it leaves out has the default below. `configs/<data>/<model>.yaml` are examples, and
`python -m detector train --config coins/hgnetv2_n` or `%remote_train coins/hgnetv2_n` takes a name from there, or a path.
`--set section.key=value` overrides one value. `${NAME}` in a value is an environment variable.

    model:
      backbone_name: hgnetv2_s
    data:
      root: data/coins
    solver:
      epochs: 20

An unknown key, a wrong type or a value out of its limits is refused before anything starts, with the nearest key or an
example."""
MAGICS: Final = """\
# Magics

<!-- Written by docs/generate.py; change the magics instead. -->

What `%magic?` shows in a notebook, for reading. Options complete with Tab, and so do their values.
"""


def configuration() -> str:
    """Return the page of all keys, a table a section."""
    meanings = dict(_meanings())
    parts = [ABOVE]
    for section, kind in schema.SECTIONS.items():
        options = [one for one in list_options() if one.key.startswith(f"{section}.")]
        parts.append(f"\n## {section}\n\n{inspect.getdoc(kind)}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts += [_row(one, meanings.get(one.key, "")) for one in options]
    return "\n".join(parts) + "\n"


def magics() -> str:
    """Return the page of all magics."""
    parts = [MAGICS]
    for family in families():
        for name, function in vars(family).items():
            if hasattr(function, "parser"):
                sigil = "%%" if name in family.magics["cell"] else "%"
                parts.append(f"## {sigil}{name}\n\n```text\n{function.__doc__.rstrip()}\n```\n")
    return "\n".join(parts)


PAGES: Final = {"configuration.md": configuration, "magics.md": magics}


def main() -> int:
    """Write the pages, or check them."""
    stale = []
    for name, page in PAGES.items():
        path, text = HERE / name, page()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}; type: python docs/generate.py", file=sys.stderr)
        return 1
    return 0


def _row(option: Option, meaning: str) -> str:
    kind = option.type
    if option.choices and option.type != "bool":
        kind = f"{kind}: {', '.join(f'`{choice}`' for choice in option.choices)}"
    limits = _limits(option)
    said = f"{meaning} ({limits})".strip() if limits else meaning
    name = option.key.partition(".")[2]
    return f"| `{name}` | {_cell(kind)} | `{option.default}` | {_cell(said)} |"


def _limits(option: Option) -> str:
    if option.greatest is not None and option.greatest < 10**9:
        return f"{option.least:g} to {option.greatest:g}"
    return "" if option.least is None else f"at least {option.least:g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _meanings() -> Iterator[tuple[str, str]]:
    """Yield `section.key` and its comment: behind the key, or in the lines above it."""
    source = inspect.getsource(schema)
    lines = source.splitlines()
    sections = {kind.__name__: section for section, kind in schema.SECTIONS.items()}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name not in sections:
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                first, last = field.lineno - 1, (field.end_lineno or field.lineno) - 1
                behind = lines[last][field.end_col_offset :].strip().removeprefix("#").strip()
                above = []
                while lines[first - 1].lstrip().startswith("#"):
                    first -= 1
                    above.insert(0, lines[first].strip().removeprefix("#").strip())
                yield f"{sections[node.name]}.{field.target.id}", behind or " ".join(above)


if __name__ == "__main__":
    sys.exit(main())
