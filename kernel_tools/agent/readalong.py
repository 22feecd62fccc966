"""The bytes of an object on their way here: one reader follows what arrives, and so does the hash."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Callable, Optional

from .partfile import PartFile

if TYPE_CHECKING:
    from hashlib import _Hash

_BLOCK_BYTES = 1 << 20
_ALL = 1 << 62


class ReadAlong:
    """Where the reader and the hash are; what lies before both is released.

    Args:
        parts: where the bytes arrive.
        check: called while the hash waits; may raise.
        start: offset of the first byte that is read.
        digest: what was hashed of the bytes before it.
    """

    def __init__(
        self,
        parts: PartFile,
        check: Callable[[], None],
        *,
        start: int = 0,
        digest: Optional[_Hash] = None,
    ) -> None:
        self._parts = parts
        self._check = check
        self._digest = hashlib.sha256() if digest is None else digest
        self._hashed = start
        self._needless = _ALL  # the reader wants nothing before it

    def reader(self, check: Callable[[], None]) -> Reader:
        """Return the one reader; before `sha256` is called.

        Args:
            check: called while it waits and at each block; may raise.
        """
        self._needless = self._hashed
        return Reader(self, self._hashed, check)

    def sha256(self) -> str:
        """Hash all of it, and return the hexadecimal digest."""
        while True:
            view = self.after(self._hashed, self._check)
            if view is None:
                return self._digest.hexdigest()
            self._digest.update(view)
            self._hashed += len(view)
            self._release()

    def after(self, offset: int, check: Callable[[], None]) -> Optional[memoryview]:
        """Wait for bytes from `offset` on, and return some; None at the end."""
        while True:
            check()
            complete = self._parts.complete
            if self._parts.wait_past(offset) > offset:
                return self._parts.view(offset, _BLOCK_BYTES)
            if complete:
                return None

    def keep_from(self, offset: int) -> None:
        """The reader wants nothing before `offset` any more."""
        self._needless = offset
        self._release()

    def _release(self) -> None:
        self._parts.release(min(self._needless, self._hashed))


class Reader(io.BufferedIOBase):
    """The bytes from where `ReadAlong` starts. Reading raises what `check` raises."""

    def __init__(self, along: ReadAlong, start: int, check: Callable[[], None]) -> None:
        super().__init__()
        self._along = along
        self._offset = start  # of what follows the block
        self._told = check
        self._block = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def peek(self, size: int = 1) -> bytes:  # noqa: ARG002 - as io.BufferedReader has it
        """Return some bytes that the next `read` begins with; none at the end."""
        self._fill()
        return bytes(self._block[:512])

    def read(self, size: Optional[int] = -1) -> bytes:
        """Return `size` bytes, fewer only at the end."""
        wanted = _ALL if size is None or size < 0 else size
        pieces = []
        while wanted:
            piece = bytes(self.view(wanted))
            if not piece:
                break
            wanted -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def view(self, size: int) -> memoryview:
        """Return up to `size` bytes where they lie, none at the end; good until `keep_from` passes them."""
        self._fill()
        piece, self._block = self._block[:size], self._block[size:]
        return piece

    def keep_from(self, offset: int) -> None:
        """All before `offset` is kept elsewhere; without this, nothing is released before `close`."""
        self._along.keep_from(offset)

    def close(self) -> None:
        """Leave the rest to the hash."""
        if not self.closed:
            self._block = memoryview(b"")
            self._along.keep_from(_ALL)
        super().close()

    def _fill(self) -> None:
        if not len(self._block):
            self._block = self._along.after(self._offset, self._told) or memoryview(b"")
            self._offset += len(self._block)
