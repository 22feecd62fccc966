"""A folder as one deterministic tar stream, and what can be read from an archive that exists already.

No network and no store here: only bytes, their names, their count and their hash. Uncompressed, since
images do not shrink and a GPU host should not spend its time on gzip.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from kernel_tools.errors import StagingError

BLOCK_BYTES: Final = 1 << 20
# Suffix -> format. The format names are those of a job's inputs.
FORMATS: Final = {".tar": "tar", ".tar.gz": "tar.gz", ".tgz": "tar.gz", ".zip": "zip"}
# Left out of a folder without a word: nothing of a data set.
IGNORED: Final = (
    ".DS_Store",
    "Thumbs.db",
    ".git",
    ".ipynb_checkpoints",
    "__pycache__",
    ".kernel_tools",
)
# Never staged unless forced: what holds credentials.
FORBIDDEN: Final = (
    ".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", ".netrc", "_netrc", ".pypirc", ".npmrc", "kaggle.json", "credentials", "credentials.json",
)  # fmt: skip


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
class _Entry:
    path: Path
    size_bytes: int
    header: bytes


@dataclass(frozen=True, slots=True)
class FolderArchive:
    """A folder, scanned: from it the same tar stream can be made any number of times.

    Attributes:
        folder: the source.
        size_bytes: of the tar, exactly.
    """

    folder: Path
    entries: tuple[_Entry, ...]
    size_bytes: int

    @property
    def facts(self) -> ArchiveFacts:
        """What the tar holds."""
        top = self.folder.resolve().name
        return ArchiveFacts(
            "tar",
            len(self.entries),
            sum(entry.size_bytes for entry in self.entries),
            (top,),
            f"data/{top}",
        )

    def blocks(self) -> Iterator[bytes]:
        """Yield the tar's bytes.

        Raises:
            StagingError: a file changed its size or vanished since the scan.
        """
        for entry in self.entries:
            yield entry.header
            left = entry.size_bytes
            try:
                with entry.path.open("rb", buffering=0) as file:
                    while left > 0:
                        block = file.read(min(left, BLOCK_BYTES))
                        if not block:
                            break
                        left -= len(block)
                        yield block
                    grown = bool(file.read(1))
            except OSError as error:
                raise StagingError(f"{entry.path} cannot be read: {error.strerror}.") from error
            if left or grown:
                raise StagingError(
                    f"{entry.path} changed while it was being read.",
                    hint="Stage again once nothing writes to the folder.",
                )
            yield bytes(-entry.size_bytes % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)

    def open(self) -> BlockReader:
        """Return the tar as a stream."""
        return BlockReader(self.blocks())


class BlockReader(io.RawIOBase):
    """A readable stream over blocks of bytes of any size."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts: list[memoryview | bytes] = []
        wanted = size if size >= 0 else None
        while wanted is None or wanted > 0:
            if not self._rest:
                block = next(self._blocks, None)
                if block is None:
                    break
                self._rest = memoryview(block)
            taken = self._rest if wanted is None else self._rest[:wanted]
            self._rest = self._rest[len(taken) :]
            if wanted is not None:
                wanted -= len(taken)
            parts.append(taken)
        return b"".join(parts)


class VerifyingReader(io.RawIOBase):
    """Passes a stream on, and refuses to give its last bytes where they would not make up `sha256`."""

    def __init__(
        self, source: BinaryIO | io.RawIOBase, *, size_bytes: int, sha256: str, what: str
    ) -> None:
        self._source = source
        self._left = size_bytes
        self._sha256 = sha256
        self._what = what
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self._source.read(size) or b""
        self._digest.update(block)
        self._left -= len(block)
        if self._left <= 0 and self._digest.hexdigest() != self._sha256:
            raise StagingError(
                f"{self._what} changed while it was being uploaded; nothing was stored.",
                hint="Stage again once nothing writes to it.",
            )
        return block


