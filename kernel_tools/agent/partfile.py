"""An object on its way to disk: the parts of it that are here, and how much of each.

Several threads write, each a part of its own; others read from the start as far as there is no gap. What
a killed process left is gone on from to the byte. Where what is read is kept in another form, a few slots
serve for all parts in turn: an archive need not lie on the disk beside its content.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import threading
from typing import Callable, Dict, Optional, Tuple

_HEADER_BYTES = 512
_RECORD = struct.Struct("<QQ")  # of a slot: part, bytes of it
_WAIT_SECONDS = 0.2
_TELL_BYTES = 1 << 20
# A thread asks for one part at a time: small enough to read along, large enough for a connection.
PART_BYTES = 8 << 20
_MOST_PARTS = 1 << 16
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class PartFile:
    """`path` and `path.map`; made anew where what is there is not of the same object.

    Args:
        path: of the bytes.
        size: of the object; None where it is told by its end, then there is one part.
        tag: what names the content: its SHA-256, or the store's tag.
        whole: one part only, for a store that knows no ranges.
        slots: how many parts lie in the file at a time, at least two; None for all. Then `size` is known,
            and a part comes when `release` has made room for it.
        start: up to here its bytes are kept elsewhere.

    Raises:
        OSError: the disk does not take it.
    """

    def __init__(
        self,
        path: str,
        *,
        size: Optional[int],
        tag: str,
        whole: bool = False,
        slots: Optional[int] = None,
        start: int = 0,
    ) -> None:
        self.path = path
        self.size = size
        self._tag = tag
        self._part = PART_BYTES
        while size is not None and size > self._part * _MOST_PARTS:
            self._part *= 2
        if whole or size is None:
            self._part = max(1, size or 1 << 62)
        parts = 1 if size is None else -(-size // self._part)
        self._slots = parts if slots is None else min(slots, parts)
        self._counts = [0] * parts
        self._front = 0
        self._released = first = start // self._part  # part
        self._told: Dict[int, int] = {}
        self._changed = threading.Condition()
        self._memory: Optional[mmap.mmap] = None
        self._descriptor, self._map = self._open(first)
        if slots is not None and start != size:
            self._take_room()
        for part in range(min(first, parts)):
            self._counts[part] = self._length(part)
        if first < parts:
            self._counts[first] = max(self._counts[first], start - first * self._part)
        self._free = [n for n in range(parts) if self._counts[n] < self._length(n)]
        # Bytes that are here, or kept elsewhere; and those of an earlier call.
        self.have = self.resumed = sum(self._counts)
        self._advance()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        with self._changed:
            return self._ended

    def claim(self, check: Callable[[], None]) -> Optional[int]:
        """Return a part that nobody else brings, the first one first; None where none is left.

        Args:
            check: called while there is no room for the next; may raise.
        """
        with self._changed:
            while self._free and self._free[0] >= self._released + self._slots:
                check()
                self._changed.wait(_WAIT_SECONDS)
            return self._free.pop(0) if self._free else None

    def release(self, offset: int) -> None:
        """What lies before `offset` is wanted no more; nobody holds a view of it."""
        part = offset // self._part
        if part > self._released:
            with self._changed:
                self._released = part
                self._changed.notify_all()

    def missing(self, part: int) -> Tuple[int, Optional[int]]:
        """Return the offsets (from, to) of what lacks in a part; the end is None where it is unknown."""
        start = part * self._part + self._counts[part]
        return start, None if self.size is None else part * self._part + self._length(part)

    def write(self, part: int, data: memoryview) -> None:
        """Append to a part. Raises OSError."""
        count, slot = self._counts[part] + len(data), part % self._slots
        offset = slot * self._part + self._counts[part]
        view = data
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written
        os.pwrite(self._map, _RECORD.pack(part, count), _HEADER_BYTES + slot * _RECORD.size)
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
        """Wait a little until more than `offset` bytes stand from the start on, if more will; return how many."""
        with self._changed:
            if self._reach() <= offset and not self._ended:
                self._changed.wait(_WAIT_SECONDS)
            return self._reach()

    def view(self, offset: int, most: int) -> memoryview:
        """Return up to `most` bytes from `offset` on, which are here; good until they are released."""
        part = offset // self._part
        skipped = offset - part * self._part
        count = min(most, self._counts[part] - skipped)
        place = part % self._slots * self._part + skipped
        if self._memory is not None:
            return memoryview(self._memory)[place : place + count]
        return memoryview(os.pread(self._descriptor, count, place))

    def close(self) -> None:
        """Close the files; they stay."""
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # a view is still held: it ends with its holder
                self._memory.close()
        for descriptor in (self._descriptor, self._map):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    @property
    def _ended(self) -> bool:
        return self.size is not None and self._front == len(self._counts)

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

    def _open(self, first: int) -> Tuple[int, int]:
        told = {"size": self.size, "tag": self._tag, "part": self._part, "slots": self._slots}
        header = json.dumps(told).encode().ljust(_HEADER_BYTES, b" ")
        flags = os.O_RDWR | os.O_CREAT
        data = os.open(self.path, flags, 0o644)
        records = os.open(self.path + ".map", flags, 0o644)
        found = os.pread(records, _HEADER_BYTES + self._slots * _RECORD.size, 0)
        if found[:_HEADER_BYTES] == header and self.size is not None:
            self._take_up(found[_HEADER_BYTES:], os.fstat(data).st_size, first)
        else:
            os.ftruncate(data, 0)
            os.ftruncate(records, 0)
            os.pwrite(records, header, 0)
        return data, records

    def _take_up(self, records: bytes, there: int, first: int) -> None:
        for slot in range(len(records) // _RECORD.size):
            part, count = _RECORD.unpack_from(records, slot * _RECORD.size)
            # A later one lies where the parts from `first` on will: they would be written over it.
            last = min(len(self._counts), first + self._slots)
            known = first <= part < last and part % self._slots == slot
            if known and count <= self._length(part) and slot * self._part + count <= there:
                self._counts[part] = count

    def _take_room(self) -> None:
        """Have the room of all slots: later a full disk would be met in the middle of a memory access."""
        room = min(self._slots * self._part, self.size or 0)
        try:
            os.posix_fallocate(self._descriptor, 0, room)
        except AttributeError:  # macOS
            return
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                self.close()
                raise
            return
        with contextlib.suppress(OSError, ValueError):  # else it is read as any file
            self._memory = mmap.mmap(self._descriptor, room, prot=mmap.PROT_READ)


def discard(path: str) -> None:
    """Remove a part file, its map, and the journal of what was unpacked from it."""
    for name in (path, path + ".map", path + ".journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
