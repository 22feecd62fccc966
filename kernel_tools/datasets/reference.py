"""What a staged data set is called from then on: `DatasetReference`, and the project's list of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from kernel_tools.datasets.sizing import DiskNeed, disk_need
from kernel_tools.errors import InvalidArgumentError, ObjectNotFoundError, StagingError
from kernel_tools.runs.registry import write_json
from kernel_tools.stores.base import HUB, ObjectStore

REGISTRY: Final = Path(".kernel_tools", "datasets.json")
SCHEMA_VERSION: Final = 1
DEFAULT_EXPIRY_SECONDS: Final = 24 * 3600
# A lock file older than this was left by a process that died. Seconds.
LOCK_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class DatasetReference:
    """One archive in a store, and where it belongs.

    Attributes:
        name: what `--dataset` calls it.
        object: its key in the bucket.
        size_bytes: of the archive.
        sha256: of the archive, lower-case hex.
        expected_root: the folder it unpacks to, relative to a run's work folder (`data/coins`).
        format: `tar`, `tar.gz` or `zip`.
        file_count: regular files in it; None where only the object's beginning was read.
        content_bytes: unpacked; None likewise.
        store: name of the store (`local`, `s3`).
        bucket: its bucket.
        source_path: the folder or archive it was made from, absolute; None for an object that was there
            already.
    """

    name: str
    object: str
    size_bytes: int
    sha256: str
    expected_root: str
    format: str
    file_count: int | None
    content_bytes: int | None
    store: str
    bucket: str
    source_path: str | None

    @property
    def place(self) -> str:
        """Where it is, as `--dataset` takes it: `s3://BUCKET/KEY` or `hf://ORG/REPO/FILE`."""
        return f"{'hf' if self.store == HUB else 's3'}://{self.bucket}/{self.object}"

    @property
    def disk(self) -> DiskNeed:
        """The disk that a run on it needs."""
        return disk_need(staged_bytes=self.size_bytes, extracted_bytes=self.content_bytes)

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        from kernel_tools.views.store import dataset_view

        return dataset_view(self)._repr_mimebundle_(include, exclude)


def input_of(reference: DatasetReference) -> dict[str, Any]:
    """Return a reference as an entry of a job's `inputs`; holds no secret."""
    return {
        "kind": "dataset",
        "name": reference.name,
        "object": reference.object,
        "size_bytes": reference.size_bytes,
        "sha256": reference.sha256,
        "dest": reference.expected_root,
        "format": reference.format,
        "file_count": reference.file_count,
        "content_bytes": reference.content_bytes,
    }


