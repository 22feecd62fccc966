"""How a rank ends: whatever it is, it is said, and recorded in the run directory before the rank leaves.

torchrun returns 1 for everything, and a rank that waits in a collective for a dead one may wait for
minutes: so each leaves its own reason, and looks out for those of the others.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from detector.calibrate import CalibrationError
from detector.checkpoint import CheckpointError
from detector.config import ConfigError
from detector.console import say
from detector.data.index import DataError
from detector.export import ExportError
from detector.models.weights import WeightsError
from detector.report import Reporter
from detector.rundir import RunDirectory
from detector.train import Ending, TrainingDivergedError

EXIT_FAILED: Final = 1
# Said in one sentence; a traceback would only hide it.
EXPECTED_ERRORS: Final = (
    ConfigError,
    DataError,
    CheckpointError,
    WeightsError,
    CalibrationError,
    ExportError,
    TrainingDivergedError,
)
_LOOK_SECONDS: Final = 1.0
_GRACE_SECONDS: Final = 5.0  # in which the dead rank's closed connections may end this one as well
_OUT_OF_MEMORY: Final = (
    "out of GPU memory: set solver.accumulate=2 (the same result from half the pictures at a time), or "
    "lower solver.batch_size or data.image_size"
)


@dataclass(slots=True)
class Rank:
    """What is known of this rank when it ends, however early that is."""

    rank: int
    run: RunDirectory | None
    report: Reporter | None = None
    peers: PeerWatch | None = None

    def watch_peers(self) -> None:
        """From now on, end where another rank has failed and this one does not notice."""
        if self.run is not None:
            self.peers = PeerWatch(self, self.run)
            self.peers.start()


class PeerWatch:
    """Looks for errors of other ranks in the run directory, from a thread."""

    def __init__(
        self,
        me: Rank,
        run: RunDirectory,
        *,
        leave: Callable[[int], Any] = os._exit,
        look_seconds: float = _LOOK_SECONDS,
        grace_seconds: float = _GRACE_SECONDS,
    ) -> None:
        self._me = me
        self._run = run
        self._leave = leave
        self._look_seconds = look_seconds
        self._grace_seconds = grace_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """This rank ends by itself."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._look_seconds):
            cause = self._run.first_error()
            if cause is None or cause["rank"] == self._me.rank:
                continue
            if self._ended.wait(self._grace_seconds):
                return
            say(f"rank {self._me.rank} ends: it would wait for rank {cause['rank']}, which failed")
            message = f"rank {cause['rank']}: {cause['type']}: {cause['message']}"
            try:
                self._run.record_end(
                    self._me.rank, reason="failed", exit_code=EXIT_FAILED, message=message
                )
                if self._me.report is not None:
                    self._me.report.finish(
                        "failed", exit_code=EXIT_FAILED, message=message, error=cause
                    )
            finally:
                self._leave(EXIT_FAILED)
            return


def guarded(body: Callable[[Rank], Ending]) -> int:
    """Run `body`; record its end and return the exit code."""
    run_dir = os.environ.get("RUN_DIR")
    supervised = os.environ.get("RUN_SUPERVISED") == "1"
    me = Rank(
        rank=int(os.environ.get("RANK", "0")),
        run=RunDirectory(Path(run_dir), supervised=supervised) if run_dir else None,
    )
    try:
        ending = body(me)
    except Exception as error:  # noqa: BLE001 - recorded and said, whatever it is
        return _failed(me, error)
    finally:
        if me.peers is not None:
            me.peers.stop()
    try:
        if me.run is not None:
            me.run.release_reserve()
            me.run.record_end(
                me.rank, reason=ending.reason, exit_code=ending.exit_code, message=ending.message
            )
        if me.report is not None:
            me.report.finish(ending.reason, exit_code=ending.exit_code, message=ending.message)
    except OSError as error:
        say(f"not_written={me.run.path if me.run else 'the end'}: {error}", to=sys.stderr)
    return ending.exit_code


def _failed(me: Rank, error: Exception) -> int:
    """Say and record what happened; a full disk must not hide it."""
    if me.run is not None:
        me.run.release_reserve()
    if isinstance(error, EXPECTED_ERRORS):
        say(f"error: {error}", to=sys.stderr)
    else:
        text = "".join(traceback.format_exception(error))
        say(f"rank {me.rank} failed:\n{text}", to=sys.stderr)
        if isinstance(error, torch.cuda.OutOfMemoryError):
            say(f"error: {_OUT_OF_MEMORY}.", to=sys.stderr)
    try:
        get_error_handler().record_exception(error)  # for torchrun's own report
        cause: Mapping[str, Any] | None = None
        if me.run is not None:
            cause = me.run.record_error(me.rank, error)
            cause = me.run.first_error() or cause
        if me.report is not None and cause is not None:
            message = f"{cause['type']}: {cause['message']}"
            if me.rank != cause["rank"]:
                message = f"rank {cause['rank']}: {message}"
            me.report.finish("failed", exit_code=EXIT_FAILED, message=message, error=cause)
    except OSError as also:
        say(f"not recorded in the run directory: {also}", to=sys.stderr)
    return EXIT_FAILED
