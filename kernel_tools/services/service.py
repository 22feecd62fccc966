"""Local services of ours (Jupyter server, object store): start one at most, share it, let it go.

A service is run by its keeper (`keeper.py`) and recorded in `<state_dir>/services/<name>.json`, mode 0600.
Every client process holds a lease; without a live lease and without a live run the keeper ends the
service after the idle time. POSIX only; importing this module is harmless anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kernel_tools.errors import ConfigurationError, ServiceError
from kernel_tools.redact import register_secret
from kernel_tools.services import keeper
from kernel_tools.settings import Secret

DEFAULT_IDLE_SECONDS: Final = 600.0
# How long a start may take on a busy machine, and how long another client's start is waited for.
READY_SECONDS: Final = 60.0
# A port that was free when it was chosen can be taken a moment later; then all is chosen anew.
ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class ServiceOrder:
    """How to start a service once.

    Attributes:
        argv: the program; never holds a secret.
        env: its whole environment.
        cwd: its working folder.
        endpoint: URL or host:port at which it will answer, on loopback.
        secrets: what clients need to use it; kept in the record and nowhere else.
        facts: other things that clients need to know (paths).
        runs_dirs: folders of runs that keep the service up while one of them lives.
        leftovers: files to remove when it has ended, however it ended.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: Path
    endpoint: str
    secrets: Mapping[str, str] = field(repr=False)
    facts: Mapping[str, str] = field(default_factory=dict)
    runs_dirs: tuple[Path, ...] = ()
    leftovers: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """A running local service and this process's lease on it."""

    name: str
    state_dir: Path
    endpoint: str
    secrets: Mapping[str, Secret]
    facts: Mapping[str, str]
    folder: Path
    service_pid: int
    keeper_pid: int
    started: bool

    @property
    def alive(self) -> bool:
        """True while the very service that was handed out runs."""
        record = _live_record(_Paths(self.state_dir, self.name))
        return record is not None and record["service"]["pid"] == self.service_pid

    def watch_runs(self, runs_dir: Path) -> None:
        """Keep the service up for as long as a run in `runs_dir` lives, this process or not."""
        _write_lease(_Paths(self.state_dir, self.name), {str(runs_dir)})

    def release(self) -> None:
        """Give the lease back; the keeper ends the service once its idle time has passed."""
        paths = _Paths(self.state_dir, self.name)
        with _leases_lock:
            count = _leases.get(paths.lease, 0) - 1
            if count > 0:
                _leases[paths.lease] = count
                return
            _leases.pop(paths.lease, None)
        lease = keeper.read_json(paths.lease)
        if lease is not None:
            # Left for the keeper to read: it must learn of the folders to watch before the lease goes.
            keeper.write_private(paths.lease, lease | {"start_time": "released"})

    def release_or_stop(self) -> bool:
        """Give the lease back, and end the service now unless a client or a live run needs it.

        Returns whether it was ended.
        """
        self.release()
        paths = _Paths(self.state_dir, self.name)
        with _locked(paths):
            record = keeper.read_json(paths.record)
            if record is None or record["service"]["pid"] != self.service_pid:
                return False
            if keeper.Watch(paths.leases, record["runs_dirs"]).needed():
                return False
            _end_recorded(paths, record)
        return True

    def stop(self) -> None:
        """End the service now, whoever else uses it, and wait until it is gone."""
        paths = _Paths(self.state_dir, self.name)
        with _locked(paths):
            record = keeper.read_json(paths.record)
            if record is not None and record["service"]["pid"] == self.service_pid:
                _end_recorded(paths, record)
        with _leases_lock:
            _leases.pop(paths.lease, None)
        paths.lease.unlink(missing_ok=True)


def ensure(
    name: str,
    *,
    state_dir: Path,
    order: Callable[[Path], ServiceOrder],
    ready: Callable[[Service], bool],
    idle_seconds: float | None = None,
) -> Service:
    """Return the running service of that name, started now if there is none, with a lease on it.

    Args:
        name: file name of its record.
        state_dir: the user's private state folder.
        order: called with the service's own folder (0700); says how to start it.
        ready: asked until it is true; a quick probe of the endpoint.
        idle_seconds: life without client or run; default `KERNEL_TOOLS_IDLE_SECONDS`, then 600.

    Raises:
        ServiceError: it cannot be started here, ended at once, or did not answer in time.
    """
    if os.name != "posix":
        raise ServiceError(
            "Embedded local services need Linux or macOS.",
            hint="Connect to a Jupyter server by URL, and set MINIO_ENDPOINT for an object store.",
        )
    paths = _Paths(state_dir, name)
    paths.make()
    with _locked(paths):
        record = _live_record(paths)
        if record is not None:
            service = _service(paths, record, started=False)
            if _wait_ready(service, ready, READY_SECONDS / 2):
                _take_lease(paths)
                return service
        _clear_stale(paths)
        reasons = []
        for _ in range(ATTEMPTS):
            plan = order(paths.folder)
            for value in plan.secrets.values():
                register_secret(value)  # before its log is quoted
            record = _start(paths, plan, idle_seconds_from(os.environ, idle_seconds))
            if record is not None:
                service = _service(paths, record, started=True)
                if _wait_ready(service, ready, READY_SECONDS):
                    _take_lease(paths)
                    return service
            reasons.append(_last_words(paths))
            _clear_stale(paths)
    raise ServiceError(
        f"The local service {name} did not start: {reasons[-1]}",
        hint=f"Its log is {paths.folder / 'service.log'}.",
    )


