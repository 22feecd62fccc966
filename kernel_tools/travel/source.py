"""Where the project stands in git when its code is sent: for the receipt, and no condition of anything."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

# A repository on a slow disk must not hold up a launch.
GIT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class SourceState:
    """A commit, and the hash of what differs from it.

    Attributes:
        git_commit: full id of HEAD.
        git_dirty: True where tracked files differ from it, or files are new.
        git_diff_sha256: of `git diff HEAD --binary`; None where no tracked file differs.
    """

    git_commit: str
    git_dirty: bool
    git_diff_sha256: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the value of `job.json`'s `source`."""
        return asdict(self)


def source_state(project_dir: Path) -> SourceState | None:
    """Return how `project_dir` stands in git; None without git, a repository or a commit."""
    commit = _git(project_dir, "rev-parse", "HEAD")
    changed = _git(project_dir, "status", "--porcelain", "--", ".")
    diff = _git(project_dir, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    if commit is None or changed is None or diff is None:
        return None
    digest = hashlib.sha256(diff).hexdigest() if diff else None
    return SourceState(commit.decode("ascii").strip(), bool(changed.strip()), digest)


def _git(project_dir: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(project_dir), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=GIT_SECONDS, check=False, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
