"""The keeper: a small process of its own that runs one local service and ends it when nobody needs it.

Started by path (`python keeper.py`), stdlib only and importing nothing of this package, so that it is up
in a few tens of milliseconds. It reads one JSON order from stdin, detaches, starts the service as its
child, writes the record, and watches clients and runs. `services.py` is its only caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

# Between SIGTERM and SIGKILL. SeaweedFS ignores SIGTERM for 30 s after large puts; SIGKILL lost nothing.
GRACE_SECONDS: Final = 3.0
# A run whose files have not been touched for this long is not alive (its agent writes every 2 s).
RUN_SILENCE_SECONDS: Final = 30.0
# The service's log is emptied when it passes this size.
LOG_LIMIT_BYTES: Final = 8 << 20
TERMINAL_STATES: Final = frozenset({"completed", "failed", "stopped", "timed_out"})


# -- processes -------------------------------------------------------------------------------------


def process_start(pid: int) -> str | None:
    """Return an opaque start time of a process, or None where it is gone (or a zombie)."""
    try:
        # The name, in brackets, may hold anything; what follows the last bracket is regular.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        return _process_start_by_ps(pid)
    return None if fields[0] in "ZX" else fields[19]


def _process_start_by_ps(pid: int) -> str | None:
    """MacOS has no /proc."""
    shown = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split(maxsplit=1)
    return None if len(shown) != 2 or shown[0].startswith("Z") else shown[1].strip()


def is_alive(process: dict[str, Any] | None) -> bool:
    """True where `{"pid", "start_time"}` names a running process, and that very one."""
    return process is not None and process_start(int(process["pid"])) == process["start_time"]


def describe(pid: int) -> dict[str, Any]:
    """Return what identifies a running process for as long as this machine is up."""
    return {"pid": pid, "start_time": process_start(pid)}


def end_group(process: dict[str, Any], *, grace_seconds: float = GRACE_SECONDS) -> None:
    """End a session leader of ours and its group: SIGTERM, a grace period, SIGKILL."""
    for number, patience in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 5.0)):
        if not is_alive(process):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process["pid"], number)
        deadline = time.monotonic() + patience
        while is_alive(process) and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process["pid"], os.WNOHANG)
            time.sleep(0.02)


def _die_with_parent() -> None:
    """In the child: Linux sends SIGTERM when the keeper goes, however it goes."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


# -- files -----------------------------------------------------------------------------------------


