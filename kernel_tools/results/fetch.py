"""Bring files of a run here, from its machine or the store: each verified by SHA-256, whole or not at all.

A file that is here already with the right hash does not travel again; one that was cut off goes on.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from kernel_tools.errors import FetchError

# A checkpoint may be replaced between its listing and its reading: list again, read again.
ATTEMPTS: Final = 4
LISTING_SECONDS: Final = 300.0  # the remote hashes what it lists; a large model takes a while
BLOCK_BYTES: Final = 1 << 20

DEFAULT_FILES: Final = (
    "weights/best.pt",
    "weights/last.pt",
    "evaluation/*",
    "visualizations/*",
    "metrics.jsonl",
    "steps.jsonl",
    "results.csv",
    "summary.json",
    "status.json",
    "config.yaml",
    "receipt.json",
    "job.json",
    "train.log",
    "errors/*",
    "work/artifacts/*",
)


class BringsFiles(Protocol):
    """The way to the files of the machine that a run is on; a `Connection` is one."""

    def call(self, function: str, *, timeout_seconds: float = 60.0, **arguments: Any) -> Any:
        """Call a function of the agent's API."""

    def get_file(self, remote_path: str, destination: Path) -> None:
        """Bring one file here; what is left at `destination` of an earlier call may be gone on from."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One file that came back, and whether it had to travel."""

    path: Path
    size_bytes: int
    sha256: str
    travelled: bool = True


@dataclass(frozen=True, slots=True)
class _Listed:
    path: str
    size_bytes: int
    sha256: str


def fetch_files(
    link: BringsFiles,
    *,
    remote_dir: str,
    run_id: str,
    globs: Sequence[str],
    folder: Path,
    artifacts: Sequence[str] = (),
    on_file: Callable[[str, int], None] | None = None,
) -> tuple[Fetched, ...]:
    """Bring what fits `globs` (relative to the run directory) into `folder`.

    Without `globs` the usual files come, and what fits `artifacts` (relative to the work folder).

    Raises:
        FetchError: a given pattern fits nothing, or a file keeps changing while it is read.
    """
    run_dir = f"{remote_dir}/runs/{run_id}"
    wanted = globs or (*DEFAULT_FILES, *(f"work/{pattern}" for pattern in artifacts))
    done: dict[str, Fetched] = {}
    for _attempt in range(ATTEMPTS):
        listed = _list(link, remote_dir, run_id, wanted)
        _refuse_unmatched(run_id, globs, listed)
        for file in listed:
            if file.path not in done:
                fetched = _fetch(link, run_dir, file, folder, on_file)
                if fetched is not None:
                    done[file.path] = fetched
        missing = [file.path for file in listed if file.path not in done]
        if not missing:
            return tuple(done[path] for path in sorted(done))
    raise FetchError(
        f"{missing[0]} of {run_id} keeps changing while it is read.",
        hint="Fetch it again when the epoch has ended.",
    )


def fits(path: str, pattern: str) -> bool:
    """Return whether a path fits a pattern: `*` within a folder, `**` over several, a folder for all in it."""
    return _fits(PurePosixPath(path).parts, PurePosixPath(pattern).parts)


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return True  # what is in a folder that was named
    if patterns[0] == "**":
        return any(_fits(parts[n:], patterns[1:]) for n in range(len(parts) + 1))
    if not parts or not PurePosixPath(parts[0]).match(patterns[0]):
        return False
    return _fits(parts[1:], patterns[1:])


def sha256_of(path: Path) -> str | None:
    """Return a file's SHA-256 in hexadecimal, None if there is no such file."""
    if not path.is_file():
        return None
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _list(
    link: BringsFiles, remote_dir: str, run_id: str, patterns: Sequence[str]
) -> tuple[_Listed, ...]:
    answer = link.call(
        "files",
        remote_dir=remote_dir,
        run_id=run_id,
        patterns=list(patterns),
        timeout_seconds=LISTING_SECONDS,
    )
    return tuple(
        _Listed(str(one["path"]), int(one["size_bytes"]), str(one["sha256"]))
        for one in answer["files"]
    )


def _refuse_unmatched(run_id: str, globs: Sequence[str], listed: Sequence[_Listed]) -> None:
    for pattern in globs:
        if not any(fits(f.path, p) for f in listed for p in (pattern, f"work/{pattern}")):
            raise FetchError(
                f"{run_id} has no file that fits {pattern!r}.",
                hint="Patterns are relative to the run directory, such as weights/*.pt.",
            )


def _fetch(
    link: BringsFiles,
    run_dir: str,
    file: _Listed,
    folder: Path,
    on_file: Callable[[str, int], None] | None,
) -> Fetched | None:
    """Bring one file; None if it changed on the way."""
    path = folder / file.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FetchError(f"the remote lists {file.path!r}, which would leave {folder}.")
    if sha256_of(path) == file.sha256:
        return Fetched(path, file.size_bytes, file.sha256, travelled=False)
    if on_file is not None:
        on_file(file.path, file.size_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named by its hash: what an earlier call left of the same content is gone on from.
    arriving = path.with_name(f".{path.name}.{file.sha256[:12]}.arriving")
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.arriving"):
        if stale != arriving:
            stale.unlink(missing_ok=True)
    link.get_file(f"{run_dir}/{file.path}", arriving)
    if sha256_of(arriving) != file.sha256:
        arriving.unlink(missing_ok=True)
        return None
    arriving.replace(path)
    return Fetched(path, file.size_bytes, file.sha256)


def read_document(path: Path) -> Mapping[str, Any]:
    """Read a JSON table.

    Raises:
        FetchError: it is none.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FetchError(f"{path} cannot be read: {error}.") from error
    if not isinstance(document, dict):
        raise FetchError(f"{path} is no table.")
    return document
