"""Bytes of a data set on their way: a folder's tar made as it is read, and streams that hash what passes.

No network and no store here.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import io
import os
import queue
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from kernel_tools.errors import StagingError

BLOCK_BYTES: Final = 1 << 20
TRAILER_BYTES: Final = 2 * tarfile.BLOCKSIZE
# How many blocks are read while the ones before them are hashed.
_AHEAD: Final = 4


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a tar that is made from a folder.

    Attributes:
        path: the file.
        size_bytes: its size when it was listed.
        header: its tar header, in whole blocks.
    """

    path: Path
    size_bytes: int
    header: bytes

    @property
    def archived_bytes(self) -> int:
        """What it takes in the tar."""
        return len(self.header) + self.size_bytes + -self.size_bytes % tarfile.BLOCKSIZE


class TarStream(io.RawIOBase):
    """The tar of `members`, read from their files; seekable, and the same at every reading.

    Raises:
        StagingError: by `read`: a file changed its size, vanished or cannot be read.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._starts = [0]
        for member in members:
            self._starts.append(self._starts[-1] + member.archived_bytes)
        self._size = self._starts[-1] + TRAILER_BYTES
        self._position = self._index = 0
        self._file: io.FileIO | None = None
        self._opened, self._read = -1, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        done = 0
        while done < len(view) and self._position < self._size:
            taken = self._fill(view[done:])
            done += taken
            self._position += taken
        return done

    def close(self) -> None:
        self._let_go()
        super().close()

    def _fill(self, view: memoryview) -> int:
        """Put what begins at the position there, at most to the end of its piece; return how much."""
        if self._position >= self._starts[-1]:
            return _zeros(view, self._size - self._position)
        index = self._index
        if not self._starts[index] <= self._position < self._starts[index + 1]:
            index = self._index = bisect.bisect_right(self._starts, self._position) - 1
        member = self._members[index]
        offset = self._position - self._starts[index]
        if offset < len(member.header):
            piece = member.header[offset : offset + len(view)]
            view[: len(piece)] = piece
            return len(piece)
        offset -= len(member.header)
        if offset < member.size_bytes:
            return self._fill_from_file(index, offset, view[: member.size_bytes - offset])
        return _zeros(view, self._starts[index + 1] - self._position)

    def _fill_from_file(self, index: int, offset: int, view: memoryview) -> int:
        member = self._members[index]
        try:
            if self._file is None or self._opened != index:
                self._let_go()
                self._file, self._opened, self._read = io.FileIO(member.path), index, 0
            assert self._file is not None
            if self._read != offset:
                self._file.seek(offset)
            taken = self._file.readinto(view) or 0
            self._read = offset + taken
            ended = offset + taken == member.size_bytes
            changed = taken == 0 or (ended and bool(self._file.read(1)))
        except OSError as error:
            raise StagingError(f"{member.path} cannot be read: {error.strerror}.") from error
        if changed:
            raise StagingError(
                f"{member.path} changed while it was being read.",
                hint="Stage again once nothing writes to the folder.",
            )
        if ended:
            self._let_go()
        return taken

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._opened = None, -1


class VerifyingReader(io.RawIOBase):
    """Passes a stream on, and refuses to give its last bytes where they would not make up `sha256`.

    It can be gone back to its beginning, where the source can. Whoever jumps about in it gets bytes that
    nobody has checked.
    """

    def __init__(
        self, source: BinaryIO | io.RawIOBase, *, size_bytes: int, sha256: str, what: str
    ) -> None:
        self._source = source
        self._size = size_bytes
        self._sha256 = sha256
        self._what = what
        self._digest = hashlib.sha256()
        self._hashed = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._source.seekable()

    def tell(self) -> int:
        return self._source.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = self._source.seek(offset, whence)
        if position == 0:
            self._digest, self._hashed = hashlib.sha256(), 0
        elif position != self._hashed:
            self._hashed = -1
        return position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count: int = self._source.readinto(view) or 0  # type: ignore[union-attr]
        if self._hashed < 0:
            return count
        self._digest.update(view[:count])
        self._hashed += count
        if self._hashed >= self._size and self._digest.hexdigest() != self._sha256:
            raise StagingError(
                f"{self._what} changed while it was being uploaded; nothing was stored.",
                hint="Stage again once nothing writes to it.",
            )
        return count


def blocks_of(stream: BinaryIO | io.RawIOBase) -> Iterator[bytes]:
    """Yield a stream's bytes, read ahead of whoever takes them."""
    return _ahead(iter(lambda: stream.read(BLOCK_BYTES) or b"", b""))


def file_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes.

    Raises:
        StagingError: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            yield from blocks_of(file)
    except OSError as error:
        raise StagingError(f"{path} cannot be read: {error.strerror}.") from error


def hash_blocks(
    blocks: Iterable[bytes], *, on_bytes: Callable[[int], None] | None = None
) -> tuple[str, int]:
    """Return (SHA-256 in hex, size in bytes)."""
    digest = hashlib.sha256()
    done = 0
    for block in blocks:
        digest.update(block)
        done += len(block)
        if on_bytes is not None:
            on_bytes(done)
    return digest.hexdigest(), done


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Return 32 hexadecimal digits that differ once a file's path, size or time of change does.

    Raises:
        StagingError: one of them is gone.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise StagingError(f"{path} cannot be read: {error.strerror}.") from error
        line = f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _ahead(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same, with the next ones fetched in a thread."""
    waiting: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
    given_up = threading.Event()

    def fetch() -> None:
        end: BaseException | None = None
        try:
            for block in blocks:
                waiting.put(block)
                if given_up.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised again where the blocks are taken
            end = error
        waiting.put(end)

    thread = threading.Thread(target=fetch, name="kernel_tools-read", daemon=True)
    thread.start()
    try:
        while isinstance(block := waiting.get(), bytes):
            yield block
        if block is not None:
            raise block
    finally:
        given_up.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                waiting.get_nowait()
            thread.join(0.01)


def _zeros(view: memoryview, most: int) -> int:
    length = min(len(view), most)
    view[:length] = bytes(length)
    return length
