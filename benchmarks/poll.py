"""What watching a run costs: python benchmarks/poll.py [--polls 60] [--runs 1000] [--log-mib 1024]

A real Jupyter server on loopback, a stub trainer under the real agent. Measured: the CPU of kernel and
server at one poll a second, round trips and bytes a poll; the list of many runs; the first paint of a
long log. Ends with 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_tools.agent.status import queued_status
from kernel_tools.kernels.base import RemoteKernel
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord
from kernel_tools.session import Session

MOST_CORE, MOST_TRIPS, MOST_BYTES = 0.01, 2, 256 * 1024
LIST_SECONDS, PAINT_SECONDS = 1.0, 2.0
# Prints about 200 bytes a step, ten steps a second: a talkative trainer.
TALKER = (
    "import time\n"
    "for i in range(10**6):\n"
    "    print('step', i, 'loss=12.3456 lr=1.00e-04 data_time=0.011 iter_time=0.099 ' * 3, flush=True)\n"
    "    time.sleep(0.1)\n"
)


class Counted:
    """A kernel whose cells and replies are counted."""

    def __init__(self, kernel: RemoteKernel) -> None:
        self.kernel = kernel
        self.cells, self.reply_bytes = 0, []

    def execute(self, code, **keywords):
        self.cells += 1
        result = self.kernel.execute(code, **keywords)
        self.reply_bytes.append(len(result.stdout))
        return result

    def __getattr__(self, name):
        return getattr(self.kernel, name)


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure_polls(session: Session, connection, polls: int) -> dict[str, float]:
    """Poll once a second; nothing else asks meanwhile."""
    run = session.run_command([sys.executable, "-c", TALKER], name="talker")
    run.detach()
    time.sleep(2.0)
    kernel_pid = int(connection.kernel.execute("import os; print(os.getpid())").stdout)
    server_pid = psutil.Process(kernel_pid).ppid()
    counted = Counted(connection.kernel)
    connection.kernel = counted
    connection.client.kernel = counted
    run.refresh()
    counted.cells, counted.reply_bytes = 0, []
    before, began = (cpu_seconds(kernel_pid), cpu_seconds(server_pid)), time.monotonic()
    for number in range(polls):
        time.sleep(max(0.0, began + number + 1 - time.monotonic()))
        run.refresh()
    seconds = time.monotonic() - began
    used = cpu_seconds(kernel_pid) - before[0], cpu_seconds(server_pid) - before[1]
    cells, most = counted.cells, max(counted.reply_bytes)
    floor, began = cpu_seconds(kernel_pid), time.monotonic()
    for number in range(polls):
        time.sleep(max(0.0, began + number + 1 - time.monotonic()))
        counted.kernel.execute("pass")
    empty = (cpu_seconds(kernel_pid) - floor) / (time.monotonic() - began)
    run.stop(now=True)
    run.wait(60, check=False)
    run.detach()
    return {
        "kernel_core_of_empty_cells": empty,
        "kernel_core": used[0] / seconds,
        "server_core": used[1] / seconds,
        "round_trips": cells / polls,
        "most_reply_bytes": most,
    }


def measure_list(session: Session, connection, runs: int) -> float:
    """List runs that are known here and there."""
    root = Path(connection.remote_dir) / "runs"
    for number in range(runs):
        run_id = f"20250101-{number:06d}-many-{number:04x}"
        folder = root / run_id
        folder.mkdir(parents=True)
        status = {**queued_status(run_id, str(folder)), "state": "completed", "phase": "done"}
        (folder / "status.json").write_text(json.dumps(status))
        (folder / "job.json").write_text(json.dumps({"name": "many", "created_at": "2025"}))
        session.registry.save(RunRecord(run_id, "many", "2025", "local", str(root.parent), "a"))
    began = time.monotonic()
    rows = session.runs()
    took = time.monotonic() - began
    assert len(rows) >= runs
    return took


def measure_paint(session: Session, connection, mebibytes: int) -> dict[str, float]:
    """Take up a run whose log is long; then wait for all of it."""
    run = session.run_command(["sleep", "600"], name="long")
    run.detach()
    log = Path(connection.remote_dir) / "runs" / run.id / "train.log"
    line = b"epoch=0001 step=%08d/99999999 loss=12.3456 lr=1.00e-04 images_per_second=123.45\n"
    block = b"".join(line % number for number in range((1 << 20) // len(line % 0) + 1))
    with log.open("ab") as stream:
        for _ in range(mebibytes):
            stream.write(block)
        stream.write(b"the newest line\n")
    again = Run(
        dataclasses.replace(run.record), link=connection,
        mirror=RunMirror(session.project_dir / "elsewhere"),
    )  # fmt: skip
    memory = psutil.Process().memory_info().rss
    began = time.monotonic()
    again.refresh()
    painted = time.monotonic() - began
    assert again.snapshot.log_tail[-2] == "the newest line"
    most = 0
    while again.behind_the_remote():
        most = max(most, psutil.Process().memory_info().rss - memory)
        time.sleep(0.1)
    whole = time.monotonic() - began
    assert again.log_path().stat().st_size == log.stat().st_size
    run.stop(now=True)
    run.wait(60, check=False)
    run.detach()
    return {"paint_seconds": painted, "whole_seconds": whole, "most_memory_mb": most / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--polls", type=int, default=60)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--log-mib", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="poll-") as folder:
        os.environ["KERNEL_TOOLS_STATE_DIR"] = f"{folder}/state"
        os.environ["KERNEL_TOOLS_IDLE_SECONDS"] = "5"
        project = Path(folder) / "project"
        project.mkdir()
        (project / "pyproject.toml").write_text("[project]\nname = 'x'\n")
        session = Session(project)
        connection = session.connect("local")
        told = measure_polls(session, connection, options.polls)
        told["list_seconds"] = measure_list(session, connection, options.runs)
        told.update(measure_paint(session, connection, options.log_mib))
        session.disconnect()
    promises = {
        "kernel_core": MOST_CORE, "round_trips": MOST_TRIPS, "most_reply_bytes": MOST_BYTES,
        "list_seconds": LIST_SECONDS, "paint_seconds": PAINT_SECONDS,
    }  # fmt: skip
    broken = [name for name, most in promises.items() if told[name] > most]
    for name, value in told.items():
        most = f"  (at most {promises[name]:g})" if name in promises else ""
        print(f"{name}={value:.4g}{most}{'  BROKEN' if name in broken else ''}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
