"""A run's weights into its model repository of the Hugging Face Hub: while it trains, and when it has ended.

With HF_TOKEN of this machine's environment, and by huggingface_hub where that is installed; otherwise it is
left to the laptop, and `hub.json` says so. The token is in no argument, log or file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import traceback
from typing import Callable, Dict, FrozenSet, Iterator, Mapping, Optional, Tuple

from .child import Child
from .complete_set import identity
from .files import Json, append_line, file_size, sha256_file, write_json
from .job import Hub, Job

# Beside what a slow line takes for the weights.
_LEAST_SECONDS = 300.0
_SLOWEST_BYTES_A_SECOND = 500e3
_LOOK_SECONDS = 1.0
_TOLD = "hub.json"
# Quiet, and by LFS, which every hub speaks; Xet would fill a cache of its own on this disk.
_CLIENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",
}


class HubPusher:
    """The way of one run's weights to its repository. Without one in the job it does nothing.

    Args:
        run_dir: the run.
        job: its job; says where to and how often.
        environment: of the agent.
    """

    def __init__(
        self, run_dir: str, job: Job, environment: Optional[Mapping[str, str]] = None
    ) -> None:
        self._run_dir = run_dir
        self._job = job
        self._environment = os.environ if environment is None else environment
        self._log = os.path.join(run_dir, "train.log")
        self._ending = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._child: Optional[Child] = None
        self._pushed: Dict[str, Tuple[int, int]] = {}  # size and time of change, by name
        self._said = ""

    @property
    def pids(self) -> FrozenSet[int]:
        """Of the upload that is under way, which is no process of the run."""
        pid = None if self._child is None else self._child.pid
        return frozenset() if pid is None else frozenset([pid])

    def start(self) -> None:
        """Push every so often from now on, in a thread of its own; without a token there is nothing to do."""
        if self._job.hub is None or not self._token() or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._watch, name="hub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Push no more; an upload that is under way is given up."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(10.0)

    def deliver(self) -> str:
        """Push `best.pt`, or `last.pt` where there is none, of a run none of whose processes is left.

        A `last.pt` that was pushed on the way is brought up to date, so that nothing old stands beside.

        Returns:
            Words for the run's message, or "".
        """
        if self._job.hub is None:
            return ""
        found = self._weights()
        if found is None:
            return self._left(None, "the run has left no weights")
        if not self._token():
            return self._left(found, "HF_TOKEN is not set there")
        problem = self._push(found, at_end=True)
        beside = self._job.hub.path is None and found != "last" and "last" in self._pushed
        if beside and not problem:
            problem = self._push("last", at_end=True)
        if problem:
            return self._left(found, problem)
        place = self._place(found)
        self._tell({"state": "pushed", "place": place, "weights": found, "why": ""})
        return ""

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _hub(self) -> Hub:
        """Where to; asked for only where the job says so."""
        assert self._job.hub is not None
        return self._job.hub

    def _watch(self) -> None:
        pause, since = self._hub.minutes * 60, time.monotonic()
        while not self._ending.wait(_LOOK_SECONDS):
            if time.monotonic() < since + pause:
                continue
            for weights in self._wanted():
                try:
                    problem = self._push(weights, at_end=False)
                except Exception as error:  # noqa: BLE001 - a defect here must not end the pushes to come
                    traceback.print_exc()
                    problem = f"{type(error).__name__} in the agent"
                if problem and problem != self._said and not self._ending.is_set():
                    self._said = problem
                    self._write(f"weights_not_pushed={self._place(weights)} {problem}")
            since = time.monotonic()

    def _wanted(self) -> Tuple[str, ...]:
        """What a push on the way is of: the file that the job names, or what a resume takes too."""
        if self._hub.path is None:
            return ("best", "last")
        return (self._weights() or "last",)

    def _push(self, weights: str, *, at_end: bool) -> str:
        """Put a file of weights there unless it is there as it is; returns what went wrong, or ""."""
        path = os.path.join(self._run_dir, "weights", weights + ".pt")
        seen = identity(path)
        if seen is None or (not at_end and self._pushed.get(weights) == seen):
            return ""
        with self._unchanging(path) as still:
            notes = {"run": self._job.run_id, "sha256": sha256_file(still)[0]}
            problem = self._upload(
                self._name(weights), still, notes, lambda: not at_end and self._ending.is_set()
            )
        if problem:
            return problem
        self._pushed[weights] = seen
        self._said = ""
        self._write(f"weights_pushed={self._place(weights)}")
        return ""

    @contextlib.contextmanager
    def _unchanging(self, path: str) -> Iterator[str]:
        """Give a second name to a file that a trainer may replace meanwhile; its own where none can be had."""
        still = os.path.join(self._run_dir, "control", "hub-" + os.path.basename(path))
        with contextlib.suppress(OSError):
            os.unlink(still)
        try:
            os.link(path, still)
        except OSError:
            yield path
            return
        try:
            yield still
        finally:
            with contextlib.suppress(OSError):
                os.unlink(still)

    def _upload(self, name: str, path: str, notes: Json, given_up: Callable[[], bool]) -> str:
        """Run the upload; returns what went wrong, or ""."""
        self._child = Child(
            "hub_upload.py",
            [self._hub.repository, name, path, json.dumps(notes)],
            dict(self._environment, **_CLIENT),
        )
        seconds = _LEAST_SECONDS + file_size(path) / _SLOWEST_BYTES_A_SECOND
        rows, problem = self._child.run(seconds=seconds, given_up=given_up)
        told = [row["problem"] for row in rows if "problem" in row]
        return str(told[-1]) if told and not problem else problem or "it said nothing"

    def _weights(self) -> Optional[str]:
        for weights in ("best", "last"):
            if os.path.isfile(os.path.join(self._run_dir, "weights", weights + ".pt")):
                return weights
        return None

    def _token(self) -> str:
        return (self._environment.get("HF_TOKEN") or "").strip()

    def _name(self, weights: str) -> str:
        return self._hub.path or weights + ".pt"

    def _place(self, weights: str) -> str:
        return f"hf://{self._hub.repository}/{self._name(weights)}"

    def _left(self, weights: Optional[str], why: str) -> str:
        hub = self._hub
        place = "hf://" + hub.repository + ("/" + hub.path if hub.path else "")
        self._tell({"state": "left", "place": place, "weights": weights, "why": why})
        self._write(f"weights_not_pushed={place} {why}")
        if weights is None:
            return f"nothing went to {place}: {why}"
        return f"the weights are not in {place}: {why}; %remote_fetch puts them there from here"

    def _tell(self, document: Json) -> None:
        with contextlib.suppress(OSError):  # a full disk; the message says it too
            write_json(os.path.join(self._run_dir, _TOLD), dict(document, schema_version=1))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep the weights from the hub
            append_line(self._log, line)
