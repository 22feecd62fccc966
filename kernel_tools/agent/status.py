"""`status.json`: the one list of its keys, a blank status, and the agent's writer.

The agent writes it before the trainer starts and after the trainer's last process is gone; rank 0
writes it in between. Every key stands in it at every moment.
"""

from __future__ import annotations

import math
import os
import socket
import time
from typing import Any, FrozenSet, Optional, Tuple

from . import host
from .files import Json, read_json, utc_now, write_json

STATUS_KEYS: Tuple[str, ...] = (
    "schema_version", "run_id", "state", "phase", "message", "pid", "host", "boot_id", "save_dir",
    "model_family", "model_size", "task", "started_at", "updated_at", "elapsed_seconds",
    "total_epochs", "start_epoch", "current_epoch", "completed_epochs", "progress",
    "epoch_seconds", "mean_epoch_seconds", "eta_seconds", "step", "steps_per_epoch",
    "optimizer_steps", "skipped_steps", "distributed", "world_size", "device", "gpu_names",
    "ranks", "batch_size", "global_batch_size", "images_per_second", "lr", "train_loss",
    "metrics", "current_metric", "current_metric_name", "best_metric", "best_metric_name",
    "best_epoch", "validated", "checkpoints", "attempt", "resumed_from", "error", "exit_code",
)  # fmt: skip

TERMINAL_STATES: FrozenSet[str] = frozenset(["completed", "failed", "stopped", "timed_out"])
STATES: FrozenSet[str] = TERMINAL_STATES | frozenset(
    ["queued", "preparing", "training", "validating", "stopping"]
)


def blank_status() -> Json:
    """Return a status with every key: null, or empty where the value is a collection."""
    status: Json = dict.fromkeys(STATUS_KEYS)
    status.update(
        schema_version=1,
        gpu_names=[],
        ranks=[],
        metrics={},
        checkpoints={"best": None, "last": None},
    )
    return status


def complete(found: Optional[Json]) -> Json:
    """Return `found` with missing keys added and its state one of ours; other trainers may write less."""
    status = blank_status()
    status.update(found or {})
    if status["state"] not in STATES:
        # LibreYOLO's word for both training and validating is "running".
        status["state"] = "training" if found else "queued"
    return status


def queued_status(run_id: str, run_dir: str) -> Json:
    """Return the first status of a run, as the launcher writes it."""
    status = blank_status()
    status.update(
        run_id=run_id,
        state="queued",
        message="waiting for the agent to start",
        pid=os.getpid(),
        host=socket.gethostname(),
        boot_id=host.boot_id(),
        save_dir=run_dir,
        updated_at=utc_now(),
    )
    return status


class StatusFile:
    """The agent's hand on one run's `status.json`."""

    def __init__(self, run_dir: str) -> None:
        self.path = os.path.join(run_dir, "status.json")
        self._run_dir = run_dir
        self._began = time.monotonic()
        self._started_at = utc_now()
        self._written: Optional[Tuple[int, int]] = None

    def write(self, **changes: Any) -> Json:
        """Read what stands there, apply `changes`, refresh the clock fields, replace atomically."""
        status = complete(read_json(self.path))
        status.update(changes)
        status.update(
            boot_id=host.boot_id(),
            host=socket.gethostname(),
            save_dir=self._run_dir,
            started_at=status["started_at"] or self._started_at,
            updated_at=utc_now(),
            elapsed_seconds=round(time.monotonic() - self._began, 3),
        )
        write_json(self.path, _finite(status))
        self._written = self._stamp()
        return status

    def untouched(self) -> bool:
        """Return whether nobody has replaced the file since this object wrote it."""
        return self._written is not None and self._stamp() == self._written

    def _stamp(self) -> Optional[Tuple[int, int]]:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
