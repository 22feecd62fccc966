"""Requests to stop: a signal, `control/stop.json`, or the hours used up.

Only asks; the training loop decides at a step boundary, together with the other ranks. No torch here,
so that the signal handler is in place before the slow imports.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

# "temporary failure, try again" in sysexits.h: stopped at a step boundary and resumable.
EXIT_RESUMABLE: Final = 75


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Why to stop: `reason` is `stopped` (a person asked) or `timed_out` (a limit)."""

    reason: str
    message: str


class StopWatch:
    """Looks for a request; cheap enough to be asked at every step."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._control: Path | None = None
        self._deadline: float | None = None
        self._max_hours = 0.0

    def catch_signals(self) -> None:
        """Take SIGTERM and the first SIGINT as requests; a second SIGINT interrupts as usual."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def watch(self, control: Path, *, max_hours: float | None, started: float) -> None:
        """Also watch the file `control`, and the hours since `started` (`time.monotonic()`)."""
        self._control = control
        if max_hours is not None:
            self._max_hours = max_hours
            self._deadline = started + max_hours * 3600.0

    def requested(self) -> StopRequest | None:
        """Return the request, if there is one. The file says most, so it is asked first."""
        if self._control is not None and os.path.exists(self._control):
            return _read_request(self._control)
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            return StopRequest("stopped", f"stopped by {name}")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return StopRequest("timed_out", f"runtime.max_hours={self._max_hours:g} is used up")
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number


def _read_request(path: Path) -> StopRequest:
    """Read `control/stop.json`; whatever stands in it, its presence is a request."""
    try:
        asked = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        asked = None
    if not isinstance(asked, dict):
        asked = {}
    reason = "timed_out" if asked.get("reason") == "timed_out" else "stopped"
    return StopRequest(reason, str(asked.get("message") or "stopped on request"))
