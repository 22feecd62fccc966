"""What a program that executes a notebook sees, in a real kernel."""

from __future__ import annotations

import contextlib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from kernel_tools.redact import MASK

ROOT = Path(__file__).resolve().parents[2]


def execute(*cells: str) -> nbformat.NotebookNode:
    """Execute cells in one kernel until one raises; return the notebook as it stands then."""
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with contextlib.suppress(CellExecutionError):
            client.execute()
    return notebook


def streams(cell) -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def errors(notebook):
    return [o for cell in notebook.cells for o in cell.outputs if o.output_type == "error"]


def test_loading_is_light_silent_and_seen_as_batch():
    notebook = execute(
        "import time, sys; began = time.perf_counter()",
        "%load_ext kernel_tools",
        "seconds = time.perf_counter() - began\n"
        "from kernel_tools.views import current_mode\n"
        "print(seconds < 0.5, sorted({'torch', 'minio', 'matplotlib', 'ipywidgets'} & set(sys.modules)),"
        " current_mode().value)",
    )
    assert notebook.cells[1].outputs == []
    assert streams(notebook.cells[2]).strip() == "True [] batch"


@pytest.mark.parametrize(
    ("line", "ename", "says"),
    [
        ("coins/hgnetv2_n --set solver.epochs=banana", "ConfigurationError", "solver.epochs"),
        ("coins/hgnetv2_x9", "ConfigurationError", "coins/hgnetv2_n"),
        ("coins/hgnetv2_n --set solver.epoch=3", "ConfigurationError", "solver.epochs"),
        ("coins/hgnetv2_n --nproc-per-node many", "InvalidArgumentError", "--nproc-per-node"),
        ("coins/hgnetv2_n --set solver.epochs={epochs}", "InvalidArgumentError", "{epochs}"),
        ("coins/hgnetv2_n", "NotConnectedError", "%remote_connect"),
    ],
)
def test_what_is_wrong_stops_the_notebook_in_one_line(line, ename, says):
    notebook = execute("%load_ext kernel_tools", f"%remote_train {line}", "print('never')")
    (error,) = errors(notebook)
    assert error.ename == ename
    assert says in error.evalue
    assert error.traceback == [f"{ename}: {error.evalue}"]
    assert "\n" not in error.evalue
    assert notebook.cells[2].outputs == []


def test_a_batch_notebook_keeps_one_static_display_and_no_widgets():
    notebook = execute(
        "from tests.fakes.runs import FakeRun, ended, snapshot, training\n"
        "from kernel_tools.views import current_mode, follow\n"
        "story = [snapshot(training(completed_epochs=i, optimizer_steps=28 * i)) for i in range(9)]\n"
        "follow.follow(FakeRun(*story, ended()), mode=current_mode())"
    )
    assert errors(notebook) == []
    (display,) = [o for o in notebook.cells[0].outputs if o.output_type == "display_data"]
    assert set(display.data) == {"text/html", "text/plain"}
    assert "optimizer_steps=280" in display.data["text/html"]
    assert len(streams(notebook.cells[0]).splitlines()) == 10
    assert "widgets" not in notebook.metadata


def test_a_panel_updates_from_its_thread_and_ends_as_a_static_summary():
    notebook = execute(
        "from tests.fakes.runs import FakeRun, ended, snapshot\n"
        "from kernel_tools.views import Mode, follow\n"
        "run = FakeRun(snapshot())\n"
        "follow.show(run, mode=Mode.INTERACTIVE)",
        "from kernel_tools.views.render import CLOCK\n"
        "run.tell(ended())\n"
        "print(CLOCK.flush(), list(CLOCK.errors))",
    )
    assert streams(notebook.cells[1]).strip() == "True []"
    display, nothing = notebook.cells[0].outputs
    assert set(display.data) == {"text/html", "text/plain"}
    assert "optimizer_steps=280" in display.data["text/html"]
    assert nothing.data == {"text/html": "", "text/plain": ""}


def test_a_thousand_epochs_leave_a_small_notebook():
    notebook = execute(
        "from tests.fakes.runs import FakeRun, ended, snapshot, training\n"
        "from kernel_tools.views import Mode, follow\n"
        "from kernel_tools.views.render import CLOCK\n"
        "run = FakeRun(snapshot())\n"
        "follow.show(run, mode=Mode.INTERACTIVE)\n"
        "for i in range(1000):\n"
        "    lines = tuple(f'epoch={i} step={j}/200 loss=1.234' for j in range(200))\n"
        "    run.tell(snapshot(training(completed_epochs=i), log_tail=lines))\n"
        "run.tell(ended())\n"
        "print(CLOCK.flush())"
    )
    assert errors(notebook) == []
    assert len(nbformat.writes(notebook)) < 150_000


def test_a_secret_that_is_known_does_not_reach_the_notebook():
    notebook = execute(
        "%load_ext kernel_tools",
        "from kernel_tools.settings import Secret\nkey = Secret('canary-' + 'value')",
        "%remote_train coins/hgnetv2_n --set solver.epochs=canary-value",
    )
    assert MASK in errors(notebook)[0].evalue
    assert "canary-value" not in nbformat.writes(notebook).replace("epochs=canary-value", "", 1)
