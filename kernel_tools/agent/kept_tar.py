"""The beginning of a tar, kept as the files that were unpacked from it.

For a download to be gone on from, an archive need not lie beside its content: its bytes are those of the
files, and between them those of a journal. The journal has a header before there is the file it announces.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Callable, Iterator, Optional

from .errors import UnsafeArchiveError
from .readalong import Reader
from .untar import Content, Source

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNK_BYTES = 1 << 20


class KeptTar(Source):
    """A tar read from what is kept of it, and from there on as it comes.

    Args:
        journal: path; made where it is not there.
        go_on: takes the length of what was kept and its hash, returns what follows.
        check: called with the bytes read so far of what is kept; may raise.
    """

    def __init__(
        self,
        journal: str,
        *,
        go_on: Callable[[int, _Hash], Reader],
        check: Callable[[int], None],
    ) -> None:
        self._journal = os.open(journal, os.O_RDWR | os.O_CREAT, 0o644)
        self.resumed = os.fstat(self._journal).st_size > 0
        self._go_on, self._check = go_on, check
        self._digest = hashlib.sha256()
        self._offset = 0
        self._coming: Optional[Reader] = None

    def read(self, size: int) -> bytes:
        """See `Source.read`."""
        found = b""
        if self._coming is None:
            found = os.read(self._journal, size)
            self._take(found)
        # Piece by piece: what is not yet in the journal keeps its slots from what is still to come.
        while len(found) < size:
            piece = bytes(self.coming().view(size - len(found)))
            if not piece:
                break
            left = memoryview(piece)
            while left:
                left = left[os.write(self._journal, left) :]
            self.passed(len(piece))
            found += piece
        return found

    def content(self, size: int) -> Content:
        """See `Source.content`."""
        return _KeptContent(self, size)

    def find(self, target: str, size: int) -> Optional[int]:
        """Read what is kept of a file, up to `size` bytes; returns how many, None where it is not there.

        Raises:
            UnsafeArchiveError: it is no file that was unpacked from here.
        """
        if self._coming is not None:
            return None
        count = 0
        try:
            with open(target, "rb", buffering=0) as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    count += len(chunk)
                    if count > size:
                        raise UnsafeArchiveError("what was unpacked before is damaged")
                    self._take(chunk)
        except FileNotFoundError:
            self.coming()
            return None
        if count < size:
            self.coming()
        return count

    def coming(self) -> Reader:
        """Return what follows from here on; nothing more is taken from what is kept."""
        if self._coming is None:
            # Of a machine that went down, the journal may say more than the files have.
            os.ftruncate(self._journal, os.lseek(self._journal, 0, os.SEEK_CUR))
            self._coming = self._go_on(self._offset, self._digest)
        return self._coming

    def passed(self, count: int) -> None:
        """So many more bytes of what comes are on disk."""
        self._offset += count
        self.coming().keep_from(self._offset)

    def close(self) -> None:
        """Close the journal; it stays."""
        os.close(self._journal)
        if self._coming is not None:
            self._coming.close()

    def _take(self, data: bytes) -> None:
        self._digest.update(data)
        self._offset += len(data)
        self._check(self._offset)


class _KeptContent(Content):
    """A file's content: kept up to a place, and coming from there on."""

    def __init__(self, tar: KeptTar, size: int) -> None:
        super().__init__(self._rest())
        self._tar = tar
        self._left = size

    def kept(self, target: str) -> Optional[int]:
        """See `Content.kept`."""
        found = self._tar.find(target, self._left)
        self._left -= found or 0
        return found

    def _rest(self) -> Iterator[bytes]:
        coming = self._tar.coming()
        while self._left:
            view = coming.view(self._left)
            if not view:
                return
            yield view  # type: ignore[misc] # it is written as bytes are
            self._left -= len(view)
            self._tar.passed(len(view))
