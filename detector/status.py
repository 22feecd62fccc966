"""`status.json`: every key at every moment, replaced whole, at least every two seconds.

The loop only sets figures in memory; a thread writes them. Under a supervisor (RUN_SUPERVISED=1) the
final state is the supervisor's to write.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from detector.console import say
from detector.files import write_json

SCHEMA_VERSION: Final = 1
STATUS_KEYS: Final = (
    "schema_version", "run_id", "state", "phase", "message", "pid", "host", "boot_id", "save_dir",
    "model_family", "model_size", "task", "started_at", "updated_at", "elapsed_seconds",
    "total_epochs", "start_epoch", "current_epoch", "completed_epochs", "progress",
    "epoch_seconds", "mean_epoch_seconds", "eta_seconds", "step", "steps_per_epoch",
    "optimizer_steps", "skipped_steps", "distributed", "world_size", "device", "gpu_names", "ranks",
    "batch_size", "global_batch_size", "images_per_second", "lr", "train_loss", "metrics",
    "current_metric", "current_metric_name", "best_metric", "best_metric_name", "best_epoch",
    "validated", "checkpoints", "attempt", "resumed_from", "error", "exit_code",
)  # fmt: skip
TERMINAL_STATES: Final = frozenset({"completed", "failed", "stopped", "timed_out"})
# Half of what readers are promised, so that one slow write does not break the promise.
_INTERVAL_SECONDS: Final = 1.0


def blank_status() -> dict[str, Any]:
    """Return a status with every key, `null` where nothing is known yet."""
    status: dict[str, Any] = dict.fromkeys(STATUS_KEYS)
    status["schema_version"] = SCHEMA_VERSION
    status["metrics"] = {}
    status["ranks"] = []
    status["gpu_names"] = []
    status["checkpoints"] = {"best": None, "last": None}
    return status


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, whole seconds."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


def boot_id() -> str:
    """Return Linux's id of this boot, empty elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class StatusWriter:
    """Keeps the status and writes it: at once when asked to, else from a thread.

    Fields that a launcher wrote before (`run_id`, `attempt`, ...) are taken over.
    """

    def __init__(self, path: Path, *, supervised: bool) -> None:
        self._path = path
        self._supervised = supervised
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failing = False
        self._thread: threading.Thread | None = None
        self._started = time.monotonic()
        self._status = {**blank_status(), **_read(path)}
        self._status.update(
            pid=os.getpid(),
            host=socket.gethostname(),
            boot_id=boot_id(),
            started_at=self._status["started_at"] or utc_now(),
        )

    def start(self) -> None:
        """Write now and from now on."""
        self.flush()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def update(self, **figures: Any) -> None:
        """Set figures; they are in the file within two seconds. `progress` never goes back.

        Raises:
            KeyError: a figure that is no key of a status.
        """
        unknown = figures.keys() - self._status.keys()
        if unknown:
            raise KeyError(f"not in status.json: {', '.join(sorted(unknown))}")
        with self._lock:
            if figures.get("progress") is not None:
                figures["progress"] = max(figures["progress"], self._status["progress"] or 0.0)
            self._status.update(figures)

    def flush(self, **figures: Any) -> None:
        """Set figures and write at once: a state or an epoch has changed.

        A full disk must not end the training: what could not be written is tried again.
        """
        self.update(**figures)
        with self._lock:
            self._status["updated_at"] = utc_now()
            self._status["elapsed_seconds"] = round(time.monotonic() - self._started, 3)
            try:
                write_json(self._path, self._status, indent=1)
            except OSError as error:
                if not self._failing:
                    say(f"not_written=status.json: {error.strerror or error}")
                self._failing = True
            else:
                self._failing = False

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the status as it stands."""
        with self._lock:
            return copy.deepcopy(self._status)

    def finish(self, state: str, *, exit_code: int, message: str, error: Any = None) -> None:
        """Write the last word and stop writing; under a supervisor the state stays as it is."""
        self.close()
        if self._supervised:
            self.flush()
        else:
            phase = {"phase": "done"} if state == "completed" else {}
            self.flush(state=state, exit_code=exit_code, message=message, error=error, **phase)

    def close(self) -> None:
        """End the thread, so that nobody writes behind the caller's back."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self.flush()


def _read(path: Path) -> dict[str, Any]:
    """Return what a launcher or an earlier attempt left: known keys, no final state."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    known = {key: found[key] for key in STATUS_KEYS if key in found}
    known.update(error=None, exit_code=None)
    if known.get("state") in TERMINAL_STATES:
        known["state"] = "preparing"
    return known