def idle_seconds_from(environ: Mapping[str, str], given: float | None = None) -> float:
    """Return the idle time: the argument, `KERNEL_TOOLS_IDLE_SECONDS`, or 600 s.

    Raises:
        ConfigurationError: the variable holds no number above zero.
    """
    if given is not None:
        return given
    text = environ.get("KERNEL_TOOLS_IDLE_SECONDS") or str(DEFAULT_IDLE_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigurationError(
            f"KERNEL_TOOLS_IDLE_SECONDS is {text!r}; give a number of seconds above 0."
        )
    return seconds


def running(state_dir: Path) -> list[str]:
    """Return the names of the services of ours that run now."""
    names = [path.stem for path in sorted((state_dir / "services").glob("*.json"))]
    return [name for name in names if _live_record(_Paths(state_dir, name)) is not None]


# -- records and leases ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Paths:
    state_dir: Path
    name: str

    @property
    def root(self) -> Path:
        return self.state_dir / "services"

    @property
    def record(self) -> Path:
        return self.root / f"{self.name}.json"

    @property
    def lock(self) -> Path:
        return self.root / f"{self.name}.lock"

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def leases(self) -> Path:
        return self.root / f"{self.name}.leases"

    @property
    def lease(self) -> Path:
        return self.leases / f"{os.getpid()}.json"

    def make(self) -> None:
        for folder in (self.state_dir, self.root, self.folder, self.leases):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


# How often this process holds each lease; a path names the process, so a fork starts at nothing.
_leases: dict[Path, int] = {}
_leases_lock = threading.Lock()


@contextlib.contextmanager
def _locked(paths: _Paths) -> Iterator[None]:
    """Hold the service's lock: one process starts, stops or takes up at a time."""
    import fcntl

    deadline = time.monotonic() + 2 * READY_SECONDS
    with paths.lock.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServiceError(
                        f"Another process has been starting the local service {paths.name} for "
                        f"{2 * READY_SECONDS:.0f} s.",
                        hint=f"See {paths.folder / 'service.log'}, then try again.",
                    ) from None
                time.sleep(0.02)
        yield


def _take_lease(paths: _Paths) -> None:
    with _leases_lock:
        _leases[paths.lease] = _leases.get(paths.lease, 0) + 1
    _write_lease(paths, set())


def _write_lease(paths: _Paths, runs_dirs: set[str]) -> None:
    known = keeper.read_json(paths.lease) or {}
    me = keeper.describe(os.getpid())
    if known.get("start_time") in (me["start_time"], "released"):
        runs_dirs = runs_dirs | set(known.get("runs_dirs", ()))
    keeper.write_private(paths.lease, me | {"runs_dirs": sorted(runs_dirs)})


def _live_record(paths: _Paths) -> dict[str, Any] | None:
    record = keeper.read_json(paths.record)
    if record is None or not keeper.is_alive(record["service"]):
        return None
    return record if keeper.is_alive(record["keeper"]) else None


def _service(paths: _Paths, record: Mapping[str, Any], *, started: bool) -> Service:
    return Service(
        name=paths.name,
        state_dir=paths.state_dir,
        endpoint=record["endpoint"],
        secrets={key: Secret(value) for key, value in record["secrets"].items()},
        facts=record["facts"],
        folder=paths.folder,
        service_pid=record["service"]["pid"],
        keeper_pid=record["keeper"]["pid"],
        started=started,
    )


def _wait_ready(service: Service, ready: Callable[[Service], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while service.alive and time.monotonic() < deadline:
        if ready(service):
            return True
        time.sleep(0.05)
    return False


def _start(paths: _Paths, plan: ServiceOrder, idle_seconds: float) -> dict[str, Any] | None:
    """Start the keeper and return its record, or None where the service has ended already."""
    order = {
        "name": paths.name,
        "argv": list(plan.argv),
        "env": dict(plan.env),
        "cwd": str(plan.cwd),
        "endpoint": plan.endpoint,
        "secrets": dict(plan.secrets),
        "facts": dict(plan.facts),
        "runs_dirs": [str(folder) for folder in plan.runs_dirs],
        "leftovers": [str(path) for path in plan.leftovers],
        "folder": str(paths.folder),
        "record": str(paths.record),
        "lock": str(paths.lock),
        "leases": str(paths.leases),
        "idle_seconds": idle_seconds,
    }
    # -I -S: no user site, no site-packages, no PYTHONPATH; it needs the standard library alone.
    started = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(keeper.__file__).resolve())],
        input=json.dumps(order).encode(),
        capture_output=True,
        start_new_session=True,
        check=False,
        timeout=READY_SECONDS,
    )
    answer = started.stdout.decode(errors="replace")
    if answer != "ok":
        raise ServiceError(
            f"The local service {paths.name} could not be started: "
            f"{answer or started.stderr.decode(errors='replace')[-300:] or 'the keeper ended'}."
        )
    return keeper.read_json(paths.record)


def _clear_stale(paths: _Paths) -> None:
    """Remove what a dead service left: its record, a survivor of its two processes, its sockets."""
    record = keeper.read_json(paths.record)
    if record is not None:
        _end_recorded(paths, record)


def _end_recorded(paths: _Paths, record: Mapping[str, Any]) -> None:
    if keeper.is_alive(record["keeper"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(record["keeper"]["pid"], signal.SIGTERM)
        deadline = time.monotonic() + keeper.GRACE_SECONDS + 3
        while keeper.is_alive(record["keeper"]) and time.monotonic() < deadline:
            time.sleep(0.02)
    keeper.end_group(record["service"])
    keeper.end_group(record["keeper"], grace_seconds=0.5)
    keeper.remove_leftovers(record["leftovers"])
    paths.record.unlink(missing_ok=True)


def _last_words(paths: _Paths) -> str:
    with contextlib.suppress(OSError):
        lines = (paths.folder / "service.log").read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1][-300:]
    return "it said nothing."
