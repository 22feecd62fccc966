"""Make a run directory appear whole, and start its agent at most once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from typing import Any, Dict, List, Mapping, Optional

from . import bootstrap, host, processes, status, trainer
from .errors import AgentError, RunNotFoundError
from .files import Json, file_size, fsync_folder, read_json, read_slice, utc_now, write_json
from .job import Job, check_run_id, same_job

# A loaded machine may take seconds to start an interpreter; past this something is wrong.
_START_SECONDS = 30.0
_LOG_TAIL_BYTES = 2000
_FOLDERS = ("code", "control", "errors", "evaluation", "reasons", "weights")


def launch(
    remote_dir: str, job: Json, manifest: Mapping[str, Any], secrets_file: Optional[str] = None
) -> Dict[str, Any]:
    """Lay the run directory, start the supervising process, return once it holds the launch lock.

    However often and from wherever it is called, one run_id starts at most once: the supervising
    process that creates `launch.lock` is the one, any other ends at once.

    Raises:
        AgentError: the job is not valid, the run_id is taken by another job, or nothing started.
    """
    root = os.path.abspath(os.path.expanduser(remote_dir))
    try:
        spec = Job.from_json(job)
        run_dir = os.path.join(root, "runs", spec.run_id)
        if not os.path.isdir(run_dir):
            _lay(root, run_dir, job, manifest)
    except AgentError:
        _discard_unused(root, secrets_file)
        raise
    found = read_json(os.path.join(run_dir, "job.json"))
    if found is None or not same_job(found, job):
        raise AgentError(f"the run {spec.run_id} exists already, with another job")
    if secrets_file is not None:
        _keep_secrets(root, spec.run_id, secrets_file)
    started = False
    if not os.path.exists(os.path.join(run_dir, "launch.lock")):
        started = _start(run_dir)
    now = status.complete(read_json(os.path.join(run_dir, "status.json")))
    if now["state"] in status.TERMINAL_STATES:
        discard_secrets(run_dir)
    return {
        "run_id": spec.run_id, "run_dir": run_dir, "started": started, "state": now["state"],
    }  # fmt: skip


def take_lock(run_dir: str, token: str) -> bool:
    """Create `launch.lock`; False where the run has an owner already."""
    path = os.path.join(run_dir, "launch.lock")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    pid, started = identity_of_self()
    owner = {
        "token": token,
        "pid": pid,
        "start_time": started,
        "boot_id": host.boot_id(),
        "created_at": utc_now(),
        "heartbeat_monotonic": round(time.monotonic(), 3),
    }
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(owner, stream)
        stream.flush()
        os.fsync(stream.fileno())
    fsync_folder(run_dir)
    return True


def secrets_path(run_dir: str) -> str:
    """Return where the secrets of a run are kept."""
    runs, run_id = os.path.split(run_dir)
    return os.path.join(os.path.dirname(runs), "secrets", run_id + ".json")


def read_secrets(run_dir: str) -> Json:
    """Return the run's secrets: {"inputs": {object: url}, "env": {name: value}}; empty where none."""
    return read_json(secrets_path(run_dir)) or {}


def discard_secrets(run_dir: str) -> None:
    """Remove the run's secrets; it has ended and needs them no more."""
    kept = secrets_path(run_dir)
    for path in (kept, os.path.splitext(kept)[0] + ".push.json"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _discard_unused(root: str, secrets_file: Optional[str]) -> None:
    """Remove secrets that were sent ahead for a run that was refused, and so will never end."""
    if secrets_file is None:
        return
    given = os.path.realpath(os.path.join(root, os.path.expanduser(secrets_file)))
    folder, name = os.path.split(given)
    if folder != os.path.realpath(os.path.join(root, "secrets")):
        return
    if not os.path.isdir(os.path.join(root, "runs", os.path.splitext(name)[0])):
        with contextlib.suppress(OSError):
            os.unlink(given)


def run_dir_of(remote_dir: str, run_id: str) -> str:
    """Return the directory of an existing run. Raises AgentError where there is none."""
    root = os.path.abspath(os.path.expanduser(remote_dir))
    run_dir = os.path.join(root, "runs", check_run_id(run_id))
    if not os.path.isdir(run_dir):
        raise RunNotFoundError(f"there is no run {run_id} in {root}")
    return run_dir


def _lay(root: str, run_dir: str, job: Json, manifest: Mapping[str, Any]) -> None:
    runs, run_id = os.path.split(run_dir)
    os.makedirs(runs, exist_ok=True)
    building = os.path.join(runs, f".new-{run_id}-{os.urandom(6).hex()}")
    try:
        for name in _FOLDERS:
            os.makedirs(os.path.join(building, name))
        try:
            bootstrap.lay_tree(root, manifest.get("files") or {}, os.path.join(building, "code"))
        except FileNotFoundError as error:
            raise AgentError("code is missing on the remote; sync again and launch") from error
        except ValueError as error:
            raise AgentError(str(error)) from error
        trainer.lay_work_folder(building)
        write_json(os.path.join(building, "job.json"), job)
        write_json(os.path.join(building, "manifest.json"), dict(manifest))
        write_json(os.path.join(building, "status.json"), status.queued_status(run_id, run_dir))
        with open(os.path.join(building, "train.log"), "ab"):
            pass
        try:
            os.rename(building, run_dir)
        except OSError as error:
            if not os.path.isdir(run_dir):  # otherwise a parallel launch was first
                raise AgentError(f"cannot create {run_dir}: {error}") from error
        fsync_folder(runs)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _keep_secrets(root: str, run_id: str, secrets_file: str) -> None:
    kept = os.path.join(root, "secrets", run_id + ".json")
    given = os.path.join(root, os.path.expanduser(secrets_file))
    if not os.path.exists(given):
        if os.path.exists(kept):
            return
        raise AgentError(f"the run's secrets file is not there: {given}")
    os.makedirs(os.path.dirname(kept), mode=0o700, exist_ok=True)
    os.chmod(given, stat.S_IRUSR | stat.S_IWUSR)
    if os.path.realpath(given) != os.path.realpath(kept):
        os.replace(given, kept)


def _start(run_dir: str) -> bool:
    token = os.urandom(16).hex()
    lock = os.path.join(run_dir, "launch.lock")
    log = os.path.join(run_dir, "agent.log")
    with open(log, "ab") as stream:
        child = subprocess.Popen(
            agent_command("supervise", run_dir, "--token", token),
            cwd="/", env=trainer.clean_environment(os.environ), stdin=subprocess.DEVNULL,
            stdout=stream, stderr=stream, start_new_session=True, close_fds=True,
        )  # fmt: skip
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        code = child.poll()  # it forks and ends at once; the child of its own goes on
        owner = read_json(lock)
        if owner is not None and code is not None:
            return bool(owner["token"] == token)
        if code:
            break
        time.sleep(0.01)
    tail = read_slice(log, max(0, file_size(log) - _LOG_TAIL_BYTES), _LOG_TAIL_BYTES)
    raise AgentError(
        "the agent did not start: {}".format(" ".join(tail.decode("utf-8", "replace").split()))
    )


def agent_command(*arguments: str) -> List[str]:
    """Return the command line that runs this very folder as a program."""
    return [sys.executable, os.path.dirname(os.path.abspath(__file__)), *arguments]


def detach() -> bool:
    """Leave the process that started us: True in the process that goes on, False in the other."""
    if os.fork():
        return False
    os.setsid()
    return True


def identity_of_self() -> processes.Identity:
    """Return this process's pid and start time."""
    me = processes.find(os.getpid())
    return (os.getpid(), "" if me is None else me.started)
