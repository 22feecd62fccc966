"""One run of everything behind a line that fails: connect, sync, launch, poll, fetch.

What is true is read past the proxy: from the disk, the process table and the server itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import websocket

from kernel_tools.connecting.connection import Connection
from kernel_tools.errors import KernelAuthError, KernelToolsError
from kernel_tools.kernels import Patience, RemoteKernel, connect_kernel
from kernel_tools.kernels.rpc import AgentClient
from kernel_tools.results.fetch import fetch_files
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord
from kernel_tools.sync import build_plan
from tests.faults.proxy import FaultProxy, Schedule
from tests.kernel.conftest import JupyterServer

T = TypeVar("T")

# Short, so that a test is; the product's own are in `Patience` and ten times as long.
PATIENCE = Patience(
    first=2.0, connect=6.0, start=15.0, request=1.5, answer=1.5, stall=6.0, turn=20.0
)
ATTEMPT_SECONDS = 1.5
CALL_SECONDS = 10.0
# A kernel that has to be found or started again: the list, the start, the first cell.
FINDING_SECONDS = PATIENCE.connect + 2 * PATIENCE.start + 3 * PATIENCE.request
# What a call may take: its own time twice, since a lost kernel is replaced once; a slow machine's share.
CALL_LIMIT = 2 * (CALL_SECONDS + 4) + FINDING_SECONDS + 10
# A transfer is bounded by its standing still; `fetch` lists and brings several files, up to four times.
MOVING_LIMIT = 240.0
ATTEMPTS = 40
STUB = Path(__file__).parent.parent / "agent" / "stub_trainer.py"
STEPS = 12


@dataclass
class World:
    """A server, somebody else's kernel on it, and the proxy before it."""

    server: JupyterServer
    proxy: FaultProxy
    project: Path
    theirs: str
    their_pid: int
    their_activity: str
    extra_clients: list[websocket.WebSocket] = field(default_factory=list)

    @classmethod
    def made(cls, server: JupyterServer, folder: Path) -> World:
        theirs = server.rest("kernels", "POST", {"name": "python3"})["id"]
        direct = connect_kernel(server.url, token=server.token, attach=theirs)
        direct.execute("theirs = 'untouched'").check()
        direct.close(stop_kernel=False)
        wait_until(lambda: server.rest(f"kernels/{theirs}")["connections"] == 0)
        project = folder / "project"
        (project / "src").mkdir(parents=True)
        shutil.copy(STUB, project / "src/stub_trainer.py")
        for number in range(20):
            (project / f"src/module_{number}.py").write_text(f"number = {number}\n" * 40)
        (project / "src/noise.bin").write_bytes(random.Random(0).randbytes(4_500_000))
        world = cls(
            server,
            None,  # type: ignore[arg-type]
            project,
            theirs,
            kernel_pid(theirs),
            server.rest(f"kernels/{theirs}")["last_activity"],
        )
        world.proxy = FaultProxy(server.port, world.on_kernel)
        return world

    @property
    def url(self) -> str:
        return self.server.url.replace(str(self.server.port), str(self.proxy.port))

    def on_kernel(self, what: str, kernel_id: str) -> None:
        """Do to a kernel of ours what happens to kernels."""
        assert kernel_id != self.theirs
        with contextlib.suppress(OSError, websocket.WebSocketException):
            if what == "killed":
                os.kill(kernel_pid(kernel_id), signal.SIGKILL)
            elif what == "restarted":
                self.server.rest(f"kernels/{kernel_id}/restart", "POST")
            else:
                url = f"{self.server.url}/api/kernels/{kernel_id}/channels"
                url = url.replace("http", "ws", 1) + f"?token={self.server.token}"
                self.extra_clients.append(websocket.create_connection(url, timeout=10))

    def check_theirs(self) -> None:
        """Nobody has touched the kernel that is not ours."""
        row = self.server.rest(f"kernels/{self.theirs}")
        assert row["last_activity"] == self.their_activity
        assert (row["execution_state"], row["connections"]) == ("idle", 0)
        assert kernel_pid(self.theirs) == self.their_pid
        touched = [
            (method, path)
            for method, path in self.proxy.counters.methods
            if self.theirs in path and method != "GET"
        ]
        assert touched == []

    def close(self) -> None:
        for line in self.extra_clients:
            line.close()
        self.proxy.close()


