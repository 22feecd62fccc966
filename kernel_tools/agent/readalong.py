"""The bytes of an object on its way here, read once: hashed and unpacked from the same memory.

Reading them twice, once for each, cost as much as hashing them.
"""

from __future__ import annotations

import hashlib
import io
import threading
from typing import Callable, Optional

from .partfile import PartFile

_BLOCK_BYTES = 1 << 20
_BLOCKS = 8
_WAIT_SECONDS = 0.2


class ReadAlong:
    """A ring of blocks between a `PartFile`, one reader and the hash.

    While there is a reader it reads and the hash follows it; without one, or after it, the hash reads
    on by itself to the end.

    Args:
        parts: where the bytes arrive.
        check: called while waiting; may raise.
    """

    def __init__(self, parts: PartFile, check: Callable[[], None]) -> None:
        self._parts = parts
        self._check = check
        self._stream = open(parts.path, "rb", buffering=0)  # noqa: SIM115 - closed with this
        self._blocks = [memoryview(bytearray(_BLOCK_BYTES)) for _ in range(_BLOCKS)]
        self._counts = [0] * _BLOCKS
        self._offset = 0  # bytes that were read
        self._filled = self._hashed = 0  # blocks
        self._ended = False
        self._reader: Optional[Reader] = None
        self._changed = threading.Condition()

    def reader(self, check: Callable[[], None]) -> Reader:
        """Return the one reader; before `sha256` is called.

        Args:
            check: called while it waits and at each block; may raise.
        """
        self._reader = Reader(self, check)
        return self._reader

    def sha256(self) -> str:
        """Hash all of it, and return the hexadecimal digest."""
        digest = hashlib.sha256()
        while True:
            with self._changed:
                while self._hashed == self._filled and self._reader is not None:
                    self._check()
                    self._changed.wait(_WAIT_SECONDS)
                followed = self._hashed < self._filled
            if not followed and not self.fill(self._check):
                return digest.hexdigest()
            index = self._hashed % _BLOCKS
            digest.update(self._blocks[index][: self._counts[index]])
            with self._changed:
                self._hashed += 1
                self._changed.notify_all()

    def fill(self, check: Callable[[], None]) -> Optional[memoryview]:
        """Read the next block, as soon as there is room for it and a byte of it; None at the end."""
        with self._changed:
            while self._filled - self._hashed == _BLOCKS:
                check()
                self._changed.wait(_WAIT_SECONDS)
        index = self._filled % _BLOCKS
        while not self._ended:
            check()
            there = self._parts.wait_past(self._offset) - self._offset
            if there > 0:
                view = self._blocks[index][: min(there, _BLOCK_BYTES)]
                count = self._stream.readinto(view) or 0
                self._counts[index] = count
                self._offset += count
                with self._changed:
                    self._filled += 1
                    self._changed.notify_all()
                return view[:count]
            self._ended = self._parts.complete
        return None

    def leave(self) -> None:
        """The reader has what it wants."""
        with self._changed:
            self._reader = None
            self._changed.notify_all()

    def close(self) -> None:
        """Close the file; nobody reads any more."""
        self._stream.close()


class Reader(io.BufferedIOBase):
    """The bytes from the start on, as `ReadAlong` has them. Reading raises what `check` raises."""

    def __init__(self, along: ReadAlong, check: Callable[[], None]) -> None:
        super().__init__()
        self._along = along
        self._told = check
        self._block = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def peek(self, size: int = 1) -> bytes:  # noqa: ARG002 - as io.BufferedReader has it
        """Return some bytes that the next `read` begins with; none at the end."""
        if not len(self._block):
            self._block = self._along.fill(self._told) or memoryview(b"")
        return bytes(self._block[:512])

    def read(self, size: Optional[int] = -1) -> bytes:
        """Return `size` bytes, fewer only at the end."""
        wanted = (1 << 62) if size is None or size < 0 else size
        pieces = []
        while wanted:
            if not len(self._block):
                block = self._along.fill(self._told)
                if block is None:
                    break
                self._block = block
            piece = bytes(self._block[:wanted])
            self._block = self._block[len(piece) :]
            wanted -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Leave the rest to the hash."""
        if not self.closed:
            self._along.leave()
        super().close()
