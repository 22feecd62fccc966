"""Whole flows on real parts: one embedded server and store for the folder, and a project of its own.

What is trained is tiny (drawn shapes, a few steps), so that what is tested is the way, not the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_tools.session import Session

TINY = (
    "model.backbone_name=hgnetv2_n",
    "data.image_size=96",
    "data.train_samples=16",
    "data.eval_samples=4",
    "solver.batch_size=4",
    "solver.epochs=1",
    "logging.log_interval=1",
)
LONG = (*TINY[:-2], "solver.epochs=500", "evaluation.interval=500", "logging.log_interval=1")
CONFIG = "synthetic/hgnetv2_s"


@pytest.fixture(scope="module")
def flow_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flow-state")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").write_text("[project]\nname = 'a-users-project'\n")
    return folder


@pytest.fixture(scope="module", autouse=True)
def flow_environment(flow_state: Path, project: Path) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_TOOLS_STATE_DIR", str(flow_state))
        patch.setenv("KERNEL_TOOLS_IDLE_SECONDS", "5")
        patch.setenv("IPYTHONDIR", str(flow_state / "ipython"))
        patch.chdir(project)
        yield patch


@pytest.fixture(autouse=True)
def own_state_dir(flow_state: Path) -> Path:
    """Replaces the folder a test: these tests share a server."""
    return flow_state


@pytest.fixture(scope="module")
def session(flow_environment: pytest.MonkeyPatch, project: Path) -> Iterator[Session]:
    session = Session(project)
    session.connect("local")
    yield session
    for run in session._runs.newest_first:
        if not run.snapshot.terminal:
            run.stop(now=True)
            run.wait(60, check=False)
    if session.connections:
        session.disconnect()


def wait_for(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait on a condition, with a deadline that fails the test."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def processes_of_run(run_id: str) -> list[int]:
    """Return the pids that carry the run's mark and are not gone (Z counts as gone)."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            marked = f"RUN_ID={run_id}".encode() in (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marked and state not in {"Z", "X"}:
            found.append(int(folder.name))
    return found


def python(code: str, *, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with the environment of the test."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd, env=dict(os.environ), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


class Cell:
    """Runs one cell in a real kernel; called with code, returns what it printed and displayed."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client

    def __call__(self, code: str, *, timeout: float = 300) -> str:
        said: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            said.append(content.get("text") or content.get("data", {}).get("text/plain", ""))
            assert message["msg_type"] != "error", content["evalue"]

        self._client.execute_interactive(code, timeout=timeout, output_hook=hear, allow_stdin=False)
        return "".join(said)

    def kill(self) -> None:
        """SIGKILL, as an out-of-memory killer would."""
        os.kill(self._manager.provisioner.pid, signal.SIGKILL)


@contextlib.contextmanager
def notebook_kernel(cwd: Path) -> Iterator[Cell]:
    """Start a notebook's kernel in a folder; ended at the end, however it went."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(cwd))
    try:
        yield Cell(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def notebook(path: Path, *cells: str) -> Path:
    """Write a notebook of code cells."""
    import nbformat

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(book, path)
    return path


def outputs_of(path: Path) -> str:
    """Return everything a notebook's outputs say, as text."""
    book = json.loads(path.read_text("utf-8"))
    return json.dumps([cell.get("outputs", []) for cell in book["cells"]])
