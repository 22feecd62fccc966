"""Batch jobs: exit 0 on success; on failure a non-zero exit and one line that names what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from .conftest import CONFIG, TINY, notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LOAD = "%load_ext kernel_tools\n%remote_connect local"
SETTINGS = " ".join(f"--set {one}" for one in TINY)


def execute(path):
    return subprocess.run(
        [
            *(sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"),
            *("--output", f"{path.stem}-done", str(path)),
        ],
        cwd=path.parent, env=dict(os.environ), capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def errors_in(path):
    """Execute cell by cell, keeping the errors; return every error output."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    NotebookClient(
        book, kernel_name="python3", allow_errors=True, timeout=400,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()  # fmt: skip
    return [o for c in book.cells for o in c.get("outputs", []) if o.output_type == "error"]


def test_a_run_that_completes_exits_zero_and_leaves_readable_figures(session, project):
    path = notebook(
        project / "good.ipynb",
        LOAD,
        f"run = %remote_train {CONFIG} --nproc-per-node 2 {SETTINGS}",
        "%remote_disconnect",
    )
    done = execute(path)
    assert done.returncode == 0, done.stderr
    text = (project / "good-done.ipynb").read_text("utf-8")
    for token in ("sync_files", "sync_size_mb", "world_size=2", "optimizer_steps=4"):
        assert token in text
    book = json.loads(text)
    assert "widgets" not in book["metadata"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"{CONFIG} {SETTINGS} --set solver.epochs=banana", "banana"),
        ("coins/no_such_model", "no_such_model"),
        (f"{CONFIG} --set solver.no_such_key=1", "no_such_key"),
        (f"{CONFIG} {SETTINGS} --set data.format=yolo --set data.root=data/nowhere", "nowhere"),
        (f"{CONFIG} --no-such-option", "no-such-option"),
    ],
    ids=["wrong value", "unknown config", "unknown key", "trainer that raises", "unknown option"],
)
def test_what_is_wrong_is_named_in_one_line_and_the_job_fails(session, project, arguments, named):
    path = notebook(project / "bad.ipynb", LOAD, f"%remote_train {arguments}")
    assert execute(path).returncode != 0
    (error,) = errors_in(path)
    assert named in error.evalue
    assert "\n" not in error.evalue
    assert [line for line in error.traceback if line.strip()] == [f"{error.ename}: {error.evalue}"]
