"""`agent.json`: the heartbeat, written every two seconds from a thread of its own, with GPU figures."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
import time
from typing import Any, Dict, List

from . import host, processes
from .files import Json, utc_now, write_json

BEAT_SECONDS = 2.0
# Missed beats and a margin for a machine that swaps: only then is a dead agent's silence evidence.
STALE_SECONDS = 15.0
AGENT_KILLED = "the agent was killed, so the run was ended"
RESTARTED = "the machine was restarted while the run was going on"
_KEYS = (
    "schema_version", "run_id", "pid", "start_time", "boot_id", "host", "python", "started_at",
    "phase", "attempt", "attempts", "trainer", "watchdog", "ranks", "processes", "inputs", "pushes", "push", "gpus",
    "heartbeat_at", "heartbeat_monotonic", "memory_total", "memory_available", "disk_free_bytes",
)  # fmt: skip


def blank_agent(run_id: str) -> Json:
    """Return an `agent.json` with every key, before anything is known."""
    empty: Json = dict.fromkeys(_KEYS)
    empty.update(schema_version=1, run_id=run_id, attempt=1)
    empty.update(attempts=[], ranks=[], processes=[], inputs=[], pushes=[], gpus=[])
    return empty


class Heart:
    """Owns `agent.json` of one run. `update` from any thread; the beat carries it out."""

    def __init__(self, run_dir: str, run_id: str) -> None:
        self._path = os.path.join(run_dir, "agent.json")
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._gpus: List[Dict[str, Any]] = []
        me = processes.find(os.getpid())
        self._facts = blank_agent(run_id)
        self._facts.update(
            pid=os.getpid(),
            start_time=None if me is None else me.started,
            boot_id=host.boot_id(),
            host=socket.gethostname(),
            python=platform.python_version(),
            started_at=utc_now(),
        )
        self._threads = [threading.Thread(target=self._beat, name="heart", daemon=True)]
        if host.has_nvidia_smi():
            self._threads.append(threading.Thread(target=self._sample, name="gpus", daemon=True))

    def start(self) -> None:
        """Write the first beat, then go on by itself."""
        self._write()
        for thread in self._threads:
            thread.start()

    def update(self, **facts: Any) -> None:
        """Change what the next beat says; a new phase is written at once."""
        with self._lock:
            urgent = "phase" in facts and facts["phase"] != self._facts["phase"]
            self._facts.update(facts)
        if urgent:
            self._wake.set()

    def stop(self, **facts: Any) -> None:
        """Write the last beat."""
        with self._lock:
            self._facts.update(facts)
            self._ended = True
        self._wake.set()
        if self._threads[0].is_alive():
            self._threads[0].join(timeout=10)
        self._write()

    def _beat(self) -> None:
        while not self._ended:
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()
            self._write()

    def _sample(self) -> None:
        while not self._ended:
            figures = host.gpus()
            with self._lock:
                self._gpus = figures
            time.sleep(BEAT_SECONDS)

    def _write(self) -> None:
        total, available = host.memory_bytes()
        with self._lock:
            facts = dict(self._facts, gpus=self._gpus)
        facts.update(
            heartbeat_at=utc_now(),
            # The same clock for every process of one boot, which no one can set.
            heartbeat_monotonic=round(time.monotonic(), 3),
            memory_total=total,
            memory_available=available,
            disk_free_bytes=host.disk_free_bytes(self._run_dir),
        )
        # A full disk must not end a run that could still save itself.
        with contextlib.suppress(OSError):
            write_json(self._path, facts)


def age_seconds(agent: Json) -> Any:
    """Return how old the last beat is, None where that cannot be told (another boot)."""
    if agent.get("boot_id") != host.boot_id() or agent.get("heartbeat_monotonic") is None:
        return None
    return round(max(0.0, time.monotonic() - float(agent["heartbeat_monotonic"])), 3)


def agent_alive(agent: Json) -> bool:
    """Return whether the process that writes these beats still runs."""
    if agent.get("boot_id") != host.boot_id():
        return False
    return processes.alive(agent.get("pid"), agent.get("start_time"))


def proof_of_death(agent: Json) -> str:
    """Return what proves that this agent cannot write any more; "" where nothing does.

    Evidence is another boot, or the process gone (absent, another start time, state Z or X) and its
    heartbeat stale.
    """
    if agent.get("boot_id") and agent["boot_id"] != host.boot_id():
        return RESTARTED
    age = age_seconds(agent)
    if agent_alive(agent) or age is None or age <= STALE_SECONDS:
        return ""
    return AGENT_KILLED
