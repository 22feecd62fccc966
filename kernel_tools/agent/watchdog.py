"""A second process that ends a run whose agent was killed, so that no GPU is paid for unwatched."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import Dict, Optional

from . import processes, trainer
from .files import append_line, read_json
from .finish import finish
from .job import Job
from .launch import agent_command, identity_of_self
from .outcome import Failure, Outcome
from .status import StatusFile

# What the trainer has between SIGTERM and SIGKILL when its agent is gone.
_TERM_SECONDS = 5.0
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
    if _wait(agent_pid, agent_started):
        return 0
    log = os.path.join(run_dir, "train.log")
    append_line(log, "agent_killed=1 ending the run, which nobody watches any more")
    left = processes.end_all(lambda: _find(run_dir), term_seconds=_TERM_SECONDS)
    if left:
        sys.stderr.write(f"cannot be ended: {[process.pid for process in left]}\n")
    failure = Failure("AgentKilled", "the agent was killed, so the run was ended")
    job = Job.of_run(run_dir)
    finish(run_dir, job, Outcome("failed", failure.message, failure), StatusFile(run_dir))
    return 0


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


def _find(run_dir: str) -> Dict[int, processes.Process]:
    agent = read_json(os.path.join(run_dir, "agent.json")) or {}
    recorded = [(int(pid), str(started)) for pid, started in agent.get("processes") or ()]
    return processes.of_run(run_dir, recorded=recorded)