def inputs_for(
    reference: DatasetReference,
    *,
    store: ObjectStore | None,
    expires_seconds: int = DEFAULT_EXPIRY_SECONDS,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (the job's input, {object: presigned URL}); the second part is secret.

    Raises:
        InvalidArgumentError: the URL's life is not between 1 s and 7 days.
        StagingError: there is no store, or it is not the one that holds the data set.
        StoreError: the store cannot sign, or has no such object any more.
    """
    if store is None or (store.name, store.bucket) != (reference.store, reference.bucket):
        here = "no store is" if store is None else f"the store {store.name}/{store.bucket} is"
        raise StagingError(
            f"{reference.name} was staged to {reference.store}/{reference.bucket}, but {here} connected.",
            hint="Type: %stage_dataset again with the same path; it is sent only if it is not there.",
        )
    info = store.stat(reference.object)
    replaced = info is not None and (
        info.size_bytes != reference.size_bytes or info.sha256 not in (None, reference.sha256)
    )
    if info is None or replaced:
        what = "was replaced since it was staged" if replaced else "is no longer there"
        raise ObjectNotFoundError(
            f"{reference.object} in bucket {store.bucket} {what}.",
            hint="Stage the data set again.",
        )
    url = store.presign_get(reference.object, expires_seconds=expires_seconds)
    return input_of(reference), {reference.object: url}


def check_name(name: str) -> str:
    """Return a name that is safe in a path, an object key and on a command line.

    Raises:
        InvalidArgumentError: it holds anything but letters, digits, dot, dash and underscore.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InvalidArgumentError(
            f"{name!r} is no usable name for a data set.",
            hint="Use letters, digits, '.', '-' and '_', starting with a letter or digit.",
        )
    return name


def name_from(text: str) -> str:
    """Return a usable name made from a file or folder name."""
    return check_name(re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or "dataset")


def check_root(root: str) -> str:
    """Return an expected root in its normal form: relative, POSIX, inside the work folder.

    Raises:
        InvalidArgumentError: it is absolute, empty, or leaves the work folder.
    """
    path = PurePosixPath(root)
    bad = path.is_absolute() or not path.parts or ".." in path.parts or "\\" in root
    if bad or re.match(r"[A-Za-z]:", root) or any(ord(character) < 32 for character in root):
        raise InvalidArgumentError(
            f"The expected root {root!r} must be a relative path inside the run's work folder.",
            hint="For example data/vehicles3",
        )
    return path.as_posix()


@dataclass(frozen=True, slots=True)
class DatasetRegistry:
    """A project's references by name, in `.kernel_tools/datasets.json`. Holds no secret."""

    project_dir: Path

    @property
    def path(self) -> Path:
        """The file."""
        return self.project_dir / REGISTRY

    def load(self) -> dict[str, DatasetReference]:
        """Return all references by name; empty where the project has none.

        Raises:
            StagingError: the file is damaged.
        """
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            return {
                name: DatasetReference(**fields) for name, fields in document["datasets"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise StagingError(
                f"{self.path} is damaged.", hint="Remove it and stage the data sets again."
            ) from error

    def names(self) -> tuple[str, ...]:
        """Return the names, sorted."""
        return tuple(sorted(self.load()))

    def save(self, reference: DatasetReference) -> None:
        """Add a reference, or replace the one of that name."""
        self.path.parent.mkdir(exist_ok=True)
        with _locked(self.path):
            _write(self.path, self.load() | {reference.name: reference})

    def knows(self, ref: str) -> bool:
        """Tell whether `REF` means a data set of this project."""
        return any(ref in (name, known.place) for name, known in self.load().items())

    def resolve(self, ref: str) -> DatasetReference:
        """Return what `REF` means: a name, or `s3://BUCKET/KEY` or `hf://ORG/REPO/FILE` of a data set of this project.

        Raises:
            InvalidArgumentError: there is none; names those that there are.
            StagingError: the list is damaged.
        """
        known = self.load()
        for name, reference in known.items():
            if ref in (name, reference.place):
                return reference
        if ref.startswith("hf://"):
            raise InvalidArgumentError(
                f"{ref} is not known in this project.", hint=f"Type: %stage_dataset --to {ref}"
            )
        if ref.startswith("s3://"):
            key = ref.removeprefix("s3://").partition("/")[2]
            raise InvalidArgumentError(
                f"{ref} is not known in this project.",
                hint=f"Type: %stage_dataset --object-name {key} --sha256 HASH",
            )
        raise InvalidArgumentError(
            f"No data set is called {ref!r} (staged here: {', '.join(sorted(known)) or 'none yet'}).",
            hint=f"Type: %stage_dataset PATH --name {ref if ref.isidentifier() else 'NAME'}",
        )


def _write(path: Path, known: Mapping[str, DatasetReference]) -> None:
    document = {
        "schema_version": SCHEMA_VERSION,
        "datasets": {name: asdict(known[name]) for name in sorted(known)},
    }
    write_json(path, document)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, on any platform: two notebooks may stage at the same time."""
    lock = path.with_name(path.name + ".lock")
    deadline = time.monotonic() + 2 * LOCK_SECONDS
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            break
        except FileExistsError:
            with contextlib.suppress(OSError):
                if time.time() - lock.stat().st_mtime > LOCK_SECONDS:
                    lock.unlink()
                    continue
            if time.monotonic() > deadline:
                raise StagingError(
                    f"{lock} is held by another process.", hint="Stage again when it has ended."
                ) from None
            time.sleep(0.02)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
