"""A folder as one deterministic tar stream, and what can be read from an archive that exists already.

No network and no store here: only bytes, their names, their count and their hash. Uncompressed, since
images do not shrink and a GPU host should not spend its time on gzip.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from kernel_tools.datasets.look import Look, Read, look_into
from kernel_tools.datasets.refusals import (
    NOTEBOOK_BYTES,
    check_member_name,
    is_notebook,
    refuse_credentials,
    refuse_notebooks,
)
from kernel_tools.datasets.stream import TRAILER_BYTES, Member, TarStream
from kernel_tools.errors import StagingError

# Suffix -> format. The format names are those of a job's inputs.
FORMATS: Final = {".tar": "tar", ".tar.gz": "tar.gz", ".tgz": "tar.gz", ".zip": "zip"}
# Left out of a folder without a word: nothing of a data set.
IGNORED: Final = frozenset(
    (".DS_Store", "Thumbs.db", ".git", ".ipynb_checkpoints", "__pycache__", ".kernel_tools")
)
_USTAR_NAME_BYTES: Final = 100
_USTAR_MOST_BYTES: Final = 8**11 - 1


@dataclass(frozen=True, slots=True)
class ArchiveFacts:
    """What an archive holds.

    Attributes:
        format: `tar`, `tar.gz` or `zip`.
        file_count: regular files.
        content_bytes: their sizes together, unpacked.
        tops: the names at its top level, sorted; empty where only its beginning was read.
        root: where it unpacks to unless told otherwise, below the work folder; None where that cannot
            be read from it (several names at the top).
    """

    format: str
    file_count: int | None
    content_bytes: int | None
    tops: tuple[str, ...]
    root: str | None


@dataclass(frozen=True, slots=True)
class FolderArchive:
    """A folder, scanned: from it the same tar stream can be made any number of times.

    Attributes:
        folder: the source.
        size_bytes: of the tar, exactly.
    """

    folder: Path
    members: tuple[Member, ...]
    size_bytes: int

    @property
    def facts(self) -> ArchiveFacts:
        """What the tar holds."""
        top = self.folder.resolve().name
        return ArchiveFacts(
            "tar",
            len(self.members),
            sum(member.size_bytes for member in self.members),
            (top,),
            f"data/{top}",
        )

    def open(self) -> TarStream:
        """Return the tar as a stream."""
        return TarStream(self.members)


def scan_folder(folder: Path, *, force: bool = False) -> FolderArchive:
    """List a folder's files and make their tar headers: sorted, owners and times zeroed, modes 0644.

    Links to files and folders are followed; empty folders and editor litter are left out. The same
    content under the same folder name gives the same bytes on every machine.

    Raises:
        StagingError: it is empty, holds something that is no file, a name that cannot travel, a circle of
            links, or (unless `force`) a file of credentials or a notebook with outputs.
    """
    top = folder.resolve().name
    found = sorted(_walk(folder, top, ()), key=lambda item: item[0])
    if not found:
        raise StagingError(f"{folder} holds no file to stage.")
    if not force:
        refuse_credentials(name for name, _, _ in found)
        refuse_notebooks(
            (name, size_bytes, path.read_bytes)
            for name, path, size_bytes in found
            if is_notebook(name)
        )
    members = [
        Member(path, size_bytes, _header(name, size_bytes)) for name, path, size_bytes in found
    ]
    size = sum(member.archived_bytes for member in members)
    return FolderArchive(folder, tuple(members), size + TRAILER_BYTES)


def _header(name: str, size_bytes: int) -> bytes:
    """Return a file's tar header; by `tarfile`, ten times slower, where plain ustar does not hold it."""
    if len(name) > _USTAR_NAME_BYTES or size_bytes > _USTAR_MOST_BYTES or not name.isascii():
        info = tarfile.TarInfo(name)
        info.size = size_bytes
        info.mode = 0o644
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
    head = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2
    head += b"%011o\0%011o\0" % (size_bytes, 0)
    tail = b"0" + bytes(100) + b"ustar\x0000"
    checksum = sum(head) + sum(tail) + 8 * ord(" ")
    return (head + b"%06o\0 " % checksum + tail).ljust(tarfile.BLOCKSIZE, b"\0")


