"""Unpack tar, tar.gz and zip without trust: each hostile kind is refused in one sentence.

A tar can be unpacked while it arrives; a zip has its directory at its end.
"""

from __future__ import annotations

import contextlib
import gzip
import struct
import zipfile
import zlib
from io import BufferedReader
from typing import IO, Callable, Iterator, Tuple, Union, cast

from .errors import UnsafeArchiveError
from .readalong import Reader
from .unpack_writer import Bounds, Writer
from .untar import Source, untar
from .unzip import unzip

__all__ = ["Bounds", "Writer", "extract", "extract_stream", "extract_tar"]


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
    with open(path, "rb") as stream:
        if kind != "zip":
            return extract_stream(stream, folder, kind=kind, bounds=bounds, tick=tick)
        writer = Writer(folder, bounds, tick)
        with _refusing_damage():
            _expect(stream.read(4) in (b"PK\x03\x04", b"PK\x05\x06"), "a zip")
            unzip(path, writer)
    return writer.files, writer.content_bytes


def extract_stream(
    stream: Union[BufferedReader, Reader],
    folder: str,
    *,
    kind: str,
    bounds: Bounds,
    tick: Callable[[int], None] = lambda _done: None,
) -> Tuple[int, int]:
    """Like `extract`, of a tar or tar.gz that is read once from its start to its end."""
    if kind not in ("tar", "tar.gz"):
        raise UnsafeArchiveError(f"{kind!r} is no kind of archive")
    writer = Writer(folder, bounds, tick)
    if kind == "tar":
        return extract_tar(Source(cast("IO[bytes]", stream)), writer)
    with _refusing_damage():
        _expect(stream.peek(2).startswith(b"\x1f\x8b"), "a gzip-compressed tar")
        with gzip.GzipFile(fileobj=stream, mode="rb") as unzipped:
            untar(cast("IO[bytes]", unzipped), writer)
    return writer.files, writer.content_bytes


def extract_tar(source: Source, writer: Writer) -> Tuple[int, int]:
    """Like `extract`, of a tar from wherever its bytes are."""
    with _refusing_damage():
        untar(source, writer)
    return writer.files, writer.content_bytes


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise UnsafeArchiveError(f"the file is not {what} archive")


@contextlib.contextmanager
def _refusing_damage() -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise UnsafeArchiveError(f"the archive is damaged: {error}") from error


# What the standard library raises where the bytes are not what they should be.
_DAMAGE = (
    EOFError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, struct.error, ValueError,
    RuntimeError, OverflowError,
)  # fmt: skip
