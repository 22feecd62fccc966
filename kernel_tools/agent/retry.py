"""Whether a trainer that crashed is to be started again: pure, from what the attempts ended with.

What the machine did (a signal, a stall, a peer that vanished) may go better the next time. What the
program or its configuration does to itself will not: it is tried again at most until it repeats itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence

from .outcome import PEER_LOST, Failure, Outcome

# Wrong before the first step and wrong at every start: never worth a second attempt.
USER_ERRORS = frozenset(
    [
        "ConfigError",
        "DataError",
        "CheckpointError",
        "SyntaxError",
        "IndentationError",
        "ImportError",
        "ModuleNotFoundError",
    ]
)  # fmt: skip
# argparse and most command lines leave so when they were called wrongly.
_USAGE_EXIT_CODE = 2
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
# The pause before attempt 2, 3, ...: doubled up to the last. Seconds.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True)
class Attempt:
    """One start of the trainer and its end. `steps` are optimizer steps of the whole run at its end."""

    number: int
    started_at: str
    ended_at: str
    outcome: Outcome
    first_step: int
    steps: int
    resumed_from: Optional[str] = None

    @property
    def cause(self) -> str:
        """`infrastructure` or `program` for a crash, "" for any other end."""
        error = self.outcome.error
        if not self.outcome.crashed or error is None:
            return ""
        return "program" if _of_the_program(error, self.outcome) else "infrastructure"

    def to_json(self) -> Dict[str, Any]:
        """Return the row that `agent.json` and the receipt show."""
        return {
            "attempt": self.number,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "state": self.outcome.state,
            "message": self.outcome.message,
            "cause": self.cause or None,
            "exit_code": self.outcome.exit_code,
            "optimizer_steps": self.steps,
            "resumed_from": self.resumed_from,
        }


def refusal(attempts: Sequence[Attempt]) -> str:
    """Return why the last crash is not worth another attempt, "" where it is."""
    last = attempts[-1]
    error = last.outcome.error
    if last.cause != "program" or error is None:
        return ""
    if last.steps <= last.first_step and _is_users(error, last.outcome):
        return "another attempt would end the same way"
    if len(attempts) > 1 and _same(attempts[-2], last):
        where = f"at step {last.steps}" if last.steps else "before the first step"
        return f"the same error came twice {where}"
    return ""


def pause_seconds(attempt: int) -> float:
    """Return how long to wait after that many attempts."""
    return float(min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1)))


def _of_the_program(error: Failure, outcome: Outcome) -> bool:
    if error.type == "ExitCode":
        return (outcome.exit_code or 0) >= 0
    return error.raised and not PEER_LOST.search(f"{error.type}: {error.message}")


def _is_users(error: Failure, outcome: Outcome) -> bool:
    name = error.type.rpartition(".")[2]
    return name in USER_ERRORS or (
        error.type == "ExitCode" and outcome.exit_code == _USAGE_EXIT_CODE
    )


def _same(first: Attempt, second: Attempt) -> bool:
    if first.cause != "program" or first.steps != second.steps:
        return False
    return _what(first) == _what(second)


def _what(attempt: Attempt) -> str:
    error = attempt.outcome.error
    # Pids, ports and addresses differ from start to start.
    return "" if error is None else _NUMBERS.sub("#", f"{error.type}: {error.message}")
