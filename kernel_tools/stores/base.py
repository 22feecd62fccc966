"""What an object store promises: a protocol, and the facts of one object. No network here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, Protocol, runtime_checkable
from urllib.parse import unquote

from kernel_tools.errors import InvalidArgumentError

# AWS Signature Version 4, query authentication: X-Amz-Expires is at most seven days.
MAX_EXPIRY_SECONDS: Final = 7 * 24 * 3600
# The key of an object's user metadata that holds the SHA-256 of its bytes.
SHA256_KEY: Final = "sha256"
# The same where the hash was not known when the object was begun: which hash its name has.
NAMED_BY_KEY: Final = "named-by"
# The `name` of a store that is a repository of the hub; its bucket is `ORG/REPO`.
HUB: Final = "hf"
# S3's own limit, and that of the file systems below other stores.
MOST_KEY_BYTES: Final = 1024
MOST_PART_BYTES: Final = 255

Progress = Callable[[int, int], None]
"""`on_progress(bytes done, bytes in all)`, called from a worker thread; it must not raise."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as the store describes it.

    Attributes:
        key: its name in the bucket.
        size_bytes: its size.
        sha256: lower-case hex from its metadata; None where the uploader left none.
        metadata: user metadata, keys in lower case without the `x-amz-meta-` prefix.
        modified: time of the last write, with a time zone; None where the store does not say.
    """

    key: str
    size_bytes: int
    sha256: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    modified: datetime | None = None


@runtime_checkable
class ObjectStore(Protocol):
    """A bucket; one that does not exist yet is an empty one. Every method raises `StoreUnreachableError`, `StoreAuthError` or another `StoreError`.

    An object appears whole or not at all: an upload that is interrupted or whose source fails leaves
    none, and leaves one that was there before as it was. What a cut upload had sent may stay, unlisted,
    for the next upload of the same content to go on from.
    """

    name: str
    bucket: str

    def put(
        self,
        source: Path | BinaryIO,
        key: str,
        *,
        size_bytes: int | None = None,
        metadata: Mapping[str, str] | None = None,
        on_progress: Progress | None = None,
    ) -> ObjectInfo:
        """Upload. `size_bytes` is needed for a stream, and the stream must hold exactly that much."""
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the object's facts, None where there is no such object."""
        ...

    def get(
        self, key: str, destination: Path, *, on_progress: Progress | None = None
    ) -> ObjectInfo:
        """Download by a temporary file and a rename; verified where the object carries its SHA-256.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        ...

    def read_range(self, key: str, *, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`, fewer at the object's end.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a prefix (without metadata), sorted by key."""
        ...

    def remove(self, key: str) -> None:
        """Remove an object; no error where there is none."""
        ...

    def presign_get(self, key: str, *, expires_seconds: int) -> str:
        """Return a URL that downloads the object without keys. Treat it as a secret."""
        ...

    def presign_put(self, key: str, *, expires_seconds: int) -> str:
        """Return a URL that uploads the object by one PUT without keys. Treat it as a secret.

        Raises:
            StoreError: the store has no such URLs, as the hub has none.
        """
        ...


@runtime_checkable
class KeepsUnfinished(Protocol):
    """A store where a cut upload leaves parts that are listed nowhere and cost all the same."""

    def unfinished(self, prefix: str = "") -> tuple[tuple[str, str, int], ...]:
        """Return (key, the upload's id, bytes) of each."""
        ...

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Remove one with its parts."""
        ...


@runtime_checkable
class NamesLater(Protocol):
    """A store that can be sent an object whose name is not known before its last byte was read."""

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
        """Upload under `draft`, hashed on the way, and rename it then.

        What was sent before a cut stays for the next call with the same draft to go on from.

        Args:
            source: read to its end, once.
            draft: the key until then. It stands for the files that the object is made of.
            size_bytes: what the source holds.
            metadata: of the object.
            name: called with the SHA-256 after the last byte; returns the key, which must end in
                `<sha256>.<format>`. What it raises leaves nothing in the store.
            on_progress: as for `put`.

        Returns:
            The object. Where another process was first to give that name, its object.
        """
        ...


def sha256_of(key: str, metadata: Mapping[str, str]) -> str | None:
    """Return the SHA-256 that an object's metadata tell, or the name that `put_draft` gave it."""
    if metadata.get(NAMED_BY_KEY) == SHA256_KEY:
        return key.rpartition("/")[2].partition(".")[0]
    return metadata.get(SHA256_KEY)


def check_expiry(expires_seconds: int) -> int:
    """Return the life of a presigned URL, in seconds.

    Raises:
        InvalidArgumentError: it is below 1 s or above 7 days, which no S3 store accepts.
    """
    if not 1 <= expires_seconds <= MAX_EXPIRY_SECONDS:
        raise InvalidArgumentError(
            f"A presigned URL can live for 1 to {MAX_EXPIRY_SECONDS} s (7 days), not {expires_seconds} s.",
            hint="Ask for less; it is renewed at every contact.",
        )
    return expires_seconds


def check_key(key: str) -> str:
    """Return an object key that every store and every URL on the way carries unchanged.

    Raises:
        InvalidArgumentError: over 1,024 bytes, or 255 in a part; a part that is empty, `.` or `..`, written
            as such or with `%2e` (proxies and stores rewrite these); a backslash, or what cannot be
            printed: controls, line separators, marks that turn the writing, halves of a surrogate pair.
    """
    parts = key.split("/")
    if (
        not all(character.isprintable() and character != "\\" for character in key)
        or len(key.encode()) > MOST_KEY_BYTES
        or any(len(part.encode()) > MOST_PART_BYTES for part in parts)
        or any(unquote(part) in {"", ".", ".."} for part in parts)
    ):
        raise InvalidArgumentError(
            f"{key if len(key) < 100 else key[:100] + '...'!r} is no usable object name.",
            hint="Give one like datasets/coins/coins.tar: no empty, '.' or '..' part, no backslash, nothing that"
            f" cannot be printed, at most {MOST_KEY_BYTES} bytes and {MOST_PART_BYTES} between two slashes.",
        )
    return key
