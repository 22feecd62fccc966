"""An object on its way to disk: its bytes in one sparse file, and beside it how much of each part is there.

Several threads write, each a part of its own; others read from the start as far as there is no gap. What
a killed process left is gone on from to the byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from typing import Dict, List, Optional, Tuple

_HEADER_BYTES = 512
_COUNT = struct.Struct("<Q")
_WAIT_SECONDS = 0.2
_TELL_BYTES = 1 << 20
# A thread asks for one part at a time: small enough to read along, large enough for a connection.
PART_BYTES = 8 << 20
_MOST_PARTS = 1 << 16


class PartFile:
    """`path` and `path.map`; made anew where what is there is not of the same object.

    Args:
        path: of the bytes.
        size: of the object; None where it is told by its end, then there is one part.
        tag: what names the content: its SHA-256, or the store's tag.
        whole: one part only, for a store that knows no ranges.
    """

    def __init__(self, path: str, *, size: Optional[int], tag: str, whole: bool = False) -> None:
        self.path = path
        self.size = size
        self.have = 0  # bytes, gaps left out
        self.resumed = 0  # those of an earlier call
        self._tag = tag
        self._part = PART_BYTES
        while size is not None and size > self._part * _MOST_PARTS:
            self._part *= 2
        if whole or size is None:
            self._part = max(1, size or 1 << 62)
        parts = 1 if size is None else -(-size // self._part)
        self._counts = [0] * parts
        self._free: List[int] = []
        self._front = 0
        self._told: Dict[int, int] = {}
        self._changed = threading.Condition()
        self._descriptor, self._map = self._open()
        self._free = [n for n in range(parts) if self._counts[n] < self._length(n)]
        self.resumed = self.have = sum(self._counts)
        self._advance()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        with self._changed:
            return self.size is not None and self._front == len(self._counts)

    def claim(self) -> Optional[int]:
        """Return a part that nobody else brings, the first one first; None where none is left."""
        with self._changed:
            return self._free.pop(0) if self._free else None

    def missing(self, part: int) -> Tuple[int, Optional[int]]:
        """Return the offsets (from, to) of what lacks in a part; the end is None where it is unknown."""
        start = part * self._part + self._counts[part]
        return start, None if self.size is None else part * self._part + self._length(part)

    def write(self, part: int, data: bytes) -> None:
        """Append to a part. Raises OSError."""
        offset = part * self._part + self._counts[part]
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written
        count = self._counts[part] + len(data)
        os.pwrite(self._map, _COUNT.pack(count), _HEADER_BYTES + part * _COUNT.size)
        with self._changed:
            self._counts[part] = count
            self.have += len(data)
            # Readers are woken for what is worth a switch between threads, and for a part's end.
            if self._advance() or (
                part == self._front and count - self._told.get(part, 0) >= _TELL_BYTES
            ):
                self._told[part] = count
                self._changed.notify_all()

    def end(self) -> None:
        """The only part has its end here."""
        with self._changed:
            self.size = self._counts[0]
            self._advance()
            self._changed.notify_all()

    def restart(self, part: int) -> None:
        """Forget what is there of a part; a store without ranges begins at its start."""
        with self._changed:
            self.have -= self._counts[part]
            self._counts[part] = 0
            self._front = min(self._front, part)

    def wait_past(self, offset: int) -> int:
        """Wait a little until more than `offset` bytes stand from the start on; return how many do."""
        with self._changed:
            if self._reach() <= offset:
                self._changed.wait(_WAIT_SECONDS)
            return self._reach()

    def close(self) -> None:
        """Close the files; they stay."""
        for descriptor in (self._descriptor, self._map):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _reach(self) -> int:
        if self._front == len(self._counts):
            return self.size or 0
        return self._front * self._part + self._counts[self._front]

    def _advance(self) -> bool:
        before = self._front
        while (
            self.size is not None
            and self._front < len(self._counts)
            and self._counts[self._front] >= self._length(self._front)
        ):
            self._front += 1
        return self._front > before

    def _length(self, part: int) -> int:
        size = self.size or 0
        return min(self._part, size - part * self._part)

    def _open(self) -> Tuple[int, int]:
        header = json.dumps({"size": self.size, "tag": self._tag, "part": self._part}).encode()
        header = header.ljust(_HEADER_BYTES, b" ")
        flags = os.O_RDWR | os.O_CREAT
        data = os.open(self.path, flags, 0o644)
        counts = os.open(self.path + ".map", flags, 0o644)
        told = os.pread(counts, _HEADER_BYTES + len(self._counts) * _COUNT.size, 0)
        if told[:_HEADER_BYTES] == header and self.size is not None:
            self._take_up(told[_HEADER_BYTES:], os.fstat(data).st_size)
        else:
            os.ftruncate(data, 0)
            os.ftruncate(counts, 0)
            os.pwrite(counts, header, 0)
        return data, counts

    def _take_up(self, told: bytes, there: int) -> None:
        for part in range(len(self._counts)):
            field = told[part * _COUNT.size : (part + 1) * _COUNT.size]
            count = _COUNT.unpack(field)[0] if len(field) == _COUNT.size else 0
            if count <= self._length(part) and part * self._part + count <= there:
                self._counts[part] = count


def discard(path: str) -> None:
    """Remove a part file and its map."""
    for name in (path, path + ".map"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
