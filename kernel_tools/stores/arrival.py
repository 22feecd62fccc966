"""An object on its way into a file, whatever store it comes from: whole and verified, or not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kernel_tools.errors import StoreError
from kernel_tools.stores.base import ObjectInfo, Progress


@contextlib.contextmanager
def arriving(
    info: ObjectInfo, destination: Path, *, on_progress: Progress | None
) -> Iterator[Callable[[bytes], None]]:
    """Yield what takes the object's blocks in order; the file has its name once they were found right.

    Raises:
        StoreError: at the end: they are not as many as `info` says, or have another SHA-256.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
    digest, done = hashlib.sha256(), 0
    try:
        with os.fdopen(handle, "wb") as file:

            def take(block: bytes) -> None:
                nonlocal done
                file.write(block)
                digest.update(block)
                done += len(block)
                if on_progress is not None:
                    on_progress(done, info.size_bytes)

            yield take
        if done != info.size_bytes or info.sha256 not in (None, digest.hexdigest()):
            raise StoreError(
                f"{info.key} arrived damaged: {done} of {info.size_bytes} bytes, or another SHA-256 "
                "than its metadata says.",
                hint="Try again; if it stays so, upload the object anew.",
            )
        Path(temporary).replace(destination)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
