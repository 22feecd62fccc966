"""Uploads that were begun in parts and never completed: which there are, under the names that they have.

The SDK asks for names as in a URL and takes every answer for such; SeaweedFS does not write them so, and
`+` or `%` would come back as something else. It also loses its place between two pages. So the request is
made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from minio import Minio

_LISTED_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True)
class Held:
    """A part that the store has."""

    size_bytes: int
    md5: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that was begun and never completed.

    Attributes:
        key: the object it would have become.
        upload_id: the store's name for it.
        parts: what is there, by part number from 1.
    """

    key: str
    upload_id: str
    parts: Mapping[int, Held] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """What its parts take in the store."""
        return sum(part.size_bytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class _Page:
    """One answer: (key, the upload's id) of each, and what asks for the next; empty at the end."""

    uploads: tuple[tuple[str, str], ...]
    after: Mapping[str, str]


def begun(client: Minio, bucket: str, prefix: str) -> tuple[Unfinished, ...]:
    """Return the uploads below a prefix that were begun and not completed, with their parts.

    Raises:
        S3Error: the store refuses.
    """
    from minio.error import S3Error

    found: list[Unfinished] = []
    after: Mapping[str, str] = {}
    while True:
        page = _page(client, bucket, prefix, after)
        for key, upload_id in page.uploads:
            try:
                parts = _parts(client, bucket, key, upload_id)
            except S3Error as error:
                if error.code != "NoSuchUpload":
                    raise
                continue  # ended between the list and the question for its parts
            found.append(Unfinished(key, upload_id, parts))
        if not page.after or page.after == after:
            return tuple(found)
        after = page.after


def abort(client: Minio, bucket: str, upload: Unfinished) -> None:
    """Remove an unfinished upload with its parts."""
    client._abort_multipart_upload(bucket, upload.key, upload.upload_id)  # noqa: SLF001


def _parts(client: Minio, bucket: str, key: str, upload_id: str) -> dict[int, Held]:
    held: dict[int, Held] = {}
    after: str | None = None
    while True:
        page = client._list_parts(  # noqa: SLF001
            bucket, key, upload_id, max_parts=_LISTED_AT_ONCE, part_number_marker=after
        )
        for part in page.parts:
            held[part.part_number] = Held(int(part.size or 0), part.etag.strip('"'))
        if not page.is_truncated or not page.parts:
            return held
        after = str(page.parts[-1].part_number)


def _page(client: Minio, bucket: str, prefix: str, after: Mapping[str, str]) -> _Page:
    query = {"uploads": "", "max-uploads": str(_LISTED_AT_ONCE), "prefix": prefix, **after}
    answer = client._execute("GET", bucket, query_params=query)  # noqa: SLF001
    root = ET.fromstring(answer.data)  # noqa: S314 - of the store whose keys we hold
    uploads = tuple(
        (_text(one, "Key"), _text(one, "UploadId")) for one in root.findall("{*}Upload")
    )
    if _text(root, "IsTruncated").lower() != "true":
        return _Page(uploads, {})
    # SeaweedFS goes by the upload's id alone, and takes no key beside it.
    marks = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
    return _Page(
        uploads, {mark: _text(root, name) for mark, name in marks.items() if _text(root, name)}
    )


def _text(element: ET.Element, name: str) -> str:
    found = element.find("{*}" + name)
    return "" if found is None else found.text or ""
