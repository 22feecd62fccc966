"""Bring every input into place, several at once, and link each into the work folder.

    <datasets_dir>/<sha256>/{marker.json,content/...}    appears by rename, complete
    <datasets_dir>/.part-<key>, and with .map, .journal  what an interrupted download left
    <datasets_dir>/.new-<key>                            being unpacked

A present marker with the right hash means that nothing is downloaded.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from . import disk
from .disk import Claim
from .errors import InputError, StopRequestedError
from .intake import Intake, content_root
from .job import Job
from .trainer import place_in_work

_PARALLEL = 4
# Connections of all inputs together, and of one at least.
_CONNECTIONS, _LEAST_CONNECTIONS = 8, 2
_MOST_CONNECTIONS = 4
_TELL_SECONDS = 0.5
_TICK_SECONDS = 0.1
_CANCEL_SECONDS = 2.0

Rows = List[Dict[str, Any]]


def stage_inputs(
    run_dir: str,
    job: Job,
    *,
    urls: Mapping[str, str],
    log: Callable[[str], None],
    progress: Callable[[Rows], None],
    should_stop: Callable[[], bool],
    stall_seconds: Optional[float],
) -> None:
    """Stage all inputs of a job, several at once, and link each to its `dest` in the work folder.

    Args:
        run_dir: the run.
        job: names the inputs and the folder of data sets.
        urls: presigned URL by object name; never logged.
        log: takes one line for the run's log.
        progress: takes one row an input: name, bytes, size_bytes, percent, state.
        should_stop: whether the run was asked to end.
        stall_seconds: how long no byte may come.

    Raises:
        InputError: an input cannot be had or is refused.
        StopRequestedError: the run was asked to end.
    """
    if not job.inputs:
        return
    folder = datasets_dir(run_dir, job)
    os.makedirs(folder, exist_ok=True)
    share = _CONNECTIONS // min(_PARALLEL, len(job.inputs))
    share = max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, share))
    tasks = [Intake(one, folder, urls.get(one.object), share) for one in job.inputs]
    disk.check_room(room_claims(tasks, folder, run_dir, job.checkpoint_bytes))
    turns = threading.BoundedSemaphore(_PARALLEL)
    # Daemons: a thread that hangs in a socket must not keep a stopped run alive.
    threads = [
        threading.Thread(target=task.guarded, args=(turns,), name=task.input.name, daemon=True)
        for task in tasks
    ]
    for thread in threads:
        thread.start()
    try:
        _wait(tasks, progress, should_stop, stall_seconds)
    except BaseException:
        for task in tasks:
            task.cancelled.set()
        for thread in threads:
            thread.join(_CANCEL_SECONDS / len(threads))
        raise
    for task in tasks:
        place_in_work(run_dir, task.input.dest, content_root(task.content, task.input))
        log(f"remote_dataset_ready={task.input.dest}")
    progress([task.row() for task in tasks])


def datasets_dir(run_dir: str, job: Job) -> str:
    """Return where staged data is kept: the job's choice, else beside the runs."""
    if job.datasets_dir:
        return os.path.abspath(os.path.expanduser(job.datasets_dir))
    return usual_datasets_dir(os.path.dirname(os.path.dirname(run_dir)))


def usual_datasets_dir(remote_dir: str) -> str:
    """Return where staged data is kept unless a job says otherwise."""
    if os.path.isdir(disk.KAGGLE_WORKING) and _can_be_made(disk.KAGGLE_SCRATCH):
        return os.path.join(disk.KAGGLE_SCRATCH, "remote_kernel_tools", "datasets")
    return os.path.join(remote_dir, "datasets")


def room_claims(
    tasks: Sequence[Intake], folder: str, run_dir: str, checkpoint_bytes: int
) -> List[Claim]:
    """Return what the inputs that are not here will take, archive and content, and the checkpoints."""
    coming = [task for task in tasks if not task.ready]
    claims = []
    for task in coming:
        one, archive = task.input, task.input.size_bytes or 0
        content = 0
        if one.format != "file":
            content = archive if one.content_bytes is None else one.content_bytes
        left = max(0, archive - task.arrived_bytes)
        claims.append(Claim(folder, (one.name,), left + content))
    if coming:
        claims.append(Claim(run_dir, ("the checkpoints",), checkpoint_bytes))
    return claims


def _can_be_made(folder: str) -> bool:
    """True for a folder that is writable, or that could be made where it belongs."""
    return os.access(folder if os.path.isdir(folder) else os.path.dirname(folder), os.W_OK)


def _wait(
    tasks: List[Intake],
    progress: Callable[[Rows], None],
    should_stop: Callable[[], bool],
    stall_seconds: Optional[float],
) -> None:
    """Return when all are ready; raise what the first one raised, or the end that was asked for."""
    seen: List[Any] = []
    moved = told = time.monotonic()
    while True:
        pending = [task for task in tasks if not task.ended.wait(_TICK_SECONDS / len(tasks))]
        for task in tasks:
            if task.error is not None:
                raise task.error
        if not pending:
            return
        if should_stop():
            raise StopRequestedError
        now = time.monotonic()
        rows = [task.row() for task in tasks]
        if now - told >= _TELL_SECONDS:
            told = now
            progress(rows)
        figures = [(row["bytes"], row["state"], task.unpacked) for row, task in zip(rows, tasks)]
        if figures != seen or any(task.queued for task in tasks):
            seen, moved = figures, now
        if stall_seconds is not None and now - moved > stall_seconds:
            waiting = ", ".join(task.input.name for task in pending)
            raise InputError(f"stalled: no byte of {waiting} came for {stall_seconds:.0f} s")
