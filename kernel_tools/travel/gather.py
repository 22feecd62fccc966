"""Which files of a project travel: the roots, and the walk below them. Reads no content.

Data never travels this way, and secrets never travel at all.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Final

from kernel_tools.errors import SyncError
from kernel_tools.travel.ignored import Ignored

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


@dataclass(frozen=True, slots=True)
class SyncFile:
    """One file that travels: POSIX path in the run's tree, permission bits, content."""

    path: str
    source: Path
    mode: int
    size: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Root:
    """A file or folder that travels as `path`; links may lead anywhere inside `fence` (None: anywhere)."""

    path: str
    source: Path
    fence: Path | None
    pattern: str | None = None  # of a folder, only the direct children that match


def default_roots(project_dir: Path) -> Iterator[Root]:
    detector = _package_dir("detector")
    if detector is not None:
        yield Root("detector", detector, None)
    configs = project_dir / "configs"
    if configs.is_dir():
        yield Root("configs", configs, project_dir)
    elif detector is not None:
        # The packed presets: inside the wheel's package, or beside it in a checkout.
        for packed in (detector / "_configs", detector.parent / "configs"):
            if packed.is_dir():
                yield Root("configs", packed, None)
                break
    for name in ("pyproject.toml", "README.md"):
        if (project_dir / name).is_file():
            yield Root(name, project_dir / name, project_dir)


def script_roots(project_dir: Path, script: str | None) -> Iterator[Root]:
    if script is None:
        return
    root = project_root(project_dir, script)
    if not root.source.is_file():
        raise SyncError(f"The script {script} is not a file.")
    folder = PurePosixPath(root.path).parent.as_posix()
    if folder == ".":
        yield Root(root.path, root.source, project_dir)
        for path in sorted(project_dir.glob("*.py")):
            yield Root(path.name, path, project_dir)
    else:
        yield Root(folder, project_dir / folder, project_dir)


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def configured_paths(project_dir: Path) -> list[str]:
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


def project_root(project_dir: Path, text: str) -> Root:
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
    return Root(relative, source, project_dir)


def walk(
    root: Root, *, exact: frozenset[str], exclude: Sequence[str], ignored: Ignored
) -> Iterator[SyncFile]:
    """Yield the files below a root, unhashed, in no order that matters.

    Args:
        root: where to begin.
        exact: paths that were named, which travel although they would be left out.
        exclude: globs on the path or on its last part.
        ignored: what the project's `.gitignore` files say; asked for what is the project's own.

    Raises:
        SyncError: a link leaves the project, or leads nowhere.
    """
    if _is_excluded(root.path, exclude) or _matches(root.source.name.lower(), SECRETS):
        return
    real = root.source.resolve()
    if root.fence is not None and not real.is_relative_to(root.fence):
        raise _leaving(root.path)
    pending = [(root.path, root.source, frozenset({str(real)}))]
    while pending:
        path, source, above = pending.pop()
        status = _status(root, path, source)
        is_folder = stat.S_ISDIR(status.st_mode)
        if path not in exact and path != root.path:
            if _is_left_out(path, source, is_folder=is_folder):
                continue
            if root.fence is not None and not _is_config(path) and (path, is_folder) in ignored:
                continue
        if is_folder:
            real = source.resolve() if source.is_symlink() else source
            if source.is_symlink() and str(real) in above:
                continue  # a link to a folder above itself
            within = above | {str(real)}
            for entry in os.scandir(source):
                below = f"{path}/{entry.name}"
                secret = _matches(entry.name.lower(), SECRETS)
                if not secret and not _is_excluded(below, exclude):
                    pending.append((below, Path(entry.path), within))
        elif stat.S_ISREG(status.st_mode):
            mode = 0o755 if status.st_mode & stat.S_IXUSR and os.name == "posix" else 0o644
            yield SyncFile(path, source, mode, status.st_size)


def _status(root: Root, path: str, source: Path) -> os.stat_result:
    """Return what is at `source`, behind a link where it is one that stays in the project."""
    status = source.lstat()
    if not stat.S_ISLNK(status.st_mode):
        return status
    if root.fence is not None and not source.resolve().is_relative_to(root.fence):
        raise _leaving(path)
    try:
        return source.stat()
    except FileNotFoundError:
        raise SyncError(f"{path} is a link to nothing.", hint="Remove or --exclude it.") from None


def _leaving(path: str) -> SyncError:
    return SyncError(
        f"{path} is a link that leaves the project, so it is not followed.",
        hint="Replace it by a copy, or leave it out with --exclude.",
    )


def _is_config(path: str) -> bool:
    """A run's configuration was checked here, so it must be there whatever `.gitignore` says."""
    return path.startswith("configs/") and path.endswith((".yaml", ".yml"))


def _is_left_out(path: str, source: Path, *, is_folder: bool) -> bool:
    name = PurePosixPath(path).name
    if name in CACHES or _matches(name, CACHE_FILES):
        return True
    # A package named `data` is code; a folder of that name without an __init__ is what code makes.
    return name in PRODUCTS and is_folder and not (source / "__init__.py").is_file()


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    return _matches(path, patterns) or _matches(PurePosixPath(path).name, patterns)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return bool(patterns) and _compiled(tuple(patterns)).match(name) is not None


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(pattern.rstrip("/")) for pattern in patterns))
