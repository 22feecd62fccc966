"""The local copy of what a run writes: its log and its rows, always a gapless prefix of the remote.

Bytes are written at the offset they have on the remote, so that two notebooks that watch one run into
one folder write the same bytes to the same place.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LOG, METRICS, STEPS = "train.log", "metrics.jsonl", "steps.jsonl"
TAIL_BYTES: Final = 64 * 1024
BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Offsets:
    """How much of each file is here, in bytes."""

    log: int
    metrics: int
    steps: int


class RunMirror:
    """The files under one folder; every method is idempotent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def log_path(self) -> Path:
        """The log so far."""
        return self.folder / LOG

    def offsets(self) -> Offsets:
        """Return the sizes of what is here."""
        return Offsets(*(self._size(name) for name in (LOG, METRICS, STEPS)))

    def write_log(self, part: Mapping[str, Any]) -> bytes:
        """Write a poll's `log` part and return its bytes.

        Raises:
            ValueError: the part would leave a gap.
        """
        data = unpack(part)
        self._write(LOG, int(part["offset"]), data)
        return data

    def write_piece(self, offset: int, packed: Path) -> int:
        """Write a zlib-compressed piece of the log at its offset; return its raw size in bytes.

        Raises:
            ValueError: the piece would leave a gap, or is damaged.
        """
        if offset > self._size(LOG):
            raise ValueError(f"{LOG}: {offset} is past the end here")
        unpack = zlib.decompressobj()
        self.log_path.touch()
        with packed.open("rb") as source, self.log_path.open("r+b") as file:
            file.seek(offset)
            while block := source.read(BLOCK_BYTES):
                try:
                    file.write(unpack.decompress(block))
                except zlib.error as error:
                    raise ValueError(f"a piece of the log is damaged: {error}") from error
            return file.tell() - offset

    def write_rows(
        self, name: str, part: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...] | None:
        """Write a poll's `metrics` or `steps` part (whole rows) and return them parsed.

        Returns None where the remote file has become shorter than the part's offset or than what is
        here, because a resume cut the rows past its checkpoint: what is here is dropped, and the next
        poll reads from the start.
        """
        size = int(part["size"])
        if size < self._size(name):
            (self.folder / name).unlink(missing_ok=True)
            return None
        if size < int(part["offset"]):
            return None  # another notebook that watches it has dropped it already
        text = str(part["data"])
        self._write(name, int(part["offset"]), text.encode("utf-8"))
        return parse_rows(text)

    def rows(self, name: str, end: int | None = None) -> tuple[Mapping[str, Any], ...]:
        """Return the rows that are here, of the first `end` bytes."""
        path = self.folder / name
        if not path.is_file():
            return ()
        with path.open("rb") as file:
            return parse_rows(file.read(-1 if end is None else end).decode("utf-8"))

    def log_tail(self, end: int | None = None) -> str:
        """Return the end of the log here, or of its first `end` bytes: whole lines, at most 64 KiB."""
        if not self.log_path.is_file():
            return ""
        with self.log_path.open("rb") as file:
            size = file.seek(0, 2) if end is None else end
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(min(size, TAIL_BYTES))
        if size > TAIL_BYTES:
            data = data.partition(b"\n")[2]
        return data.decode("utf-8", "replace")

    def _size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.is_file() else 0

    def _write(self, name: str, offset: int, data: bytes) -> None:
        if not data:
            return
        if offset > self._size(name):
            raise ValueError(f"{name}: {offset} is past the end here")
        path = self.folder / name
        path.touch()
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)


def unpack(part: Mapping[str, Any]) -> bytes:
    """Return the bytes of a poll's `log` part."""
    packed = base64.b64decode(part["data"])
    return zlib.decompress(packed) if packed else b""


def parse_rows(text: str) -> tuple[Mapping[str, Any], ...]:
    """Return the JSON objects of `text`, one a line; what is no object is passed over."""
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return tuple(rows)
