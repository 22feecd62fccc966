"""What an archive holds, read as the remote will read it: what that refuses is refused before it is uploaded.

Nothing is written here; the checks are the agent's own (`agent/untar.py`, `unzip.py`, `unpack_writer.py`).
"""

from __future__ import annotations

import contextlib
import gzip
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, BinaryIO, Final, cast

from kernel_tools.agent.errors import UnsafeArchiveError
from kernel_tools.agent.unpack_writer import Bounds, Kept, Writer, nothing_kept
from kernel_tools.agent.untar import untar
from kernel_tools.agent.unzip import checked_members
from kernel_tools.errors import StagingError

# Whoever packed it may have packed as much as he likes; the remote holds it to what is found here.
_UNBOUNDED: Final = Bounds(0, content_bytes=1 << 62, file_count=1 << 40)

Read = Callable[[], bytes]


class Look(Writer):
    """Takes what an archive holds, and keeps only names, sizes and what was asked to be looked at.

    Args:
        wanted: whether a file's content is to be looked at, by its name and size in bytes.
        seen: takes name and content of each of those.
    """

    def __init__(
        self, wanted: Callable[[str, int], bool], seen: Callable[[str, int, Read], None]
    ) -> None:
        super().__init__("", _UNBOUNDED, lambda _done: None)
        self.names: list[str] = []
        self.wanted = wanted
        self._seen = seen

    def directory(self, name: str) -> None:
        """See `Writer.directory`."""
        self.claim_folder(name)

    def file(
        self,
        name: str,
        mode: int,
        size: int,
        chunks: Iterable[bytes],
        kept: Kept = nothing_kept,  # noqa: ARG002 - nothing is written
    ) -> None:
        """See `Writer.file`."""
        self.claim_file(name, mode)
        self.names.append(name)
        self.content_bytes += size
        if self.wanted(name, size):
            content = b"".join(chunks)
            self._seen(name, size, lambda: content)
            arrived = len(content)
        else:
            arrived = sum(map(len, chunks))
        if arrived != size:
            raise UnsafeArchiveError(f"the archive is cut short at {name[:80]!r}")


def look_into(file: BinaryIO, *, kind: str, what: str, look: Look) -> None:
    """Read an archive to its end.

    Args:
        file: the archive, seekable for zip.
        kind: its format.
        what: how messages call it.
        look: is told what is in it.

    Raises:
        StagingError: it is damaged, of another kind than it says, or would not be unpacked.
    """
    with _refusing(kind, what):
        if kind == "zip":
            _look_into_zip(file, look)
        elif kind == "tar":
            untar(file, look)
        else:
            with gzip.GzipFile(fileobj=file, mode="rb") as stream:
                untar(cast("IO[bytes]", stream), look)


def _look_into_zip(file: BinaryIO, look: Look) -> None:
    """Only the list is read, and what is to be looked at: the rest has its checksum there and here."""
    with zipfile.ZipFile(file) as archive:
        for info in checked_members(archive, file):
            if info.is_dir():
                look.directory(info.filename)
                continue
            mode = info.external_attr >> 16
            if look.wanted(info.filename, info.file_size):
                with archive.open(info) as stream:
                    look.file(info.filename, mode, info.file_size, iter([stream.read()]))
            else:
                unread = cast("bytes", range(info.file_size))  # as long, and of no memory
                look.file(info.filename, mode, info.file_size, iter([unread]))


@contextlib.contextmanager
def _refusing(kind: str, what: str) -> Iterator[None]:
    try:
        yield
    except UnsafeArchiveError as error:
        raise StagingError(
            f"{what} would not be unpacked as a {kind}: {error}.",
            hint="Pack it anew: plain files and folders, each name once.",
        ) from error
    except _DAMAGE as error:
        raise StagingError(
            f"{what} is no sound {kind} archive: {error}.", hint="Pack or download it again."
        ) from error


# What the standard library raises where the bytes are not what they should be.
_DAMAGE: Final = (
    EOFError, OSError, zlib.error, zipfile.BadZipFile, struct.error, ValueError, RuntimeError,
    NotImplementedError, OverflowError,
)  # fmt: skip
