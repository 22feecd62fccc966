"""Another trainer's status file: LibreYOLO's keys by state, missing, torn, and left by a process that is gone."""

import json
import os
import sys

import pytest
from kernel_tools_agent import files, foreign, launch

from .conftest import wait_until

START = {
    "schema_version": 1, "pid": os.getpid(), "model_family": "yolo9", "model_size": "t", "task": "detect",
    "save_dir": "/runs/train/exp", "total_epochs": 10, "start_epoch": 1,
    "started_at": "2026-01-01T00:00:00+00:00", "updated_at": "2026-01-01T00:00:00+00:00",
    "elapsed_seconds": 0.1, "progress": 0.0, "state": "running", "completed_epochs": 0, "current_epoch": None,
}  # fmt: skip
EPOCH = dict(
    START, completed_epochs=4, current_epoch=4, progress=0.4, epoch_seconds=2.0, mean_epoch_seconds=2.5,
    eta_seconds=15.0, train_loss=3.5, metrics={"mAP50": 0.61, "mAP50-95": 0.4}, validated=True,
    current_metric=0.4, current_metric_name="mAP50-95", best_metric=0.42, best_metric_name="mAP50-95",
    best_epoch=3,
)  # fmt: skip
COMPLETED = dict(
    START, state="completed", completed_epochs=10, progress=1.0, total_seconds=30.0, train_loss=2.0,
    best_metric=0.5, best_epoch=9, checkpoints={"best": "weights/best.pt", "last": "weights/last.pt"},
)  # fmt: skip
FAILED = {key: value for key, value in START.items() if key != "completed_epochs"}
FAILED.update(state="failed", error={"type": "RuntimeError", "message": "CUDA out of memory"})


class Folder:
    def __init__(self, root):
        self.run_dir = str(root)
        self.path = os.path.join(self.run_dir, "work", "runs", "train", "exp")
        os.makedirs(self.path)
        self.watch = foreign.ForeignStatus(self.run_dir, "runs/*/exp*")

    def write(self, document, name="status.json"):
        files.write_bytes(os.path.join(self.path, name), json.dumps(document).encode())

    def rows(self):
        with open(os.path.join(self.run_dir, "metrics.jsonl"), encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_figures_are_told_in_our_names_and_the_state_stays_the_agents(folder):
    assert folder.watch.look() == {}
    folder.write(START)
    assert folder.watch.look()["state"] == "training"
    folder.write(EPOCH)
    told = folder.watch.look()
    assert (told["state"], told["phase"], told["message"]) == ("training", "train", "")
    assert (told["current_epoch"], told["total_epochs"], told["eta_seconds"]) == (4, 10, 15.0)
    assert told["metrics"] == {"mAP50": 0.61, "mAP50-95": 0.4, "AP50": 0.61}
    assert not {"run_id", "save_dir", "started_at", "updated_at", "attempt"} & set(told)
    assert folder.watch.look() == {}  # nothing is new


def test_what_a_later_file_leaves_out_stays_known(folder):
    folder.write(EPOCH)
    folder.watch.look()
    folder.write(FAILED)
    told = folder.watch.look()
    assert (told["state"], told["completed_epochs"], told["progress"], told["best_metric"]) == (
        "training", 4, 0.4, 0.42,
    )  # fmt: skip
    assert "status file says failed" in told["message"]
    failure = folder.watch.failure
    assert (failure.type, failure.message, failure.raised) == (
        "RuntimeError",
        "CUDA out of memory",
        True,
    )


@pytest.mark.parametrize("content", [b"", b'{"state": "comp', b"[1, 2]", b"null", b"\xff\xfe"])
def test_a_torn_file_changes_nothing(folder, content):
    folder.write(EPOCH)
    folder.watch.look()
    with open(os.path.join(folder.path, "status.json"), "wb") as stream:
        stream.write(content)
    assert folder.watch.look() == {}
    assert folder.watch.known()["completed_epochs"] == 4


def test_a_pid_that_is_gone_is_said(folder):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    folder.write(dict(EPOCH, pid=pid))
    assert folder.watch.look()["message"].endswith(f"(pid {pid}) is gone")


@pytest.mark.parametrize(
    "document", [{}, {"state": 7}, {"metrics": 5, "progress": "much"}, {"pid": "x"}]
)
def test_any_table_is_borne(folder, document):
    folder.write(document)
    assert folder.watch.look()["state"] == "training"


def test_rows_come_whole_under_our_names_once(folder):
    row = {"epoch": 1, "time": 2.0, "train/loss": 3.5, "metrics/mAP50": 0.6, "lr/pg0": 0.01}
    path = os.path.join(folder.path, "metrics.jsonl")
    with open(path, "w") as stream:
        stream.write(json.dumps(row) + "\n" + json.dumps(dict(row, epoch=2))[:20])
    folder.write(EPOCH)
    folder.watch.look()
    folder.watch.look()
    (told,) = folder.rows()
    assert (told["epoch"], told["train_loss"], told["lr"], told["metrics"]) == (
        1, 3.5, 0.01, {"mAP50": 0.6, "AP50": 0.6},
    )  # fmt: skip


def test_a_link_out_of_the_run_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "status.json").write_text(json.dumps(EPOCH))
    work = tmp_path / "run" / "work"
    work.mkdir(parents=True)
    os.symlink(str(outside), str(work / "exp"))
    assert foreign.ForeignStatus(str(tmp_path / "run"), "exp").look() == {}


