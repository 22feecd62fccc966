"""`control/stop.json`: how a run is asked to end, and what was asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Optional

from .files import read_json, utc_now, write_json

STOPPED = "stopped"
TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class StopRequest:
    """Why a run is to end. `now` leaves the trainer no time to save."""

    reason: str
    message: str
    now: bool = False


def read_stop(run_dir: str) -> Optional[StopRequest]:
    """Return the request that stands, None where nobody asked."""
    document = read_json(_path(run_dir))
    if document is None:
        return None
    reason = document.get("reason")
    return StopRequest(
        TIMED_OUT if reason == TIMED_OUT else STOPPED,
        str(document.get("message") or ""),
        bool(document.get("now")),
    )


def ask_stop(run_dir: str, request: StopRequest) -> StopRequest:
    """Ask for an end; the first reason stands, and a later `now` is added to it.

    Returns:
        The request that stands.
    """
    found = read_stop(run_dir)
    if found is not None and (found.now or not request.now):
        return found
    if found is not None:
        request = StopRequest(found.reason, found.message, now=True)
    os.makedirs(os.path.dirname(_path(run_dir)), exist_ok=True)
    write_json(
        _path(run_dir),
        {
            "reason": request.reason,
            "message": request.message,
            "now": request.now,
            "requested_at": utc_now(),
        },
    )
    return request


def _path(run_dir: str) -> str:
    return os.path.join(run_dir, "control", "stop.json")
