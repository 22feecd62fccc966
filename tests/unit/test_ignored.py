"""`.gitignore` is read as git reads it: its own answer is the measure."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest

from kernel_tools.travel.ignored import Ignored

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

NAMES = ("a", "b", "build", "x.py", "x.log", "data", ".hidden", "a b", "[odd]")
LINES = (
    "*.log", "!x.log", "build/", "/build", "/a/b", "a/b/", "a/**/x.py", "**/data", "data/**", "b/**/", "?", "[ab]",
    "[!a]", "x.*", "# comment", "", "\\#a", "a b", "trailing  ", "\\[odd\\]", "*", "!a", "!*/", "/*.py", "a/*", "**/b/x.py", "!/a/b/x.py",
    ".hidden", "[a-c]", "**", "a*", "!build/",
)  # fmt: skip


def git(folder, *words, text=""):
    return subprocess.run(
        ["git", "-C", str(folder), *words], input=text, capture_output=True, text=True, check=False
    ).stdout


def by_git(folder, paths):
    """What git ignores; it sees on the disk what is a folder."""
    listed = "".join(f"{path}\0" for path, _ in paths)
    told = git(folder, "check-ignore", "--no-index", "-z", "--stdin", text=listed).split("\0")
    return {path for path in told if path}


def by_us(folder, paths):
    """Walking down as the sync does: what is below an ignored folder is ignored."""
    ignored, found = Ignored(folder), set()
    for path, is_folder in sorted(paths):
        parent = path.rpartition("/")[0]
        if parent in found or (path, is_folder) in ignored:
            found.add(path)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_any_lines_are_read_as_git_reads_them(tmp_path, seed):
    rng = random.Random(seed)
    git(tmp_path, "init", "-q")
    paths = set()
    for _ in range(25):
        parts = rng.choices(NAMES, k=rng.randint(1, 4))
        if any("/".join(parts[:n]) in {p for p, f in paths if not f} for n in range(1, len(parts))):
            continue
        target = tmp_path.joinpath(*parts)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        paths.add(("/".join(parts), False))
        paths |= {("/".join(parts[:n]), True) for n in range(1, len(parts))}
    (tmp_path / ".gitignore").write_text("\n".join(rng.choices(LINES, k=rng.randint(1, 6))) + "\n")
    folders = sorted(path for path, is_folder in paths if is_folder)
    if folders and rng.random() < 0.5:
        lines = "\n".join(rng.choices(LINES, k=2))
        (tmp_path / rng.choice(folders) / ".gitignore").write_text(lines)
    assert by_us(tmp_path, paths) == by_git(tmp_path, paths), (tmp_path / ".gitignore").read_text()


def test_files_above_the_project_count_up_to_the_repositorys_root(tmp_path):
    (tmp_path / ".gitignore").write_text("*.everything\n")
    repository = tmp_path / "repository"
    project = repository / "sub/project"
    project.mkdir(parents=True)
    (repository / ".git").mkdir()
    (repository / ".gitignore").write_text("*.tmp\n/sub/project/here\n")
    ignored = Ignored(project)
    assert ("a.tmp", False) in ignored
    assert ("here", True) in ignored
    assert ("a.everything", False) not in ignored


def test_without_a_repository_the_projects_own_file_counts(tmp_path):
    (tmp_path / ".gitignore").write_text("*.tmp\n")
    assert ("deep/a.tmp", False) in Ignored(tmp_path)
    assert ("deep/a.py", False) not in Ignored(tmp_path)
