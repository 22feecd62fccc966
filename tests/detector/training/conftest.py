"""A training small enough for tests: D-FINE N on drawn shapes, 64 pixels, a few pictures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from detector.stopping import StopWatch

ROOT = Path(__file__).resolve().parents[3]
TINY = """
model:
  num_queries: 10
  num_denoising: 10
data:
  format: synthetic
  image_size: 64
  train_samples: 8
  eval_samples: 4
solver:
  epochs: 2
  batch_size: 2
  lr: 0.0008
  warmup_steps: 2
logging:
  log_interval: 1
evaluation:
  batch_size: 2
"""
DEADLINE_SECONDS = 120


@pytest.fixture(autouse=True)
def no_supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder, without what torchrun or an agent may have set; keep pytest's signals."""

    class DeafWatch(StopWatch):
        def catch_signals(self) -> None:
            """Leave the handlers to pytest."""

    monkeypatch.setattr("detector.__main__.StopWatch", DeafWatch)
    for name in ("RUN_DIR", "RUN_ID", "RUN_SUPERVISED", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The path of a configuration that trains in seconds."""
    path = tmp_path / "configs" / "tiny" / "n.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def train_here(tiny: str, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Train in this process in a run directory of the given name; returns exit code and paths."""

    def train(
        name: str,
        *overrides: str,
        resume: str | None = None,
        output: Path | None = None,
        supervised: bool = False,
    ) -> SimpleNamespace:
        from detector.commands import train_command
        from detector.rundir import RunDirectory
        from detector.stopping import StopWatch

        run_dir = tmp_path / name
        environment = {"RUN_DIR": str(run_dir), "RUN_SUPERVISED": "1" if supervised else ""}
        before = {key: os.environ.get(key) for key in environment}
        os.environ.update(environment)
        try:
            code = train_command(
                tiny, list(overrides), watch=StopWatch(), resume=resume, output=output
            )
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value
        return SimpleNamespace(code=code, run=RunDirectory(run_dir))

    return train


@pytest.fixture
def start_ranks(tmp_path: Path) -> Callable[..., list[subprocess.Popen[str]]]:
    """Start a Python command once a rank, as torchrun would but without its seconds."""
    started: list[subprocess.Popen[str]] = []

    def start(
        arguments: Sequence[str], *, world_size: int = 2, **environment: str
    ) -> list[subprocess.Popen[str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = []
        for rank in range(world_size):
            shared = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTHONWARNINGS": "error",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **environment,
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=shared,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        started.extend(processes)
        return processes

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def finish_ranks() -> Callable[..., list[tuple[int, str]]]:
    """Wait for all ranks; returns exit code and output of each."""

    def finish(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        ends = []
        for process in processes:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ends.append((process.returncode, output))
        return ends

    return finish


class Forker:
    """Starts ranks as forks of a process that has imported everything; seconds instead of tens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "n.yaml"
        self.config.write_text(TINY)
        program = Path(__file__).with_name("programs.py")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
        environment |= {"OMP_NUM_THREADS": "1"}
        for name in ("RUN_DIR", "RUN_ID", "RUN_SUPERVISED", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        self._server = subprocess.Popen(
            [sys.executable, str(program), "serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running: set[int] = set()

    def _ask(self, **request: object) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(
        self,
        run: str,
        *overrides: str,
        world_size: int = 1,
        resume: str | None = None,
        hook: str | None = None,
        **environment: str,
    ) -> list[int]:
        """Train in `<folder>/<run>`; returns the ranks' pids. What they print is in `<run>.log`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        argv = ["train", "--config", str(self.config), "--set", "data.cache=none", *overrides]
        argv += ["--resume", resume] if resume else []
        pids = []
        for rank in range(world_size):
            shared = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "RUN_DIR": str(self.folder / run),
                **environment,
            }
            log = str(self.folder / f"{run}.log")
            request = {"argv": argv, "env": shared, "log": log, "hook": hook}
            pids.append(self._ask(**request, cwd=str(self.folder)))
        self._running.update(pids)
        return pids

    def run(self, program: str, *arguments: str, world_size: int = 1) -> list[int]:
        """Start a program of `programs.py`; returns the ranks' pids. They print to `<program>.log`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = []
        for rank in range(world_size):
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
            shared |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = str(self.folder / f"{program}.log")
            request = {"program": program, "argv": arguments, "env": shared, "log": log}
            pids.append(self._ask(**request, cwd=str(self.folder)))
        self._running.update(pids)
        return pids

    def wait(self, pids: Sequence[int]) -> list[int]:
        """Return the exit codes, negative for a signal."""
        codes = []
        for pid in pids:
            codes.append(self._ask(wait=pid))
            self._running.discard(pid)
        return codes

    def train(self, run: str, *overrides: str, **options: object) -> list[int]:
        """`start` and `wait`."""
        return self.wait(self.start(run, *overrides, **options))

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL, and wait."""
        for pid in pids:
            os.kill(pid, 9)
        self.wait(pids)

    def log(self, run: str) -> str:
        """Return what all attempts of a run printed."""
        return (self.folder / f"{run}.log").read_text()

    def close(self) -> None:
        """Leave nothing behind."""
        for pid in self._running:
            os.kill(pid, 9)
        self._server.communicate(timeout=60)


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Ranks that start fast, one server a module."""
    server = Forker(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()
