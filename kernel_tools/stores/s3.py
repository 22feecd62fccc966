"""Any S3-compatible store through the minio SDK, with no call that only a MinIO server knows.

With `client`, `multipart` and `failures` the only module that imports `minio`, and only when a store is
opened. Foreign exceptions end here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

from kernel_tools.errors import (
    ConfigurationError,
    ObjectNotFoundError,
    StoreError,
)
from kernel_tools.redact import register_secret
from kernel_tools.settings import Secret, Settings
from kernel_tools.stores import multipart
from kernel_tools.stores.arrival import arriving
from kernel_tools.stores.base import (
    SHA256_KEY,
    ObjectInfo,
    Progress,
    check_expiry,
    check_key,
    sha256_of,
)
from kernel_tools.stores.begun import Unfinished, abort, begun
from kernel_tools.stores.client import (
    DEFAULT_REGION,
    READ_SECONDS,
    is_loopback,
    normal_endpoint,
    open_client,
)
from kernel_tools.stores.failures import no_object, translated

DEFAULT_BUCKET: Final = "dataset"


class S3Store:
    """A bucket of an S3-compatible store; implements `ObjectStore`. Safe to share between threads.

    Args:
        endpoint: `host:port`, or a URL with its scheme. Without a scheme: https, but http for loopback.
        access_key: its access key.
        secret_key: its secret key.
        bucket: created at the first upload if it is absent.
        public_endpoint: what presigned URLs name and are signed for; default `endpoint`.
        region: default `us-east-1`, for AWS hosts found out by asking.
        name: how references and messages call it.

    Raises:
        MissingDependencyError: the minio SDK is not installed.
        ConfigurationError: an endpoint is malformed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        access_key: Secret,
        secret_key: Secret,
        bucket: str = DEFAULT_BUCKET,
        public_endpoint: str | None = None,
        region: str | None = None,
        name: str = "s3",
    ) -> None:
        self.name = name
        self.bucket = bucket
        self.endpoint = normal_endpoint(endpoint, "MINIO_ENDPOINT")
        signed_for = normal_endpoint(public_endpoint or endpoint, "MINIO_PUBLIC_ENDPOINT")
        self._bucket_is_there = False
        self._on_this_machine = is_loopback(urlsplit(self.endpoint).hostname or "")
        self._client = open_client(self.endpoint, access_key, secret_key, region)
        self._signer = (
            self._client
            if signed_for == self.endpoint
            else open_client(signed_for, access_key, secret_key, region or DEFAULT_REGION)
        )

    @classmethod
    def from_settings(cls, settings: Settings) -> S3Store:
        """Open the store that `MINIO_*` describes.

        Raises:
            ConfigurationError: the endpoint or a key is not set.
        """
        endpoint = settings.get("MINIO_ENDPOINT")
        if endpoint is None:
            raise ConfigurationError(
                "MINIO_ENDPOINT is not set, so there is no object store to use.",
                hint="Set MINIO_ENDPOINT, MINIO_ACCESS_KEY and MINIO_SECRET_KEY in the environment or .env.",
            )
        return cls(
            endpoint,
            access_key=settings.require_secret("MINIO_ACCESS_KEY"),
            secret_key=settings.require_secret("MINIO_SECRET_KEY"),
            bucket=settings.get("MINIO_BUCKET") or DEFAULT_BUCKET,
            public_endpoint=settings.get("MINIO_PUBLIC_ENDPOINT"),
            region=settings.get("MINIO_REGION"),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint}, bucket={self.bucket!r})"

    # -- ObjectStore -------------------------------------------------------------------------------

    def put(
        self,
        source: Path | BinaryIO,
        key: str,
        *,
        size_bytes: int | None = None,
        metadata: Mapping[str, str] | None = None,
        on_progress: Progress | None = None,
    ) -> ObjectInfo:
        """See `ObjectStore.put`. Parts are read, hashed for the signature and sent side by side."""
        check_key(key)
        if isinstance(source, Path):
            with source.open("rb") as file:
                return self.put(
                    file,
                    key,
                    size_bytes=os.fstat(file.fileno()).st_size,
                    metadata=metadata,
                    on_progress=on_progress,
                )
        if size_bytes is None:
            raise StoreError(f"The size of the stream for {key} must be given.")
        metadata = dict(metadata or {})
        try:
            # Only of a key that names its content can what another process began be gone on with.
            resumable = _names_its_content(key, metadata)
            self._send(source, key, size_bytes, metadata, on_progress, resumable=resumable)
        except StoreError:
            there = self.stat(key) if _names_its_content(key, metadata) else None
            if there is None or (there.sha256, there.size_bytes) != (
                metadata[SHA256_KEY],
                size_bytes,
            ):
                raise
            return there  # another process went on with the same upload, and was first
        return self.stat(key) or ObjectInfo(key, size_bytes, metadata=metadata)

    def stat(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.stat`."""
        check_key(key)
        try:
            with self._translated(key):
                found = self._client.stat_object(self.bucket, key)
        except ObjectNotFoundError:
            return None
        metadata = _user_metadata(found.metadata or {})
        return ObjectInfo(
            key, int(found.size or 0), sha256_of(key, metadata), metadata, found.last_modified
        )

    def get(
        self, key: str, destination: Path, *, on_progress: Progress | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.get`."""
        info = self.stat(key)
        if info is None:
            raise no_object(endpoint=self.endpoint, bucket=self.bucket, key=key)
        with (
            arriving(info, destination, on_progress=on_progress) as take,
            self._translated(key),
        ):
            response = self._client.get_object(self.bucket, key)
            try:
                for block in response.stream(1 << 20):
                    take(block)
            finally:
                response.close()
                response.release_conn()
        return info

    def read_range(self, key: str, *, offset: int, length: int) -> bytes:
        """See `ObjectStore.read_range`."""
        check_key(key)
        with self._translated(key):
            response = self._client.get_object(self.bucket, key, offset=offset, length=length)
            try:
                return bytes(response.read())
            finally:
                response.close()
                response.release_conn()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        try:
            with self._translated(prefix):
                for found in self._client.list_objects(self.bucket, prefix=prefix, recursive=True):
                    if not found.is_dir:
                        yield ObjectInfo(
                            str(found.object_name),
                            int(found.size or 0),
                            modified=found.last_modified,
                        )
        except ObjectNotFoundError:
            return  # the bucket is made by the first upload

    def remove(self, key: str) -> None:
        """See `ObjectStore.remove`."""
        check_key(key)
        with contextlib.suppress(ObjectNotFoundError), self._translated(key):
            self._client.remove_object(self.bucket, key)

    def presign_get(self, key: str, *, expires_seconds: int) -> str:
        """See `ObjectStore.presign_get`. No request is made (but for the region of an AWS host)."""
        check_key(key)
        expires = timedelta(seconds=check_expiry(expires_seconds))
        with self._translated(key):
            return _as_secret(self._signer.presigned_get_object(self.bucket, key, expires=expires))

    def presign_put(self, key: str, *, expires_seconds: int) -> str:
        """See `ObjectStore.presign_put`. The bucket is made, since the holder of the URL cannot."""
        check_key(key)
        expires = timedelta(seconds=check_expiry(expires_seconds))
        self._ensure_bucket()
        with self._translated(key):
            return _as_secret(self._signer.presigned_put_object(self.bucket, key, expires=expires))

    def begin_upload(self, key: str) -> str:
        """Begin an upload in parts for somebody without keys; return its id."""
        check_key(key)
        self._ensure_bucket()
        with self._translated(key):
            return str(self._client._create_multipart_upload(self.bucket, key, {}))  # noqa: SLF001

    def presign_part(self, key: str, upload_id: str, number: int, *, expires_seconds: int) -> str:
        """Return a URL that uploads one part, from 1, without keys. Treat it as a secret."""
        query = {"partNumber": str(number), "uploadId": upload_id}
        return self._presign("PUT", key, query, expires_seconds)

    def presign_completion(self, key: str, upload_id: str, *, expires_seconds: int) -> str:
        """Return a URL whose POST makes the object of its parts. Treat it as a secret."""
        return self._presign("POST", key, {"uploadId": upload_id}, expires_seconds)

    def unfinished(self, prefix: str = "") -> tuple[tuple[str, str, int], ...]:
        """Return (key, the upload's id, bytes) of what was begun in parts and never completed."""
        try:
            with self._translated(prefix):
                return tuple(
                    (one.key, one.upload_id, one.size_bytes)
                    for one in begun(self._client, self.bucket, prefix)
                )
        except ObjectNotFoundError:
            return ()

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Remove what was sent of an upload that was never completed."""
        with contextlib.suppress(ObjectNotFoundError), self._translated(key):
            abort(self._client, self.bucket, Unfinished(key, upload_id))

    # -- inside ------------------------------------------------------------------------------------

    def _send(
        self,
        source: BinaryIO,
        key: str,
        size_bytes: int,
        metadata: Mapping[str, str],
        on_progress: Progress | None,
        *,
        resumable: bool,
    ) -> str:
        """Upload a stream; return the object's ETag."""
        self._ensure_bucket()
        upload = multipart.Upload(
            self._client,
            bucket=self.bucket,
            key=key,
            size_bytes=size_bytes,
            headers=_headers(metadata),
            resumable=resumable,
            shortcut=self._shortcut() if size_bytes > multipart.PART_BYTES else None,
            on_progress=on_progress,
        )
        with self._translated(key):
            return _run_interruptibly(lambda: upload.send(source), upload.cancel)

    def _shortcut(self) -> multipart.PartSender | None:
        """Return a cheaper way for parts than the SDK's, where there is one."""
        return multipart.unhashed(self._client, self.bucket) if self._on_this_machine else None

    def _presign(self, method: str, key: str, query: dict[str, str], expires_seconds: int) -> str:
        expires = timedelta(seconds=check_expiry(expires_seconds))
        with self._translated(key):
            return str(
                self._signer.get_presigned_url(
                    method,
                    self.bucket,
                    check_key(key),
                    expires=expires,
                    extra_query_params=query,
                )
            )

    def _ensure_bucket(self) -> None:
        if self._bucket_is_there:
            return
        with self._translated(self.bucket):
            if not self._client.bucket_exists(self.bucket):
                from minio.error import S3Error

                try:
                    self._client.make_bucket(self.bucket)
                except S3Error as error:
                    if error.code not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                        raise
        self._bucket_is_there = True

    def _translated(self, key: str) -> contextlib.AbstractContextManager[None]:
        return translated(
            endpoint=self.endpoint,
            bucket=self.bucket,
            key=key,
            ask_again=lambda: next(iter(self._client.list_objects(self.bucket)), None),
        )


def _run_interruptibly(work: Callable[[], str], cancel: Callable[[], None]) -> str:
    """Run `work` in a thread, so that Ctrl-C here can end it in order and no half of an object is left."""
    failure: list[BaseException] = []
    result: list[str] = []
    ended = threading.Event()

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
            failure.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name="kernel_tools-upload", daemon=True).start()
    try:
        # Not by `join`: interrupted, it takes the thread for ended (CPython before 3.13, bpo-45274).
        while not ended.wait(0.1):
            pass
    except BaseException:
        cancel()
        ended.wait(READ_SECONDS)
        raise
    if failure:
        raise failure[0]
    return result[0]


def _headers(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that an object is made with."""
    return {
        "Content-Type": "application/octet-stream",
        **{f"x-amz-meta-{name}": value for name, value in metadata.items()},
    }


def _names_its_content(key: str, metadata: Mapping[str, str]) -> bool:
    sha256 = metadata.get(SHA256_KEY)
    return sha256 is not None and sha256 in key


def _user_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    prefix = "x-amz-meta-"
    return {
        name.lower()[len(prefix) :]: value
        for name, value in headers.items()
        if name.lower().startswith(prefix)
    }


def _as_secret(url: str) -> str:
    """Register the signature of a URL, so that not even a fragment of it is shown."""
    register_secret(url.partition("X-Amz-Signature=")[2].partition("&")[0])
    return url
