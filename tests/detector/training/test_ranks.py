"""Two gloo ranks in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from detector.checkpoint import load_checkpoint

Start = Callable[..., list[subprocess.Popen[str]]]
Finish = Callable[..., list[tuple[int, str]]]
TRAIN = ("-m", "detector", "train", "--config")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


GRADIENTS = """
import sys, torch
from detector.config import RuntimeConfig
from detector.losses import Criterion
from detector.models.detector import build_detector
from detector.models.blocks import freeze_norms
from detector.runtime import start_runtime
from detector.targets import Targets

out = sys.argv[1]
BOXES = [(3, 1, 30, 2), (2, 1, 0, 0), (0, 0, 5, 1)]  # of four pictures, in three steps
with start_runtime(RuntimeConfig()) as runtime:
    torch.manual_seed(0)
    model = build_detector("hgnetv2_n", num_classes=3, num_queries=30, num_denoising=0)
    model = model.double()
    freeze_norms(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    network = runtime.wrap(model).train()
    criterion = Criterion(3)
    for step, counts in enumerate(BOXES):
        draw = torch.Generator().manual_seed(step)
        images = torch.rand(4, 3, 64, 64, generator=draw, dtype=torch.float64)
        boxes = [torch.rand(n, 4, generator=draw) * 0.3 + 0.2 for n in counts]
        labels = [torch.randint(3, (n,), generator=draw) for n in counts]
        share = slice(runtime.rank * 4 // runtime.world_size, (runtime.rank + 1) * 4 // runtime.world_size)
        targets = Targets.pad(boxes[share], labels[share])
        losses = criterion(network(images[share], targets), targets, reduce_mean=runtime.reduce_mean)
        optimizer.zero_grad()
        losses["total"].backward()
        optimizer.step()
    if runtime.is_main:
        torch.save({"grads": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
                    "weights": dict(model.named_parameters())}, out)
"""


def test_two_ranks_give_the_gradients_and_weights_of_one(
    start_ranks: Start, finish_ranks: Finish, tmp_path: Path
) -> None:
    """Also where one of them has only background."""
    files = []
    for world_size in (1, 2):
        files.append(tmp_path / f"{world_size}.pt")
        processes = start_ranks(["-c", GRADIENTS, str(files[-1])], world_size=world_size)
        for code, output in finish_ranks(processes):
            assert code == 0, output
    one, two = (torch.load(file, weights_only=False) for file in files)
    for kind in ("grads", "weights"):
        assert one[kind].keys() == two[kind].keys()
        for name, expected in one[kind].items():
            torch.testing.assert_close(two[kind][name], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_two_ranks_train_and_killed_and_resumed_equal_uninterrupted(
    start_ranks: Start, finish_ranks: Finish, tiny: str, tmp_path: Path
) -> None:
    command = [*TRAIN, tiny, "--set", "solver.checkpoint_steps=1", "logging.log_interval=3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ends = finish_ranks(start_ranks(command, RUN_DIR=str(whole)))
    assert [code for code, _ in ends] == [0, 0], ends
    assert "distributed=True world_size=2" in ends[0][1].splitlines()
    assert ends[1][1] == ""
    assert [entry["rank"] for entry in read(whole / "status.json")["ranks"]] == [0, 1]

    processes = start_ranks(command, RUN_DIR=str(cut))
    deadline = time.monotonic() + 60
    while not (cut / "weights" / "last.previous.pt").exists():
        assert time.monotonic() < deadline
        assert processes[0].poll() is None
        time.sleep(0.01)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    finish_ranks(processes)
    ends = finish_ranks(start_ranks([*command, "--resume", "auto"], RUN_DIR=str(cut)))
    assert [code for code, _ in ends] == [0, 0], ends
    one, two = (load_checkpoint(path / "weights" / "last.pt") for path in (whole, cut))
    assert one["progress"] == two["progress"]
    for part in ("model", "ema"):
        theirs = two[part] if part == "model" else two[part]["model"]
        mine = one[part] if part == "model" else one[part]["model"]
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_a_rank_that_raises_ends_both_quickly_and_is_named(
    start_ranks: Start, finish_ranks: Finish, tiny: str, tmp_path: Path
) -> None:
    program = (
        "import os, sys, detector.train as t; from detector.__main__ import main\n"
        "real = t.reported\n"
        "def broken(losses):\n"
        "    if os.environ['RANK'] == '1': raise ValueError('rank 1 is unwell')\n"
        "    return real(losses)\n"
        "t.reported = broken\n"
        f"code = main(['train', '--config', {tiny!r}]); sys.stdout.flush(); os._exit(code)"
    )
    run = tmp_path / "run"
    processes = start_ranks(["-c", program], RUN_DIR=str(run))
    began = time.monotonic()
    ends = finish_ranks(processes)
    assert time.monotonic() - began < 60
    assert [code for code, _ in ends] == [1, 1]
    assert "ValueError: rank 1 is unwell" in ends[1][1]
    assert "in broken" in read(run / "errors" / "rank1.json")["traceback"]
    status = read(run / "status.json")
    assert (status["state"], status["error"]["rank"]) == ("failed", 1)
    assert "rank 1 is unwell" in status["message"]


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_at_a_step_boundary(tiny: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(__file__).resolve().parents[3])
    with open(tmp_path / "log", "w") as log:
        torchrun = subprocess.Popen(
            [*launcher, *TRAIN, tiny, "--set", "solver.epochs=1000", "evaluation.interval=1000"],
            env={**os.environ, "PYTHONPATH": root, "RUN_DIR": str(run), "RUN_SUPERVISED": "1"},
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 90
        while not (run / "steps.jsonl").exists():
            assert time.monotonic() < deadline
            assert torchrun.poll() is None
            time.sleep(0.02)
        torchrun.send_signal(signal.SIGTERM)
        torchrun.wait(timeout=30)
    finally:
        if torchrun.poll() is None:
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait()
    reasons = [read(run / "reasons" / f"rank{rank}.json") for rank in (0, 1)]
    assert [(reason["reason"], reason["exit_code"]) for reason in reasons] == [("stopped", 75)] * 2
    assert load_checkpoint(run / "weights" / "last.pt")["progress"]["optimizer_steps"] >= 1
    assert read(run / "status.json")["state"] == "stopping"
