"""The stopper's side: ask a live run to end; end what a dead agent left behind."""

from __future__ import annotations

from typing import Any, Dict

from .control import STOPPED, StopRequest, ask_stop
from .launch import run_dir_of
from .monitor import read_agent, read_status
from .status import TERMINAL_STATES
from .watchdog import bury_if_due


def stop(remote_dir: str, run_id: str, *, message: str, now: bool) -> Dict[str, Any]:
    """Ask a run to end; returns at once with its state and whether anything was asked.

    A second stop changes nothing, but that `now` is added. A stop before the trainer starts keeps
    it from starting; after the end it is no request. Where the agent is dead its processes are ended
    and the run is failed, since nobody else is left to do it.
    """
    run_dir = run_dir_of(remote_dir, run_id)
    state = read_status(run_dir, ended=False)["state"]
    if state in TERMINAL_STATES:
        return {"state": state, "asked": False}
    ask_stop(run_dir, StopRequest(STOPPED, message, now=now))
    bury_if_due(run_dir, read_agent(run_dir))
    return {"state": read_status(run_dir, ended=False)["state"], "asked": True}
