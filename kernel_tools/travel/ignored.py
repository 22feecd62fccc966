"""What `.gitignore` files say, as git reads them: the nearest file and its last fitting line decide.

Only the files of the project and of the folders above it up to the repository's root are read; git's own
excludes of the user and of `.git/info` are not, as a sync must not depend on whose machine it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final

FILE: Final = ".gitignore"


@dataclass(frozen=True, slots=True)
class _Line:
    """One line: fits a path relative to the file's folder."""

    pattern: re.Pattern[str]
    negated: bool
    folders_only: bool


class Ignored:
    """The `.gitignore` files of one project, read when a path needs them."""

    def __init__(self, project_dir: Path) -> None:
        self._project = project_dir
        self._lines: dict[Path, tuple[_Line, ...]] = {}

    def __contains__(self, entry: tuple[str, bool]) -> bool:
        """True where `(path relative to the project, is it a folder)` itself is ignored.

        A caller that walks down need not ask for what is below an ignored folder: git does not either.
        """
        path, is_folder = entry
        place = self._project / path
        for folder in self._folders_above(path):
            relative = place.relative_to(folder).as_posix()
            for line in reversed(self._read(folder)):
                if (is_folder or not line.folders_only) and line.pattern.fullmatch(relative):
                    return not line.negated
        return False

    def _folders_above(self, path: str) -> list[Path]:
        """The nearest first; above the project up to where `.git` is."""
        inside = [self._project / parent for parent in PurePosixPath(path).parents]
        return [*inside, *self._above]

    @cached_property
    def _above(self) -> tuple[Path, ...]:
        above: list[Path] = []
        folder = self._project
        while not (folder / ".git").exists():
            if folder.parent == folder:
                return ()  # no repository, so what lies above is none of the project's business
            folder = folder.parent
            above.append(folder)
        return tuple(above)

    def _read(self, folder: Path) -> tuple[_Line, ...]:
        if folder not in self._lines:
            try:
                text = (folder / FILE).read_text(encoding="utf-8", errors="replace")
            except OSError:
                text = ""
            parsed = (_parse(line) for line in text.splitlines())
            self._lines[folder] = tuple(line for line in parsed if line is not None)
        return self._lines[folder]


def _parse(text: str) -> _Line | None:
    text = re.sub(r"(?<!\\)((?:\\\\)*)[ \t]+$", r"\1", text)
    if not text or text.startswith("#"):
        return None
    negated = text.startswith("!")
    text = text.removeprefix("!") if negated else text
    folders_only = text.endswith("/")
    text = text.rstrip("/") if folders_only else text
    # A slash at the start or in the middle ties the line to its folder.
    anchored = "/" in text
    text = text.removeprefix("/")
    if not text:
        return None
    try:
        pattern = re.compile(("" if anchored else "(?:.*/)?") + _regex(text), re.DOTALL)
    except re.error:  # a bracket that git takes for nothing as well
        return None
    return _Line(pattern, negated, folders_only)


def _regex(glob: str) -> str:
    """Translate git's wildcards: `*` and `?` stop at a slash, `**` between slashes does not."""
    out, at = [], 0
    while at < len(glob):
        rest = glob[at:]
        if rest.startswith("**/") and (at == 0 or glob[at - 1] == "/"):
            out.append("(?:.*/)?")
            at += 3
        elif rest == "**" and at and glob[at - 1] == "/":
            out.append(".+")
            at += 2
        elif rest[0] == "*":
            out.append("[^/]*")
            at += len(rest) - len(rest.lstrip("*"))
        elif rest[0] == "?":
            out.append("[^/]")
            at += 1
        elif rest[0] == "[" and (end := _end_of_set(rest)):
            inside = rest[1:end].replace("\\", "\\\\")
            inside = "^" + inside[1:] if inside[:1] in {"!", "^"} else inside
            out.append(f"(?!/)[{inside}]")
            at += end + 1
        elif rest[0] == "\\" and len(rest) > 1:
            out.append(re.escape(rest[1]))
            at += 2
        else:
            out.append(re.escape(rest[0]))
            at += 1
    return "".join(out)


def _end_of_set(rest: str) -> int:
    """Return where `[...]` ends; 0 where it does not."""
    start = 2 if rest[1:2] in {"!", "^"} else 1
    return max(0, rest.find("]", start + 1))
