"""Zip through `zipfile`, after its directory was checked as a whole."""

from __future__ import annotations

import os
import stat
import zipfile
from typing import IO, List

from .errors import UnsafeArchiveError
from .unpack_writer import Writer
from .untar import body


def unzip(path: str, writer: Writer) -> None:
    """Write what the zip at `path` holds. Raises UnsafeArchiveError, zipfile.BadZipFile."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        members = checked_members(archive, file)
        total = sum(info.file_size for info in members)
        writer.bounds.check(total, sum(not info.is_dir() for info in members))
        for info in members:
            if info.is_dir():
                writer.directory(info.filename)
                continue
            with archive.open(info) as stream:
                writer.file(
                    info.filename,
                    info.external_attr >> 16,
                    info.file_size,
                    body(stream, info.file_size + 1),
                )


def checked_members(archive: zipfile.ZipFile, file: IO[bytes]) -> List[zipfile.ZipInfo]:
    """Return what the directory of a zip names, in the file's order. Raises UnsafeArchiveError."""
    _check_ends(archive, file)
    members = sorted(archive.infolist(), key=lambda info: info.header_offset)
    for info, following in zip(members, [*members[1:], None]):
        end = info.header_offset + 30 + info.compress_size
        limit = archive.start_dir if following is None else following.header_offset
        if end > limit:
            raise UnsafeArchiveError("the archive has entries that overlap")
        _check_member(info)
    return members


def _check_member(info: zipfile.ZipInfo) -> None:
    mode = info.external_attr >> 16
    kind = stat.S_IFMT(mode)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        name = "a symbolic link" if kind == stat.S_IFLNK else "a special file"
        raise UnsafeArchiveError(f"the archive holds {name}: {info.filename[:80]!r}")
    if info.flag_bits & 0x1:
        raise UnsafeArchiveError("the archive is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnsafeArchiveError("the archive uses a compression that is not supported")
    if info.orig_filename != info.filename:
        raise UnsafeArchiveError("the archive holds a name with a zero byte")
    if info.is_dir() and info.file_size:
        raise UnsafeArchiveError("the archive holds a folder with content")


def _check_ends(archive: zipfile.ZipFile, file: IO[bytes]) -> None:
    file.seek(-22 - len(archive.comment), os.SEEK_END)
    data = file.read(22)
    told = int.from_bytes(data[20:22], "little")
    if not data.startswith(b"PK\x05\x06") or told != len(archive.comment):
        raise UnsafeArchiveError("the archive has something after its end")
