"""Killed with SIGKILL at a random step and resumed: the same run, to the bit where the ranks are the same."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from detector.checkpoint import load_checkpoint
from detector.files import RowLog
from detector.report import CLOCK_FIELDS
from tests.detector.training.conftest import Forker
from tests.detector.training.test_train import differences

SEEDS = range(10)
# Nine steps in three epochs, of which an interrupted run does at most four.
PLAN = (
    "data.train_samples=12", "data.horizontal_flip=0.5", "data.zoom_out=0.5", "data.iou_crop=0.5",
    "data.photometric=0.5", "solver.batch_size=4", "solver.epochs=3", "logging.log_interval=1",
)  # fmt: skip
FROZEN = (*PLAN, "model.freeze=norms", "solver.lr=0.0001")
DEADLINE_SECONDS = 240


@pytest.fixture(scope="module")
def whole(forker: Forker) -> dict[str, Path]:
    """The runs that nobody interrupts, by name; each is made when it is first asked for."""

    class Runs(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            plan = FROZEN if name.startswith("frozen") else PLAN
            pixels = str(forker.folder / f"{name}-pixels")
            world_size = int(name[-1])
            codes = forker.train(name, *plan, world_size=world_size, hook="pixels", PIXELS=pixels)
            assert codes == [0] * world_size, forker.log(name)
            self[name] = forker.folder / name
            return self[name]

    return Runs()


def cut(forker: Forker, name: str, plan: tuple[str, ...], *, world_size: int, seed: int) -> str:
    """Start a run and kill all of it at a moment that the seed decides; returns how often it saves."""
    draw = random.Random(seed)
    rows_wanted, pause = draw.randint(1, 4), draw.random() * 0.3
    every = f"solver.checkpoint_steps={draw.randint(1, 3)}"
    rows = RowLog(forker.folder / name / "steps.jsonl")
    last = forker.folder / name / "weights" / "last.pt"
    pixels = str(forker.folder / f"{name}-pixels")
    pids = forker.start(name, *plan, every, world_size=world_size, hook="pixels", PIXELS=pixels)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(rows.rows()) < rows_wanted or not last.exists():
        assert time.monotonic() < deadline, forker.log(name)
        time.sleep(0.005)
    time.sleep(pause)  # anywhere in a step, a save or an evaluation
    forker.kill(pids)
    return every


def resume(
    forker: Forker, name: str, plan: tuple[str, ...], every: str, *, world_size: int
) -> Path:
    pixels = str(forker.folder / f"{name}-pixels")
    codes = forker.train(
        name, *plan, every, world_size=world_size, resume="auto", hook="pixels", PIXELS=pixels
    )
    assert codes == [0] * world_size, forker.log(name)
    assert "resumed_from=" in forker.log(name)
    return forker.folder / name


def rows_of(
    run: Path, file: str, *, without: frozenset[str] = CLOCK_FIELDS
) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in without}
        for row in RowLog(run / file).rows()
    ]


def pixels_of(forker: Forker, name: str) -> dict[str, list[Any]]:
    """Return ids and hashes of each step's global batch, in order."""
    steps: dict[str, dict[int, list[Any]]] = {}
    for path in (forker.folder / f"{name}-pixels").iterdir():
        step, _, rank = path.stem.rpartition("-")
        steps.setdefault(step, {})[int(rank)] = json.loads(path.read_text())
    return steps


def assert_same_run(one: Path, two: Path) -> None:
    for file in ("last.pt", "best.pt"):
        ours, theirs = (load_checkpoint(run / "weights" / file) for run in (one, two))
        ours.pop("config"), theirs.pop("config")  # checkpoint_steps
        assert differences(ours, theirs) == []
    for file in ("metrics.jsonl", "steps.jsonl"):
        assert rows_of(one, file) == rows_of(two, file)


def same_ranks(forker: Forker, whole: dict[str, Path], world_size: int, seed: int) -> None:
    name = f"cut-{world_size}-{seed}"
    every = cut(forker, name, PLAN, world_size=world_size, seed=seed)
    resumed = resume(forker, name, PLAN, every, world_size=world_size)
    assert_same_run(whole[f"whole-{world_size}"], resumed)


def other_ranks(
    forker: Forker, whole: dict[str, Path], before: int, after: int, seed: int
) -> float:
    """Returns how far the last weights are apart, relative to their size."""
    name = f"moved-{before}-{after}-{seed}"
    every = cut(forker, name, FROZEN, world_size=before, seed=seed)
    # Of the killed ranks' last steps only what the checkpoint holds counts.
    done = load_checkpoint(forker.folder / name / "weights" / "last.pt")["progress"]["batches"]
    for path in (forker.folder / f"{name}-pixels").iterdir():
        epoch, step, _ = map(int, path.stem.split("-"))
        if epoch * 3 + step >= done:
            path.unlink()
    resumed = resume(forker, name, FROZEN, every, world_size=after)
    reference = whole["frozen-1"]
    expected = pixels_of(forker, "frozen-1")
    found = pixels_of(forker, name)
    assert found.keys() == expected.keys()
    for step, ranks in found.items():
        together = [picture for rank in sorted(ranks) for picture in ranks[rank]]
        assert together == expected[step][0], step
    kept = ("epoch", "step", "optimizer_steps", "lr", "skipped_steps")
    for file in ("steps.jsonl", "metrics.jsonl"):
        for ours, theirs in zip(rows_of(reference, file), rows_of(resumed, file), strict=True):
            assert {k: ours.get(k) for k in kept} == {k: theirs.get(k) for k in kept}
    ours, theirs = (load_checkpoint(run / "weights" / "last.pt") for run in (reference, resumed))
    for counter in ("epoch", "step", "batches", "optimizer_steps", "skipped_steps"):
        assert ours["progress"][counter] == theirs["progress"][counter]
    assert ours["progress"]["batches"] - done >= 5
    return max(
        apart(ours["model"], theirs["model"]), apart(ours["ema"]["model"], theirs["ema"]["model"])
    )


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    one, two = (
        torch.cat([value.double().flatten() for value in state.values()])
        for state in (ours, theirs)
    )
    return float((one - two).norm() / one.norm())


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_and_resumed_on_as_many_ranks_equals_uninterrupted(
    forker: Forker, whole: dict[str, Path], world_size: int
) -> None:
    same_ranks(forker, whole, world_size, seed=SEEDS[0])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_killed_and_resumed_on_other_ranks_trains_on_the_same_pictures(
    forker: Forker, whole: dict[str, Path], before: int, after: int
) -> None:
    assert other_ranks(forker, whole, before, after, seed=SEEDS[0]) <= 1e-5


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_at_ten_moments_and_resumed_equals_uninterrupted(
    forker: Forker, whole: dict[str, Path], world_size: int
) -> None:
    for seed in SEEDS:
        same_ranks(forker, whole, world_size, seed)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_killed_at_ten_moments_and_moved_to_other_ranks(
    forker: Forker, whole: dict[str, Path], before: int, after: int
) -> None:
    distances = [other_ranks(forker, whole, before, after, seed) for seed in SEEDS]
    assert max(distances) <= 1e-5, distances
