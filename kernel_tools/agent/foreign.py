"""The status file of another trainer, in LibreYOLO's words, told in ours.

Such a file is written at the start, at the end of an epoch and at the end, with other keys each time;
it may be torn, absent, or left by a process that is gone. What was known stays known; the run's state
is the agent's alone, so a file that says `completed` ends nothing.
"""

from __future__ import annotations

import glob
import json
import os
from typing import Any, Dict, List, Optional, Tuple

from . import processes
from .files import Json, file_size, is_inside, read_json, read_slice, write_bytes
from .outcome import Failure
from .status import STATUS_KEYS

# What describes the run itself, which the agent knows better than any trainer.
_OURS = frozenset(
    [
        "schema_version", "run_id", "state", "phase", "message", "host", "boot_id", "save_dir",
        "started_at", "updated_at", "elapsed_seconds", "attempt", "resumed_from", "error", "exit_code",
    ]
)  # fmt: skip
_TAKEN = tuple(key for key in STATUS_KEYS if key not in _OURS)
# What other trainers call the figure that is shown as AP50.
_AP50_NAMES = ("AP50", "mAP50", "mAP_50", "map50", "mAP@0.5")
_MOST_ROWS_BYTES = 4 << 20


class ForeignStatus:
    """Reads `status.json` and `metrics.jsonl` of a folder that another trainer writes."""

    def __init__(self, run_dir: str, status_dir: Optional[str]) -> None:
        self._run_dir = run_dir
        self._status_dir = status_dir
        self._known: Dict[str, Any] = {}
        self._rows: Tuple[str, int] = ("", 0)
        self.document: Json = {}
        folder = self._folder()  # what an earlier attempt left says nothing of this one
        self._seen = None if folder is None else _stamp(os.path.join(folder, "status.json"))

    def look(self) -> Dict[str, Any]:
        """Return what is to be changed in the run's status, {} where nothing is new."""
        folder = self._folder()
        if folder is None:
            return {}
        if folder != self._run_dir:
            self._copy_rows(folder)
        path = os.path.join(folder, "status.json")
        seen = _stamp(path)
        if seen is None or seen == self._seen:
            return {}
        document = read_json(path)
        if document is None:
            return {}  # torn: the next look may find it whole
        self._seen, self.document = seen, document
        return self._told(document)

    def known(self) -> Dict[str, Any]:
        """Return every figure that was told so far, although the newest file may hold fewer."""
        return dict(self._known)

    @property
    def says(self) -> str:
        """`running`, `completed` or `failed` as the newest file has it; "" for any other word."""
        state = self.document.get("state")
        return state if state in ("running", "completed", "failed") else ""

    @property
    def failure(self) -> Optional[Failure]:
        """The error that the newest file tells, None where it tells none."""
        error = self.document.get("error")
        if self.says != "failed" or not isinstance(error, dict):
            return None
        stack = error.get("traceback")
        return Failure(
            str(error.get("type") or "Error"),
            str(error.get("message") or ""),
            stack if isinstance(stack, str) else None,
            None,
            raised=True,
        )

    def _told(self, document: Json) -> Dict[str, Any]:
        fresh = {key: document[key] for key in _TAKEN if document.get(key) not in (None, {}, [])}
        for key in ("progress", "completed_epochs"):
            # A file that says failed or completed may leave out, or count anew, what was reached.
            before = self._known.get(key)
            if _is_number(before) and _is_number(fresh.get(key)):
                fresh[key] = max(before, fresh[key])
        metrics = fresh.get("metrics")
        if isinstance(metrics, dict):
            fresh["metrics"] = _with_ap50(metrics)
        elif metrics is not None:
            del fresh["metrics"]
        self._known.update(fresh)
        state = "validating" if document.get("state") == "validating" else "training"
        changes = dict(self._known, state=state, phase="eval" if state == "validating" else "train")
        changes["message"] = self._message(document)
        return changes

    def _message(self, document: Json) -> str:
        state, pid = self.says, document.get("pid")
        if state in ("completed", "failed"):
            return f"the trainer's status file says {state}; its process has yet to end"
        row = processes.find(pid) if isinstance(pid, int) and not isinstance(pid, bool) else None
        if pid is not None and (row is None or row.gone):
            return f"the process that wrote the trainer's status file (pid {pid}) is gone"
        return ""

    def _folder(self) -> Optional[str]:
        """The folder that is watched; of several that fit a pattern, the newest."""
        if self._status_dir is None:
            return self._run_dir
        work = os.path.join(self._run_dir, "work")
        found = []
        for folder in glob.glob(os.path.join(glob.escape(work), self._status_dir)):
            path = os.path.join(folder, "status.json")
            if os.path.isfile(path) and is_inside(path, self._run_dir):
                found.append((os.stat(path).st_mtime_ns, folder))
        return max(found)[1] if found else None

    def _copy_rows(self, folder: str) -> None:
        """Bring whole new rows into the run's own `metrics.jsonl`, under our names."""
        source = os.path.join(folder, "metrics.jsonl")
        if source != self._rows[0] or file_size(source) < self._rows[1]:
            self._rows = (source, 0)
            if file_size(source):
                write_bytes(os.path.join(self._run_dir, "metrics.jsonl"), b"")
        chunk = read_slice(source, self._rows[1], _MOST_ROWS_BYTES)
        whole = chunk[: chunk.rfind(b"\n") + 1]
        if not whole:
            return
        self._rows = (source, self._rows[1] + len(whole))
        rows = [translate_row(row) for row in _parsed(whole)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with open(os.path.join(self._run_dir, "metrics.jsonl"), "ab") as stream:
            stream.write(text.encode("utf-8"))


def translate_row(row: Json) -> Json:
    """Return a row of LibreYOLO's `metrics.jsonl` with our names beside its own."""
    told = dict(row)
    told.setdefault("train_loss", row.get("train/loss"))
    told.setdefault("epoch_seconds", row.get("time"))
    rates = [value for key, value in row.items() if key.startswith("lr/")]
    told.setdefault("lr", rates[0] if rates else None)
    metrics = {
        key[len("metrics/") :]: value for key, value in row.items() if key.startswith("metrics/")
    }
    told.setdefault("metrics", _with_ap50(metrics) or None)
    return told


def _stamp(path: str) -> Optional[Tuple[str, int, int]]:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (path, found.st_ino, found.st_mtime_ns)


def _with_ap50(metrics: Dict[str, Any]) -> Dict[str, Any]:
    found = dict(metrics)
    for name in _AP50_NAMES:
        if "AP50" not in found and _is_number(found.get(name)):
            found["AP50"] = found[name]
    return found


def _parsed(data: bytes) -> List[Json]:
    rows = []
    for line in data.decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