def write_private(path: Path, document: dict[str, Any]) -> None:
    """Write JSON whole or not at all, readable by its owner only."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the document, or None where there is none to be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


# -- what keeps the service up ---------------------------------------------------------------------


class Watch:
    """Knows whether a client or a run still needs the service."""

    def __init__(self, leases: Path, runs_dirs: list[str]) -> None:
        self.leases = leases
        self.runs_dirs = {Path(folder) for folder in runs_dirs}
        self._ended_runs: set[Path] = set()

    def needed(self) -> bool:
        # Both are looked at: reading the leases is also what collects the folders to watch.
        clients = self._live_clients()
        return clients > 0 or any(self._has_live_run(folder) for folder in self.runs_dirs)

    def _live_clients(self) -> int:
        live = 0
        for path in self.leases.glob("*.json"):
            lease = read_json(path)
            if lease is None:
                continue
            self.runs_dirs.update(Path(folder) for folder in lease["runs_dirs"])
            if is_alive(lease):
                live += 1
            else:
                path.unlink(missing_ok=True)
        return live

    def _has_live_run(self, runs_dir: Path) -> bool:
        try:
            found = [Path(e.path) for e in os.scandir(runs_dir) if e.is_dir(follow_symlinks=False)]
        except OSError:
            return False
        return any(self._is_live(run) for run in found if run not in self._ended_runs)

    def _is_live(self, run: Path) -> bool:
        status = read_json(run / "status.json")
        if status is None:
            return False
        if status.get("state") in TERMINAL_STATES:
            self._ended_runs.add(run)  # a terminal state is never left
            return False
        touched = 0.0
        for name in ("agent.json", "status.json"):
            with contextlib.suppress(OSError):
                touched = max(touched, (run / name).stat().st_mtime)
        return time.time() - touched < RUN_SILENCE_SECONDS


# -- the process -----------------------------------------------------------------------------------


class Keeper:
    """Runs the order of `services.ensure`; see `services.ServiceOrder` for its fields."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.folder = Path(order["folder"])
        self.record = Path(order["record"])
        self.lock = Path(order["lock"])
        self.log = self.folder / "service.log"
        self.watch = Watch(Path(order["leases"]), order["runs_dirs"])
        self.asked_to_end = False
        self.service: dict[str, Any] = {}
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the service and write its record."""
        signal.signal(signal.SIGTERM, self._ask_to_end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            self.child = subprocess.Popen(
                self.order["argv"],
                cwd=self.order["cwd"],
                env=self.order["env"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        finally:
            os.close(log)
        self.service = describe(self.child.pid)
        write_private(
            self.record,
            {
                "schema_version": 1,
                "name": self.order["name"],
                "endpoint": self.order["endpoint"],
                "secrets": self.order["secrets"],
                "facts": self.order["facts"],
                "folder": str(self.folder),
                "idle_seconds": self.order["idle_seconds"],
                "runs_dirs": self.order["runs_dirs"],
                "keeper": describe(os.getpid()),
                "service": self.service,
                "leftovers": self.order["leftovers"],
            },
        )

    def run(self) -> None:
        """Watch until the service ended, was asked to end, or nobody has needed it for long enough."""
        idle_seconds = float(self.order["idle_seconds"])
        pause = min(0.5, max(0.05, idle_seconds / 8))
        needed_at = time.monotonic()
        while not self.asked_to_end and self.child is not None and self.child.poll() is None:
            if self.watch.needed():
                needed_at = time.monotonic()
            elif time.monotonic() - needed_at > idle_seconds and self._end_unless_wanted():
                return
            self._trim_log()
            time.sleep(pause)
        self._end()

    def _end_unless_wanted(self) -> bool:
        """End under the lock, so that no client takes up a service that is on its way out."""
        import fcntl

        with self.lock.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False  # a client is connecting or stopping it right now
            if self.watch.needed():
                return False
            self._end()
            return True

    def _end(self) -> None:
        end_group(self.service)
        if self.child is not None:
            self.child.wait()
        remove_leftovers(self.order["leftovers"])
        record = read_json(self.record)
        if record is not None and record.get("keeper", {}).get("pid") == os.getpid():
            self.record.unlink(missing_ok=True)

    def _trim_log(self) -> None:
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > LOG_LIMIT_BYTES:
                os.truncate(self.log, 0)

    def _ask_to_end(self, _number: int, _frame: object) -> None:
        self.asked_to_end = True


def remove_leftovers(paths: list[str]) -> None:
    """Remove sockets and the like that a killed service could not remove itself."""
    for path in paths:
        with contextlib.suppress(OSError):
            Path(path).unlink()


def main() -> None:
    """Read the order, detach, keep. Says `ok` or the reason on stdout, then closes it."""
    order = json.load(sys.stdin)
    if os.fork():
        os._exit(0)  # the starter reaps this one at once; the keeper belongs to init
    os.setsid()
    os.umask(0o077)
    os.chdir("/")
    keeper = Keeper(order)
    try:
        keeper.start()
        answer = "ok"
    except OSError as error:
        answer = f"{type(error).__name__}: {error.strerror}: {error.filename}"
    with contextlib.suppress(OSError):
        os.write(1, answer.encode())
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if answer == "ok":
        keeper.run()
    else:
        keeper._end()  # noqa: SLF001
    os._exit(0)


if __name__ == "__main__":
    main()
