"""Which files travel, and how they get there: a plan made here, then one or two round trips.

The plan is a manifest of (path, mode, SHA-256). The remote says which contents it lacks and gets those
in one pack; `launch` builds the run's own tree from the manifest, so a later sync changes no running
job. Data never travels this way, and secrets never travel at all.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from kernel_tools.errors import SyncError
from kernel_tools.kernels.base import RemoteKernel
from kernel_tools.kernels.rpc import AGENT_PACKAGE, AgentClient, Blob, agent_source

# Bytes of 10^6, as printed. Code is kilobytes; what is larger is data and belongs in the object store.
REFUSED_ABOVE_BYTES: Final = 16_000_000
WARNED_ABOVE_BYTES: Final = 5_000_000
# Files above this are streamed from disk, not held in memory.
STREAMED_ABOVE_BYTES: Final = 1024 * 1024

# Left out wherever they are met, unless a path names them exactly.
PRODUCTS: Final = frozenset({"data", "artifacts", "runs", "site"})
CACHES: Final = frozenset(
    {
        ".venv", ".cache", ".exp", ".git", "__pycache__", ".ipynb_checkpoints", ".mypy_cache",
        ".pytest_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", "venv", "node_modules",
    }
)  # fmt: skip
CACHE_FILES: Final = ("*.pyc", "*.pyo", ".DS_Store", "*.egg-info")
# Never, even when named: what holds keys, and our own folder with references and local run files.
SECRETS: Final = (
    ".env*", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", "kaggle.json",
    "credentials.json", ".aws", ".ssh", ".gnupg", ".kaggle", ".kernel_tools",
)  # fmt: skip

READ_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class SyncFile:
    """One file that travels: POSIX path in the run's tree, permission bits, content."""

    path: str
    source: Path
    mode: int
    size: int
    sha256: str = ""


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
    """What travelled. `files`, `bytes` and `uploaded` count the agent's own modules too."""

    paths: tuple[str, ...]
    files: int
    bytes: int
    uploaded: int
    manifest: dict[str, Any] = field(repr=False)
    agent_hash: str = ""
    warnings: tuple[str, ...] = ()

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
    named = [*_configured_paths(project_dir), *sync_paths]
    extras = [_Root(path, file, None) for path, file in (extra_files or {}).items()]
    candidates = [
        *_default_roots(project_dir),
        *_script_roots(project_dir, script),
        *(_project_root(project_dir, text) for text in named),
        *extras,
    ]
    roots: dict[str, _Root] = {}
    for root in candidates:
        roots.setdefault(root.path, root)
    found: dict[str, SyncFile] = {}
    # The extras first: a file of the same path in `configs` is not the one that was asked for.
    for root in (*extras, *roots.values()):
        for file in _walk(root, exact=frozenset(roots), exclude=exclude):
            found.setdefault(file.path, file)
    size = sum(file.size for file in found.values())
    if size > REFUSED_ABOVE_BYTES and not allow_large:
        raise _too_large(found.values(), size)
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
    missing = set(client.missing([*agent.digests, *(file.sha256 for file in plan.files)]))
    uploaded = sum(digest in missing for digest in agent.digests)
    blobs = {blob.sha256: blob for blob in agent.blobs if blob.sha256 in missing}
    for file in plan.files:
        if file.sha256 not in missing:
            continue
        uploaded += 1
        current, blob = _for_sending(file)
        files[file.path] = current
        blobs[blob.sha256] = blob
    if blobs:
        client.send(blobs.values())
    manifest = {"files": {path: [file.mode, file.sha256] for path, file in files.items()}}
    return SyncReport(
        paths=(AGENT_PACKAGE, *plan.paths),
        files=len(files) + len(agent.contents),
        bytes=sum(f.size for f in files.values()) + sum(map(len, agent.contents.values())),
        uploaded=uploaded,
        manifest=manifest,
        agent_hash=agent.hash,
        warnings=plan.warnings,
    )


@dataclass(frozen=True, slots=True)
class _Root:
    """A file or folder that travels as `path`; links may lead anywhere inside `fence` (None: anywhere)."""

    path: str
    source: Path
    fence: Path | None
    pattern: str | None = None  # of a folder, only the direct children that match


def _default_roots(project_dir: Path) -> Iterator[_Root]:
    detector = _package_dir("detector")
    if detector is not None:
        yield _Root("detector", detector, None)
    configs = project_dir / "configs"
    if configs.is_dir():
        yield _Root("configs", configs, project_dir)
    elif detector is not None:
        # The packed presets: inside the wheel's package, or beside it in a checkout.
        for packed in (detector / "_configs", detector.parent / "configs"):
            if packed.is_dir():
                yield _Root("configs", packed, None)
                break
    for name in ("pyproject.toml", "README.md"):
        if (project_dir / name).is_file():
            yield _Root(name, project_dir / name, project_dir)


