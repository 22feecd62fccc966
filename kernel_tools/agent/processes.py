"""Find and end every process of a run, and never one that is not of it.

torchrun starts its workers in sessions of their own, so a process group does not hold a run together.
A process is of the run when its environment carries the run's marker (RUN_DIR), when it descends from
a process that is, or when it was recorded before. A pid counts only together with its start time, and
states Z (ended, not reaped) and X count as gone. Without /proc the tree is read from `ps`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Callable, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Set, Tuple

MARKER = "RUN_DIR"

Identity = Tuple[int, str]


class Process(NamedTuple):
    """One row of the process table; `started` is comparable within one boot only."""

    pid: int
    started: str
    parent: int
    state: str

    @property
    def identity(self) -> Identity:
        """Pid and start time, which together are not reused."""
        return (self.pid, self.started)

    @property
    def gone(self) -> bool:
        """True for a process that runs no more, reaped or not."""
        return self.state in ("Z", "X")


def find(pid: int) -> Optional[Process]:
    """Return the process of that pid, None where there is none."""
    if not _has_proc():
        return _table_from_ps().get(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            data = stream.read()
    except OSError:
        return None
    # The second field is the name in brackets, which may itself hold brackets and spaces.
    fields = data[data.rindex(b")") + 2 :].split()
    return Process(pid, fields[19].decode("ascii"), int(fields[1]), fields[0].decode("ascii"))


def alive(pid: Optional[int], started: Optional[str]) -> bool:
    """Return whether exactly this process still runs."""
    if not pid or started is None:
        return False
    process = find(int(pid))
    return process is not None and not process.gone and process.started == str(started)


def table() -> Dict[int, Process]:
    """Return every process that can be seen, by pid."""
    if not _has_proc():
        return _table_from_ps()
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = find(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def environment_of(pid: int) -> Dict[str, str]:
    """Return the environment that a process was started with; empty where it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            data = stream.read()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def of_run(
    run_dir: str,
    *,
    recorded: Iterable[Identity] = (),
    parents: Iterable[int] = (),
    exclude: FrozenSet[int] = frozenset(),
) -> Dict[int, Process]:
    """Return the live processes of a run by pid.

    Args:
        run_dir: the run's folder, as its marker has it.
        recorded: processes seen before; they and their descendants count.
        parents: pids whose descendants count although they themselves do not.
        exclude: pids that never count (the agent, its watchdog); their descendants may.
    """
    rows = table()
    marker = f"{MARKER}={run_dir}".encode("utf-8", "surrogateescape")
    mine: Set[int] = set()
    for identity in recorded:
        row = rows.get(identity[0])
        if row is not None and row.started == str(identity[1]):
            mine.add(row.pid)
    mine.update(pid for pid in rows if _carries(pid, marker))
    children: Dict[int, List[int]] = {}
    for row in rows.values():
        children.setdefault(row.parent, []).append(row.pid)
    queue = list(mine) + [pid for pid in parents if pid in rows]
    seen = set(queue)
    while queue:
        for child in children.get(queue.pop(), ()):
            mine.add(child)
            if child not in seen:
                seen.add(child)
                queue.append(child)
    mine -= exclude
    mine.discard(os.getpid())
    return {pid: rows[pid] for pid in mine if not rows[pid].gone}


def send(process: Process, number: int) -> bool:
    """Signal a process after a last look at its start time; False where it is gone."""
    if not alive(process.pid, process.started):
        return False
    try:
        os.kill(process.pid, number)
    except OSError:
        return False
    return True


def end_all(
    look: Callable[[], Dict[int, Process]],
    *,
    term_seconds: float,
    kill_seconds: float = 10.0,
) -> List[Process]:
    """SIGTERM what `look` finds, wait `term_seconds`, then SIGKILL until nothing is found.

    Returns:
        What is still there after `kill_seconds` (a process in the kernel's hands cannot be killed).
    """
    found = look()
    if found and term_seconds > 0:
        for process in found.values():
            send(process, signal.SIGTERM)
        deadline = time.monotonic() + term_seconds
        while found and time.monotonic() < deadline:
            time.sleep(0.05)
            found = look()
    deadline = time.monotonic() + kill_seconds
    while found:
        for process in found.values():
            send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
        found = look()
    return list(found.values())


def reap_orphans(*, keep: FrozenSet[int]) -> None:
    """Collect ended processes that were handed to us, but for `keep`, which others wait for."""
    for row in table().values():
        if row.parent == os.getpid() and row.gone and row.pid not in keep:
            with contextlib.suppress(OSError):
                os.waitpid(row.pid, os.WNOHANG)


def adopt_orphans() -> None:
    """Ask that orphaned descendants become our children instead of init's (Linux; else nothing)."""
    with contextlib.suppress(Exception):  # an extra net, never a condition
        import ctypes

        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler of its own for a signal (Linux; else False)."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as stream:
            for line in stream:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _has_proc() -> bool:
    return os.path.exists("/proc/self/stat")


def _carries(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            data = stream.read()
    except OSError:
        return False
    return data.startswith(marker + b"\0") or b"\0" + marker + b"\0" in data


def _table_from_ps() -> Dict[int, Process]:
    command = ["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="]
    environment = dict(os.environ, LC_ALL="C")
    try:
        text = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=10, check=False, env=environment,
        ).stdout.decode("ascii", "replace")  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in text.splitlines():
        cells = line.split(None, 3)
        if len(cells) == 4 and cells[0].isdigit():
            started = " ".join(cells[3].split())
            found[int(cells[0])] = Process(int(cells[0]), started, int(cells[1]), cells[2][:1])
    return found
