"""The end of a run: log line, receipt, artifact manifest, and the terminal status after all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import traceback
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import artifacts, disk
from .files import Json, append_line, read_json, write_json
from .hub import HubPusher
from .job import Job
from .launch import discard_secrets
from .outcome import Failure, Outcome, read_elastic_errors, read_reasons
from .push import Pusher
from .receipt import write_receipt
from .status import TERMINAL_STATES, StatusFile, complete
from .trainer import ELASTIC_FOLDER

_TRIES = 5


def finish(
    run_dir: str,
    job: Job,
    outcome: Outcome,
    status: StatusFile,
    *,
    attempts: Optional[List[Json]] = None,
    pusher: Optional[Pusher] = None,
    hub: Optional[HubPusher] = None,
) -> None:
    """Write everything that stands at the end, so that whoever sees a terminal state finds it all.

    Call it only when no process of the run is left. A second call changes nothing.
    """
    if complete(read_json(status.path))["state"] in TERMINAL_STATES and os.path.exists(
        os.path.join(run_dir, "artifacts.json")
    ):
        return
    disk.release(run_dir)
    message = outcome.message
    failure: Optional[Failure] = outcome.error
    with contextlib.suppress(OSError):
        lay_rank_errors(run_dir)
        if job.push is not None:
            status.write(phase="push", message="sending files to the store")
    pusher = pusher or Pusher(run_dir, job)
    problem = _to_store(pusher.push_all)
    left = _to_hub(hub or HubPusher(run_dir, job), job, status)
    message += f"; {left}" if left else ""
    try:
        listed, unmatched = _settle(run_dir, job, outcome, status, attempts)
    except OSError as error:  # a full disk: the state must still be told
        traceback.print_exc()
        listed, unmatched = [], []
        message += f"; its artifacts could not be listed: {error}"
    if unmatched:
        message += "; nothing matched the artifact {}".format(", ".join(unmatched))
    changes = {
        "state": outcome.state,
        "phase": "done",
        "message": message,
        "pid": os.getpid(),
        "exit_code": outcome.exit_code,
        "error": None if failure is None else failure.to_json(),
        "eta_seconds": 0.0 if outcome.state == "completed" else None,
        "checkpoints": _checkpoints(run_dir, complete(read_json(status.path))["checkpoints"]),
    }
    if outcome.state == "completed":
        changes["progress"] = 1.0
    if not problem:
        last = dict(complete(read_json(status.path)), **changes)
        problem = _to_store(lambda: pusher.push_end(listed, last))
    if problem:
        changes["message"] = f"{message}; not everything is in the store: {problem}"
    discard_secrets(run_dir)
    _retry(lambda: status.write(**changes))


def _to_store(action: Callable[[], str]) -> str:
    """Push; returns what went wrong. The state must be told whatever happens."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return f"{type(error).__name__} in the agent"


def _to_hub(hub: HubPusher, job: Job, status: StatusFile) -> str:
    """Send the weights where the job names a repository; returns what is to be said of it."""
    if job.hub is None:
        return ""
    with contextlib.suppress(OSError):
        status.write(phase="push", message="sending the weights to the hub")
    return _to_store(hub.deliver)


def _settle(
    run_dir: str, job: Job, outcome: Outcome, status: StatusFile, attempts: Optional[List[Json]]
) -> Tuple[List[str], List[str]]:
    """Everything but the terminal state; returns the listed paths, and the globs that match nothing."""
    now = _retry(lambda: status.write(phase="push", message="listing artifacts"))
    log = os.path.join(run_dir, "train.log")
    append_line(log, f"run_ended={outcome.state} {outcome.message}")
    found, unmatched = artifacts.paths(run_dir, job.artifacts)
    for pattern in unmatched:
        append_line(log, f"remote_artifact_missing={pattern}")
    listed = artifacts.entries(run_dir, (path for path in found if path != "receipt.json"))
    write_receipt(run_dir, job, outcome, now, listed, attempts=attempts)
    listed += artifacts.entries(run_dir, ["receipt.json"])
    artifacts.write_manifest(run_dir, job.run_id, listed, unmatched)
    return [row["path"] for row in listed], unmatched


def lay_rank_errors(run_dir: str) -> None:
    """Write `errors/rank<k>.json` from what torchelastic and the ranks left; drop the scratch folder."""
    folder = os.path.join(run_dir, "errors")
    os.makedirs(folder, exist_ok=True)
    told = [(reason.rank, reason.error) for reason in read_reasons(run_dir)]
    told += [(failure.rank or 0, failure) for failure in read_elastic_errors(run_dir)]
    for rank, error in told:
        path = os.path.join(folder, f"rank{rank}.json")
        if error is not None and not os.path.exists(path):
            write_json(path, error.to_json())
    for name in os.listdir(run_dir):
        if name.startswith(ELASTIC_FOLDER):
            shutil.rmtree(os.path.join(run_dir, name), ignore_errors=True)


def _checkpoints(run_dir: str, told: Any) -> Dict[str, Any]:
    """What the trainer told, and what stands where it told nothing; relative to the run directory."""
    found = dict(told) if isinstance(told, dict) else {}
    for name in ("best", "last"):
        path = f"weights/{name}.pt"
        if not found.get(name):
            found[name] = path if os.path.isfile(os.path.join(run_dir, path)) else None
    return found


def _retry(action: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
    for left in range(_TRIES - 1, -1, -1):
        try:
            return action()
        except OSError:
            if not left:
                raise
            time.sleep(0.5)
    raise AssertionError
