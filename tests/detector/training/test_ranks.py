"""Two gloo ranks in processes of their own: they agree with one rank, with each other, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detector.checkpoint import load_checkpoint
from detector.config import ConfigError
from detector.guard import PeerWatch, Rank
from detector.rundir import RunDirectory
from detector.runtime import Runtime, _refuse_shared_cards
from tests.detector.training.conftest import Forker

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ("-m", "detector", "train", "--config")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """How far two sets of tensors are apart, relative to the first one's size."""
    assert ours.keys() == theirs.keys()
    one, two = (
        torch.cat([values[name].double().flatten() for name in ours]) for values in (ours, theirs)
    )
    return float((one - two).norm() / one.norm())


@pytest.fixture(scope="module")
def one_rank(forker: Forker) -> dict[str, Any]:
    """Gradients, losses and weights of five steps on one rank, in one go."""
    path = forker.folder / "1-1.pt"
    assert forker.wait(forker.run("gradients", str(path), "1")) == [0], forker.log("gradients")
    return torch.load(path)


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_and_micro_batches_give_the_gradients_and_weights_of_one(
    forker: Forker, one_rank: dict[str, Any], world_size: int, accumulate: int
) -> None:
    """With denoising, 0, 1 and 30 boxes on different ranks, in float32, batch norms frozen."""
    path = forker.folder / f"{world_size}-{accumulate}.pt"
    pids = forker.run("gradients", str(path), str(accumulate), world_size=world_size)
    assert forker.wait(pids) == [0] * world_size, forker.log("gradients")
    found = torch.load(path)
    assert found["losses"] == pytest.approx(one_rank["losses"], rel=1e-6)
    for step, (ours, theirs) in enumerate(zip(one_rank["grads"], found["grads"], strict=True)):
        assert apart(ours, theirs) <= 1e-5, step
    assert apart(one_rank["weights"], found["weights"]) <= 1e-5


def test_a_rank_with_nothing_but_background_neither_hangs_nor_drifts(forker: Forker) -> None:
    codes = forker.train("background", "solver.max_steps=3", world_size=2, hook="background")
    assert codes == [0, 0], forker.log("background")
    hashes = {(forker.folder / f"weights-{rank}").read_text() for rank in (0, 1)}
    assert len(hashes) == 1
    run = RunDirectory(forker.folder / "background")
    assert [row["optimizer_steps"] for row in run.steps.rows()] == [1, 2, 3]


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_both(forker: Forker) -> None:
    codes = forker.train(
        "nan", "solver.batch_size=4", "solver.epochs=2", world_size=2, hook="nan",
        BROKEN_RANK="1", BROKEN_STEPS="2,3",
    )  # fmt: skip
    log = forker.log("nan")
    assert codes == [0, 0], log
    run = RunDirectory(forker.folder / "nan")
    status = read(run.status)
    assert (status["optimizer_steps"], status["skipped_steps"]) == (2, 2)
    assert log.splitlines().count("step_skipped=non_finite epoch=1 step=2") == 1
    assert "distributed=True world_size=2" in log.splitlines()
    assert [(entry["rank"], entry["device"]) for entry in status["ranks"]] == [
        (0, "cpu"),
        (1, "cpu"),
    ]
    state = load_checkpoint(run.last)
    assert state["ema"]["updates"] == 2
    assert all(torch.isfinite(v).all() for v in state["model"].values() if v.is_floating_point())


@pytest.mark.parametrize("others_hang", ["", "1"])
def test_a_rank_that_raises_ends_both_quickly_and_is_named(
    forker: Forker, others_hang: str
) -> None:
    """Also where the other waits in a collective that never notices."""
    name = f"raise{others_hang}"
    pids = forker.start(name, world_size=2, hook="raise", OTHERS_HANG=others_hang)
    error = forker.folder / name / "errors" / "rank1.json"
    deadline = time.monotonic() + 240
    while not error.exists():
        assert time.monotonic() < deadline, forker.log(name)
        time.sleep(0.02)
    began = time.monotonic()
    assert forker.wait(pids) == [1, 1]
    assert time.monotonic() - began < 30
    log = forker.log(name)
    assert "ValueError: rank 1 is unwell" in log
    assert "in broken" in read(error)["traceback"]
    run = RunDirectory(forker.folder / name)
    status = read(run.status)
    assert (status["state"], status["error"]["rank"], status["exit_code"]) == ("failed", 1, 1)
    assert "rank 1: ValueError: rank 1 is unwell" in status["message"]
    assert [read(run.path / "reasons" / f"rank{k}.json")["reason"] for k in (0, 1)] == [
        "failed"
    ] * 2
    assert (others_hang == "1") == ("rank 0 ends: it would wait for rank 1" in log)


