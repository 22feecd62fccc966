"""`stage`: the whole of `%stage_dataset`, from a folder, an archive or an object to a reference.

The object's name is the hash of its bytes, so the source is read twice: once for the hash, which tells
whether anything must be sent at all, and once for the upload, where the bytes are hashed again on their
way and refused if they differ. Where the store has nothing of that name yet and can name an object after
it was sent, there is nothing to be saved by knowing the hash first, and one pass does it all.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast
from urllib.parse import quote, unquote

from kernel_tools.datasets.archive import (
    ArchiveFacts,
    archive_format,
    archive_stem,
    first_member,
    inspect_archive,
    scan_folder,
)
from kernel_tools.datasets.reference import (
    DatasetReference,
    DatasetRegistry,
    check_name,
    check_root,
    name_from,
)
from kernel_tools.datasets.stream import (
    VerifyingReader,
    blocks_of,
    file_blocks,
    files_fingerprint,
    hash_blocks,
)
from kernel_tools.errors import (
    InvalidArgumentError,
    ObjectNotFoundError,
    StagingError,
    StoreError,
)
from kernel_tools.stores.base import (
    HUB,
    SHA256_KEY,
    KeepsUnfinished,
    NamesLater,
    ObjectInfo,
    ObjectStore,
    Progress,
    check_key,
)

# How the name of an object begins that was sent and has no name of its own yet.
DRAFT: Final = "draft-"


def stage(
    path: Path | str | None = None,
    *,
    store: ObjectStore | None,
    project_dir: Path,
    name: str | None = None,
    object_name: str | None = None,
    expected_root: str | None = None,
    sha256: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> DatasetReference:
    """Bring a data set into the store, once, and return its reference.

    Args:
        path: a folder or an archive; None for an object that is there already (`object_name`).
        store: where to; None is enough for a dry run of a path.
        project_dir: whose `.kernel_tools/datasets.json` gets the reference; relative paths start here.
        name: what to call it (default: from the file or folder name).
        object_name: the object's key (default: `datasets/<name>/<sha256>.<format>`; on the hub
            `<name>.<format>`, whose history keeps the earlier ones).
        expected_root: where it unpacks to in a run's work folder (default: `data/<top folder>`).
        sha256: what the archive must have.
        force: stage files that look like credentials; replace another object under `object_name`.
        dry_run: read and hash, but send and record nothing.
        on_progress: bytes done, and in all (counted twice where the hash is made first).

    Raises:
        InvalidArgumentError: arguments that do not go together.
        StagingError: the data are not fit to be staged.
        StoreError: the store refused, failed, or has no such object.
    """
    if name is not None:
        check_name(name)
    if expected_root is not None:
        expected_root = check_root(expected_root)
    if object_name is not None:
        check_key(object_name)
    wanted = None if sha256 is None else sha256.strip().lower()
    if wanted is not None and (len(wanted) != 64 or set(wanted) - set("0123456789abcdef")):
        raise InvalidArgumentError(
            f"--sha256 {sha256!r} is no SHA-256.", hint="It has 64 hexadecimal digits."
        )
    if path is None:
        if object_name is None or store is None:
            raise InvalidArgumentError(
                "Nothing to stage was named.",
                hint="Give a folder or an archive, or --object-name for an object that is there.",
            )
        reference = _existing(store, object_name, name, expected_root, wanted)
    else:
        source = _open_source(project_dir / Path(path).expanduser(), force=force)
        reference = _upload(
            source, store, name, object_name, expected_root, wanted,
            force=force, dry_run=dry_run, on_progress=on_progress,
        )  # fmt: skip
    if not dry_run:
        DatasetRegistry(project_dir).save(reference)
    return reference


# -- from a path -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """A folder or archive file, behind one face."""

    path: Path
    stem: str
    format: str
    size_bytes: int
    fingerprint: Callable[[], str]
    hash: Callable[[Callable[[int], None]], tuple[str, int]]
    open: Callable[[], BinaryIO]
    facts: Callable[[], ArchiveFacts]


def _open_source(path: Path, *, force: bool) -> _Source:
    if path.is_dir():
        folder = scan_folder(path, force=force)
        return _Source(
            path=path,
            stem=path.resolve().name,
            format="tar",
            size_bytes=folder.size_bytes,
            fingerprint=lambda: files_fingerprint(member.path for member in folder.members),
            hash=lambda tick: hash_blocks(blocks_of(folder.open()), on_bytes=tick),
            open=lambda: cast("BinaryIO", folder.open()),
            facts=lambda: folder.facts,
        )
    if not path.exists():
        raise StagingError(f"There is no {path}.", hint="Give a folder or an archive that exists.")
    kind = archive_format(path.name)

    def facts() -> ArchiveFacts:
        with path.open("rb") as file:
            return inspect_archive(file, kind=kind, what=str(path), force=force)

    return _Source(
        path=path,
        stem=archive_stem(path.name),
        format=kind,
        size_bytes=path.stat().st_size,
        fingerprint=lambda: files_fingerprint([path]),
        hash=lambda tick: hash_blocks(file_blocks(path), on_bytes=tick),
        open=lambda: path.open("rb"),
        facts=facts,
    )


def _upload(
    source: _Source,
    store: ObjectStore | None,
    name: str | None,
    object_name: str | None,
    expected_root: str | None,
    wanted: str | None,
    *,
    force: bool,
    dry_run: bool,
    on_progress: Progress | None,
) -> DatasetReference:
    total = 2 * source.size_bytes

    def tick(done: int) -> None:
        if on_progress is not None:
            on_progress(done, total)

    name = name_from(source.stem) if name is None else name
    if object_name is None and wanted is None and not dry_run:
        sent = _upload_draft(source, store, name, expected_root, on_progress)
        if sent is not None:
            return sent
    digest, size_bytes = source.hash(tick)
    if wanted not in (None, digest):
        raise StagingError(
            f"{source.path} has the SHA-256 {digest}, not the one given.",
            hint="Download or pack it again, or give the right --sha256.",
        )
    key = object_name or _key(store, name, digest, source.format)
    there = store.stat(key) if store is not None else None
    if there is not None and (there.sha256, there.size_bytes) != (digest, size_bytes):
        if not force and object_name is not None:
            raise StagingError(
                f"Another object is already called {key}.",
                hint="Leave --object-name out, choose another, or replace it with --force.",
            )
        there = None
    facts = (_facts_in(there) if there is not None else None) or source.facts()
    root = expected_root or facts.root
    if root is None:
        raise _no_root(source.path.name, facts)
    if there is None and store is not None and not dry_run:
        with source.open() as stream:
            verified = VerifyingReader(
                stream, size_bytes=size_bytes, sha256=digest, what=str(source.path)
            )
            store.put(
                cast("BinaryIO", verified),
                key,
                size_bytes=size_bytes,
                metadata=_metadata(digest, facts),
                on_progress=lambda done, _: tick(size_bytes + done),
            )
    tick(total)
    info = ObjectInfo(key, size_bytes, digest)
    return _reference(source, store, info, name=name, root=root, facts=facts)


def _upload_draft(
    source: _Source,
    store: ObjectStore | None,
    name: str,
    expected_root: str | None,
    on_progress: Progress | None,
) -> DatasetReference | None:
    """Pack, hash and send in one pass; None where the hash should be known first.

    That is so where the store holds something of this name, which most often is the same, and where it
    cannot name an object that it has.
    """
    if store is None or not isinstance(store, NamesLater) or _holds(store, name):
        return None
    draft = f"datasets/{name}/{DRAFT}{source.fingerprint()}.{source.format}"
    facts = source.facts()
    root = expected_root or facts.root
    if root is None:
        raise _no_root(source.path.name, facts)

    def key(digest: str) -> str:
        if source.fingerprint() not in draft:
            raise StagingError(
                f"{source.path} changed while it was being uploaded; nothing was stored.",
                hint="Stage again once nothing writes to it.",
            )
        return _key(store, name, digest, source.format)

    try:
        with source.open() as stream:
            info = store.put_draft(
                stream, draft, size_bytes=source.size_bytes, metadata=_facts_metadata(facts),
                name=key, on_progress=on_progress,
            )  # fmt: skip
    except StoreError:
        if store.stat(draft) is not None or _holds(store, name):
            return None  # another process went on with the same draft, and was first
        raise
    return _reference(source, store, info, name=name, root=root, facts=facts)


def _holds(store: ObjectStore, name: str) -> bool:
    """True where the store has something of a data set, whole or begun, under a name with its hash."""
    prefix = f"datasets/{name}/"

    def keys() -> Iterator[str]:
        yield from (found.key for found in store.list(prefix))
        if isinstance(store, KeepsUnfinished):
            yield from (key for key, _, _ in store.unfinished(prefix))

    return any(not key.startswith(prefix + DRAFT) for key in keys())


def _reference(
    source: _Source,
    store: ObjectStore | None,
    info: ObjectInfo,
    *,
    name: str,
    root: str,
    facts: ArchiveFacts,
) -> DatasetReference:
    assert info.sha256 is not None
    return DatasetReference(
        name=name,
        object=info.key,
        size_bytes=info.size_bytes,
        sha256=info.sha256,
        expected_root=check_root(root),
        format=source.format,
        file_count=facts.file_count,
        content_bytes=facts.content_bytes,
        store=store.name if store is not None else "none",
        bucket=store.bucket if store is not None else "",
        source_path=str(source.path.resolve()),
    )


def _key(store: ObjectStore | None, name: str, digest: str, kind: str) -> str:
    if store is not None and store.name == HUB:
        return f"{name}.{kind}"
    return f"datasets/{name}/{digest}.{kind}"


# -- from an object --------------------------------------------------------------------------------


def _existing(
    store: ObjectStore, key: str, name: str | None, expected_root: str | None, wanted: str | None
) -> DatasetReference:
    info = store.stat(key)
    if info is None:
        store.read_range(key, offset=0, length=1)  # says whether it is the bucket that is missing
        raise ObjectNotFoundError(
            f"There is no object {key} in bucket {store.bucket}.",
            hint="Check the name, or stage the folder or archive itself.",
        )
    if wanted is not None and info.sha256 not in (None, wanted):
        raise StagingError(
            f"{key} has the SHA-256 {info.sha256} by its metadata, not the one given."
        )
    digest = wanted or info.sha256
    if digest is None:
        raise StagingError(
            f"{key} does not say what its SHA-256 is, so nobody could check what arrives.",
            hint="Give it with --sha256.",
        )
    kind = archive_format(key)
    facts = _facts_in(info)
    if facts is None:
        facts = _read_facts(store, info, kind)
    root = expected_root or facts.root
    if root is None:
        raise _no_root(key, facts)
    return DatasetReference(
        name=name_from(archive_stem(key.rpartition("/")[2])) if name is None else name,
        object=key,
        size_bytes=info.size_bytes,
        sha256=digest,
        expected_root=check_root(root),
        format=kind,
        file_count=facts.file_count,
        content_bytes=facts.content_bytes,
        store=store.name,
        bucket=store.bucket,
        source_path=None,
    )


def _read_facts(store: ObjectStore, info: ObjectInfo, kind: str) -> ArchiveFacts:
    """Read as little of an object as tells its top folder: a zip's list, a tar's first member."""
    file = cast("BinaryIO", io.BufferedReader(_RangeReader(store, info), 1 << 16))
    if kind == "zip":
        return inspect_archive(file, kind=kind, what=info.key, force=True)
    return first_member(file, kind=kind, what=info.key)


class _RangeReader(io.RawIOBase):
    """A seekable view of an object by ranged reads."""

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self._store = store
        self._info = info
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.size_bytes}
        self._position = max(0, start[whence] + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        length = min(len(view), self._info.size_bytes - self._position)
        if length <= 0:
            return 0
        block = self._store.read_range(self._info.key, offset=self._position, length=length)
        view[: len(block)] = block
        self._position += len(block)
        return len(block)


# -- facts beside the object -----------------------------------------------------------------------


def _metadata(digest: str, facts: ArchiveFacts) -> dict[str, str]:
    """What the next stager need not read the archive for. Header values are ASCII."""
    return {SHA256_KEY: digest, **_facts_metadata(facts)}


def _facts_metadata(facts: ArchiveFacts) -> dict[str, str]:
    return {
        "format": facts.format,
        "file-count": str(facts.file_count),
        "content-bytes": str(facts.content_bytes),
        "root": quote(facts.root or ""),
    }


def _facts_in(info: ObjectInfo) -> ArchiveFacts | None:
    try:
        return ArchiveFacts(
            info.metadata["format"],
            int(info.metadata["file-count"]),
            int(info.metadata["content-bytes"]),
            (),
            unquote(info.metadata["root"]) or None,
        )
    except (KeyError, ValueError):
        return None


def _no_root(what: str, facts: ArchiveFacts) -> StagingError:
    tops = ", ".join(facts.tops[:3]) or "no folder of its own"
    return StagingError(
        f"{what} does not say where it unpacks to: at its top is {tops}.",
        hint="Give --expected-root, for example data/vehicles3.",
    )
