"""Where unpacked files are written: every name checked against all before it, every size bounded."""

from __future__ import annotations

import os
import stat
import unicodedata
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, Optional, Set, Tuple

from .errors import UnsafeArchiveError

_MOST_NAME_BYTES = 1024
_MOST_PART_BYTES = 255
_MOST_DEPTH = 48
# Where the archive's size is not declared: images do not shrink, so this is generous.
_MOST_RATIO = 100
_FREE_BYTES = 256 << 20
_MOST_FILES = 5_000_000
# Beside those of its files; each costs an inode and no byte of content.
_MOST_FOLDERS = 1_000_000
# Invisible, or turning the writing direction: names that do not read as what they are.
_TRICKS = frozenset("\u200b\u200e\u200f\u061c\u2060\ufeff\u00ad\u180e") | frozenset(
    chr(code) for code in [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)
_SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID

Kept = Callable[[str], Optional[int]]


def nothing_kept(_target: str) -> Optional[int]:
    """No file is there yet."""
    return None


@dataclass(frozen=True)
class Bounds:
    """What was declared of an archive when it was made; None where nothing was."""

    archive_bytes: int
    content_bytes: Optional[int] = None
    file_count: Optional[int] = None

    def check(self, content_bytes: int, file_count: int) -> None:
        """Raise UnsafeArchiveError where more comes out than was declared or is plausible."""
        most = self.content_bytes
        if most is None:
            most = max(_FREE_BYTES, self.archive_bytes * _MOST_RATIO)
        if content_bytes > most:
            what = "declared" if self.content_bytes is not None else "plausible for its size"
            raise UnsafeArchiveError(
                f"the archive unpacks to more than the {most} bytes that are {what}"
            )
        if file_count > (_MOST_FILES if self.file_count is None else self.file_count):
            raise UnsafeArchiveError("the archive holds more files than were declared")


class Writer:
    """Checks each name against all before it and writes what passes."""

    def __init__(self, folder: str, bounds: Bounds, tick: Callable[[int], None]) -> None:
        self.files = 0
        self.content_bytes = 0
        self._folder = folder
        self.bounds = bounds
        self._tick = tick
        self._kinds: Dict[str, str] = {}  # folded path -> "file" or the folder's spelling
        self._claimed: Set[Tuple[str, ...]] = set()
        self._made = {folder}

    def directory(self, name: str) -> None:
        """Make a folder; one that is listed twice is made once."""
        parts = self.claim_folder(name)
        if parts:
            self._make(os.path.join(self._folder, *parts))

    def file(
        self, name: str, mode: int, size: int, chunks: Iterable[bytes], kept: Kept = nothing_kept
    ) -> None:
        """Write a file of exactly `size` bytes.

        Args:
            name: as the archive has it.
            mode: its permissions there.
            size: in bytes.
            chunks: its content, less what is kept.
            kept: returns how many bytes of it an earlier call has written, given its path.
        """
        parts = self.claim_file(name, mode)
        self.bounds.check(self.content_bytes + size, self.files)
        target = os.path.join(self._folder, *parts)
        self._make(os.path.dirname(target))
        begun = written = kept(target)
        if written != size:
            # Read-only from the start: the content is shared by runs.
            permissions = 0o555 if mode & 0o111 else 0o444
            opened = _create if begun is None else _reopen
            descriptor = opened(target, permissions)
            try:
                written = self._write(descriptor, begun or 0, size, chunks)
            finally:
                os.close(descriptor)
        if written != size:
            raise UnsafeArchiveError(f"the archive is cut short at {name[:80]!r}")
        self.content_bytes += size

    def _write(self, descriptor: int, written: int, size: int, chunks: Iterable[bytes]) -> int:
        for chunk in chunks:
            written += len(chunk)
            if written > size:
                break
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]
            self._tick(self.content_bytes + written)
        return written

    def claim_folder(self, name: str) -> Tuple[str, ...]:
        """Take a folder's name for taken; returns its parts, none for the archive's own top."""
        parts = _parts(name)
        if parts:
            self._claim_folders(parts, name)
            if len(self._kinds) - self.files > _MOST_FOLDERS:
                raise UnsafeArchiveError("the archive holds more folders than are plausible")
        return parts

    def claim_file(self, name: str, mode: int) -> Tuple[str, ...]:
        """Take a file's name, and those of its folders, for taken; returns its parts."""
        if mode & _SPECIAL_BITS:
            raise UnsafeArchiveError(f"the archive holds a set-user-id file: {name[:80]!r}")
        parts = _parts(name)
        if not parts or name.endswith("/"):
            raise UnsafeArchiveError("the archive holds a file without a name")
        self._claim_folders(parts[:-1], name)
        key = _fold("/".join(parts))
        if key in self._kinds:
            raise UnsafeArchiveError(
                f"the archive holds two entries that are one on some systems: {name[:80]!r}"
            )
        self._kinds[key] = "\0file"
        self.files += 1
        return parts

    def _claim_folders(self, parts: Tuple[str, ...], name: str) -> None:
        if parts in self._claimed:
            return
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            if self._kinds.setdefault(_fold(path), path) != path:
                raise UnsafeArchiveError(
                    f"the archive holds two entries that are one on some systems: {name[:80]!r}"
                )
        self._claimed.add(parts)

    def _make(self, path: str) -> None:
        if path not in self._made:
            os.makedirs(path, exist_ok=True)
            self._made.add(path)


def _create(target: str, permissions: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.open(target, flags, permissions)


def _reopen(target: str, permissions: int) -> int:
    """Open a file that an earlier call had begun, at its end; it is read-only as all are."""
    os.chmod(target, 0o600)
    descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0))
    os.chmod(target, permissions)
    return descriptor


def _parts(name: str) -> Tuple[str, ...]:
    """Check a name as a POSIX relative path; returns its parts."""
    problem = _problem(name)
    if problem is None and not name.isascii():
        folded = unicodedata.normalize("NFKC", name)
        if folded != name and (folded.count("/") != name.count("/") or _problem(folded)):
            problem = "has look-alike characters in it"
    if problem is not None:
        raise UnsafeArchiveError(f"the archive holds a name that {problem}: {name[:80]!r}")
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _problem(name: str) -> Optional[str]:
    parts = name.split("/")
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        return "is no UTF-8"
    if name.startswith("/") or "\\" in name or (len(name) > 1 and name[1] == ":"):
        return "is absolute or of another system"
    if ".." in parts:
        return "leaves the folder"
    plain = name.isascii() and name.isprintable()
    if not plain and any(ord(char) < 32 or ord(char) == 127 or char in _TRICKS for char in name):
        return "has control characters in it"
    longest = max(len(part.encode("utf-8")) for part in parts)
    if len(encoded) > _MOST_NAME_BYTES or longest > _MOST_PART_BYTES or len(parts) > _MOST_DEPTH:
        return "is too long or too deep"
    return None


def _fold(path: str) -> str:
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
