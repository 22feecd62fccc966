"""The console log: whole lines, at once. The log may lie on the disk that is full, so it never raises."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


def say(line: str, *, to: TextIO | None = None) -> None:
    """Print a line; lost where it cannot be written."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed
        print(line, file=to or sys.stdout, flush=True)
