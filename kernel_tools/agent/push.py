"""When a run's files go to the store: at milestones from a thread, and at its end, whatever it was.

    every best, every N epochs, every M minutes     weights, rows, log, status
    the end                                         all that is to be brought back

A push that fails is told in the log and in `agent.json`, and tried again.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from . import artifacts
from .complete_set import CompleteSet, Ledger, identity
from .errors import PushError, StopRequestedError
from .files import Json, append_line, file_size, read_json, utc_now
from .job import Job, PushPolicy
from .status import complete
from .targets import read_targets

LAST, BEST = "weights/last.pt", "weights/best.pt"
# What a resume and a look from afar need; in this order, so that rows are never older than weights.
MILESTONE_FILES = (
    LAST, "weights/last.pt.sha256", BEST, "weights/best.pt.sha256", "weights/epoch_*.pt",
    "config.yaml", "job.json", "metrics.jsonl", "steps.jsonl", "results.csv", "train.log",
    "status.json",
)  # fmt: skip
# The checkpoint before the last serves on the spot only.
_NOT_PUSHED = frozenset(["weights/last.previous.pt", "weights/last.previous.pt.sha256"])
_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 60.0
# A longer log goes with the end only.
_MOST_LOG_BYTES = 32 << 20
_MOST_ROWS = 20
_END = "the end"

Tell = Callable[..., None]


@dataclass(frozen=True)
class Standing:
    """What a push is judged by: epochs done, and which files of weights stand there."""

    epochs: int
    last: Optional[Tuple[int, int]]
    best: Optional[Tuple[int, int]]

    @classmethod
    def of_run(cls, run_dir: str) -> Standing:
        """Look at a run now."""
        status = complete(read_json(os.path.join(run_dir, "status.json")))
        epochs = status["completed_epochs"]
        weights = [identity(os.path.join(run_dir, path)) for path in (LAST, BEST)]
        return cls(epochs if isinstance(epochs, int) else 0, weights[0], weights[1])


def due(policy: PushPolicy, now: Standing, pushed: Standing, seconds: float) -> str:
    """Return why a push is due, "" where none is. `seconds` have gone by since the last one."""
    if now.last is not None and now.epochs > pushed.epochs:
        if now.best not in (None, pushed.best):
            return f"best of epoch {now.epochs}"
        if policy.epochs is not None and now.epochs >= pushed.epochs + policy.epochs:
            return f"epoch {now.epochs}"
    if policy.minutes is not None and seconds >= policy.minutes * 60:
        return f"{seconds / 60:.0f} min"
    return ""


class Pusher:
    """The way of one run's files to the store.

    Args:
        run_dir: the run.
        job: its job; without a policy in it nothing is pushed.
        tell: takes what `agent.json` is to show, as keywords.
    """

    def __init__(self, run_dir: str, job: Job, tell: Tell = lambda **_facts: None) -> None:
        self._run_dir = run_dir
        self._job = job
        self._tell = tell
        self._log = os.path.join(run_dir, "train.log")
        self._rows: List[Json] = []
        self._ending = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._used: Set[str] = set()
        self._ledger = Ledger(run_dir)
        self._one_at_a_time = threading.Lock()

    def start(self) -> None:
        """Look for milestones from now on, in a thread of its own."""
        if self._job.push is not None and self._thread is None:
            self._tell(push=self._facts())
            self._thread = threading.Thread(target=self._watch, name="push", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look no more; a push that is under way is given up."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(35.0)  # a little more than what a request may take without an answer

    def push_all(self) -> str:
        """Push all of a run whose processes have ended. Returns what went wrong, or ""."""
        if self._job.push is None:
            return ""
        paths, _ = artifacts.paths(self._run_dir, self._job.artifacts)
        return self._push([p for p in paths if p not in _NOT_PUSHED], _END, _never, told=True)

    def push_end(self, listed: Sequence[str], status: Mapping[str, Any]) -> str:
        """Push what has changed since, the list of all and the terminal status; the log stays as listed."""
        if self._job.push is None:
            return ""
        text = json.dumps(dict(status), indent=1, ensure_ascii=False)
        # Also what is in the store already: where the list could not be made, all of it must stay named.
        known = (row["path"] for row in self._ledger.files)
        paths = dict.fromkeys([*known, *listed, "artifacts.json"])
        documents = {"status.json": text.encode("utf-8", "replace")}
        return self._push(
            [path for path in paths if path not in _NOT_PUSHED], _END, _never, documents=documents
        )

    def _watch(self) -> None:
        policy = self._job.push
        assert policy is not None
        pushed, since = Standing.of_run(self._run_dir), time.monotonic()
        not_before = 0.0
        while not self._ending.wait(_LOOK_SECONDS):
            now = Standing.of_run(self._run_dir)
            reason = due(policy, now, pushed, time.monotonic() - since)
            if not reason or time.monotonic() < not_before:
                continue
            try:
                if not self._push(self._milestone(), reason, self._check, told=True):
                    pushed, since = now, time.monotonic()
                    continue
            except StopRequestedError:
                return
            except Exception:  # noqa: BLE001 - a defect here must not end the pushes to come
                traceback.print_exc()
            not_before = time.monotonic() + _AGAIN_SECONDS

    def _milestone(self) -> List[str]:
        globs = (*MILESTONE_FILES, *("work/" + pattern for pattern in self._job.artifacts))
        paths = artifacts.match(self._run_dir, globs)
        if file_size(self._log) > _MOST_LOG_BYTES:
            paths.remove("train.log")
        return paths

    def _check(self) -> None:
        if self._ending.is_set():
            raise StopRequestedError

    def _push(
        self,
        paths: Sequence[str],
        reason: str,
        check: Callable[[], None],
        *,
        documents: Optional[Mapping[str, bytes]] = None,
        told: bool = False,
    ) -> str:
        """Push a set; returns what went wrong, in one sentence, or "". `told` writes it to the log."""
        began = time.monotonic()
        one = CompleteSet(
            self._run_dir, self._job.run_id, reason=reason, ended=documents is not None,
            ledger=self._ledger,
        )  # fmt: skip
        problem = ""
        try:
            targets = read_targets(self._run_dir)
            if targets is None:
                raise PushError("there are no links to the store: %remote_attach brings new ones")
            with self._one_at_a_time:  # a milestone may still hang in the line when the end comes
                one.send(
                    targets, paths, documents=documents or {}, used=self._used, check=check,
                    on_file=self._uploaded if told and reason == _END else _ignore,
                )  # fmt: skip
        except PushError as error:
            problem = str(error)
        except OSError as error:
            problem = f"a file cannot be read: {error.strerror}"
        seconds = round(time.monotonic() - began, 3)
        row = {
            "at": utc_now(),
            "reason": reason,
            "files": one.files,
            "bytes": one.bytes,
            "seconds": seconds,
            "error": problem or None,
        }
        self._rows = [*self._rows, row][-_MOST_ROWS:]
        self._tell(pushes=list(self._rows), push=self._facts())
        if told:
            self._say(one, reason, seconds, problem)
        return problem

    def _say(self, one: CompleteSet, reason: str, seconds: float, problem: str) -> None:
        if problem:
            self._write(f"push_failed={reason}: {problem}")
            return
        figures = f"files={one.files} size_mb={one.bytes / 1e6:.2f} seconds={seconds:.1f}"
        self._write(f"pushed={reason} {figures}")
        if one.left_out:
            count, first = len(one.left_out), one.left_out[0]
            self._write(
                f"push_left_out={count} files, for which no object is left or which cannot be read: {first}"
            )

    def _uploaded(self, path: str) -> None:
        self._write(f"remote_artifact_uploaded={path}")

    def _write(self, line: str) -> None:
        """Write to the log; a full disk must not keep a checkpoint from the store."""
        with contextlib.suppress(OSError):
            append_line(self._log, line)

    def _facts(self) -> Dict[str, Any]:
        """What a contact needs to know to decide about new links."""
        targets = read_targets(self._run_dir)
        now = Standing.of_run(self._run_dir)
        largest = max(found[0] if found else 0 for found in (now.last, now.best))
        if targets is None:
            return {"expires_at": None, "uploads_left": 0, "largest_bytes": largest}
        parted = [
            upload
            for rows in targets.slots.values()
            for target in rows
            for upload in target.uploads
            if upload.complete not in self._used
        ]
        return {
            "expires_at": targets.expires_at,
            "life_seconds": targets.life_seconds,
            "uploads_left": len(parted),
            "largest_bytes": largest,
        }


def _never() -> None:
    """A push at the end is not ended by anything."""


def _ignore(_path: str) -> None:
    """Tell nobody."""
