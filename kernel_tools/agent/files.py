"""Files that appear whole or not at all: atomic JSON, hashing, append-only log lines, UTC times."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import threading
from typing import Any, Dict, Optional, Tuple, Union

Json = Dict[str, Any]

_CHUNK_BYTES = 1 << 20


def utc_now() -> str:
    """Return the time as `2026-01-31T12:00:00+00:00`."""
    return dt.datetime.now(dt.timezone.utc).replace(microsecond=0).isoformat()


def fsync_folder(path: str) -> None:
    """Make a rename in `path` durable; some file systems cannot, which is no error."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_bytes(path: str, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` atomically: temporary file in the same folder, fsync, rename."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str, value: Any, *, mode: int = 0o644) -> None:
    """Replace `path` atomically with `value` as JSON; NaN and infinity are refused (ValueError)."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, text.encode("utf-8", "surrogatepass"), mode=mode)


def read_json(path: str) -> Optional[Json]:
    """Return the JSON object in `path`; None where it is absent, torn or no object."""
    try:
        with open(path, "rb") as stream:
            value = json.loads(stream.read().decode("utf-8", "surrogatepass"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def sha256_file(path: str) -> Tuple[str, int]:
    """Return the SHA-256 (hex) and the size in bytes of what `path` held when it was opened."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(_CHUNK_BYTES), b""):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def append_line(path: str, text: str) -> None:
    """Append one line in a single write, so that it cannot tear what other processes append."""
    line = (" ".join(text.splitlines()) + "\n").encode("utf-8", "replace")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read_slice(path: str, offset: int, length: int) -> bytes:
    """Return at most `length` bytes from `offset`; empty where the file is absent or shorter."""
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(length)
    except OSError:
        return b""


def file_size(path: str) -> int:
    """Return the size in bytes, 0 where there is no file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def is_inside(path: str, folder: str) -> bool:
    """Return whether the real `path` lies in the real `folder`."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)


def clean_relative(path: str) -> Union[str, None]:
    """Return a POSIX relative path without `.` parts, None where it is absolute or escapes."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        return None
    return "/".join(parts)
