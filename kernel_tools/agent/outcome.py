"""How a run ended, from evidence alone: exit codes, reasons the ranks left, what was asked, the log.

`judge` is pure. torchrun hides its workers' exit codes (it answers 1 where workers answered 75), so
what each rank left in `reasons/` counts first, then torchrun's own report in the log, then its code.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .control import STOPPED, TIMED_OUT, StopRequest
from .files import Json, read_json
from .trainer import ELASTIC_FOLDER

EXIT_RESUMABLE = 75

# What a rank says when another one is gone: the effect, seldom the cause.
PEER_LOST = re.compile(
    r"connection closed by peer|connection reset|broken pipe|DistNetworkError|DistBackendError"
    r"|NCCL error|socket timeout|Gloo connect|recvValue failed|unhandled system error",
    re.IGNORECASE,
)
# torchrun's report: "rank      : 1 (local_rank: 1)" then "exitcode  : -9 (pid: 123)".
_REPORT = re.compile(
    r"^ *rank *: (\d+) \(local_rank: \d+\)\s*\n *exitcode *: (-?\d+) ", re.MULTILINE
)
_RANK_PREFIX = re.compile(r"^\[rank(\d+)\]: ?")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?\Z")
_LONGEST_TRACEBACK = 20_000


@dataclass(frozen=True)
class Failure:
    """An error as it stands in `status["error"]`."""

    type: str
    message: str
    traceback: Optional[str] = None
    rank: Optional[int] = None
    raised: bool = False  # an exception of the trainer, not a finding of the agent

    @property
    def sentence(self) -> str:
        """What happened, in one line."""
        if not self.raised:
            return self.message
        who = "the trainer" if self.rank is None else f"rank {self.rank}"
        text = f"{who} raised {self.type}: {self.message}"
        return " ".join(text.rstrip(": ").split())

    def to_json(self) -> Json:
        """Return the value of `status["error"]`."""
        return {
            "type": self.type,
            "message": self.message,
            "traceback": self.traceback,
            "rank": self.rank,
        }


@dataclass(frozen=True)
class Reason:
    """What one rank left before it ended; `at` orders them (modification time, seconds)."""

    rank: int
    reason: str
    exit_code: Optional[int]
    message: str
    error: Optional[Failure]
    at: float


@dataclass(frozen=True)
class Evidence:
    """All that is known when the last process of an attempt is gone.

    `exit_code` is the trainer's, negative for a signal. `forced` names what the agent did to end it
    ("", "SIGTERM", "SIGKILL"). `own_failure` is the agent's own finding (a stall).
    """

    kind: str
    exit_code: Optional[int]
    reasons: Tuple[Reason, ...] = ()
    reported: Tuple[Tuple[int, int], ...] = ()  # (rank, exit code) in torchrun's report
    rank_errors: Tuple[Failure, ...] = ()  # torchelastic's files, earliest first
    log_errors: Tuple[Failure, ...] = ()  # tracebacks in the log, in order
    stop: Optional[StopRequest] = None
    forced: str = ""
    own_failure: Optional[Failure] = None
    out_of_memory: bool = False
    claim: str = ""  # the state that another trainer's own status file ends with
    claimed: Optional[Failure] = None  # and the error it tells
    left_behind: int = 0  # processes that outlived the one that was started
    unbegun: bool = False  # a stop found it before its first step, and it was killed at once


@dataclass(frozen=True)
class Outcome:
    """The end of a run or of an attempt. `crashed`: another attempt may go better."""

    state: str
    message: str
    error: Optional[Failure] = None
    exit_code: Optional[int] = None
    crashed: bool = False


def judge(evidence: Evidence) -> Outcome:
    """Name the end state and its cause."""
    code = evidence.exit_code
    if evidence.own_failure is not None:
        found = evidence.own_failure
        return Outcome("failed", found.message, found, code, crashed=True)
    if not evidence.forced:
        failure = _failure(evidence)
        if failure is not None:
            return Outcome("failed", failure.sentence, failure, _cause_code(evidence), crashed=True)
        # After a stop an exit code of 0 alone may mean that the trainer obeyed.
        said = evidence.stop is None or evidence.reasons or evidence.claim == "completed"
        if code == 0 and said and all(r.reason == "completed" for r in evidence.reasons):
            return Outcome("completed", _completed_message(evidence), None, 0)
    stop = evidence.stop
    if stop is not None:
        return Outcome(stop.reason, _ended_message(evidence, stop), None, _cause_code(evidence))
    for reason in evidence.reasons:
        # Asked by someone else than us: a signal from the host, or the trainer's own limit.
        if reason.reason in (STOPPED, TIMED_OUT):
            message = reason.message or reason.reason
            return Outcome(reason.reason, message, None, reason.exit_code)
    if code == EXIT_RESUMABLE:
        return Outcome(STOPPED, "the trainer stopped by itself and can be resumed", None, code)
    unknown = Failure("Unknown", f"the trainer ended without saying why (exit code {code})")
    return Outcome("failed", unknown.message, unknown, code, crashed=True)


def _completed_message(evidence: Evidence) -> str:
    if evidence.claim in ("", "completed"):
        return "completed"
    return f"completed (exit code 0), although its status file still says {evidence.claim}"


def _ended_message(evidence: Evidence, stop: StopRequest) -> str:
    message = stop.message or stop.reason
    if evidence.unbegun:
        message += " before training began"
    elif evidence.forced == "SIGKILL" and not stop.now:
        message += "; the trainer did not end in time and was killed"
    elif evidence.forced == "SIGTERM":
        message += "; the trainer ended at SIGTERM"
    return message


def _failure(evidence: Evidence) -> Optional[Failure]:
    """The cause of a failure that nobody asked for, None where nothing failed."""
    # torchrun passes SIGTERM on to the ranks that are left: that is never the cause.
    for rank, code in evidence.reported:
        if code < 0 and -code != signal.SIGTERM:
            errors = (*evidence.rank_errors, *evidence.log_errors)
            own = [error for error in errors if error.rank == rank]
            if own and -code in (signal.SIGABRT, signal.SIGSEGV):
                return own[0]  # it raised, and then fell over its threads on the way out
            return _by_signal(f"rank {rank}", -code, rank, evidence)
    raised = sorted((r for r in evidence.reasons if r.reason == "failed"), key=lambda r: r.at)
    if raised:
        return _first_cause([reason.error or _bare(reason) for reason in raised], evidence)
    # A rank that ended without a word; the others were then told to stop, which is no cause.
    told = {reason.rank for reason in evidence.reasons}
    for rank, code in evidence.reported:
        if rank not in told and code not in (0, EXIT_RESUMABLE, -signal.SIGTERM):
            causes = evidence.rank_errors or evidence.log_errors
            return _first_cause(causes, evidence) if causes else _by_exit_code(rank, code)
    exit_code = evidence.exit_code
    obeyed = any(reason.reason in (STOPPED, TIMED_OUT) for reason in evidence.reasons)
    killed = exit_code is not None and exit_code < 0
    if exit_code == 0 and evidence.stop is None:
        found = _contradiction(evidence)
        if found is not None:
            return found
    if exit_code in (0, EXIT_RESUMABLE) or (obeyed and (evidence.stop is not None or not killed)):
        return None
    if exit_code is not None and killed:
        what = "the command" if evidence.kind == "command" else "the launcher (torchrun)"
        return _by_signal(what, -exit_code, None, evidence)
    raised_there = evidence.rank_errors or evidence.log_errors
    if evidence.claimed is not None and all(
        error.type != evidence.claimed.type for error in raised_there
    ):
        return evidence.claimed
    if raised_there:
        return _first_cause(raised_there, evidence)
    return Failure("ExitCode", f"the trainer ended with exit code {exit_code}")


def _contradiction(evidence: Evidence) -> Optional[Failure]:
    """What another trainer's status file says against an exit code of 0."""
    if evidence.claimed is not None:
        return evidence.claimed
    if evidence.claim == "running" and evidence.left_behind:
        return Failure(
            "LeftInBackground",
            "the command ended at once and left its training in the background, where it was ended;"
            " start it in the foreground, without & or nohup",
        )
    return None


