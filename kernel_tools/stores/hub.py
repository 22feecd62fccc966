"""A repository of the Hugging Face Hub as an object store: one file an object, one commit a change.

With `hub_failures` the only module of this package that imports `huggingface_hub`, and only when it is used. An
upload becomes visible by its commit, so an object is there whole or not at all. The hub keeps no metadata
of a file: they lie in `.kernel_tools/<key>.json`, written by the same commit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, cast

from kernel_tools.errors import (
    InvalidArgumentError,
    MissingDependencyError,
    ObjectNotFoundError,
    StoreError,
)
from kernel_tools.redact import register_secret
from kernel_tools.settings import Secret, Settings
from kernel_tools.stores.arrival import arriving
from kernel_tools.stores.base import HUB, SHA256_KEY, ObjectInfo, Progress, check_expiry, check_key
from kernel_tools.stores.hub_failures import no_object, translated

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFIX: Final = "hf://"
NOTES: Final = ".kernel_tools"
_NAME: Final = r"[A-Za-z0-9][\w.-]*"
_PLACE: Final = re.compile(rf"hf://(?P<repository>{_NAME}/{_NAME})(?:/(?P<key>.+))?")
_PIECE_BYTES: Final = 16 << 20
# The client goes back to the beginning twice before it sends: after a sample, and after the hash.
_SENT_AFTER: Final = 2


def parse_place(text: str) -> tuple[str, str | None]:
    """Return (`ORG/REPO`, the object in it or None) of `hf://ORG/REPO[/FILE]`.

    Raises:
        InvalidArgumentError: it is not of that form.
    """
    found = _PLACE.fullmatch(text)
    if found is None:
        raise InvalidArgumentError(
            f"{text} is no place on the hub.", hint="Write hf://ORG/REPO or hf://ORG/REPO/FILE.tar."
        )
    return found["repository"], found["key"]


class HubStore:
    """A repository, of data sets or of weights; implements `ObjectStore`, but for `presign_put`, which the hub lacks.

    Args:
        repository: `ORG/REPO`; created at the first upload if it is absent, private.
        token: an access token that may write to it; None for what anybody may read.
        endpoint: of the hub (default: HF_ENDPOINT, then huggingface.co).
        kind: `model` for a repository of weights.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
    """

    def __init__(
        self,
        repository: str,
        *,
        token: Secret | None = None,
        endpoint: str | None = None,
        kind: Literal["dataset", "model"] = "dataset",
    ) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise MissingDependencyError(
                "A data set repository on the hub needs huggingface_hub, which is not installed.",
                hint='Type: pip install "remote-kernel-tools[hub]"',
            ) from error
        self.name = HUB
        self.bucket = repository
        self._kind = kind
        self._has_token = token is not None
        # False: a token that somebody once left on this machine is not taken without being named.
        self._api: HfApi = HfApi(endpoint=endpoint, token=token.reveal() if token else False)
        self.endpoint = str(self._api.endpoint)

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        repository: str,
        *,
        kind: Literal["dataset", "model"] = "dataset",
    ) -> HubStore:
        """Open a repository with `HF_TOKEN` and `HF_ENDPOINT` from the environment or `.env`."""
        return cls(
            repository,
            token=settings.secret("HF_TOKEN"),
            endpoint=settings.get("HF_ENDPOINT"),
            kind=kind,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({PREFIX}{self.bucket})"

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
        """See `ObjectStore.put`. The source is read twice: the hub asks for the hash before the bytes."""
        from huggingface_hub import CommitOperationAdd

        _check(key)
        if isinstance(source, Path):
            with source.open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                return self.put(
                    file, key, size_bytes=size_bytes, metadata=metadata, on_progress=on_progress
                )
        if size_bytes is None:
            raise StoreError(f"The size of the stream for {key} must be given.")
        with contextlib.ExitStack() as stack:
            stream = _Upload(_seekable(source, size_bytes, stack), size_bytes, on_progress)
            addition = CommitOperationAdd(key, cast("BinaryIO", stream))
            if addition.upload_info.size != size_bytes:
                raise StoreError(f"{key} has {addition.upload_info.size} bytes, not {size_bytes}.")
            notes = dict(metadata or {})
            additions = [addition]
            if notes:
                note = json.dumps(notes, sort_keys=True).encode()
                additions.append(CommitOperationAdd(_note_of(key), note))
            with self._translated(key):
                self._api.create_repo(
                    self.bucket, repo_type=self._kind, private=True, exist_ok=True
                )
                self._api.create_commit(
                    self.bucket, additions, commit_message=f"Stage {key}", repo_type=self._kind
                )
            stream.finish()
        return self.stat(key) or ObjectInfo(key, size_bytes, metadata=notes)

    def stat(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.stat`."""
        _check(key)
        try:
            with self._translated(key):
                found = {
                    one.path: one
                    for one in self._api.get_paths_info(
                        self.bucket, [key, _note_of(key)], expand=True, repo_type=self._kind
                    )
                    if hasattr(one, "size")
                }
        except ObjectNotFoundError:
            return None
        if key not in found:
            return None
        metadata = self._note(key) if _note_of(key) in found else {}
        return _info(found[key], metadata)

    def get(
        self, key: str, destination: Path, *, on_progress: Progress | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.get`."""
        info = self.stat(key)
        if info is None:
            raise self._no_object(key)
        done = 0
        with arriving(info, destination, on_progress=on_progress) as take:
            while done < info.size_bytes:
                block = self.read_range(key, offset=done, length=_PIECE_BYTES)
                if not block:
                    break
                take(block)
                done += len(block)
        return info

    def read_range(self, key: str, *, offset: int, length: int) -> bytes:
        """See `ObjectStore.read_range`."""
        _check(key)
        return self._read(key, offset, length)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        try:
            with self._translated(prefix):
                found = list(
                    self._api.list_repo_tree(self.bucket, recursive=True, repo_type=self._kind)
                )
        except ObjectNotFoundError:
            return  # the repository is made by the first upload
        for one in sorted(found, key=lambda entry: entry.path):
            hidden = one.path.startswith((f"{NOTES}/", ".git"))
            if hasattr(one, "size") and one.path.startswith(prefix) and not hidden:
                yield _info(one, {})

    def remove(self, key: str) -> None:
        """See `ObjectStore.remove`. Earlier commits go on holding it until the history is squashed."""
        from huggingface_hub import CommitOperationDelete

        _check(key)
        info = self.stat(key)
        if info is None:
            return
        paths = [key, *([_note_of(key)] if info.metadata else [])]
        with self._translated(key):
            self._api.create_commit(
                self.bucket,
                [CommitOperationDelete(path, is_folder=False) for path in paths],
                commit_message=f"Remove {key}",
                repo_type=self._kind,
            )

    def presign_get(self, key: str, *, expires_seconds: int) -> str:
        """See `ObjectStore.presign_get`. How long the link lives is the hub's to say: about an hour."""
        _check(key)
        check_expiry(expires_seconds)
        with self._translated(key):
            where = str(self._api.get_hf_file_metadata(url=self._url(key)).location)
        if where == self._url(key) and self._has_token:
            raise StoreError(
                f"The hub gives no link to {key}, which it does not keep as a large file.",
                hint="Stage it as a .tar, or read it with HF_TOKEN.",
            )
        register_secret(where.partition("?")[2])
        return where

    def presign_put(self, key: str, *, expires_seconds: int) -> str:
        """The hub has no links for uploads.

        Raises:
            StoreError: always.
        """
        check_expiry(expires_seconds)
        raise StoreError(
            f"The hub has no link to upload {_check(key)} by.",
            hint=f"Push with a token: --push-to {PREFIX}{self.bucket}.",
        )

    # -- inside ------------------------------------------------------------------------------------

    def _url(self, key: str) -> str:
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self.bucket, key, repo_type=self._kind, endpoint=self.endpoint))

    def _note(self, key: str) -> dict[str, str]:
        try:
            note = json.loads(self._read(_note_of(key), 0, 1 << 20))
            return {str(name): str(value) for name, value in note.items()}
        except (ObjectNotFoundError, ValueError, AttributeError):
            return {}

    def _read(self, path: str, offset: int, length: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers(token=self._api.token)
        headers |= {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        with self._translated(path):
            reply = get_session().get(self._url(path), headers=headers)
            if reply.status_code == 416:
                return b""
            hf_raise_for_status(reply)
        partial = reply.status_code == 206
        return bytes(reply.content if partial else reply.content[offset : offset + length])

    def _no_object(self, key: str) -> ObjectNotFoundError:
        return no_object(f"{PREFIX}{self.bucket}", key)

    def _translated(self, key: str) -> contextlib.AbstractContextManager[None]:
        return translated(
            f"{PREFIX}{self.bucket}", key, endpoint=self.endpoint, has_token=self._has_token
        )


class _Upload(io.BufferedIOBase):
    """What the client reads from its beginning: to look at it, to hash it, and then to send it."""

    def __init__(self, source: BinaryIO, total: int, on_progress: Progress | None) -> None:
        self._source = source
        self._total = total
        self._on_progress = on_progress
        self._begun = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._source.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._begun += (offset, whence) == (0, io.SEEK_SET)
        return self._source.seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        block = self._source.read(-1 if size is None else size)
        if self._on_progress is not None and self._begun >= _SENT_AFTER:
            self._on_progress(self._source.tell(), self._total)
        return block

    def finish(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._total, self._total)


def _seekable(source: BinaryIO, size_bytes: int, stack: contextlib.ExitStack) -> BinaryIO:
    """Return the source, or a copy of it on disk where it can be read only once."""
    if source.seekable():
        return source
    copy = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack is its context
    left = size_bytes
    while left and (block := source.read(min(left, 1 << 20))):
        copy.write(block)
        left -= len(block)
    if left:
        raise StoreError(f"The stream ended {left} bytes early.")
    copy.seek(0)
    return cast("BinaryIO", copy)


def _check(key: str) -> str:
    if key.partition("/")[0] in {NOTES, ".git"}:
        raise InvalidArgumentError(
            f"{key!r} is no usable object name.", hint=f"{NOTES} and .git are not for data sets."
        )
    return check_key(key)


def _note_of(key: str) -> str:
    return f"{NOTES}/{key}.json"


def _info(found: Any, metadata: Mapping[str, str]) -> ObjectInfo:
    sha256 = metadata.get(SHA256_KEY) or (found.lfs.sha256 if found.lfs is not None else None)
    modified = found.last_commit.date if found.last_commit is not None else None
    return ObjectInfo(found.path, int(found.size), sha256, metadata, modified)
