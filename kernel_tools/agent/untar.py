"""A strict reader of tar: plain files and folders; ustar, GNU long names, pax paths.

Own instead of `tarfile`: no member is written that was not checked, headers are bounded, and what
follows the end must be zeros.
"""

from __future__ import annotations

from typing import IO, Dict, Iterator, Optional, Union

from .errors import UnsafeArchiveError
from .unpack_writer import Writer

_BLOCK = 512
_CHUNK_BYTES = 1 << 20
# pax and GNU headers carry names; nothing honest needs more.
_MOST_HEADER_BYTES = 64 << 10
# Zeros after the end: tar pads to 10 KiB, some tools to a tape's block.
_MOST_PADDING_BYTES = 64 << 20
_OTHER_KINDS = (b"\x1f\x8b", b"PK")  # gzip, zip
_KINDS = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device",
    b"6": "a FIFO", b"S": "a sparse file", b"V": "a volume header", b"M": "a continued file",
}  # fmt: skip


class Source:
    """The bytes of a tar, once from its start to its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end, of what is not a file's content."""
        return self._stream.read(size)

    def content(self, size: int) -> Content:
        """Return the content of a file of `size` bytes, which follows."""
        return Content(body(self._stream, size))


class Content:
    """A file's content, in chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def kept(self, target: str) -> Optional[int]:  # noqa: ARG002 - for those that keep something
        """Return how many bytes of it are in the file at `target`, and will not be among the chunks."""
        return None


def untar(tar: Union[IO[bytes], Source], writer: Writer) -> None:
    """Write what a tar holds. Raises UnsafeArchiveError."""
    source = tar if isinstance(tar, Source) else Source(tar)
    name: Optional[str] = None
    size: Optional[int] = None
    first = True
    while True:
        header = source.read(_BLOCK)
        if first and header.startswith(_OTHER_KINDS):
            raise UnsafeArchiveError("the file is not a tar archive")
        _expect_length(header, _BLOCK, "at a header")
        if not header.strip(b"\0"):
            break
        if not _checksum_fits(header):
            what = "no tar archive" if first else "damaged: a header's checksum does not fit"
            raise UnsafeArchiveError("the archive is " + what)
        first = False
        kind = header[156:157]
        length = _number(header[124:136])
        if kind in (b"x", b"g", b"L", b"K"):
            if length > _MOST_HEADER_BYTES:
                raise UnsafeArchiveError(f"the archive has a header of {length} bytes")
            data = source.read(_padded(length))
            _expect_length(data, _padded(length), "in a header")
            data = data[:length]
            if kind == b"K":
                raise UnsafeArchiveError("the archive holds a link")
            if kind == b"L":
                name = _text(data.rstrip(b"\0"))
            else:
                records = _pax(data)
                if any(key.startswith("GNU.sparse") for key in records):
                    raise UnsafeArchiveError("the archive holds a sparse file")
                if kind == b"x":
                    name = records.get("path", name)
                    if "size" in records:
                        size = _decimal(records["size"])
            continue
        plain = _plain_name(header) if name is None else name
        length = length if size is None else size
        name = size = None
        if kind in _KINDS:
            raise UnsafeArchiveError(f"the archive holds {_KINDS[kind]}: {plain[:80]!r}")
        if kind == b"5" or (kind in (b"0", b"\0") and plain.endswith("/")):
            if length:
                raise UnsafeArchiveError(f"the archive holds a folder with content: {plain[:80]!r}")
            writer.directory(plain)
        elif kind in (b"0", b"\0", b"7"):
            content = source.content(length)
            writer.file(plain, _number(header[100:108]), length, content, content.kept)
            padding = _padded(length) - length
            _expect_length(source.read(padding), padding, "after a file")
        else:
            raise UnsafeArchiveError(f"the archive holds an entry of unknown kind {kind!r}")
    if name is not None or size is not None:
        raise UnsafeArchiveError("the archive ends after a header")
    _only_zeros(source)


def _only_zeros(source: Source) -> None:
    """The end: a second block of zeros, and nothing else after it."""
    seen = 0
    while True:
        chunk = source.read(_CHUNK_BYTES)
        if not chunk:
            break
        seen += len(chunk)
        if chunk.strip(b"\0"):
            raise UnsafeArchiveError("the archive has something after its end")
        if seen > _MOST_PADDING_BYTES:
            raise UnsafeArchiveError("the archive has no end")
    if seen < _BLOCK:
        raise UnsafeArchiveError("the archive is cut short: it has no end mark")


def _expect_length(data: bytes, length: int, where: str) -> None:
    if len(data) != length:
        raise UnsafeArchiveError(f"the archive is cut short {where}")


def _padded(length: int) -> int:
    return (length + _BLOCK - 1) // _BLOCK * _BLOCK


def _checksum_fits(header: bytes) -> bool:
    try:
        told = int(header[148:156].strip(b"\0 ") or b"0", 8)
    except ValueError:
        return False
    return told == sum(header[:148]) + sum(header[156:]) + 8 * 32


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256, for sizes from 8 GiB
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40 or value > 1 << 50:
            raise UnsafeArchiveError("the archive holds a size that cannot be")
        return value
    digits = field.strip(b"\0 ") or b"0"
    # `int` would take a sign: the rest of the stream would be read for a body of a negative size.
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise UnsafeArchiveError("the archive is damaged: a number is no number")
    return int(digits, 8)


def _decimal(text: str) -> int:
    if not text.isdigit() or len(text) > 15:
        raise UnsafeArchiveError("the archive holds a size that cannot be")
    return int(text)


def _plain_name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        if prefix:
            name = prefix + b"/" + name
    return _text(name)


def _text(data: bytes) -> str:
    if b"\0" in data:
        raise UnsafeArchiveError("the archive holds a name with a zero byte")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UnsafeArchiveError("the archive holds a name that is no UTF-8") from None


def _pax(data: bytes) -> Dict[str, str]:
    records: Dict[str, str] = {}
    position = 0
    while position < len(data):
        blank = data.find(b" ", position, position + 10)
        digits = data[position:blank] if blank > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        record = data[blank + 1 : position + length]
        if length < 5 or position + length > len(data) or not record.endswith(b"\n"):
            raise UnsafeArchiveError("the archive is damaged: a pax header is not well-formed")
        key, _, value = record[:-1].partition(b"=")
        if key in (b"path", b"size"):
            records[key.decode("ascii")] = _text(value)
        else:
            records[key.decode("utf-8", "replace")] = ""
        position += length
    if "linkpath" in records:
        raise UnsafeArchiveError("the archive holds a link")
    return records


def body(stream: IO[bytes], length: int) -> Iterator[bytes]:
    """Yield `length` bytes in chunks, fewer where the stream ends before."""
    left = length
    while left:
        chunk = stream.read(min(left, _CHUNK_BYTES))
        if not chunk:
            return
        left -= len(chunk)
        yield chunk
