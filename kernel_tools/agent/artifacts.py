"""Which files are to be brought back, each with size and SHA-256; and the manifest that is written last."""

from __future__ import annotations

import fnmatch
import glob
import os
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from .files import Json, clean_relative, is_inside, sha256_file, utc_now, write_json

# What every run leaves, relative to the run directory. status.json is not among them: it changes
# once more after the manifest.
RUN_FILES = (
    "job.json",
    "config.yaml",
    "metrics.jsonl",
    "steps.jsonl",
    "results.csv",
    "summary.json",
    "receipt.json",
    "hub.json",
    "train.log",
    "weights/*",
    "evaluation/*",
    "visualizations/*",
    "errors/*.json",
)


def paths(run_dir: str, job_globs: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Return the files to bring back, relative to the run directory, and the globs that match nothing.

    `job_globs` are relative to the work folder.
    """
    found = dict.fromkeys(match(run_dir, RUN_FILES))
    unmatched = []
    for pattern in job_globs:
        matched = _matches(run_dir, "work/" + (clean_relative(pattern) or ""))
        if not matched:
            unmatched.append(pattern)
        found.update(dict.fromkeys(matched))
    return list(found), unmatched


def entries(run_dir: str, found: Iterable[str]) -> List[Json]:
    """Return {path, size_bytes, sha256} of each file."""
    return [_entry(run_dir, path) for path in found]


def write_manifest(
    run_dir: str, run_id: str, listed: Sequence[Json], unmatched: Iterable[str]
) -> None:
    """Write `artifacts.json`: its presence means that the list is complete."""
    write_json(
        os.path.join(run_dir, "artifacts.json"),
        {
            "schema_version": 1,
            "run_id": run_id,
            "created_at": utc_now(),
            "files": list(listed),
            "unmatched": list(unmatched),
        },
    )


def match(run_dir: str, patterns: Iterable[str]) -> List[str]:
    """Return the files that fit patterns relative to the run directory, in the patterns' order."""
    found: Dict[str, None] = {}
    for pattern in patterns:
        found.update(dict.fromkeys(_matches(run_dir, pattern)))
    return list(found)


def files(run_dir: str, patterns: Sequence[str]) -> Dict[str, Any]:
    """Return {"files": [{path, size_bytes, sha256}]} of what matches now, in the run or its work folder."""
    found: Dict[str, None] = {}
    for pattern in patterns:
        clean = clean_relative(pattern)
        if clean is None:
            continue
        found.update(dict.fromkeys(_matches(run_dir, clean) or _matches(run_dir, "work/" + clean)))
    return {"files": entries(run_dir, found)}


def _matches(run_dir: str, pattern: str) -> List[str]:
    """Files that match, as POSIX paths relative to `run_dir`; a folder stands for all in it."""
    result = []
    for path in sorted(glob.glob(os.path.join(glob.escape(run_dir), pattern), recursive=True)):
        if not is_inside(path, run_dir):
            continue  # a link out of the run: data sets are no artifacts
        if os.path.isfile(path):
            result.append(path)
        elif os.path.isdir(path):
            for folder, _, names in os.walk(path):
                result.extend(os.path.join(folder, name) for name in sorted(names))
    kept = [
        path
        for path in result
        if os.path.isfile(path)
        and is_inside(path, run_dir)
        and not fnmatch.fnmatch(os.path.basename(path), ".*.tmp")
    ]
    return [os.path.relpath(path, run_dir).replace(os.sep, "/") for path in kept]


def _entry(run_dir: str, path: str) -> Json:
    digest, size = sha256_file(os.path.join(run_dir, path))
    return {"path": path, "size_bytes": size, "sha256": digest}
