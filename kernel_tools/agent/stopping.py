"""The stopper's side: ask a live run to end; end what a dead agent left behind."""

from __future__ import annotations

from typing import Any, Dict

from . import host, processes
from .control import STOPPED, StopRequest, ask_stop
from .finish import finish
from .heart import agent_alive
from .job import Job
from .launch import run_dir_of
from .monitor import read_agent, read_status
from .outcome import Failure, Outcome
from .status import TERMINAL_STATES, StatusFile


def stop(remote_dir: str, run_id: str, *, message: str, now: bool) -> Dict[str, Any]:
    """Ask a run to end; returns at once with its state and whether anything was asked.

    A second stop changes nothing, but that `now` is added. A stop before the trainer starts keeps
    it from starting; after the end it is no request. Where the agent is dead its processes are ended
    here and the run is failed, since nobody else is left to do it.
    """
    run_dir = run_dir_of(remote_dir, run_id)
    state = read_status(run_dir, ended=False)["state"]
    if state in TERMINAL_STATES:
        return {"state": state, "asked": False}
    ask_stop(run_dir, StopRequest(STOPPED, message, now=now))
    agent = read_agent(run_dir)
    if agent is not None and not agent_alive(agent):
        _bury(run_dir, agent)
    return {"state": read_status(run_dir, ended=False)["state"], "asked": True}


def _bury(run_dir: str, agent: Dict[str, Any]) -> None:
    watchdog = (agent.get("watchdog") or {}).get("pid")
    row = processes.find(watchdog) if watchdog else None
    if row is not None and not row.gone:
        return  # it is at work, or will be within a second
    if read_status(run_dir, ended=False)["state"] in TERMINAL_STATES:
        return
    recorded = [(int(pid), str(started)) for pid, started in agent.get("processes") or ()]
    processes.end_all(
        lambda: processes.of_run(run_dir, recorded=recorded), term_seconds=0, kill_seconds=5
    )
    message = "the agent and its watchdog were killed; the run was ended"
    if agent.get("boot_id") != host.boot_id():
        message = "the machine was restarted while the run was going on"
    failure = Failure("AgentKilled", message)
    finish(
        run_dir,
        Job.of_run(run_dir),
        Outcome("failed", failure.message, failure),
        StatusFile(run_dir),
    )
