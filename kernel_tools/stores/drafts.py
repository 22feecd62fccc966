"""Objects that get their name at the end: sent and hashed in one pass, then renamed.

A name that holds the hash cannot be known before the last byte was read. Most stores would have to copy
the object to rename it; those with S3's RenameObject only write its entry anew.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import BinaryIO, Final, cast
from urllib.parse import quote

from kernel_tools.errors import StoreError
from kernel_tools.stores.base import NAMED_BY_KEY, SHA256_KEY, ObjectInfo, Progress, check_key
from kernel_tools.stores.client import signed_put
from kernel_tools.stores.multipart import PART_BYTES
from kernel_tools.stores.s3 import S3Store

_NOTHING_SHA256: Final = hashlib.sha256().hexdigest()
_BLOCK_BYTES: Final = 1 << 20


class DraftStore(S3Store):
    """An `S3Store` with RenameObject; implements `NamesLater`."""

    def put_draft(
        self,
        source: BinaryIO,
        draft: str,
        *,
        size_bytes: int,
        metadata: Mapping[str, str],
        name: Callable[[str], str],
        on_progress: Progress | None = None,
    ) -> ObjectInfo:
        """See `NamesLater.put_draft`."""
        metadata = {**metadata, NAMED_BY_KEY: SHA256_KEY}
        found = self._left_whole(source, draft, size_bytes)
        if found is None:
            source.seek(0)
            hashed = _Hashing(source)
            stream = cast("BinaryIO", hashed)
            etag = self._send(stream, draft, size_bytes, metadata, on_progress, resumable=True)
            found = hashed.sha256, etag
        sha256, etag = found
        try:
            key = check_key(name(sha256))
        except BaseException:
            self.remove(draft)
            raise
        if not self._rename(draft, key, etag=etag):
            self.remove(draft)
        return self.stat(key) or ObjectInfo(key, size_bytes, sha256, metadata)

    def _left_whole(self, source: BinaryIO, draft: str, size_bytes: int) -> tuple[str, str] | None:
        """Return (SHA-256, ETag) of a draft that was sent whole and not renamed; None without one."""
        left = self.stat(draft)
        if left is None or left.size_bytes != size_bytes:
            return None
        digest = hashlib.sha256()
        for offset in range(0, size_bytes, PART_BYTES):
            digest.update(self.read_range(draft, offset=offset, length=PART_BYTES))
        hashed = _Hashing(source)
        while hashed.read(_BLOCK_BYTES):
            pass
        if hashed.sha256 != digest.hexdigest():
            return None
        with self._translated(draft):
            etag = self._client.stat_object(self.bucket, draft).etag
        return hashed.sha256, str(etag).strip('"')

    def _rename(self, draft: str, key: str, *, etag: str) -> bool:
        """Give an object another name; return whether it has it, False where another one had it before.

        Args:
            draft: its key.
            key: the new one.
            etag: what the object must have, so that nobody else's draft gets this name.

        Raises:
            StoreError: the store refused.
        """
        with self._translated(key):
            answer = signed_put(
                self._client,
                bucket=self.bucket,
                key=key,
                query={"renameObject": ""},
                content_sha256=_NOTHING_SHA256,
                headers={
                    "If-None-Match": "*",
                    "x-amz-rename-source": quote(f"{self.bucket}/{draft}"),
                    "x-amz-rename-source-if-match": f'"{etag}"',
                },
            )
        if answer.status == HTTPStatus.OK:
            return True
        if self.stat(key) is None:
            raise StoreError(
                f"The store did not give {draft} its name (HTTP {answer.status}).",
                hint="Stage again; what was sent is not sent again.",
            )
        return False


class _Hashing(io.RawIOBase):
    """Passes a stream on and hashes it."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what was read."""
        return self._digest.hexdigest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count: int = self._source.readinto(view) or 0  # type: ignore[attr-defined]
        self._digest.update(view[:count])
        return count
