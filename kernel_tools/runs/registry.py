"""What stays here of each run: `.kernel_tools/runs/<run_id>/`, enough to come back from any notebook.

`record.json` says what was launched and where; beside it lies the mirror of the run's log and rows.
No secret and no URL stands in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kernel_tools.errors import InvalidArgumentError, RunNotFoundError

FOLDER: Final = ".kernel_tools/runs"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One launched run, as remembered on this side."""

    run_id: str
    name: str
    created_at: str
    where: str  # "local", or the host's name; never a URL
    remote_dir: str
    artifact_dir: str
    sync: Mapping[str, Any] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()  # globs relative to the work folder
    images_root: str | None = None  # the data set's folder here, to draw predictions from
    inputs: tuple[str, ...] | None = None  # objects in the store that it reads; None: not known


class Registry:
    """The records of one project."""

    def __init__(self, project_dir: Path) -> None:
        self.root = project_dir / FOLDER

    def folder(self, run_id: str) -> Path:
        """Return where a run's record and mirror are; it may not exist yet."""
        if run_id in {"", ".", ".."} or "/" in run_id or os.sep in run_id:
            raise InvalidArgumentError(f"{run_id!r} is not a run id; %remote_runs lists them.")
        return self.root / run_id

    def save(self, record: RunRecord) -> None:
        """Write or replace a record, whole."""
        folder = self.folder(record.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "record.json", dataclasses.asdict(record))

    def load(self, run_id: str) -> RunRecord:
        """Return a record.

        Raises:
            RunNotFoundError: there is none here.
        """
        try:
            data = json.loads((self.folder(run_id) / "record.json").read_text("utf-8"))
        except FileNotFoundError:
            raise RunNotFoundError(
                f"no run {run_id!r} is recorded in {self.root}.", hint="%remote_runs lists them."
            ) from None
        known = {f.name for f in dataclasses.fields(RunRecord)}
        for name in ("argv", "artifacts"):
            data[name] = tuple(data.get(name, ()))
        data["inputs"] = None if data.get("inputs") is None else tuple(data["inputs"])
        return RunRecord(**{key: value for key, value in data.items() if key in known})

    def last_state(self, run_id: str) -> str | None:
        """Return the state that a run ended with, None where it was never seen to end."""
        try:
            status = json.loads((self.folder(run_id) / "status.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return str(status["state"]) if isinstance(status, dict) and "state" in status else None

    def run_ids(self) -> tuple[str, ...]:
        """Return the recorded ids, newest first."""
        if not self.root.is_dir():
            return ()
        return tuple(sorted((p.parent.name for p in self.root.glob("*/record.json")), reverse=True))

    def find(self, run_id: str) -> str:
        """Complete an unambiguous part of an id (its name, its four last digits) to the whole.

        Raises:
            RunNotFoundError: it fits none, or more than one.
        """
        ids = self.run_ids()
        if run_id in ids:
            return run_id
        fitting = [known for known in ids if run_id in known]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise RunNotFoundError(
                f"{run_id!r} fits {len(fitting)} runs.", hint=f"Type more of one: {fitting[0]}."
            )
        return run_id


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically by `value` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, sort_keys=True)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
