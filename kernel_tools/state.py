"""What is known of a run: states, frozen events, and a pure `reduce(snapshot, event)`.

No IO and no clock here. Loss of contact is an observation (`Contact`), never a state; a run is failed
only on positive evidence, and a terminal state is never left again.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

# Lines of log that a snapshot carries for panels; the whole log is a file beside it.
LOG_TAIL_LINES: Final = 200
# Rows of steps that a snapshot carries for curves; all of them are in the file beside the log.
MOST_STEP_ROWS: Final = 4000
# Without an answer for this long, figures on the screen are called stale, then lost. Seconds.
STALE_AFTER_SECONDS: Final = 10.0
LOST_AFTER_SECONDS: Final = 120.0


class RunState(str, enum.Enum):
    """`status["state"]`. The last four are terminal."""

    QUEUED = "queued"
    PREPARING = "preparing"
    TRAINING = "training"
    VALIDATING = "validating"
    STOPPING = "stopping"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    TIMED_OUT = "timed_out"

    @property
    def terminal(self) -> bool:
        """True where nothing of the run works on."""
        return self in TERMINAL_STATES


TERMINAL_STATES: Final = frozenset(
    {RunState.COMPLETED, RunState.FAILED, RunState.STOPPED, RunState.TIMED_OUT}
)

_ENDS: Final = TERMINAL_STATES
_AT_WORK: Final = frozenset({RunState.PREPARING, RunState.TRAINING, RunState.VALIDATING})
# From each state, what may come next. A crash that is tried again leads back to `preparing` or
# `training`; who was asked to stop is never called at work again.
TRANSITIONS: Final[Mapping[RunState, frozenset[RunState]]] = MappingProxyType(
    {
        RunState.QUEUED: frozenset({RunState.PREPARING, RunState.STOPPING}) | _ENDS,
        RunState.PREPARING: _AT_WORK | {RunState.STOPPING} | _ENDS,
        RunState.TRAINING: _AT_WORK | {RunState.STOPPING} | _ENDS,
        RunState.VALIDATING: _AT_WORK | {RunState.STOPPING} | _ENDS,
        RunState.STOPPING: _ENDS,
        **{state: frozenset() for state in TERMINAL_STATES},
    }
)


def may_follow(earlier: RunState, later: RunState) -> bool:
    """Return whether a reader who saw `earlier` may see `later` next, some in between unseen."""
    if earlier is later:
        return True
    seen, queue = {earlier}, [earlier]
    while queue:
        for state in TRANSITIONS[queue.pop()] - seen:
            if state is later:
                return True
            seen.add(state)
            queue.append(state)
    return False


@dataclass(frozen=True, slots=True)
class Contact:
    """How fresh the figures are: `live`, or `stale` / `lost` with the age of the last answer."""

    kind: str
    age_seconds: float = 0.0

    def __str__(self) -> str:
        return self.kind if self.kind == "live" else f"{self.kind}, {self.age_seconds:.0f} s"

    @classmethod
    def of_age(cls, age_seconds: float) -> Contact:
        """Name the age of the last answer."""
        if age_seconds < STALE_AFTER_SECONDS:
            return cls("live", age_seconds)
        return cls("stale" if age_seconds < LOST_AFTER_SECONDS else "lost", age_seconds)


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Everything a panel, a table or a script reads; replaced whole, never changed."""

    run_id: str
    name: str
    state: RunState = RunState.QUEUED
    contact: Contact = Contact("live")
    status: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    agent: Mapping[str, Any] | None = None
    sync: Mapping[str, Any] | None = None
    log_size: int = 0
    log_tail: tuple[str, ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    where: str = ""
    run_dir: str = ""
    local_dir: Path = Path()
    artifacts: Mapping[str, Any] | None = None
    message: str = ""

    @property
    def terminal(self) -> bool:
        """True once the run has ended."""
        return self.state.terminal

    def figure(self, key: str) -> Any:
        """Return `status[key]`, None where it is not known yet."""
        return self.status.get(key)


@dataclass(frozen=True, slots=True)
class Polled:
    """The remote answered: what it said, already decoded.

    `status_whole` is False where the status file was torn or gone: its figures then say nothing.
    `log_skipped` says that lines before `log_text` are not shown, because there are too many.
    """

    status: Mapping[str, Any]
    agent: Mapping[str, Any] | None
    agent_alive: bool
    boot_id: str
    agent_heartbeat_age_seconds: float | None
    log_text: str
    log_size: int
    metrics: tuple[Mapping[str, Any], ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    artifacts: Mapping[str, Any] | None = None
    run_dir: str = ""
    status_whole: bool = True
    log_skipped: bool = False


@dataclass(frozen=True, slots=True)
class ContactLost:
    """No answer for this long; nothing else is known."""

    age_seconds: float


Event = Polled | ContactLost
Rows = tuple[Mapping[str, Any], ...]

# A heartbeat is written every 2 s; three missed beats and a margin for a machine that swaps.
STALE_HEARTBEAT_SECONDS: Final = 15.0


def reduce(snapshot: RunSnapshot, event: Event) -> RunSnapshot:
    """Return the snapshot after `event`. Terminal states stay; contact comes and goes.

    A state that cannot follow the one before is not taken over: the file may be another trainer's.
    """
    if isinstance(event, ContactLost):
        return dataclasses.replace(snapshot, contact=Contact.of_age(event.age_seconds))
    if not event.status_whole and snapshot.status:
        event = dataclasses.replace(event, status=snapshot.status)
    status, state, message = _judge(event)
    if not may_follow(snapshot.state, state) and not snapshot.terminal:
        state = snapshot.state
        status = {**status, "state": state.value}
    if snapshot.terminal:
        status, state, message = snapshot.status, snapshot.state, snapshot.message
    return dataclasses.replace(
        snapshot,
        state=state,
        contact=Contact("live"),
        status=MappingProxyType(dict(status)),
        agent=event.agent,
        log_size=event.log_size,
        log_tail=_extend_tail(() if event.log_skipped else snapshot.log_tail, event.log_text),
        metrics=snapshot.metrics + event.metrics,
        steps=thinned(snapshot.steps + event.steps),
        artifacts=event.artifacts or snapshot.artifacts,
        run_dir=event.run_dir or snapshot.run_dir,
        message=message,
    )


def thinned(rows: Rows, most: int = MOST_STEP_ROWS) -> Rows:
    """Return the rows, of too many every second one, the first and the newest always among them."""
    while len(rows) > most:
        rows = (*rows[:-1:2], rows[-1])
    return rows


def _judge(event: Polled) -> tuple[Mapping[str, Any], RunState, str]:
    """State as written, or `failed` where the machine proves that nobody can write it any more."""
    status = event.status
    state = RunState(status["state"])
    message = str(status.get("message") or "")
    if state.terminal:
        return status, state, message
    cause = _proof_of_death(event)
    if cause is None:
        return status, state, message
    error = status.get("error") or {
        "type": "AgentLost",
        "message": cause,
        "traceback": None,
        "rank": None,
    }
    return {**status, "state": "failed", "message": cause, "error": error}, RunState.FAILED, cause


def _proof_of_death(event: Polled) -> str | None:
    boot_then = event.status.get("boot_id") or (event.agent or {}).get("boot_id")
    if boot_then and event.boot_id and boot_then != event.boot_id:
        return "the machine was restarted while the run was going on"
    if event.agent is None or event.agent_alive:
        return None
    age = event.agent_heartbeat_age_seconds
    if age is None or age <= STALE_HEARTBEAT_SECONDS:
        return None
    return f"the agent process is gone and its heartbeat is {age:.0f} s old"


def _extend_tail(tail: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Append `text` to the last lines; an unfinished last line is completed by the next text."""
    if not text:
        return tail
    joined = "\n".join(tail) + text if tail else text
    lines = joined.split("\n")
    return tuple(lines[-(LOG_TAIL_LINES + 1) :])