@dataclass
class Play:
    """One schedule, played through; `errors` is what a user would have been told."""

    world: World
    client: str
    folder: Path
    seed: int
    errors: list[KernelToolsError] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    connection: Connection | None = None

    @property
    def remote(self) -> Path:
        return self.folder / "remote"

    def run(self) -> Run:
        """Play it; every step is repeated until it works, as a user would, and checked each time."""
        world = self.world
        world.proxy.start(Schedule.of_seed(self.seed))
        self.connection = self.step("connect", self._connect, FINDING_SECONDS + 10)
        plan = build_plan(
            world.project,
            sync_paths=["src"],
            exclude=["detector", "configs", "pyproject.toml", "README.md"],
        )
        report = self.step("sync", lambda: self.connection.sync(plan), MOVING_LIMIT)
        job = self._job()
        for _ in range(2):  # once more, as one whose first reply was lost would
            launched = self.step(
                "launch",
                lambda: self.connection.call(
                    "launch",
                    remote_dir=self.connection.remote_dir,
                    job=job,
                    manifest=report.manifest,
                    secrets_file=None,
                    timeout_seconds=CALL_SECONDS,
                ),
                CALL_LIMIT,
            )
            assert launched["run_id"] == job["run_id"]
        run = self._attached(job)
        while not run._watcher.finished:
            self.step("poll", run.refresh, 60 + FINDING_SECONDS + 10)
        self.step("fetch", lambda: self._fetch(run), MOVING_LIMIT)
        return run

    def step(self, name: str, action: Callable[[], T], limit: float) -> T:
        """Act until it works; each time it ends in time, with a result or one clear error."""
        for _ in range(ATTEMPTS):
            began = time.monotonic()
            try:
                value = action()
            except KernelAuthError as error:
                self._note(name, began, limit, error)
                self._get_a_new_url()
            except KernelToolsError as error:
                self._note(name, began, limit, error)
            else:
                self._note(name, began, limit, None)
                return value
        raise AssertionError(f"{name} never worked: {self.errors[-3:]}, {self._happened()}")

    def check(self, run: Run) -> None:
        """Compare what is here with what is true."""
        run_dir = self.remote / "runs" / run.id
        log = (run_dir / "train.log").read_bytes()
        lines = log.decode().splitlines()
        assert [folder.name for folder in (self.remote / "runs").iterdir()] == [run.id]
        assert lines.count("trainer_started") == 1, "launched twice"
        steps = [line for line in lines if line.startswith("step=")]
        assert steps == [f"step={step}/{STEPS}" for step in range(1, STEPS + 1)]
        assert run.log_path().read_bytes() == log, "the log here is not the log there"
        assert run.state.value == "completed"
        for path in ("weights/last.pt", "train.log", "code/src/noise.bin"):
            assert sha256(self.folder / "fetched" / path) == sha256(run_dir / path), path
        noise = self.world.project / "src/noise.bin"
        assert sha256(self.folder / "fetched/code/src/noise.bin") == sha256(noise)
        left = [p.name for p in (self.folder / "fetched").rglob(".*") if p.is_file()]
        assert left == []
        for error in self.errors:
            assert len(str(error).splitlines()) == 1
            for secret in (self.world.server.token, self.world.server.jwe):
                assert secret not in f"{error}{error.__cause__}"
        self.world.check_theirs()

    def close(self) -> set[str]:
        """End our kernels past all faults; return those that were left behind."""
        self.world.proxy.heal()
        if self.connection is not None:
            self.connection.close()
        left = self.world.server.kernel_ids() - {self.world.theirs}
        for kernel_id in left:
            with contextlib.suppress(OSError):
                self.world.server.rest(f"kernels/{kernel_id}", "DELETE")
        return left

    def _connect(self) -> Connection:
        def kernel() -> RemoteKernel:
            return connect_kernel(
                self.world.url,
                token=self.world.server.token,
                client=self.client,
                patience=PATIENCE,
            )

        ours = kernel()
        agent = AgentClient(ours, str(self.remote), attempt_seconds=ATTEMPT_SECONDS)
        return Connection("faulty", "url", ours, agent, kernel)

    def _get_a_new_url(self) -> None:
        """The URL has expired: nothing more is asked with it; then the user comes with a new one."""
        proxy, old = self.world.proxy, self.connection
        assert proxy.expired
        if old is not None:
            asked = proxy.counters.requests
            try:
                old.call("list_runs", remote_dir=str(self.remote))
            except KernelAuthError:
                assert proxy.counters.requests == asked, "asked again with an expired URL"
            else:
                raise AssertionError("an expired URL was used")
        proxy.schedule = dataclasses.replace(proxy.schedule, expires_at_request=None)
        proxy.expired = False
        if old is not None:
            old.take_over(self.step("connect", self._connect, FINDING_SECONDS + 10))

    def _note(self, name: str, began: float, limit: float, error: KernelToolsError | None) -> None:
        seconds = time.monotonic() - began
        self.slowest[name] = max(seconds, self.slowest.get(name, 0.0))
        assert seconds < limit, f"{name} took {seconds:.1f} s: {self._happened()}"
        if error is not None:
            self.errors.append(error)

    def _happened(self) -> list[str]:
        return self.world.proxy.counters.happened

    def _job(self) -> dict[str, Any]:
        run_id = f"20260101-000000-seed-{self.seed:04d}"
        return {
            "schema_version": 1,
            "run_id": run_id,
            "name": run_id,
            "created_at": "2026-01-01T00:00:00+00:00",
            "kind": "command",
            "argv": [
                sys.executable, "src/stub_trainer.py", "--steps", str(STEPS),
                "--step-seconds", "0.05",
            ],
            "limits": {"grace_seconds": 5, "stall_minutes": None},
        }  # fmt: skip

    def _attached(self, job: dict[str, Any]) -> Run:
        record = RunRecord(
            run_id=job["run_id"],
            name=job["name"],
            created_at=job["created_at"],
            where="faulty",
            remote_dir=str(self.remote),
            artifact_dir=str(self.folder / "artifacts"),
        )
        return Run(record, link=self.connection, mirror=RunMirror(self.folder / "mirror"))

    def _fetch(self, run: Run) -> object:
        return fetch_files(
            self.connection,
            remote_dir=str(self.remote),
            run_id=run.id,
            globs=["weights/last.pt", "train.log", "code/src/noise.bin"],
            folder=self.folder / "fetched",
        )


def kernel_pid(kernel_id: str) -> int:
    """Return the process of a kernel."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(f"kernel-{kernel_id}" in word for word in words):
            return int(process.pid)
    raise AssertionError(f"no process of kernel {kernel_id}")


def sha256(path: Path) -> str:
    """Return a file's hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait on a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
