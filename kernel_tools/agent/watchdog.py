"""A second process that ends a run whose agent was killed, so that no GPU is paid for unwatched.

Where both were killed, whoever looks at the run next starts a watchdog anew (`bury_if_due`), which ends
what is left and writes the terminal state. At most one of them is at work on a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from typing import Dict, Iterator, Optional

from . import host, processes, trainer
from .files import Json, append_line, read_json
from .finish import finish
from .heart import AGENT_KILLED, STALE_SECONDS, agent_alive, proof_of_death
from .job import Job
from .launch import agent_command, identity_of_self
from .outcome import Failure, Outcome
from .status import TERMINAL_STATES, StatusFile, complete

# What the trainer has between SIGTERM and SIGKILL when its agent is gone.
_TERM_SECONDS = 5.0
# How long the evidence of a death is waited for, and when a second process may be started for it.
_EVIDENCE_SECONDS = 2 * STALE_SECONDS
_BURIAL_SECONDS = 2 * _EVIDENCE_SECONDS
_DONE = b"done"


class Watchdog:
    """The agent's side: starts the process, keeps the pipe whose end tells that the agent is gone."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._child: Optional[subprocess.Popen] = None  # type: ignore[type-arg]

    @property
    def pid(self) -> Optional[int]:
        """The process's pid, None where it does not run."""
        return None if self._child is None else self._child.pid

    @property
    def identity(self) -> Json:
        """Pid and start time, as `agent.json` shows them."""
        row = None if self.pid is None else processes.find(self.pid)
        return {"pid": self.pid, "start_time": None if row is None else row.started}

    def keep(self) -> None:
        """Start it, or start it anew where somebody ended it."""
        if self._child is not None and self._child.poll() is None:
            return
        pid, started = identity_of_self()
        with open(os.path.join(self._run_dir, "agent.log"), "ab") as log:
            self._child = subprocess.Popen(
                agent_command("watch", self._run_dir, str(pid), started), cwd="/",
                env=trainer.clean_environment(os.environ), stdin=subprocess.PIPE, stdout=log,
                stderr=log, start_new_session=True, close_fds=True,
            )  # fmt: skip

    def dismiss(self) -> None:
        """Tell it that all is done, and wait for it."""
        if self._child is None:
            return
        try:
            self._child.communicate(_DONE, timeout=5)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._child.kill()
            self._child.wait()


def watch(run_dir: str, agent_pid: int, agent_started: str) -> int:
    """The process itself: wait for the agent's end; unless it said done, end the run and say so."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if not _wait(agent_pid, agent_started):
        _end(run_dir)
    return 0


def bury(run_dir: str) -> int:
    """Like `watch`, for an agent that is gone already: wait for the evidence, then end the run."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + _EVIDENCE_SECONDS
    while time.monotonic() < deadline:
        if proof_of_death(_agent(run_dir)):
            _end(run_dir)
            break
        time.sleep(0.5)
    return 0


def _end(run_dir: str) -> None:
    with _alone(run_dir) as first:
        if not first or _ended(run_dir):
            return
        agent = _agent(run_dir)
        log = os.path.join(run_dir, "train.log")
        append_line(log, "agent_killed=1 ending the run, which nobody watches any more")
        left = processes.end_all(lambda: _find(run_dir, agent), term_seconds=_TERM_SECONDS)
        if left:
            sys.stderr.write(f"cannot be ended: {[process.pid for process in left]}\n")
        failure = Failure("AgentKilled", proof_of_death(agent) or AGENT_KILLED)
        job = Job.of_run(run_dir)
        finish(run_dir, job, Outcome("failed", failure.message, failure), StatusFile(run_dir))


def bury_if_due(run_dir: str, agent: Optional[Json]) -> bool:
    """Start the end of a run that has lost its agent and its watchdog; returns at once.

    What is started acts on evidence alone: another boot, or no agent process and a stale heartbeat.

    Returns:
        Whether a process was started.
    """
    if agent is None or agent_alive(agent) or _ended(run_dir):
        return False
    watchdog = agent.get("watchdog") or {}
    if agent.get("boot_id") == host.boot_id() and processes.alive(
        watchdog.get("pid"), watchdog.get("start_time")
    ):
        return False  # it is at work, or will be within a second
    with _alone(run_dir) as first:
        lock = _lock_path(run_dir)
        if not first or 0 <= time.time() - os.stat(lock).st_mtime < _BURIAL_SECONDS:
            return False
        os.utime(lock)
    with open(os.path.join(run_dir, "agent.log"), "ab") as log:
        child = subprocess.Popen(
            agent_command("bury", run_dir), cwd="/", env=trainer.clean_environment(os.environ),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True,
        )  # fmt: skip
    child.wait()  # it forks and ends at once, so that it is nobody's zombie
    return True


def _agent(run_dir: str) -> Json:
    """The last heartbeat; before the first one, who holds the launch lock."""
    path = os.path.join(run_dir, "agent.json")
    return read_json(path) or read_json(os.path.join(run_dir, "launch.lock")) or {}


def _lock_path(run_dir: str) -> str:
    return os.path.join(run_dir, "control", "end.lock")


@contextlib.contextmanager
def _alone(run_dir: str) -> Iterator[bool]:
    """Whether nobody else is ending this run right now; the lock goes with the process that has it."""
    path = _lock_path(run_dir)
    fresh = not os.path.exists(path)
    with open(path, "ab") as stream:
        if fresh:
            os.utime(path, (0, 0))  # nobody has been at it yet
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _ended(run_dir: str) -> bool:
    """Whether the run has its terminal state, and all that stands before it."""
    status = complete(read_json(os.path.join(run_dir, "status.json")))
    return status["state"] in TERMINAL_STATES and (
        status["phase"] == "done" or os.path.exists(os.path.join(run_dir, "artifacts.json"))
    )


def _wait(pid: int, started: str) -> bool:
    """Return True when the agent said that it is done, False when it is gone without a word."""
    said = b""
    while True:
        ready, _, _ = select.select([0], [], [], 1.0)
        if ready:
            chunk = os.read(0, 64)
            said += chunk
            if said.startswith(_DONE):
                return True
            if not chunk:  # the pipe's other end is closed: the agent has ended or is ending
                deadline = time.monotonic() + 2.0
                while processes.alive(pid, started) and time.monotonic() < deadline:
                    time.sleep(0.02)
                return False
        elif not processes.alive(pid, started):
            return False


def _find(run_dir: str, agent: Json) -> Dict[int, processes.Process]:
    if agent.get("boot_id") != host.boot_id():
        return processes.of_run(run_dir)  # pids of another boot say nothing
    recorded = [(int(pid), str(started)) for pid, started in agent.get("processes") or ()]
    return processes.of_run(run_dir, recorded=recorded)
