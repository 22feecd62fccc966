"""One object in parts: read, hashed and sent side by side, and gone on with after a cut.

The SDK's own upload throws away what it has sent when it fails, and cannot take up what a killed process
left. Here a part that the store holds already, by its size and MD5, is not sent again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, BinaryIO, Final

from kernel_tools.stores.base import Progress
from kernel_tools.stores.begun import Unfinished, abort, begun
from kernel_tools.stores.client import signed_put

if TYPE_CHECKING:
    from minio import Minio

# S3 allows 10,000 parts of at least 5 MiB. Two are read ahead and four are on their way: this bounds
# memory as well. A little less than 8 MiB, which SeaweedFS's buffers are doubled for: its work is 5 % less.
PART_BYTES: Final = (8 << 20) - (64 << 10)
MAX_PARTS: Final = 10_000
PARALLEL_PARTS: Final = 4
READ_AHEAD: Final = 2
_UNHASHED: Final = "UNSIGNED-PAYLOAD"

# Sends a part: the upload, the part's number from 1, its bytes. Returns its ETag, None where it was refused.
PartSender = Callable[[Unfinished, int, memoryview], "str | None"]


class CancelledError(Exception):
    """The upload was asked to end."""


class ShortSourceError(OSError):
    """The stream ended before the bytes that were announced."""


def part_bytes(size_bytes: int) -> int:
    """Return the part size of a multipart upload: `PART_BYTES`, more where 10,000 of them do not do."""
    mebibyte = 1 << 20
    needed = -(-size_bytes // MAX_PARTS)
    return PART_BYTES if needed <= PART_BYTES else -(-needed // mebibyte) * mebibyte


def read_part(source: BinaryIO, into: memoryview) -> None:
    """Fill `into` with the stream's next bytes.

    Raises:
        ShortSourceError: the stream has less.
    """
    filled = 0
    while filled < len(into):
        block = _read_into(source, into[filled:])
        if not block:
            raise ShortSourceError(f"the stream ended {len(into) - filled} bytes early")
        filled += block


def _read_into(source: BinaryIO, view: memoryview) -> int:
    if isinstance(source, (io.RawIOBase, io.BufferedIOBase)):
        return source.readinto(view) or 0
    block = source.read(len(view))
    view[: len(block)] = block
    return len(block)


def _give_back(free: queue.SimpleQueue[bytearray], buffer: bytearray, _: object) -> None:
    free.put(buffer)


def _is_gone(error: BaseException) -> bool:
    """True where the store knows the upload no more: another process completed or aborted it."""
    return getattr(error, "code", None) == "NoSuchUpload"


def unhashed(client: Minio, bucket: str) -> PartSender:
    """Return what sends parts under a signature that does not cover their bytes.

    For a store on this machine, which hears them through no wire.
    """

    def send(upload: Unfinished, number: int, block: memoryview) -> str | None:
        answer = signed_put(
            client,
            bucket=bucket,
            key=upload.key,
            query={"partNumber": str(number), "uploadId": upload.upload_id},
            content_sha256=_UNHASHED,
            body=block,
        )
        etag = answer.headers.get("ETag")
        return etag.strip('"') if answer.status == HTTPStatus.OK and etag else None

    return send


class Upload:
    """One object on its way into the store.

    Args:
        client: the SDK's.
        bucket: where to; it exists.
        key: the object.
        size_bytes: of the object.
        headers: of the object: metadata and content type.
        resumable: parts that an earlier upload of this key left are used, and what was sent stays for
            the next one when this one is cut. Only right where the key itself names the content.
        shortcut: a cheaper way for a part than the SDK's, which signs its hash; tried first.
        on_progress: bytes that the store has, and all.
    """

    def __init__(
        self,
        client: Minio,
        *,
        bucket: str,
        key: str,
        size_bytes: int,
        headers: Mapping[str, str],
        resumable: bool,
        shortcut: PartSender | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._key = key
        self._size = size_bytes
        self._headers = dict(headers)
        self._resumable = resumable
        self._shortcut = shortcut
        self._on_progress = on_progress
        self._part_bytes = part_bytes(size_bytes)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stored = 0
        self._worth_keeping = True

    def cancel(self) -> None:
        """End it, from another thread."""
        self._stop.set()

    def send(self, source: BinaryIO) -> str:
        """Read the source to its end and make the object of it; return its ETag.

        Raises:
            CancelledError: `cancel` was called.
            Exception: whatever the source or the SDK raised.
        """
        if self._size <= self._part_bytes:
            block = bytearray(self._size)
            read_part(source, memoryview(block))
            self._check()
            put = self._client._put_object  # noqa: SLF001
            etag = put(self._bucket, self._key, bytes(block), self._headers).etag
            self._note(len(block))
            return str(etag)
        upload = self._begin()
        try:
            return self._complete(upload, self._send_parts(source, upload))
        except BaseException as error:
            # One that ended elsewhere is aborted too: parts that came after it are in no list of the store.
            kept = self._resumable and self._worth_keeping and not _is_gone(error)
            if not kept:
                with contextlib.suppress(Exception):  # what it failed of is what counts
                    abort(self._client, self._bucket, upload)
            raise

    # -- inside ------------------------------------------------------------------------------------

    def _begin(self) -> Unfinished:
        from minio.error import S3Error

        left: list[Unfinished] = []
        if self._resumable:
            with contextlib.suppress(S3Error):  # keys that may write need not be allowed to list
                found = begun(self._client, self._bucket, self._key)
                left = [one for one in found if one.key == self._key]
        if left:
            return max(left, key=lambda one: one.size_bytes)
        upload_id = self._client._create_multipart_upload(  # noqa: SLF001
            self._bucket, self._key, self._headers
        )
        return Unfinished(self._key, upload_id)

    def _send_parts(self, source: BinaryIO, upload: Unfinished) -> list[str]:
        """Return the parts' ETags in order."""
        # Each buffer is filled again and again: new ones would be zeroed and given back every time.
        free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(PARALLEL_PARTS + READ_AHEAD):
            free.put(bytearray(self._part_bytes))
        sent: list[Future[str]] = []
        left = self._size
        with ThreadPoolExecutor(PARALLEL_PARTS, "kernel_tools-part") as pool:
            while left and not self._stop.is_set():
                buffer = free.get()
                block = memoryview(buffer)[: min(left, self._part_bytes)]
                try:
                    read_part(source, block)
                except BaseException:
                    self._worth_keeping = False  # parts of a source that failed or changed
                    self._stop.set()
                    raise
                left -= len(block)
                sent.append(pool.submit(self._bring, upload, len(sent) + 1, block))
                sent[-1].add_done_callback(functools.partial(_give_back, free, buffer))
        failures = [failure for one in sent if (failure := one.exception()) is not None]
        for failure in failures:
            if not isinstance(failure, CancelledError):
                raise failure
        self._check()
        return [one.result() for one in sent]

    def _bring(self, upload: Unfinished, number: int, block: memoryview) -> str:
        """Have the part in the store, sent unless it is there; return its ETag."""
        try:
            self._check()
            etag = self._already_there(upload, number, block)
            if etag is None:
                etag = self._send_part(upload, number, block)
        except BaseException:
            self._stop.set()
            raise
        self._note(len(block))
        return etag

    def _already_there(self, upload: Unfinished, number: int, block: memoryview) -> str | None:
        held = upload.parts.get(number)
        if held is None or held.size_bytes != len(block):
            return None
        md5 = hashlib.md5(block, usedforsecurity=False).hexdigest()
        return held.md5 if held.md5 == md5 else None

    def _send_part(self, upload: Unfinished, number: int, block: memoryview) -> str:
        if self._shortcut is not None:
            etag = self._shortcut(upload, number, block)
            if etag:
                return etag
            self._shortcut = None
        # Also where that was refused: the SDK reads what the store says about it.
        return str(
            self._client._upload_part(  # noqa: SLF001
                self._bucket, self._key, bytes(block), None, upload.upload_id, number
            )
        )

    def _complete(self, upload: Unfinished, etags: Sequence[str]) -> str:
        from minio.datatypes import Part

        parts = [Part(number, etag) for number, etag in enumerate(etags, 1)]
        done = self._client._complete_multipart_upload(  # noqa: SLF001
            self._bucket, self._key, upload.upload_id, parts
        )
        return str(done.etag)

    def _note(self, sent: int) -> None:
        with self._lock:
            self._stored += sent
            if self._on_progress is not None:
                self._on_progress(self._stored, self._size)

    def _check(self) -> None:
        if self._stop.is_set():
            raise CancelledError