def _by_exit_code(rank: int, code: int) -> Failure:
    return Failure("ExitCode", f"rank {rank} ended with exit code {code}", None, rank)


def _by_signal(who: str, number: int, rank: Optional[int], evidence: Evidence) -> Failure:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    message = f"{who} was killed by signal {number}"
    if number == signal.SIGKILL:
        message += (
            ": out of memory (the system's killer ended it)"
            if evidence.out_of_memory
            else ": most often out of memory"
        )
    else:
        message += f" ({name})"
    return Failure(name, message, None, rank)


def _first_cause(errors: Sequence[Failure], evidence: Evidence) -> Failure:
    """The earliest that is not merely the echo of another rank's end."""
    for error in errors:
        if not PEER_LOST.search(f"{error.type}: {error.message}"):
            return error
    told = {error.rank for error in errors}
    for rank, code in evidence.reported:
        if rank not in told and code > 0:  # the one whose end the others complain of
            return _by_exit_code(rank, code)
    return errors[0]


def _bare(reason: Reason) -> Failure:
    message = reason.message or f"ended with exit code {reason.exit_code}"
    return Failure("Error", message, None, reason.rank)


def _cause_code(evidence: Evidence) -> Optional[int]:
    """The exit code that tells most: a rank's own before torchrun's."""
    for _, code in evidence.reported:
        if code < 0 and -code != signal.SIGTERM:
            return code
    for wanted in ("failed", STOPPED, TIMED_OUT):
        for reason in sorted(evidence.reasons, key=lambda r: r.at):
            if reason.reason == wanted and reason.exit_code is not None:
                return reason.exit_code
    return evidence.exit_code


