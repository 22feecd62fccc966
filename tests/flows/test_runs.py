"""A run owns itself: the notebook may die, and a stop leaves nothing behind but a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from detector.status import STATUS_KEYS
from kernel_tools.errors import NotConnectedError

from .conftest import CONFIG, LONG, TINY, notebook_kernel, processes_of_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_trains_with_two_ranks_and_its_files_come_back(session):
    said = []
    run = session.train(CONFIG, overrides=TINY, nproc_per_node=2, report=said.append)
    run.wait(300)
    status = run.status()
    assert (status["state"], status["world_size"], status["optimizer_steps"]) == ("completed", 2, 4)
    assert "distributed=True world_size=2" in run.logs(500)
    assert [line.partition("=")[0] for line in said] == [
        "sync_paths", "sync_files", "sync_size_mb", "sync_uploaded", "run_id",
    ]  # fmt: skip
    fetched = {str(f.path).partition(run.id)[2].lstrip("/") for f in run.fetch()}
    assert {"weights/last.pt", "evaluation/metrics.json", "receipt.json", "train.log"} <= fetched
    assert (
        run.log_path().read_bytes()
        == (
            run.log_path().parent.parent.parent.parent / "artifacts/remote" / run.id / "train.log"
        ).read_bytes()
    )


def test_the_notebooks_kernel_may_be_killed_and_another_takes_the_run_up(session, project):
    settings = " ".join(f"--set {one}" for one in TINY)
    with notebook_kernel(project) as cell:
        cell("%load_ext kernel_tools")
        cell("%remote_connect local")
        cell(f"run = %remote_train {CONFIG} --nproc-per-node 2 {settings} --no-wait")
        run_id = cell("print(run.id)").split()[-1]
        wait_for(lambda: processes_of_run(run_id))
        cell.kill()
    with notebook_kernel(project) as cell:
        cell("%load_ext kernel_tools")
        cell("%remote_connect local")
        cell(f"run = %remote_attach {run_id}")
        cell("%remote_wait")
        said = cell("print(run.state.value, run.status()['optimizer_steps'])")
        assert said.splitlines()[-1] == "completed 4"
        said = cell("%remote_logs -n 1000")
    remote = Path(session.connection().remote_dir) / "runs" / run_id / "train.log"
    for line in remote.read_text("utf-8").splitlines():
        assert line in said
    for token in ("distributed=True world_size=2", "epoch=1 step=1/4", "optimizer_steps=4"):
        assert token in said


def test_a_stop_leaves_a_loadable_checkpoint_and_no_process(session):
    run = session.train(CONFIG, overrides=LONG, nproc_per_node=2)
    wait_for(lambda: (run.snapshot.figure("optimizer_steps") or 0) >= 1, seconds=120)
    run.stop()
    run.wait(120)
    assert run.state.value == "stopped"
    wait_for(lambda: not processes_of_run(run.id), seconds=20)
    (last,) = run.fetch("weights/last.pt")
    import torch

    assert "model" in torch.load(last.path, weights_only=True)
    assert run.stop().state.value == "stopped"


def test_a_kill_ends_it_at_once(session):
    run = session.train(CONFIG, overrides=LONG, nproc_per_node=2)
    wait_for(lambda: (run.snapshot.figure("optimizer_steps") or 0) >= 1, seconds=120)
    run.stop(now=True)
    run.wait(30, check=False)
    assert run.state.value == "stopped"
    wait_for(lambda: not processes_of_run(run.id), seconds=20)


def test_the_status_is_whole_at_fifty_readings_a_second_from_first_to_last(session):
    torn, missing, seen, over = [], [], set(), threading.Event()
    runs = Path(session.connection().remote_dir) / "runs"
    before = set(runs.iterdir()) if runs.is_dir() else set()

    def read_all_the_time():
        while not over.wait(0.02):
            for folder in set(runs.iterdir()) - before:
                if folder.name.startswith("."):
                    continue
                try:
                    status = json.loads((folder / "status.json").read_text("utf-8"))
                except (OSError, ValueError) as error:
                    torn.append(repr(error))
                    continue
                missing.extend(set(STATUS_KEYS) ^ set(status))
                seen.add(status["state"])

    reader = threading.Thread(target=read_all_the_time)
    reader.start()
    try:
        session.train(CONFIG, overrides=TINY, nproc_per_node=2).wait(300)
    finally:
        over.set()
        reader.join()
    assert (torn, missing) == ([], [])
    assert {"queued", "preparing", "training", "completed"} & seen >= {"preparing", "training"}


@pytest.mark.shared
def test_photographs_train_for_twenty_steps_with_two_ranks_and_the_loss_falls(session, coco128):
    session.stage_dataset(coco128, name="coco128")
    run = session.train(
        "coco128/hgnetv2_n",
        overrides=["solver.max_steps=20", "data.image_size=192", "logging.log_interval=1"],
        datasets=["coco128"],
        nproc_per_node=2,
    )
    run.wait(500)
    losses = [
        row["train_loss"] if "train_loss" in row else row["loss"] for row in run.snapshot.steps
    ]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])


def test_the_local_server_may_be_killed_while_a_run_is_watched(session):
    run = session.train(CONFIG, overrides=TINY)
    killed = session.connection().server.service.service_pid
    os.kill(killed, signal.SIGKILL)
    assert run.wait(300).state.value == "completed"
    assert session.connection().server.service.service_pid != killed


def test_a_run_is_watched_on_after_disconnecting_and_connecting_again(session):
    run = session.train(CONFIG, overrides=LONG)
    session.disconnect()
    with pytest.raises(NotConnectedError):
        run.stop()
    session.connect("local")
    run.stop(now=True)
    assert run.wait(60).state.value == "stopped"
