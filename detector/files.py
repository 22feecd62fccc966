"""Files that appear whole or not at all, and JSON rows that a reader may follow while they grow."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from detector.console import say


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file beside `path`; on success it is synced to disk and takes its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def keep_going(what: str) -> Iterator[None]:
    """Say that `what` could not be written, and go on: a figure less is no reason to end a run."""
    try:
        yield
    except OSError as error:
        say(f"not_written={what}: {error.strerror or error}")


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Write JSON, whole or not at all. What is not finite becomes null: JSON has no NaN."""
    write_text(path, json.dumps(finite(value), indent=indent, ensure_ascii=False) + "\n")


def finite(value: Any) -> Any:
    """Return `value` with every float that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last through a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class RowLog:
    """A `.jsonl` file: one whole row a write, so that a reader at any moment sees whole rows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row, or none where the disk is full.

        Raises:
            OSError: nothing was added.
        """
        line = (json.dumps(finite(row), ensure_ascii=False) + "\n").encode("utf-8")
        with open(self.path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            except OSError:
                file.truncate(before)  # the next row would be glued to a torn one
                raise

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows; a torn last line is left out."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drop the rows that are not wanted (after a resume they are computed again)."""
        rows = [row for row in self.rows() if wanted(row)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(self.path, text)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
