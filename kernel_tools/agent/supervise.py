"""One run from its lock to its terminal state: inputs, trainer, limits, end. The agent's main loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
import traceback
from typing import Any, Dict, List, Optional, Tuple

from . import control, disk, host, outcome, processes, retry, stacks, stage, trainer
from .control import StopRequest
from .deadlines import Deadlines
from .ending import Ending, LostPeers, Progress
from .errors import AgentError, StopRequestedError
from .files import append_line, file_size, read_json, read_slice, utc_now
from .finish import finish
from .foreign import ForeignStatus
from .group import Group
from .heart import Heart
from .hub import HubPusher
from .job import Job
from .launch import discard_secrets, read_secrets, take_lock
from .outcome import Evidence, Failure, Outcome
from .push import Pusher
from .status import StatusFile
from .watchdog import Watchdog

_TICK_SECONDS = 0.2
# What a process that outlives its trainer gets between SIGTERM and SIGKILL.
_LEFTOVER_SECONDS = 2.0
_LOG_TAIL_BYTES = 256 << 10


def supervise(run_dir: str, token: str = "") -> int:
    """Own the run in `run_dir` from here on. 0 also where another process owns it already."""
    run_dir = os.path.abspath(run_dir)
    if not take_lock(run_dir, token):
        return 0
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes.adopt_orphans()
    return Supervisor(run_dir).run()


class Supervisor:
    """The agent of one run."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.log = os.path.join(run_dir, "train.log")
        self.job = Job.of_run(run_dir)
        self.status = StatusFile(run_dir)
        self.heart = Heart(run_dir, self.job.run_id)
        self.watchdog = Watchdog(run_dir)
        self.pusher = Pusher(run_dir, self.job, self.heart.update)
        self.hub = HubPusher(run_dir, self.job)
        self.group = Group(run_dir, self.heart, self.watchdog, others=lambda: self.hub.pids)
        self.deadlines = Deadlines(run_dir, self.job.limits)
        self.secrets: Dict[str, Any] = {}
        self.attempts: List[retry.Attempt] = []
        self.foreign: Optional[ForeignStatus] = None
        self._host_asks = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self) -> int:
        """Carry the run to a terminal state; whatever happens, nothing of it is left running."""
        disk.reserve(self.run_dir)
        self.heart.start()
        self.watchdog.keep()
        self.heart.update(watchdog=self.watchdog.identity)
        try:
            result = self._attempts() if self._inputs() else self._stopped()
        except StopRequestedError:
            result = self._stopped()
        except AgentError as error:
            result = _failed(Failure(type(error).__name__, str(error)))
        except Exception as error:  # noqa: BLE001
            # A defect of the agent: the log has where, the status says what.
            traceback.print_exc()
            result = _failed(Failure(type(error).__name__, f"the agent failed: {error}"))
        self.group.end(term_seconds=_LEFTOVER_SECONDS)
        try:
            self.heart.update(phase="push")
            self.pusher.stop()
            self.hub.stop()
            attempts = [attempt.to_json() for attempt in self.attempts]
            finish(
                self.run_dir, self.job, result, self.status, attempts=attempts, pusher=self.pusher,
                hub=self.hub,
            )  # fmt: skip
        finally:
            self.heart.stop(phase="done", processes=[])
            discard_secrets(self.run_dir)
            self.watchdog.dismiss()
        return 0

    def _inputs(self) -> bool:
        """Bring every input into place; False where a stop was asked before anything began."""
        self.heart.update(phase="inputs")
        self.status.write(state="preparing", phase="inputs", message="", pid=os.getpid())
        self.secrets = read_secrets(self.run_dir)
        if self._stop_request() is not None:
            return False
        stage.stage_inputs(
            self.run_dir,
            self.job,
            urls=self.secrets.get("inputs") or {},
            log=lambda line: append_line(self.log, line),
            progress=self._staged,
            should_stop=lambda: self._stop_request() is not None,
            stall_seconds=_minutes(self.job.limits.stall_minutes),
        )
        return self._stop_request() is None

    def _staged(self, rows: List[Dict[str, Any]]) -> None:
        """Tell how far the inputs are; called about twice a second while they come."""
        self.heart.update(inputs=rows)
        coming = ["{} {:.0f} %".format(row["name"], row["percent"]) for row in rows]
        self.status.write(message="inputs: " + ", ".join(coming) if coming else "")

    def _attempts(self) -> Outcome:
        """Start the trainer, and again after a crash as often as the job allows."""
        checkpoint = self._absolute(self.job.resume_checkpoint)
        self.pusher.start()
        self.hub.start()
        while True:
            result = self._attempt(len(self.attempts) + 1, checkpoint)
            self.heart.update(attempts=[attempt.to_json() for attempt in self.attempts])
            number = len(self.attempts)
            if not result.crashed or self._stop_request() is not None:
                return result
            if number > self.job.max_restarts:
                return self._after(result, f"attempt {number} of {number}" if number > 1 else "")
            append_line(
                self.log,
                f"attempt_failed={number} cause={self.attempts[-1].cause} {result.message}",
            )
            refusal = retry.refusal(self.attempts)
            if refusal:
                return self._after(result, f"not tried again: {refusal}")
            if not self._pause(retry.pause_seconds(number)):
                return self._stopped(f"before attempt {number + 1} started")
            checkpoint = self._newest_checkpoint() or checkpoint
            self.status.write(message=f"attempt {number + 1}: {result.message}")

    def _attempt(self, attempt: int, checkpoint: str) -> Outcome:
        self._clear_reasons(attempt)
        command = trainer.build(
            self.job,
            run_dir=self.run_dir,
            secret_env=self.secrets.get("env") or {},
            attempt=attempt,
            resume_checkpoint=checkpoint,
            inherited=os.environ,
        )
        trainer.record(command, self.run_dir)
        self.heart.update(phase="starting", attempt=attempt)
        # A trainer that resumes counts one up from what it finds.
        told = (attempt - 1 or None) if checkpoint and self.job.kind == "detector" else attempt
        changes: Dict[str, Any] = {"attempt": told, "resumed_from": checkpoint or None}
        if self.job.kind == "detector":
            changes.update(state="preparing", phase="starting")
            if attempt == 1:
                changes["message"] = "starting the trainer"
        else:  # it may never write a status of its own
            changes.update(state="training", phase="train", message="")
            self.foreign = ForeignStatus(self.run_dir, self.job.status_dir)
        self.status.write(**changes)
        started_at, first_step = utc_now(), self._steps()
        log_start = file_size(self.log)
        oom_before = host.oom_kills()
        self.deadlines.trainer_starts()
        self.group.start(command)
        evidence = self._watch(log_start)
        oom_after = host.oom_kills()
        killed = oom_before is not None and oom_after is not None and oom_after > oom_before
        result = outcome.judge(dataclasses.replace(evidence, out_of_memory=killed))
        if evidence.reported and result.error is None:
            append_line(self.log, "the report above is torchrun's: ranks that obey a stop leave with "
                        "a code of their own, and nothing failed")  # fmt: skip
        self.attempts.append(
            retry.Attempt(
                attempt,
                started_at,
                utc_now(),
                result,
                first_step,
                self._steps(),
                checkpoint or None,
            )
        )
        return result

    def _pause(self, seconds: float) -> bool:
        """Wait before another attempt; False where the end was asked meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.deadlines.enforce()
            if self._stop_request() is not None:
                return False
            time.sleep(_TICK_SECONDS)
        return True

    def _after(self, result: Outcome, words: str) -> Outcome:
        """Say beside the cause why there is no further attempt."""
        if not words or not self.job.max_restarts:
            return result
        return dataclasses.replace(result, message=f"{result.message} ({words})")

    def _steps(self) -> int:
        steps = (read_json(self.status.path) or {}).get("optimizer_steps")
        return steps if isinstance(steps, int) else 0

    def _newest_checkpoint(self) -> str:
        """The run's own last checkpoint, or the one before where a crash took it; "" where none is."""
        last = os.path.join(self.run_dir, "weights", "last.pt")
        previous = os.path.join(self.run_dir, "weights", "last.previous.pt")
        return last if os.path.isfile(last) or os.path.isfile(previous) else ""

    def _watch(self, log_start: int) -> Evidence:
        """Wait for the trainer's end, or bring it about; nothing of the attempt is left after it."""
        child = self.group.child
        if child is None:
            raise AssertionError("no trainer was started")
        ending = Ending(self.job.limits.grace_seconds)
        progress = Progress(self.run_dir, _minutes(self.job.limits.stall_minutes))
        peers = LostPeers(self.run_dir)
        own_failure: Optional[Failure] = None
        unbegun = False
        while child.poll() is None:
            if self.group.look():
                self._show_foreign()
                self.group.end_lost_peers(peers)
            self.deadlines.enforce()
            stop = self._stop_request()
            if stop is None and own_failure is None and progress.stalled():
                own_failure = self._stalled()
                ending.skip_grace()
            if stop is not None or own_failure is not None:
                unbegun = unbegun or (stop is not None and self._unbegun())
                step = ending.next(now=unbegun or (stop is not None and stop.now))
                if step == "SIGTERM":
                    child.send_signal(signal.SIGTERM)
                elif step == "SIGKILL":
                    self.group.end(term_seconds=0)
                self._mark_stopping(stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_TICK_SECONDS)
        left_behind = len(self.group.find())
        self.group.end(term_seconds=0 if ending.step == "SIGKILL" else _LEFTOVER_SECONDS)
        evidence = self._gather(child.returncode, log_start, ending.step, own_failure)
        return dataclasses.replace(evidence, left_behind=left_behind, unbegun=unbegun)

    def _gather(
        self, exit_code: int, log_start: int, forced: str, own_failure: Optional[Failure]
    ) -> Evidence:
        start = max(log_start, file_size(self.log) - _LOG_TAIL_BYTES)
        text = read_slice(self.log, start, _LOG_TAIL_BYTES).decode("utf-8", "replace")
        reasons = outcome.read_reasons(self.run_dir)
        reported = () if self.job.kind == "command" else outcome.parse_report(text)
        codes = dict(reported)
        codes.update({r.rank: r.exit_code for r in reasons if r.exit_code is not None})
        ranks = self.group.ranks
        if exit_code == 0:
            codes.update({rank: 0 for rank in ranks if rank not in codes})
        for rank, code in codes.items():
            ranks.setdefault(rank, {"rank": rank, "pid": None})["exit_code"] = code
        claim, claimed = self._foreign_end()
        self.heart.update(
            ranks=self.group.rows(),
            trainer={"pid": self.group.pid, "exit_code": exit_code},
        )
        return Evidence(
            kind=self.job.kind,
            exit_code=exit_code,
            reasons=reasons,
            reported=reported,
            rank_errors=outcome.read_elastic_errors(self.run_dir),
            log_errors=outcome.parse_tracebacks(text),
            stop=self._stop_request(),
            forced=forced,
            own_failure=own_failure,
            claim=claim,
            claimed=claimed,
        )

    def _foreign_end(self) -> Tuple[str, Optional[Failure]]:
        """What another trainer's status file says at the end; its figures are kept in ours."""
        if self.foreign is None:
            return "", None
        self.foreign.look()
        known = self.foreign.known()
        if known:
            self.status.write(**known)
        return self.foreign.says, self.foreign.failure

    def _show_foreign(self) -> None:
        """Take over what another trainer's status says, unless it was asked to end."""
        changes = {} if self.foreign is None else self.foreign.look()
        if changes and self.job.status_dir is not None and self._stop_request() is None:
            self.status.write(**changes)

    def _stop_request(self) -> Optional[StopRequest]:
        if self._host_asks:
            self._host_asks = False
            message = "the host asked the agent to end (SIGTERM)"
            control.ask_stop(self.run_dir, StopRequest(control.STOPPED, message))
        return control.read_stop(self.run_dir)

    def _unbegun(self) -> bool:
        """Whether the detector still imports and builds: it has nothing to save, and listens only later."""
        status = read_json(self.status.path) or {}
        return self.job.kind == "detector" and status.get("phase") == "starting"

    def _stalled(self) -> Failure:
        """Ask every rank that listens for its stacks, and name what was seen."""
        minutes = self.job.limits.stall_minutes
        message = (
            f"stalled: no new step and no new log line for {minutes or 0:.3g} min (--stall-minutes)"
        )
        append_line(self.log, message)
        ranks: Dict[Optional[int], processes.Identity] = dict(self.group.identities.items())
        if not ranks and self.group.pid is not None:
            row = processes.find(self.group.pid)
            ranks = {} if row is None else {None: row.identity}
        places = stacks.dump(self.log, ranks)
        return Failure("Stalled", f"{message}; {places}" if places else message)

    def _mark_stopping(self, stop: Optional[StopRequest]) -> None:
        """Say that the end was asked, where the trainer writes no status that could say it."""
        if stop is None or self.job.kind == "detector" or not self.status.untouched():
            return
        self.status.write(state="stopping", message=stop.message)

    def _clear_reasons(self, attempt: int) -> None:
        """Put what an earlier attempt left out of the way of this one's."""
        for name in ("reasons", "errors", trainer.ELASTIC_FOLDER):
            folder = os.path.join(self.run_dir, name)
            if attempt > 1 and os.path.isdir(folder):
                os.replace(folder, f"{folder}-attempt{attempt - 1}")
            os.makedirs(folder, exist_ok=True)

    def _stopped(self, when: str = "before the trainer started") -> Outcome:
        stop = self._stop_request() or StopRequest(control.STOPPED, "stopped")
        return Outcome(stop.reason, f"{stop.message or stop.reason} {when}")

    def _absolute(self, checkpoint: Optional[str]) -> str:
        if not checkpoint:
            return ""
        remote_dir = os.path.dirname(os.path.dirname(self.run_dir))
        path = os.path.join(remote_dir, checkpoint)
        root, extension = os.path.splitext(path)
        if not os.path.isfile(path) and not os.path.isfile(f"{root}.previous{extension}"):
            raise AgentError(f"the checkpoint to resume from is not there: {checkpoint}")
        return path

    def _on_sigterm(self, _number: int, _frame: Any) -> None:
        self._host_asks = True


def _failed(failure: Failure) -> Outcome:
    return Outcome("failed", failure.message, failure)


def _minutes(value: Optional[float]) -> Optional[float]:
    return None if not value else value * 60.0
