"""What a watcher reads in one short call: status, heartbeat, new bytes of the log, new rows."""

from __future__ import annotations

import base64
import contextlib
import os
import zlib
from typing import Any, Dict, List, Optional

from . import host
from .errors import AgentError
from .files import Json, file_size, read_json, read_slice, utc_now, write_bytes
from .heart import age_seconds, agent_alive, blank_agent, proof_of_death
from .launch import run_dir_of
from .status import TERMINAL_STATES, complete
from .watchdog import bury_if_due

# One document stays below what a server passes on at once, with room for the rest of it.
_OVERHEAD_BYTES = 48 << 10
_ROWS_SHARE = 8
# Of many runs that have lost their agents, so many are ended each time the runs are listed.
_MOST_BURIALS = 2
# Text shrinks five times or so; what is read at once is bounded so that a call stays short.
_MOST_LOG_BYTES = 2 << 20


def poll(
    remote_dir: str,
    run_id: str,
    log_offset: int = 0,
    metrics_offset: int = 0,
    steps_offset: int = 0,
    max_bytes: int = 262144,
) -> Dict[str, Any]:
    """Return the run as it stands, and what is new since the caller's offsets, within `max_bytes`.

    A negative `log_offset` is that many bytes from the end. An offset past the end (the file was
    rewritten by a resumed run) is answered from the beginning.
    """
    run_dir = run_dir_of(remote_dir, run_id)
    # The order matters: an agent seen dead can write no more, so a status read after is its last;
    # a log read after a terminal status is the whole log.
    agent = read_agent(run_dir)
    alive = agent is not None and agent_alive(agent)
    if not alive:
        bury_if_due(run_dir, agent)
    manifest_there = os.path.exists(os.path.join(run_dir, "artifacts.json"))
    found = read_json(os.path.join(run_dir, "status.json"))
    status = _status_of(run_dir, found, ended=manifest_there)
    manifest = None
    if status["state"] in TERMINAL_STATES:
        manifest = read_json(os.path.join(run_dir, "artifacts.json"))
    budget = max(16 << 10, max_bytes - _OVERHEAD_BYTES)
    metrics = _rows(os.path.join(run_dir, "metrics.jsonl"), metrics_offset, budget // _ROWS_SHARE)
    steps = _rows(os.path.join(run_dir, "steps.jsonl"), steps_offset, budget // _ROWS_SHARE)
    left = budget - len(metrics["data"]) - len(steps["data"])
    return {
        "run_id": run_id,
        "run_dir": run_dir,
        "status": status,
        "status_whole": found is not None,
        "agent": agent,
        "agent_alive": alive,
        "agent_heartbeat_age_seconds": None if agent is None else age_seconds(agent),
        "boot_id": host.boot_id(),
        "now": utc_now(),
        "log": _log(os.path.join(run_dir, "train.log"), log_offset, left),
        "metrics": metrics,
        "steps": steps,
        "artifacts": manifest,
    }


def pack_log(
    remote_dir: str, run_id: str, key: str, offset: int, length: int = 16 << 20
) -> Dict[str, Any]:
    """Lay a compressed piece of the log beside it, to be fetched as a file.

    A long log goes so, piece by piece, while short polls go on in between. One piece a `key` lies there
    at a time; a `length` of 0 removes it.

    Returns:
        {"path": of the piece, absolute, "offset", "length": raw bytes in it, "size": of the log}
    """
    run_dir = run_dir_of(remote_dir, run_id)
    if not key.isalnum():
        raise AgentError(f"not a key: {key!r}")
    path = os.path.join(run_dir, "control", f"log-{key}.zlib")
    log = os.path.join(run_dir, "train.log")
    data = read_slice(log, offset, length) if length > 0 else b""
    if data:
        write_bytes(path, zlib.compress(data, 1))
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return {"path": path, "offset": offset, "length": len(data), "size": file_size(log)}


def read_agent(run_dir: str) -> Optional[Json]:
    """Return the last heartbeat; before the first one, who holds the launch lock."""
    found = read_json(os.path.join(run_dir, "agent.json"))
    if found is not None:
        return found
    owner = read_json(os.path.join(run_dir, "launch.lock"))
    if owner is None:
        return None
    agent = blank_agent(os.path.basename(run_dir))
    agent.update({key: owner[key] for key in owner if key in agent})
    return agent


def read_status(run_dir: str, *, ended: bool) -> Json:
    """Return the status with every key. A trainer's own "completed" is not the run's until all is listed."""
    return _status_of(run_dir, read_json(os.path.join(run_dir, "status.json")), ended=ended)


def _status_of(run_dir: str, found: Optional[Json], *, ended: bool) -> Json:
    status = complete(found)
    if status["state"] in TERMINAL_STATES and not ended:
        again = os.path.exists(os.path.join(run_dir, "artifacts.json"))
        if not again and status.get("phase") != "done":
            status["state"] = "training"
    return status


def list_runs(remote_dir: str) -> Dict[str, List[Dict[str, Any]]]:
    """Return every run of this remote folder, newest first."""
    folder = os.path.join(os.path.abspath(os.path.expanduser(remote_dir)), "runs")
    try:
        names = sorted(os.listdir(folder), reverse=True)
    except OSError:
        names = []
    runs = []
    left = _MOST_BURIALS
    for name in names:
        run_dir = os.path.join(folder, name)
        if name.startswith(".") or not os.path.isdir(run_dir):
            continue
        status = read_status(run_dir, ended=False)
        job = read_json(os.path.join(run_dir, "job.json")) or {}
        ended = status["state"] in TERMINAL_STATES
        agent = None if ended else read_agent(run_dir)
        dead = "" if agent is None else proof_of_death(agent)
        if dead:
            if left:  # each starts a process, and a list must be quick
                left -= bury_if_due(run_dir, agent)
            status.update(state="failed", message=dead)
        runs.append(
            {
                "run_id": name,
                "name": job.get("name", name),
                "state": status["state"],
                "attempt": status["attempt"],
                "created_at": job.get("created_at"),
                "agent_alive": agent is not None and agent_alive(agent),
                "optimizer_steps": status["optimizer_steps"],
                "world_size": status["world_size"],
                "message": status["message"],
                "sync": job.get("sync"),
                "artifacts": job.get("artifacts"),
            }
        )
    return {"runs": runs}


def _log(path: str, offset: int, budget: int) -> Dict[str, Any]:
    size = file_size(path)
    from_end = offset < 0
    start = max(0, size + offset) if from_end else (offset if offset <= size else 0)
    length = min(size - start, _MOST_LOG_BYTES)
    if from_end:
        start = size - length
    while True:
        data = read_slice(path, start, length)
        encoded = base64.b64encode(zlib.compress(data, 1)) if data else b""
        if len(encoded) <= budget or length <= 1024:
            return {"offset": start, "data": encoded.decode("ascii"), "size": size}
        length //= 2
        if from_end:  # the newest bytes are what a first look is for
            start = size - length


def _rows(path: str, offset: int, budget: int) -> Dict[str, Any]:
    """Whole rows from `offset`: what follows the last newline belongs to the next call."""
    size = file_size(path)
    start = offset if 0 <= offset <= size else 0
    data, length = b"", budget
    while start < size and not data:
        chunk = read_slice(path, start, length)
        data = chunk[: chunk.rfind(b"\n") + 1]
        if len(chunk) < length:
            break
        length *= 2  # one row longer than the budget
    return {"offset": start, "data": data.decode("utf-8", "replace"), "size": size}