def read_reasons(run_dir: str) -> Tuple[Reason, ...]:
    """Return what the ranks left, by rank."""
    folder = os.path.join(run_dir, "reasons")
    found = []
    for name in _names(folder):
        path = os.path.join(folder, name)
        document = read_json(path)
        if document is None or not re.match(r"rank\d+\.json\Z", name):
            continue
        rank = int(document.get("rank", int(re.sub(r"\D", "", name))))
        found.append(
            Reason(
                rank=rank,
                reason=str(document.get("reason")),
                exit_code=document.get("exit_code"),
                message=str(document.get("message") or ""),
                error=_failure_from(document.get("error"), rank),
                at=os.stat(path).st_mtime,
            )
        )
    return tuple(sorted(found, key=lambda reason: reason.rank))


def read_elastic_errors(run_dir: str) -> Tuple[Failure, ...]:
    """Return the errors that torchelastic recorded for its workers, earliest first."""
    found: List[Tuple[float, Failure]] = []
    for folder, _, names in os.walk(os.path.join(run_dir, ELASTIC_FOLDER)):
        if "error.json" not in names:
            continue
        document = read_json(os.path.join(folder, "error.json")) or {}
        entry = document.get("message")
        rank_name = os.path.basename(folder)
        rank = int(rank_name) if rank_name.isdigit() else None
        text, stack, at = str(entry), None, 0.0
        if isinstance(entry, dict):
            extra = entry.get("extraInfo") or {}
            text, stack = str(entry.get("message")), extra.get("py_callstack")
            at = float(extra.get("timestamp") or 0)
        match = _EXCEPTION.match(text.split("\n")[0])
        kind = match.group(1) if match else "Error"
        message = text if match is None else text[len(kind) :].lstrip(": ")
        found.append((at, Failure(kind, message, stack, rank, raised=True)))
    return tuple(failure for _, failure in sorted(found, key=lambda pair: pair[0]))


def parse_report(log: str) -> Tuple[Tuple[int, int], ...]:
    """Return (rank, exit code) of each failure in torchrun's last report, root cause first."""
    start = log.rfind("FAILED\n---")
    text = log[start:] if start >= 0 else ""
    pairs = [(int(rank), int(code)) for rank, code in _REPORT.findall(text)]
    root = text.find("Root Cause")
    if root >= 0:
        pairs = [(int(r), int(c)) for r, c in _REPORT.findall(text[root:])] + pairs
    return tuple(dict.fromkeys(pairs))


def parse_tracebacks(log: str) -> Tuple[Failure, ...]:
    """Return the Python tracebacks of a log in order, without torchrun's own."""
    groups: Dict[Optional[int], List[str]] = {}
    done: List[Failure] = []
    for line in log.split("\n"):
        match = _RANK_PREFIX.match(line)
        rank = int(match.group(1)) if match else None
        text = line[match.end() :] if match else line
        text = text.rstrip("\r")
        if text.startswith(_TRACEBACK):
            groups[rank] = [text]
        elif rank in groups:
            groups[rank].append(text)
            found = _EXCEPTION.match(text)
            if found and not text.startswith((" ", "\t")):
                stack = "\n".join(groups.pop(rank))[-_LONGEST_TRACEBACK:]
                done.append(Failure(found.group(1), found.group(2) or "", stack, rank, raised=True))
    return tuple(error for error in done if not error.type.endswith("ChildFailedError"))


def _failure_from(value: Any, rank: int) -> Optional[Failure]:
    if not isinstance(value, dict):
        return None
    stack = value.get("traceback")
    return Failure(
        str(value.get("type") or "Error"),
        str(value.get("message") or ""),
        None if stack is None else (stack if isinstance(stack, str) else json.dumps(stack)),
        value.get("rank", rank),
        raised=True,
    )


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
