"""Where each rank stands: asked by SIGUSR1, answered by the rank's own faulthandler into the log.

One rank after the other, so that their lines do not tear each other. A process without a handler for
the signal is left alone, since the signal would end it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Dict, Optional

from . import processes
from .files import append_line, file_size, read_slice

# How long a rank may take for its stacks, and how long the log must be quiet for them to be whole.
_ANSWER_SECONDS = 3.0
_QUIET_SECONDS = 0.3
_LONGEST_BYTES = 256 << 10
_INNERMOST = re.compile(
    r'^(?:Current thread|Stack)[^\n]*\n  File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE
)


def dump(log: str, ranks: Dict[Optional[int], processes.Identity]) -> str:
    """Have every rank write its stacks into `log`.

    Args:
        log: path of the run's log, to which the ranks' stderr goes.
        ranks: pid and start time by rank; None is a trainer that has no ranks.

    Returns:
        Where each stood, in words: "rank 0 in all_reduce (distributed_c10d.py:2810), ..."; "" where
        none answered.
    """
    told = []
    for rank, (pid, started) in sorted(
        ranks.items(), key=lambda item: -1 if item[0] is None else item[0]
    ):
        who = "the trainer" if rank is None else f"rank {rank}"
        if not processes.alive(pid, started):
            append_line(log, f"stacks={who} pid={pid} is gone")
            continue
        if not processes.catches(pid, signal.SIGUSR1):
            append_line(log, f"stacks={who} pid={pid} has no faulthandler for SIGUSR1")
            continue
        append_line(log, f"stacks={who} pid={pid}")
        place = innermost(_ask(log, pid))
        if place:
            told.append(f"{who} in {place}")
    return ", ".join(told)


def innermost(text: str) -> str:
    """Return the innermost frame of faulthandler's text: `function (file.py:12)`, or ""."""
    found = _INNERMOST.search(text)
    if found is None:
        return ""
    return f"{found.group(3)} ({os.path.basename(found.group(1))}:{found.group(2)})"


def _ask(log: str, pid: int) -> str:
    start = size = file_size(log)
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return ""
    deadline = time.monotonic() + _ANSWER_SECONDS
    grown = 0.0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = file_size(log)
        if now != size:
            size, grown = now, time.monotonic()
        elif grown and time.monotonic() - grown >= _QUIET_SECONDS:
            break
    return read_slice(log, start, _LONGEST_BYTES).decode("utf-8", "replace")