# Under the real agent -----------------------------------------------------------------------------

LEFT = (
    "the command ended at once and left its training in the background, where it was ended;"
    " start it in the foreground, without & or nohup"
)
PROGRAM = """
import json, os, sys, time
os.makedirs("runs/train/exp/weights")
def tell(**document):
    with open("runs/train/exp/.s", "w") as f: json.dump(document, f)
    os.replace("runs/train/exp/.s", "runs/train/exp/status.json")
tell(state="running", pid=os.getpid(), total_epochs=3, completed_epochs=1, progress=0.33, train_loss=1.5)
with open("runs/train/exp/metrics.jsonl", "w") as f: f.write(json.dumps({"epoch": 1, "train/loss": 1.5}) + chr(10))
open("runs/train/exp/weights/best.pt", "w").write("w")
end = sys.argv[1]
deadline = time.monotonic() + 30
while not os.path.exists("go") and time.monotonic() < deadline: time.sleep(0.02)
if end == "completed": tell(state="completed", completed_epochs=3, progress=1.0)
if end == "failed": tell(state="failed", error={"type": "ValueError", "message": "banana"}); sys.exit(1)
if end == "quiet-failure": tell(state="failed", error={"type": "ValueError", "message": "banana"})
if end == "background" and os.fork() == 0: time.sleep(600)
"""


@pytest.mark.parametrize(
    ("end", "state", "message"),
    [
        ("completed", "completed", "completed"),
        ("still-running", "completed", "completed (exit code 0), although its status file still says running"),
        ("failed", "failed", "the trainer raised ValueError: banana"),
        ("quiet-failure", "failed", "the trainer raised ValueError: banana"),
        ("background", "failed", LEFT),
    ],
)  # fmt: skip
def test_a_command_is_watched_by_its_status_folder(remote, end, state, message):
    job = remote.job(end, argv=[sys.executable, "-c", PROGRAM, end], status_dir="runs/train/*")
    job["artifacts"] = ["runs/train/*"]
    remote.launch_job(job)
    wait_until(lambda: remote.status(end)["completed_epochs"] == 1, what="its status is told")
    document = remote.poll(end)
    assert (document["status"]["state"], document["status"]["train_loss"]) == ("training", 1.5)
    assert '"train_loss": 1.5' in document["metrics"]["data"]
    open(os.path.join(remote.dir(end), "work", "go"), "w").close()
    told = remote.wait_end(end)
    assert (told["state"], told["message"]) == (state, message)
    assert (told["total_epochs"], told["exit_code"]) == (3, 1 if end == "failed" else 0)
    listed = [entry["path"] for entry in remote.poll(end)["artifacts"]["files"]]
    assert "work/runs/train/exp/weights/best.pt" in listed
    assert remote.processes(end) == []


def test_a_status_folder_outside_the_work_folder_is_refused(remote):
    with pytest.raises(launch.AgentError, match="status_dir"):
        remote.launch("escape", status_dir="../../x")
