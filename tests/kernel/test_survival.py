"""A run owns itself: whatever happens to line, kernel, notebook or laptop, it completes and its log comes whole.

Both server versions, a stub trainer under the real agent. What is true is read from the disk.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kernel_tools.connecting.connection import Connection
from kernel_tools.kernels import connect_kernel
from kernel_tools.kernels.rpc import AgentClient
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord

STUB = Path(__file__).parent.parent / "agent" / "stub_trainer.py"
STEPS = 60
# The laptop's lid: short here, and as long as the promise in the campaign.
SHORT_SLEEP, LONG_SLEEP = 5.0, 90.0


def job(run_id: str, *, steps: int = STEPS, step_seconds: float = 0.1) -> dict:
    arguments = ["--steps", str(steps), "--step-seconds", str(step_seconds), "--ranks", "2"]
    return {
        "schema_version": 1, "run_id": run_id, "name": run_id, "created_at": "t", "kind": "command",
        "argv": [sys.executable, str(STUB), *arguments], "limits": {"stall_minutes": None},
    }  # fmt: skip


def connection(server, remote_dir: Path) -> Connection:
    def connect():
        return connect_kernel(server.url, token=server.token)

    kernel = connect()
    return Connection("remote", "url", kernel, AgentClient(kernel, str(remote_dir)), connect)


def attach(link: Connection, run_id: str, folder: Path) -> Run:
    record = RunRecord(run_id, run_id, "t", "remote", link.remote_dir, "artifacts/remote")
    return Run(record, link=link, mirror=RunMirror(folder))


def launch(link: Connection, run_id: str, **keywords) -> None:
    link.call("launch", job=job(run_id, **keywords), manifest={"files": {}})


def wait_for(condition, *, seconds: float = 90.0, what: str = "it"):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in time"
        time.sleep(0.05)
    return value


def status(remote_dir: Path, run_id: str) -> dict:
    try:
        return json.loads((remote_dir / "runs" / run_id / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def check_whole(server, remote_dir: Path, run_id: str, folder: Path) -> None:
    """The run completes by itself; a new kernel then brings its log, byte for byte."""
    end = wait_for(
        lambda: (s := status(remote_dir, run_id)).get("state") == "completed" and s, what="the end"
    )
    assert end["optimizer_steps"] == STEPS
    link = connection(server, remote_dir)
    try:
        run = attach(link, run_id, folder)
        assert run.wait(60).state.value == "completed"
        told = run.log_path().read_bytes()
        assert told == (remote_dir / "runs" / run_id / "train.log").read_bytes()
        assert told.count(b"trainer_started") == 1
        run.detach()
    finally:
        link.close()


def end_line(link, server):
    link.kernel.close(stop_kernel=False)


def interrupt(link, server):
    server.rest(f"kernels/{link.kernel.kernel_id}/interrupt", "POST")


def restart(link, server):
    server.rest(f"kernels/{link.kernel.kernel_id}/restart", "POST")


def delete(link, server):
    server.rest(f"kernels/{link.kernel.kernel_id}", "DELETE")


def kill(link, server):
    pid = int(link.kernel.execute("import os; print(os.getpid())").stdout)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("event", [end_line, interrupt, restart, delete, kill])
def test_a_run_outlives_what_happens_to_its_kernel(server, tmp_path, event):
    remote_dir = tmp_path / "remote"
    link = connection(server, remote_dir)
    kernel_id = link.kernel.kernel_id
    try:
        launch(link, "run")
        wait_for(lambda: (status(remote_dir, "run").get("optimizer_steps") or 0) >= 2)
        assert status(remote_dir, "run")["state"] == "training"
        event(link, server)
        check_whole(server, remote_dir, "run", tmp_path / "mirror")
    finally:
        link.kernel.close(stop_kernel=False)
        if kernel_id in server.kernel_ids():
            server.rest(f"kernels/{kernel_id}", "DELETE")


NOTEBOOK = """
    import sys
    from pathlib import Path
    from tests.kernel.conftest import JupyterServer
    from tests.kernel.test_survival import attach, connection, launch
    port, token, jwe, root = sys.argv[1:5]
    server = JupyterServer(int(port), token, jwe, Path(root), sys.executable)
    link = connection(server, Path(sys.argv[5]))
    launch(link, "run")
    run = attach(link, "run", Path(sys.argv[6])).watch()
    print("watching", link.kernel.kernel_id, flush=True)
    run.wait(300)
    print(run.state.value, flush=True)
    run.detach()
    link.close()
"""


def start_notebook(server, remote_dir: Path, folder: Path) -> tuple[subprocess.Popen, str]:
    words = [
        str(server.port),
        server.token,
        server.jwe,
        str(server.root),
        str(remote_dir),
        str(folder),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(NOTEBOOK), *words], text=True,
        cwd=Path(__file__).parent.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    line = process.stdout.readline()
    assert line.startswith("watching"), process.communicate()[1]
    return process, line.split()[1]


def test_a_run_outlives_the_notebook_that_launched_it(server, tmp_path):
    process, kernel_id = start_notebook(server, tmp_path / "remote", tmp_path / "first")
    wait_for(lambda: (status(tmp_path / "remote", "run").get("optimizer_steps") or 0) >= 2)
    process.kill()
    process.communicate()
    check_whole(server, tmp_path / "remote", "run", tmp_path / "second")
    server.rest(f"kernels/{kernel_id}", "DELETE")


def sleep_and_wake(server, tmp_path, seconds):
    remote_dir, folder = tmp_path / "remote", tmp_path / "mirror"
    process, _ = start_notebook(server, remote_dir, folder)
    wait_for(lambda: (status(remote_dir, "run").get("optimizer_steps") or 0) >= 2)
    os.kill(process.pid, signal.SIGSTOP)
    asleep = time.monotonic()
    wait_for(lambda: status(remote_dir, "run").get("state") == "completed", what="the end")
    wait_for(lambda: time.monotonic() - asleep >= seconds, seconds=seconds + 5)
    os.kill(process.pid, signal.SIGCONT)
    said, complaint = process.communicate(timeout=240)
    assert said.strip() == "completed", complaint
    told = (folder / "train.log").read_bytes()
    assert told == (remote_dir / "runs" / "run" / "train.log").read_bytes()


def test_a_laptop_that_was_asleep_has_everything_when_it_wakes(server, tmp_path):
    sleep_and_wake(server, tmp_path, SHORT_SLEEP)


@pytest.mark.campaign
def test_a_laptop_that_was_asleep_for_long_has_everything_when_it_wakes(server, tmp_path):
    sleep_and_wake(server, tmp_path, LONG_SLEEP)
