"""What must not travel with a data set: credentials, notebooks with outputs, names that no disk shares."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterable
from typing import Final

from kernel_tools.errors import StagingError

# Never staged unless forced: what holds credentials.
FORBIDDEN: Final = (
    ".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", ".netrc", "_netrc", ".pypirc", ".npmrc", "kaggle.json", "credentials", "credentials.json",
)  # fmt: skip
_FORBIDDEN: Final = re.compile("|".join(fnmatch.translate(pattern) for pattern in FORBIDDEN))
# A notebook above this size is not read; that large, it has outputs.
NOTEBOOK_BYTES: Final = 64 << 20

Read = Callable[[], bytes]


def check_member_name(name: str, *, where: str) -> None:
    """Refuse a file name that cannot be written the same way on every machine.

    Raises:
        StagingError: it is no UTF-8, or holds a backslash or a control character.
    """
    if name.isascii() and name.isprintable() and "\\" not in name:
        return
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StagingError(
            f"A file name in {where} is not UTF-8: {name!r}.", hint="Rename it."
        ) from None
    if "\\" in name or any(ord(character) < 32 for character in name):
        raise StagingError(
            f"The file name {name!r} in {where} holds a backslash or a control character.",
            hint="Rename it.",
        )


def refuse_credentials(names: Iterable[str]) -> None:
    """Refuse names that look like credentials.

    Raises:
        StagingError: names the first of them and says how many there are.
    """
    bad = [name for name in names if _FORBIDDEN.match(name.rpartition("/")[2].lower())]
    if bad:
        raise StagingError(
            f"{_first(bad)} would travel with the data set and may hold credentials.",
            hint="Move it out of the folder, or give --force if it is harmless.",
        )


def refuse_notebooks(notebooks: Iterable[tuple[str, int, Read]]) -> None:
    """Refuse notebooks that still hold outputs: whatever a cell ever printed would travel too.

    Args:
        notebooks: name, size in bytes, and how to read it.

    Raises:
        StagingError: names the first of them and says how many there are.
    """
    bad = [name for name, size, read in notebooks if size > NOTEBOOK_BYTES or _has_outputs(read())]
    if bad:
        raise StagingError(
            f"{_first(bad)} would travel with the data set, with the outputs of its cells.",
            hint="Clear its outputs, move it out of the folder, or give --force if it is harmless.",
        )


def is_notebook(name: str) -> bool:
    """True for a name that a notebook has."""
    return name.lower().endswith(".ipynb")


def _has_outputs(text: bytes) -> bool:
    try:
        cells = json.loads(text)["cells"]
        return any(cell.get("outputs") for cell in cells)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # no notebook, whatever it is called


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