def scan_folder(folder: Path, *, force: bool = False) -> FolderArchive:
    """List a folder's files and make their tar headers: sorted, owners and times zeroed, modes 0644.

    Links to files and folders are followed; empty folders and editor litter are left out. The same
    content under the same folder name gives the same bytes on every machine.

    Raises:
        StagingError: it is empty, holds something that is no file, a name that cannot travel, a circle of
            links, or (unless `force`) a file of credentials.
    """
    top = folder.resolve().name
    found = sorted(_walk(folder, PurePosixPath(top), ()), key=lambda item: item[0])
    if not found:
        raise StagingError(f"{folder} holds no file to stage.")
    if not force:
        refuse_credentials(name for name, _, _ in found)
    entries = []
    for name, path, size_bytes in found:
        info = tarfile.TarInfo(name)
        info.size = size_bytes
        info.mode = 0o644
        entries.append(_Entry(path, size_bytes, info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")))
    size = sum(len(e.header) + e.size_bytes + -e.size_bytes % tarfile.BLOCKSIZE for e in entries)
    return FolderArchive(folder, tuple(entries), size + 2 * tarfile.BLOCKSIZE)


def _walk(
    folder: Path, name: PurePosixPath, above: tuple[str, ...]
) -> Iterator[tuple[str, Path, int]]:
    real = str(folder.resolve())
    if real in above:
        raise StagingError(f"{folder} is a link to a folder above itself.", hint="Remove the link.")
    try:
        with os.scandir(folder) as scanned:
            found = list(scanned)
    except OSError as error:
        raise StagingError(f"{folder} cannot be read: {error.strerror}.") from error
    for entry in found:
        if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in IGNORED):
            continue
        check_member_name(entry.name, where=str(folder))
        try:
            status = entry.stat()
        except OSError as error:
            raise StagingError(f"{entry.path} cannot be read: {error.strerror}.") from error
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(Path(entry.path), name / entry.name, (*above, real))
        elif stat.S_ISREG(status.st_mode):
            yield (name / entry.name).as_posix(), Path(entry.path), status.st_size
        else:
            raise StagingError(f"{entry.path} is neither a file nor a folder.", hint="Remove it.")


def check_member_name(name: str, *, where: str) -> None:
    """Refuse a file name that cannot be written the same way on every machine.

    Raises:
        StagingError: it is no UTF-8, or holds a backslash or a control character.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StagingError(
            f"A file name in {where} is not UTF-8: {name!r}.", hint="Rename it."
        ) from None
    if "\\" in name or any(ord(character) < 32 for character in name):
        raise StagingError(
            f"The file name {name!r} in {where} holds a backslash or a control character.",
            hint="Rename it.",
        )


def refuse_credentials(names: Iterable[str]) -> None:
    """Refuse names that look like credentials.

    Raises:
        StagingError: names the first of them and says how many there are.
    """
    bad = [
        name
        for name in names
        if any(fnmatch.fnmatchcase(name.rpartition("/")[2].lower(), p) for p in FORBIDDEN)
    ]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise StagingError(
            f"{bad[0]}{more} would travel with the data set and may hold credentials.",
            hint="Move it out of the folder, or give --force if it is harmless.",
        )


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
        force: let files of credentials pass.

    Raises:
        StagingError: it is damaged, of another kind than it says, empty, or holds credentials.
    """
    names: list[str] = []
    content_bytes = 0
    try:
        if kind == "zip":
            with zipfile.ZipFile(file) as archive:
                for item in archive.infolist():
                    if not item.is_dir():
                        names.append(item.filename)
                        content_bytes += item.file_size
        else:
            with tarfile.open(fileobj=file, mode="r|gz" if kind == "tar.gz" else "r|") as tar:
                for member in tar:
                    if not member.isdir():
                        names.append(member.name)
                        content_bytes += member.size
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error) as error:
        raise StagingError(
            f"{what} is no sound {kind} archive: {error}.", hint="Pack or download it again."
        ) from error
    if not names:
        raise StagingError(f"{what} holds no file.")
    if not force:
        refuse_credentials(names)
    tops, root = roots_of(names)
    return ArchiveFacts(kind, len(names), content_bytes, tops, root)


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


def file_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes.

    Raises:
        StagingError: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except OSError as error:
        raise StagingError(f"{path} cannot be read: {error.strerror}.") from error
