"""LibreYOLO's status files, replayed through agent, reducer and panel: the right state, also where they are not whole."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from kernel_tools.agent import api, host, launch
from kernel_tools.agent.processes import find
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord
from kernel_tools.views.summary import RunView

RUN_ID = "20260101-000000-yolo-0001"
BASE = {
    "schema_version": 1, "pid": 4242, "model_family": "yolo9", "model_size": "t", "task": "detect",
    "save_dir": "runs/train/exp", "total_epochs": 10, "start_epoch": 1, "progress": 0.0,
    "started_at": "2026-01-01T00:00:00+00:00", "updated_at": "2026-01-01T00:00:01+00:00",
}  # fmt: skip
START = {**BASE, "state": "running", "completed_epochs": 0, "current_epoch": None}
EPOCH = {
    **BASE, "state": "running", "completed_epochs": 4, "current_epoch": 4, "progress": 0.4,
    "eta_seconds": 65.0, "train_loss": 3.5, "metrics": {"mAP50": 0.61}, "best_metric": 0.42,
    "best_metric_name": "mAP50-95", "best_epoch": 3, "validated": True,
}  # fmt: skip
COMPLETED = {
    **BASE,
    "state": "completed",
    "completed_epochs": 10,
    "progress": 1.0,
    "best_metric": 0.5,
}
FAILED = {**BASE, "state": "failed", "error": {"type": "ValueError", "message": "banana"}}


class Link:
    where = "this machine"

    def call(self, function, *, timeout_seconds=60.0, **arguments):
        return getattr(api, function)(**arguments)

    def get_file(self, remote_path, destination):
        destination.write_bytes(Path(remote_path).read_bytes())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_start", lambda run_dir: False)
    job = {"run_id": RUN_ID, "name": "yolo", "kind": "command", "argv": ["libreyolo", "train"]}
    return Path(api.launch(str(tmp_path / "remote"), job, {"files": {}})["run_dir"])


@pytest.fixture
def run(folder, tmp_path):
    record = RunRecord(RUN_ID, "yolo", "t", "local", str(tmp_path / "remote"), "artifacts/remote")
    run = Run(record, link=Link(), mirror=RunMirror(tmp_path / "mirror"))
    yield run
    run.detach()


def beat(folder, *, age=0.0, pid=None):
    pid = os.getpid() if pid is None else pid
    row = find(pid)
    agent = {
        "pid": pid, "start_time": "1" if row is None else row.started, "boot_id": host.boot_id(),
        "heartbeat_monotonic": time.monotonic() - age, "gpus": [], "ranks": [], "watchdog": None,
    }  # fmt: skip
    (folder / "agent.json").write_text(json.dumps(agent))


def shown(run, folder, document):
    content = document if isinstance(document, str) else json.dumps(document)
    (folder / "status.json").write_text(content)
    return RunView(run.refresh()).plain()


def test_a_training_is_shown_with_its_figures(run, folder):
    beat(folder)
    assert "training" in shown(run, folder, START)
    text = shown(run, folder, EPOCH)
    for words in ("training", "epoch 4 of 10", "1 min 05 s", "3.5", "mAP50-95 0.4200, epoch 3"):
        assert words in text


@pytest.mark.parametrize("document", [COMPLETED, FAILED])
def test_the_files_last_word_is_not_the_runs(run, folder, document):
    beat(folder)
    text = shown(run, folder, document)
    assert "training" in text
    assert run.state.value == "training"  # the agent has yet to see the process end


@pytest.mark.parametrize("key", sorted(EPOCH))
def test_any_key_may_be_missing(run, folder, key):
    beat(folder)
    text = shown(run, folder, {name: value for name, value in EPOCH.items() if name != key})
    assert "training" in text


@pytest.mark.parametrize("torn", ["", '{"state": "run', "[]", "null"])
def test_a_torn_file_leaves_the_figures_on_the_screen(run, folder, torn):
    beat(folder)
    before = shown(run, folder, EPOCH)
    assert shown(run, folder, torn) == before


def test_a_dead_run_is_not_called_running(run, folder):
    beat(folder)
    shown(run, folder, EPOCH)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    beat(folder, age=3.0, pid=child)
    assert "training" in shown(run, folder, EPOCH)  # it may be writing its last words
    beat(folder, age=60.0, pid=child)
    text = shown(run, folder, EPOCH)
    assert run.state.value == "failed"
    assert "heartbeat is 60 s old" in text
    assert "epoch" in text
