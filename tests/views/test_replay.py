"""A long training in a notebook with a live panel: the file stays small, the kernel idle and lean."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from kernel_tools.state import MOST_STEP_ROWS

CONNECT = "%load_ext kernel_tools\n%remote_connect local"
MEASURE = """
import json, psutil, time
from kernel_tools.views import follow
from kernel_tools.views.render import CLOCK

me = psutil.Process()
run = %remote_run custom --command "python replay.py {epochs} {lines} {seconds} {slow}" --sync-path replay.py --status-dir out
before = peak = me.memory_info().rss
slow = share = None
while not run.snapshot.terminal:
    time.sleep(0.25)
    peak = max(peak, me.memory_info().rss)
    rows = run.snapshot.steps
    if slow is None and rows and rows[-1]["optimizer_steps"] > {epochs} * {lines}:  # has caught up
        slow = time.monotonic(), sum(me.cpu_times()[:2])
    elif slow and run.snapshot.figure("phase") == "train":
        share = (sum(me.cpu_times()[:2]) - slow[1]) / (time.monotonic() - slow[0])
# What is drawn behind the end of its cell, nbclient passes over, unlike a front end.
while any(panel.live for panel in follow._panels):
    time.sleep(0.1)
assert CLOCK.flush() and not CLOCK.errors, list(CLOCK.errors)
"""
TELL = """
print(json.dumps({"share": share, "grown": peak - before, "state": run.state.value,
                  "rows": len(run.snapshot.steps), "epochs": len(run.metrics()),
                  "lines": run.log_path().read_bytes().count(b" loss=")}))
"""


class Watching(NotebookClient):
    """Notes when which widget was written to, as a front end would be told."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.written = defaultdict(list)

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "comm_msg" and "value" in msg["content"]["data"].get("state", {}):
            self.written[msg["content"]["comm_id"]].append(time.monotonic())
        return super().process_message(msg, cell, cell_index)


def watched(folder, monkeypatch, **told):
    """Execute the notebook as a front end with widgets would; return figures, notebook and writes."""
    monkeypatch.setenv("KERNEL_TOOLS_MODE", "interactive")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    (folder / "pyproject.toml").write_text("")
    shutil.copy(Path(__file__).with_name("replay.py"), folder)
    sources = (CONNECT, MEASURE.format(**told), TELL, "%remote_disconnect")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in sources])
    where = {"metadata": {"path": str(folder)}}
    client = Watching(notebook, timeout=900, resources=where, store_widget_state=False)
    client.execute()
    return json.loads(notebook.cells[2].outputs[-1].text), notebook, client.written


def busiest_second(times):
    """The most writes within any second."""
    return max(sum(start <= other < start + 1 for other in times) for start in times)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "seconds", "slow", "share"),
    [
        pytest.param(100, 10, 12, 0.1, id="a-tenth"),  # in seconds too few to be exact
        pytest.param(
            1000, 180, 60, 0.05, id="whole", marks=[pytest.mark.campaign, pytest.mark.timeout(900)]
        ),
    ],
)
def test_a_thousand_epochs_and_two_hundred_thousand_lines_go_by(
    tmp_path, monkeypatch, epochs, seconds, slow, share
):
    told, notebook, written = watched(
        tmp_path, monkeypatch, epochs=epochs, lines=200, seconds=seconds, slow=slow
    )
    assert told["state"] == "completed"
    assert told["lines"] == epochs * 200 + slow * 20
    assert told["epochs"] == epochs
    assert told["rows"] <= MOST_STEP_ROWS
    outputs = notebook.cells[1].outputs
    shown, nothing = [one for one in outputs if one.output_type == "display_data"]
    assert set(shown.data) == {"text/html", "text/plain"}
    assert nothing.data == {"text/html": "", "text/plain": ""}
    assert len(json.dumps(outputs)) < 150_000
    assert max(map(busiest_second, written.values())) <= 4
    assert told["grown"] < 80e6
    assert told["share"] < share
