"""The processes of a run: started, found again, told apart by rank, and ended. Judges nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Set, Tuple

from . import processes, trainer
from .ending import LostPeers
from .errors import AgentError
from .files import append_line, read_json
from .heart import Heart
from .watchdog import Watchdog

# How often the process table is read for what belongs to the run.
LOOK_SECONDS = 2.0


class Group:
    """The trainer with all that it starts.

    Args:
        run_dir: the run.
        heart: told of what is found.
        watchdog: kept up by the way; it is no part of the group.
        others: pids of further children of the agent that are none of the run.
    """

    def __init__(
        self,
        run_dir: str,
        heart: Heart,
        watchdog: Watchdog,
        *,
        others: Callable[[], FrozenSet[int]] = frozenset,
    ) -> None:
        self.child: Optional[subprocess.Popen] = None  # type: ignore[type-arg]
        self.ranks: Dict[int, Dict[str, Any]] = {}
        self.identities: Dict[int, processes.Identity] = {}  # by rank
        self._run_dir = run_dir
        self._log = os.path.join(run_dir, "train.log")
        self._heart = heart
        self._watchdog = watchdog
        self._others = others
        self._known: Set[processes.Identity] = set()
        self._looked = 0.0

    @property
    def pid(self) -> Optional[int]:
        """The trainer's, None before the first start."""
        return None if self.child is None else self.child.pid

    def start(self, command: trainer.Command) -> None:
        """Start the trainer, its output into the log. Raises AgentError."""
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self.child = subprocess.Popen(
                command.argv, cwd=os.path.join(self._run_dir, "work"),
                env=dict(command.environment), stdin=subprocess.DEVNULL, stdout=descriptor,
                stderr=descriptor, start_new_session=True, close_fds=True,
            )  # fmt: skip
        except OSError as error:
            raise AgentError(f"cannot start {command.argv[0]}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self.ranks, self.identities = {}, {}
        row = processes.find(self.child.pid)
        self._known = set() if row is None else {row.identity}
        self._heart.update(
            trainer={
                "pid": self.child.pid,
                "start_time": None if row is None else row.started,
                "processes": command.processes,
                "exit_code": None,
            },
            processes=sorted(self._known),
        )

    def look(self) -> bool:
        """Record what belongs to the run, so that it is found even when its parents are gone.

        Returns:
            Whether it was time to look.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        self._watchdog.keep()
        found = self.find()
        fresh = {process.identity for process in found.values()} - self._known
        self._known = {process.identity for process in found.values()}
        for pid, _ in fresh:
            rank = processes.environment_of(pid).get("RANK", "")
            # Data loader processes inherit their rank's environment; the rank is torchrun's child.
            if rank.isdigit() and found[pid].parent == self.pid:
                self.ranks[int(rank)] = {"rank": int(rank), "pid": pid, "exit_code": None}
                self.identities[int(rank)] = found[pid].identity
        phase = (read_json(os.path.join(self._run_dir, "status.json")) or {}).get("phase")
        self._heart.update(
            phase=phase if phase in ("train", "eval") else "starting",
            processes=sorted(self._known),
            ranks=self.rows(),
            watchdog=self._watchdog.identity,
        )
        processes.reap_orphans(keep=self._own_pids())
        return True

    def rows(self) -> List[Dict[str, Any]]:
        """Return rank, pid and exit code of each rank that was seen."""
        return [self.ranks[rank] for rank in sorted(self.ranks)]

    def find(self) -> Dict[int, processes.Process]:
        """Return what lives of the run; what the trainer leaves behind becomes our child."""
        parents = () if self.child is None else (os.getpid(),)
        return processes.of_run(
            self._run_dir, recorded=self._known, parents=parents, exclude=self._helpers()
        )

    def end_lost_peers(self, peers: LostPeers) -> None:
        """Kill the ranks that outlive a dead one, which torchrun would leave hanging for longer."""
        alive = frozenset(pid for pid, _ in self._known)
        ranks = {rank: pid for rank, (pid, _) in self.identities.items()}
        if not peers.overdue(ranks, alive):
            return
        left = sorted(rank for rank, pid in ranks.items() if pid in alive)
        append_line(
            self._log, f"ranks_killed={left} a rank is gone, and they did not end by themselves"
        )
        for rank in left:
            pid, started = self.identities[rank]
            processes.send(processes.Process(pid, started, 0, ""), signal.SIGKILL)

    def end(self, *, term_seconds: float) -> None:
        """End all of it: SIGTERM, SIGKILL after so many seconds, and nothing is left."""
        left = processes.end_all(self.find, term_seconds=term_seconds)
        if self.child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(1.0)
        processes.reap_orphans(keep=self._own_pids())
        if left:
            append_line(self._log, f"cannot_be_killed={[row.pid for row in left]}")
        self._known = {row.identity for row in left}

    def _helpers(self) -> FrozenSet[int]:
        own = frozenset(pid for pid in (os.getpid(), self._watchdog.pid) if pid)
        return own | self._others()

    def _own_pids(self) -> FrozenSet[int]:
        child: Tuple[int, ...] = () if self.child is None else (self.child.pid,)
        return self._helpers() | frozenset(child)
