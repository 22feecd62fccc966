"""Which files travel, and how they get there: a plan made here, then one or two round trips.

The plan is a manifest of (path, mode, SHA-256). The remote says which contents it lacks and gets those
in one pack; `launch` builds the run's own tree from the manifest, so a later sync changes no running
job. Data never travels this way, and secrets never travel at all.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from kernel_tools.errors import SyncError
from kernel_tools.kernels.base import RemoteKernel
from kernel_tools.kernels.rpc import AGENT_PACKAGE, AgentClient, Blob, agent_source
from kernel_tools.travel.gather import (
    Root,
    SyncFile,
    configured_paths,
    default_roots,
    project_root,
    script_roots,
    walk,
)
from kernel_tools.travel.ignored import Ignored
from kernel_tools.travel.listing import lacking

# Bytes of 10^6, as printed. Code is kilobytes; what is larger is data and belongs in the object store.
REFUSED_ABOVE_BYTES: Final = 16_000_000
WARNED_ABOVE_BYTES: Final = 5_000_000
# A folder called `data` that was named may hold a list of classes; above this it is a data set.
DATA_REFUSED_ABOVE_BYTES: Final = 1_000_000
# Files above this are streamed from disk, not held in memory.
STREAMED_ABOVE_BYTES: Final = 1024 * 1024

READ_ATTEMPTS: Final = 5
# A file that was written this short a time ago may be written again without its times changing.
RESTED_SECONDS: Final = 2.0

# SHA-256 by path and what `stat` says: a file that has rested is read once in a process's life.
_known_digests: dict[tuple[str, int, int, int, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What would travel: the printed roots, every file, and what a person should be told."""

    project_dir: Path
    paths: tuple[str, ...]
    files: tuple[SyncFile, ...]
    warnings: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)

    def largest(self, count: int = 5) -> tuple[SyncFile, ...]:
        """The largest files, first first."""
        return tuple(sorted(self.files, key=lambda file: -file.size)[:count])


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What travelled. `files`, `bytes` and `uploaded` count the agent's own modules too.

    `sent_bytes` is what the `uploaded` files hold; each of them once, however often it is in the tree.
    """

    paths: tuple[str, ...]
    files: int
    bytes: int
    uploaded: int
    manifest: dict[str, Any] = field(repr=False)
    agent_hash: str = ""
    warnings: tuple[str, ...] = ()
    sent_bytes: int = 0

    def lines(self) -> tuple[str, ...]:
        """The four lines that are printed and looked for in logs."""
        return (
            f"sync_paths={','.join(self.paths)}",
            f"sync_files={self.files}",
            f"sync_size_mb={self.bytes / 1e6:.2f}",
            f"sync_uploaded={self.uploaded}",
        )


def build_plan(
    project_dir: Path,
    *,
    script: str | None = None,
    sync_paths: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_large: bool = False,
    extra_files: Mapping[str, Path] | None = None,
) -> SyncPlan:
    """Collect and hash what travels: `detector`, configs, project files, and what is named.

    Args:
        project_dir: root; every path in the tree is relative to it.
        script: a program of the project; its folder travels (of the root itself, its `*.py` alone).
        sync_paths: further files and folders of the project; one that names an excluded folder exactly
            takes it along.
        exclude: globs on the path or on its last part.
        allow_large: travel although it is more than 16 MB.
        extra_files: single files by the path they are to have there (a configuration from elsewhere).

    Raises:
        SyncError: a path is absent, leaves the project or is a secret; or it is too much. Nothing has
            been sent then.
    """
    project_dir = project_dir.resolve()
    named = [*configured_paths(project_dir), *sync_paths]
    extras = [Root(path, file, None) for path, file in (extra_files or {}).items()]
    candidates = [
        *default_roots(project_dir),
        *script_roots(project_dir, script),
        *(project_root(project_dir, text) for text in named),
        *extras,
    ]
    roots: dict[str, Root] = {}
    for root in candidates:
        roots.setdefault(root.path, root)
    exact = frozenset((*roots, *([Path(script).as_posix()] if script else [])))
    ignored = Ignored(project_dir)
    found: dict[str, SyncFile] = {}
    # The extras first: a file of the same path in `configs` is not the one that was asked for.
    for root in (*extras, *roots.values()):
        for file in walk(root, exact=exact, exclude=exclude, ignored=ignored):
            found.setdefault(file.path, file)
    size = sum(file.size for file in found.values())
    if not allow_large:
        _refuse_too_large(found.values(), size)
        _refuse_data(found.values(), roots)
    files = tuple(_hashed(file) for _, file in sorted(found.items()))
    warnings: list[str] = []
    if size > WARNED_ABOVE_BYTES:
        largest = max(files, key=lambda file: file.size)
        warnings.append(
            f"{size / 1e6:.1f} MB of code travel; the largest is {largest.path} "
            f"({largest.size / 1e6:.1f} MB). Leave it out with --exclude, or stage it."
        )
    shown = tuple(path for path in roots if any(_is_below(file.path, path) for file in files))
    return SyncPlan(project_dir, shown, files, tuple(warnings))


def sync(
    client: AgentClient | RemoteKernel, plan: SyncPlan, remote_dir: str | None = None
) -> SyncReport:
    """Bring the plan's contents and the agent to the remote, as far as they are not there.

    Args:
        client: an agent's client, or a kernel.
        plan: from `build_plan`.
        remote_dir: needed with a bare kernel.

    Raises:
        SyncError: a file keeps changing while it is read.
        KernelError: the line or the kernel.
    """
    if not isinstance(client, AgentClient):
        if remote_dir is None:
            raise TypeError("sync needs a remote_dir with a bare kernel")
        client = AgentClient(client, remote_dir)
    agent = agent_source()
    files = {file.path: file for file in plan.files}
    digests = {f"{AGENT_PACKAGE}/{name}": str(one[1]) for name, one in agent.manifest.items()}
    lacks = lacking(client, {**digests, **{file.path: file.sha256 for file in plan.files}})
    missing = lacks.digests
    uploaded = sum(digest in missing for digest in agent.digests)
    blobs = {blob.sha256: blob for blob in agent.blobs if blob.sha256 in missing}
    for file in plan.files:
        if file.sha256 not in missing:
            continue
        uploaded += 1
        current, blob = _for_sending(file)
        files[file.path] = current
        blobs[blob.sha256] = blob
    if blobs or lacks.listings:
        client.send([*blobs.values(), *lacks.listings])
    manifest = {"files": {path: [file.mode, file.sha256] for path, file in files.items()}}
    return SyncReport(
        paths=(AGENT_PACKAGE, *plan.paths),
        files=len(files) + len(agent.contents),
        bytes=sum(f.size for f in files.values()) + sum(map(len, agent.contents.values())),
        uploaded=uploaded,
        manifest=manifest,
        agent_hash=agent.hash,
        warnings=plan.warnings,
        sent_bytes=sum(blob.size for blob in blobs.values()),
    )


def _hashed(file: SyncFile) -> SyncFile:
    """Hash a file; one that changes meanwhile is read again.

    Raises:
        SyncError: it keeps changing.
    """
    for _ in range(READ_ATTEMPTS):
        before = file.source.stat()
        key = _identity(file.source, before)
        if key in _known_digests:
            return SyncFile(file.path, file.source, file.mode, file.size, _known_digests[key])
        with file.source.open("rb") as stream:
            digest = hashlib.sha256()
            size = 0
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
        if key == _identity(file.source, file.source.stat()) and size == before.st_size:
            found = digest.hexdigest()
            if time.time() - before.st_mtime > RESTED_SECONDS:
                _known_digests[key] = found
            return SyncFile(file.path, file.source, file.mode, size, found)
    raise SyncError(
        f"{file.path} keeps changing while it is read.", hint="Sync again when it rests."
    )


def _identity(path: Path, status: os.stat_result) -> tuple[str, int, int, int, int, int]:
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (str(path), status.st_dev, status.st_ino, status.st_size, *times)


def _for_sending(file: SyncFile) -> tuple[SyncFile, Blob]:
    """Return the file as it is now with its content: what is sent is what the manifest says."""
    if file.size > STREAMED_ABOVE_BYTES:
        return file, Blob(file.sha256, file.size, file.source.read_bytes, file.source)
    for _ in range(READ_ATTEMPTS):
        data = file.source.read_bytes()
        if hashlib.sha256(data).hexdigest() == file.sha256:
            return file, Blob.of(data)
        file = _hashed(file)
    raise SyncError(
        f"{file.path} keeps changing while it is read.", hint="Sync again when it rests."
    )


def _refuse_too_large(files: Collection[SyncFile], size: int) -> None:
    if size <= REFUSED_ABOVE_BYTES:
        return
    by_folder: dict[str, int] = {}
    for file in files:
        parent = PurePosixPath(file.path).parent.as_posix()
        by_folder[parent] = by_folder.get(parent, 0) + file.size
    folder = max(by_folder, key=lambda name: by_folder[name])
    raise SyncError(
        f"{size / 1e6:.1f} MB would travel as code, more than {REFUSED_ABOVE_BYTES / 1e6:.0f} MB. "
        f"The largest: {_largest(files)}. Nothing was sent.",
        hint=f"Stage data instead: %stage_dataset {folder} and --dataset; leave files out with "
        "--exclude; or, if it must travel, --allow-large.",
    )


def _refuse_data(files: Collection[SyncFile], roots: Collection[str]) -> None:
    """Refuse a data set that was named as if it were code."""
    for path in roots:
        if PurePosixPath(path).name != "data":
            continue
        below = [file for file in files if _is_below(file.path, path)]
        size = sum(file.size for file in below)
        if size > DATA_REFUSED_ABOVE_BYTES and f"{path}/__init__.py" not in {
            file.path for file in below
        }:
            raise SyncError(
                f"{path} holds {len(below)} files, {size / 1e6:.1f} MB: data does not travel as code. "
                f"The largest: {_largest(below)}. Nothing was sent.",
                hint=f"Stage it: %stage_dataset {path}, then --dataset with its name; or, if it must "
                "travel, --allow-large.",
            )


def _largest(files: Collection[SyncFile]) -> str:
    largest = sorted(files, key=lambda file: -file.size)[:3]
    return ", ".join(f"{file.path} ({file.size / 1e6:.1f} MB)" for file in largest)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")