def _script_roots(project_dir: Path, script: str | None) -> Iterator[_Root]:
    if script is None:
        return
    root = _project_root(project_dir, script)
    if not root.source.is_file():
        raise SyncError(f"The script {script} is not a file.")
    folder = PurePosixPath(root.path).parent.as_posix()
    if folder == ".":
        yield _Root(root.path, root.source, project_dir)
        for path in sorted(project_dir.glob("*.py")):
            yield _Root(path.name, path, project_dir)
    else:
        yield _Root(folder, project_dir / folder, project_dir)


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _configured_paths(project_dir: Path) -> list[str]:
    """Read `[tool.kernel_tools] sync = [...]` of the project."""
    path = project_dir / "pyproject.toml"
    if not path.is_file():
        return []
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SyncError(
            f"pyproject.toml cannot be read: {error}.", hint="Correct it; nothing was sent."
        ) from None
    listed = table.get("tool", {}).get("kernel_tools", {}).get("sync", [])
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise SyncError("[tool.kernel_tools] sync in pyproject.toml must be a list of paths.")
    return listed


def _relative(project_dir: Path, text: str) -> str:
    """Return a named path relative to the project, in POSIX form, without following links."""
    path = Path(os.path.normpath(project_dir / text))
    try:
        relative = path.relative_to(project_dir).as_posix()
    except ValueError:
        raise SyncError(
            f"{text} lies outside the project {project_dir.name}.",
            hint="Only what lies in the project can be synced; data is staged with %stage_dataset.",
        ) from None
    if relative == ".":
        raise SyncError("The whole project is too much to sync.", hint="Name its folders.")
    return relative


def _project_root(project_dir: Path, text: str) -> _Root:
    relative = _relative(project_dir, text)
    for part in PurePosixPath(relative).parts:
        if _matches(part.lower(), SECRETS):
            raise SyncError(f"{text} is never synced: {part} may hold secrets.")
    source = project_dir / relative
    if not source.exists():
        raise SyncError(
            f"There is no {relative} in the project {project_dir.name}.",
            hint="Name it relative to the project's folder.",
        )
    return _Root(relative, source, project_dir)


def _walk(root: _Root, *, exact: frozenset[str], exclude: Sequence[str]) -> Iterator[SyncFile]:
    """Yield the files below a root, unhashed, in no order that matters."""
    pending: list[tuple[str, Path, frozenset[str]]] = [(root.path, root.source, frozenset())]
    while pending:
        path, source, above = pending.pop()
        if path not in exact and path != root.path and _is_left_out(path, source):
            continue
        if _is_excluded(path, exclude) or _matches(source.name.lower(), SECRETS):
            continue
        real = source.resolve()
        if root.fence is not None and not real.is_relative_to(root.fence):
            raise SyncError(
                f"{path} is a link that leaves the project, so it is not followed.",
                hint="Replace it by a copy, or leave it out with --exclude.",
            )
        try:
            status = source.stat()
        except FileNotFoundError:
            raise SyncError(
                f"{path} is a link to nothing.", hint="Remove or --exclude it."
            ) from None
        if stat.S_ISDIR(status.st_mode):
            if str(real) in above:
                continue  # a link to a folder above itself
            within = above | {str(real)}
            pending += [(f"{path}/{child.name}", child, within) for child in source.iterdir()]
        elif stat.S_ISREG(status.st_mode):
            mode = 0o755 if status.st_mode & stat.S_IXUSR and os.name == "posix" else 0o644
            yield SyncFile(path, source, mode, status.st_size)


def _is_left_out(path: str, source: Path) -> bool:
    name = PurePosixPath(path).name
    if name in CACHES or _matches(name, CACHE_FILES):
        return True
    # A package named `data` is code; a folder of that name without an __init__ is what code makes.
    return name in PRODUCTS and source.is_dir() and not (source / "__init__.py").is_file()


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    return _matches(path, patterns) or _matches(PurePosixPath(path).name, patterns)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.rstrip("/")) for pattern in patterns)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _hashed(file: SyncFile) -> SyncFile:
    """Hash a file; one that changes meanwhile is read again.

    Raises:
        SyncError: it keeps changing.
    """
    for _ in range(READ_ATTEMPTS):
        before = file.source.stat()
        with file.source.open("rb") as stream:
            digest = hashlib.sha256()
            size = 0
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
        after = file.source.stat()
        if (
            (before.st_mtime_ns, before.st_size)
            == (after.st_mtime_ns, after.st_size)
            == (
                after.st_mtime_ns,
                size,
            )
        ):
            return SyncFile(file.path, file.source, file.mode, size, digest.hexdigest())
    raise SyncError(
        f"{file.path} keeps changing while it is read.", hint="Sync again when it rests."
    )


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


def _too_large(files: Any, size: int) -> SyncError:
    by_folder: dict[str, int] = {}
    for file in files:
        parent = PurePosixPath(file.path).parent.as_posix()
        by_folder[parent] = by_folder.get(parent, 0) + file.size
    folder = max(by_folder, key=lambda name: by_folder[name])
    largest = sorted(files, key=lambda file: -file.size)[:3]
    named = ", ".join(f"{file.path} ({file.size / 1e6:.1f} MB)" for file in largest)
    return SyncError(
        f"{size / 1e6:.1f} MB would travel as code, more than {REFUSED_ABOVE_BYTES / 1e6:.0f} MB. "
        f"The largest: {named}. Nothing was sent.",
        hint=f"Stage data instead: %stage_dataset {folder} and --dataset; leave files out with "
        "--exclude; or, if it must travel, --allow-large.",
    )