def _walk(folder: Path, name: str, above: tuple[str, ...]) -> Iterator[tuple[str, Path, int]]:
    real = str(folder.resolve())
    if real in above:
        raise StagingError(f"{folder} is a link to a folder above itself.", hint="Remove the link.")
    try:
        with os.scandir(folder) as scanned:
            found = list(scanned)
    except OSError as error:
        raise StagingError(f"{folder} cannot be read: {error.strerror}.") from error
    for entry in found:
        if entry.name in IGNORED:
            continue
        check_member_name(entry.name, where=str(folder))
        try:
            status = entry.stat()
        except OSError as error:
            raise StagingError(f"{entry.path} cannot be read: {error.strerror}.") from error
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(Path(entry.path), f"{name}/{entry.name}", (*above, real))
        elif stat.S_ISREG(status.st_mode):
            yield f"{name}/{entry.name}", Path(entry.path), status.st_size
        else:
            raise StagingError(f"{entry.path} is neither a file nor a folder.", hint="Remove it.")


def archive_format(name: str) -> str:
    """Return the format that a file name says.

    Raises:
        StagingError: it is none that can be unpacked on the remote.
    """
    for suffix, found in FORMATS.items():
        if name.lower().endswith(suffix):
            return found
    raise StagingError(
        f"{name} is neither a folder nor an archive of a known kind.",
        hint=f"Give a folder or one of: {' '.join(FORMATS)}.",
    )


def archive_stem(name: str) -> str:
    """Return an archive's name without its suffix."""
    for suffix in sorted(FORMATS, key=len, reverse=True):
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def inspect_archive(file: BinaryIO, *, kind: str, what: str, force: bool = False) -> ArchiveFacts:
    """Read the whole list of an archive.

    Args:
        file: the archive, seekable for zip.
        kind: its format.
        what: how messages call it.
        force: let files of credentials and notebooks with outputs pass.

    Raises:
        StagingError: it is damaged, of another kind than it says, empty, or holds what must not travel.
    """
    notebooks = _Notebooks(force=force)
    look = Look(notebooks.wanted, notebooks.seen)
    look_into(file, kind=kind, what=what, look=look)
    names = look.names
    if not names:
        raise StagingError(f"{what} holds no file.")
    if not force:
        refuse_credentials(names)
    tops, root = roots_of(names)
    return ArchiveFacts(kind, len(names), look.content_bytes, tops, root)


@dataclass(frozen=True, slots=True)
class _Notebooks:
    """Refuses those that hold outputs; those that are too large to be looked at count as such."""

    force: bool

    def wanted(self, name: str, size_bytes: int) -> bool:
        if self.force or not is_notebook(name):
            return False
        if size_bytes > NOTEBOOK_BYTES:
            refuse_notebooks([(name, size_bytes, bytes)])
        return True

    def seen(self, name: str, size_bytes: int, read: Read) -> None:
        refuse_notebooks([(name, size_bytes, read)])


def first_member(file: BinaryIO, *, kind: str, what: str) -> ArchiveFacts:
    """Read only the beginning of a tar: enough to tell its top folder where its author kept to one.

    Raises:
        StagingError: it is no tar of that kind.
    """
    try:
        with tarfile.open(fileobj=file, mode="r|gz" if kind == "tar.gz" else "r|") as tar:
            for member in tar:
                if not member.isdir():
                    _, root = roots_of([member.name])
                    return ArchiveFacts(kind, None, None, (), root)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise StagingError(f"{what} is no sound {kind} archive: {error}.") from error
    raise StagingError(f"{what} holds no file.")


def roots_of(names: Iterable[str]) -> tuple[tuple[str, ...], str | None]:
    """Return (names at the top, the folder that the archive unpacks to by itself).

    `vehicles3/...` gives `data/vehicles3`; an archive that holds the whole path, `data/vehicles3/...`,
    gives the same; several names at the top, or a file there, give None.
    """
    paths = [PurePosixPath(name).parts for name in names]
    paths = [parts[1:] if parts[:1] == (".",) else parts for parts in paths]
    tops = tuple(sorted({parts[0] for parts in paths if parts}))
    if len(tops) != 1 or any(len(parts) < 2 for parts in paths):
        return tops, None
    below = {parts[1] for parts in paths}
    if tops[0] == "data" and len(below) == 1 and all(len(parts) > 2 for parts in paths):
        return tops, f"data/{below.pop()}"
    return tops, f"data/{tops[0]}"
