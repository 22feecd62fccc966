"""The run directory: where each file of a run lies, and the records that a rank leaves at its end.

With RUN_DIR in the environment a supervisor made it; else it is `<runtime.output_dir>/<time>-<name>`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import secrets
import traceback as traceback_module
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from detector.config import Config
from detector.console import say
from detector.files import RowLog, write_json
from detector.status import blank_status

DEFAULT_OUTPUT_DIR = "runs"
_RESERVE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    path: Path
    supervised: bool = False

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def last(self) -> Path:
        return self.weights / "last.pt"

    @property
    def best(self) -> Path:
        return self.weights / "best.pt"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation"

    @property
    def stop_request(self) -> Path:
        return self.path / "control" / "stop.json"

    def hold_reserve(self) -> None:
        """Keep some room, so that a run that fills the disk can still say how it ended.

        Raises:
            OSError: there is not even that much.
        """
        self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def release_reserve(self) -> None:
        """Give the room back, for the last words."""
        with contextlib.suppress(OSError):
            self._reserve.unlink()

    @property
    def _reserve(self) -> Path:
        return self.path / ".reserve"

    @property
    def metrics(self) -> RowLog:
        """One row an epoch."""
        return RowLog(self.path / "metrics.jsonl")

    @property
    def steps(self) -> RowLog:
        """One row every `logging.log_interval` optimizer steps."""
        return RowLog(self.path / "steps.jsonl")

    def record_end(self, rank: int, *, reason: str, exit_code: int, message: str) -> None:
        """Leave `reasons/rank<k>.json`: why this rank ended."""
        self._record(rank, reason=reason, exit_code=exit_code, message=message, error=None)

    def record_error(self, rank: int, error: BaseException) -> dict[str, Any]:
        """Leave `errors/rank<k>.json` and the reason `failed`; return the error as a record."""
        record = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback_module.format_exception(error)),
            "rank": rank,
        }
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="microseconds")
        write_json(self.path / "errors" / f"rank{rank}.json", {**record, "time": now}, indent=1)
        message = f"{record['type']}: {record['message']}"
        self._record(rank, reason="failed", exit_code=1, message=message, error=record)
        return record

    def first_error(self) -> dict[str, Any] | None:
        """Return the earliest error on record: what the other ranks died of is its consequence."""
        found = []
        for path in (self.path / "errors").glob("rank*.json"):
            with contextlib.suppress(OSError, ValueError):
                entry = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(entry, dict) and {"time", "rank", "type", "message"} <= entry.keys():
                    found.append(entry)  # as a rank writes it
        if not found:
            return None
        first: dict[str, Any] = min(found, key=lambda entry: str(entry["time"]))
        first.pop("time")
        return first

    def _record(
        self,
        rank: int,
        *,
        reason: str,
        exit_code: int,
        message: str,
        error: Mapping[str, Any] | None,
    ) -> None:
        write_json(
            self.path / "reasons" / f"rank{rank}.json",
            {
                "rank": rank,
                "reason": reason,
                "exit_code": exit_code,
                "message": message,
                "error": error,
            },
            indent=1,
        )


def plan_run_path(config: Config, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where a new run goes. Called on rank 0 only: the name holds the time."""
    if environ.get("RUN_DIR"):
        return Path(environ["RUN_DIR"]).resolve()
    parent = Path(config.runtime.output_dir or DEFAULT_OUTPUT_DIR)
    name = Path(config.source)
    stamp = dt.datetime.now(dt.timezone.utc).strftime("%Y%m%d-%H%M%S")
    title = "-".join(part for part in (name.parent.name, name.stem) if part) or "run"
    return (parent / f"{stamp}-{title}-{secrets.token_hex(2)}").resolve()


def create_run_directory(
    path: Path, config: Config, *, environ: Mapping[str, str] = os.environ
) -> RunDirectory:
    """Make the directory (or take up the one that is there) with a status from the first moment."""
    run = RunDirectory(path, supervised=environ.get("RUN_SUPERVISED") == "1")
    if not path.exists():
        fresh = path.with_name(f".new-{path.name}")
        fresh.mkdir(parents=True)
        status = {**blank_status(), "run_id": environ.get("RUN_ID") or path.name, "state": "queued"}
        write_json(fresh / "status.json", status, indent=1)
        os.rename(fresh, path)
    for folder in ("weights", "evaluation", "reasons", "errors", "control"):
        (path / folder).mkdir(exist_ok=True)
    run.hold_reserve()
    left = ("reasons/rank*.json", "errors/rank*.json", "weights/.*")
    for stale in (name for pattern in left for name in path.glob(pattern)):
        stale.unlink()  # of an attempt before this one: its reasons, and the file it was killed at
    if not run.supervised:
        run.stop_request.unlink(missing_ok=True)
    if environ.get("RUN_DIR") and config.runtime.output_dir is not None:
        _link(Path(config.runtime.output_dir), path)
    return run


def _link(link: Path, target: Path) -> None:
    """Make `link` point to `target`; a folder that holds anything is left alone, and said so."""
    if link.exists() and link.resolve() == target.resolve():
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    with contextlib.suppress(OSError):
        link.rmdir()  # only an empty folder lets itself be removed
    try:
        link.symlink_to(target, target_is_directory=True)
    except OSError as error:
        say(f"runtime.output_dir={link} is not linked to {target}: {error}")
