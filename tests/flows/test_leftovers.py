"""After everything, and after the idle time, no process of ours is left and nothing listens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import CONFIG, TINY, python, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def processes_of(state_dir):
    """Return command lines of live processes whose environment or arguments name the state folder."""
    mark, found = str(state_dir).encode(), {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            said = (folder / "cmdline").read_bytes() + b"\0" + (folder / "environ").read_bytes()
            where = os.readlink(folder / "cwd").encode()
        except OSError:
            continue
        if state not in {"Z", "X"} and mark in said + where:
            found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ")[:90]
    return found


def test_nothing_is_left_after_the_idle_time(project, flow_state):
    done = python(
        f"""
        from pathlib import Path
        from kernel_tools import default_session
        from detector.data.prepare import prepare
        if not Path("data/shapes").is_dir():
            prepare("synthetic", to="data/shapes", train=16, val=4, size=96)
        s = default_session(); s.connect("local")
        s.stage_dataset("data/shapes")
        run = s.train({CONFIG!r}, overrides={TINY!r}, datasets=["shapes"], nproc_per_node=1)
        run.wait(300)
        print(run.status()["world_size"], run.state.value)
        """,
        cwd=project,
        timeout=400,
    )
    assert done.stdout.strip().endswith("1 completed"), done.stderr
    wait_for(lambda: not processes_of(flow_state), seconds=60)