def test_an_error_of_ones_own_does_not_wake_the_watch(tmp_path: Path) -> None:
    left: list[int] = []
    run = RunDirectory(tmp_path)
    run.record_error(1, ValueError("mine"))
    watch = PeerWatch(Rank(1, run), run, leave=left.append, look_seconds=0.001, grace_seconds=0.001)
    watch.start()
    watch._thread.join(0.2)
    assert watch._thread.is_alive()
    run.record_error(0, ValueError("theirs, but later"))
    watch._thread.join(0.2)
    watch.stop()
    watch._thread.join(30)
    assert left == []


def test_two_ranks_on_one_card_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Runtime):
        """Says that the other rank has a card of this name too."""

        def all_gather(self, value: Any) -> list[Any]:
            return [value, (value[0], others)]

    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="card-a")
    )
    two = Two(0, 0, 2, torch.device("cuda", 0))
    others = "card-b"
    _refuse_shared_cards(two)
    others = "card-a"
    with pytest.raises(ConfigError, match="Two ranks would share one card"):
        _refuse_shared_cards(two)


def test_statistics_are_synchronised_only_where_a_card_has_few_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from detector import runtime as module

    seen: list[int] = []
    monkeypatch.setattr(module, "synchronize_norms", lambda _: seen.append(1))
    monkeypatch.setattr(module, "DistributedDataParallel", lambda model, **_: model)
    model = torch.nn.Conv2d(1, 1, 1)
    for device, batch, expected in (("cuda:0", 15, 1), ("cuda:0", 16, 0), ("cpu", 2, 0)):
        seen.clear()
        Runtime(0, 0, 2, torch.device(device)).wrap(model, batch=batch)
        assert len(seen) == expected, (device, batch)


def test_sigterm_to_torchrun_saves_at_a_step_boundary_and_a_resume_goes_on(
    tiny: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    endless = ["solver.epochs=1000", "evaluation.interval=1000"]

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {"PYTHONPATH": str(ROOT), "RUN_DIR": str(run), "RUN_SUPERVISED": "1"}
        with open(tmp_path / "log", "a") as log:
            return subprocess.Popen(
                [*launcher, *TRAIN, tiny, "--set", *endless, *arguments],
                env={**os.environ, **environment},
                cwd=tmp_path,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    torchrun = start()
    try:
        deadline = time.monotonic() + 240
        while not (run / "steps.jsonl").exists():
            assert time.monotonic() < deadline
            assert torchrun.poll() is None
            time.sleep(0.02)
        torchrun.send_signal(signal.SIGTERM)
        torchrun.wait(timeout=30)
        reasons = [read(run / "reasons" / f"rank{rank}.json") for rank in (0, 1)]
        assert [(r["reason"], r["exit_code"]) for r in reasons] == [("stopped", 75)] * 2
        progress = load_checkpoint(run / "weights" / "last.pt")["progress"]
        done = progress["optimizer_steps"]
        assert done == progress["batches"] >= 1
        assert read(run / "status.json")["state"] == "stopping"

        torchrun = start(f"solver.max_steps={done + 2}", "--resume", "auto")
        assert torchrun.wait(timeout=240) == 0, (tmp_path / "log").read_text()
    finally:
        if torchrun.poll() is None:
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait()
    rows = RunDirectory(run).steps.rows()
    assert [row["optimizer_steps"] for row in rows] == list(range(1, done + 3))
    assert read(run / "status.json")["attempt"] == 2
