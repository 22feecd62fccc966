"""Unpack tar, tar.gz and zip without trust: each hostile kind is refused in one sentence."""

from __future__ import annotations

import gzip
import struct
import zipfile
import zlib
from typing import IO, Callable, Mapping, Tuple, cast

from .errors import UnsafeArchiveError
from .unpack_writer import Bounds, Writer
from .untar import untar
from .unzip import unzip

__all__ = ["Bounds", "extract"]


def extract(
    path: str,
    folder: str,
    *,
    kind: str,
    bounds: Bounds,
    tick: Callable[[int], None] = lambda _done: None,
) -> Tuple[int, int]:
    """Unpack the archive at `path` into the empty `folder`.

    Args:
        path: the archive.
        folder: exists and is empty; on an error the caller removes it.
        kind: "tar", "tar.gz" or "zip".
        bounds: what it may hold.
        tick: called with the content bytes written so far; may raise to end it.

    Returns:
        (files, content bytes).

    Raises:
        UnsafeArchiveError: the archive is not what it says, damaged, or holds what must not be.
    """
    if kind not in _UNPACKERS:
        raise UnsafeArchiveError(f"{kind!r} is no kind of archive")
    writer = Writer(folder, bounds, tick)
    with open(path, "rb") as stream:
        start = stream.read(4)
    try:
        _UNPACKERS[kind](path, start, writer)
    except _DAMAGE as error:
        raise UnsafeArchiveError(f"the archive is damaged: {error}") from error
    return writer.files, writer.content_bytes


def _tar(path: str, start: bytes, writer: Writer) -> None:
    _expect(not start.startswith((b"\x1f\x8b", b"PK")), "a tar")
    with open(path, "rb") as stream:
        untar(stream, writer)


def _tar_gz(path: str, start: bytes, writer: Writer) -> None:
    _expect(start.startswith(b"\x1f\x8b"), "a gzip-compressed tar")
    with gzip.open(path, "rb") as stream:
        untar(cast("IO[bytes]", stream), writer)


def _zip(path: str, start: bytes, writer: Writer) -> None:
    _expect(start in (b"PK\x03\x04", b"PK\x05\x06"), "a zip")
    unzip(path, writer)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise UnsafeArchiveError(f"the file is not {what} archive")


_UNPACKERS: Mapping[str, Callable[[str, bytes, Writer], None]] = {
    "tar": _tar,
    "tar.gz": _tar_gz,
    "zip": _zip,
}
# What the standard library raises where the bytes are not what they should be.
_DAMAGE = (
    EOFError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, struct.error, ValueError,
    RuntimeError, OverflowError,
)  # fmt: skip
