"""Evaluation, drawing and calibration as they are started: ranks of their own, files, one sentence."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detector.__main__ import main
from detector.calibrate import Calibration
from detector.checkpoint import Architecture, header, save_checkpoint
from tests.detector.test_evaluate import METRICS, reference, scene

Start = Callable[..., list[subprocess.Popen[str]]]
Finish = Callable[..., list[tuple[int, str]]]

SCENES = """
import json, sys
from detector.config import RuntimeConfig
from detector.evaluate import Evaluator
from detector.runtime import start_runtime
from tests.detector.test_evaluate import scene

with start_runtime(RuntimeConfig()) as runtime:
    for seed in range(int(sys.argv[1])):
        index, found = scene(seed)
        evaluator = Evaluator(index)
        mine = [k for k in range(runtime.rank, len(index), runtime.world_size) if k in found]
        evaluator.add([index.image_ids[k] for k in mine], [found[k] for k in mine])
        evaluator.gather(runtime)
        if runtime.is_main:
            print(json.dumps(dict(evaluator.summarize().metrics)))
"""


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("world_size", [2, 3])
def test_real_ranks_give_pycocotools_figures(
    start_ranks: Start, finish_ranks: Finish, world_size: int
) -> None:
    seeds = 20
    ends = finish_ranks(start_ranks(["-c", SCENES, str(seeds)], world_size=world_size))
    assert [code for code, _ in ends] == [0] * world_size, ends
    told = [json.loads(line) for line in ends[0][1].splitlines()]
    assert len(told) == seeds
    for seed, metrics in enumerate(told):
        ours = np.array([metrics[name] for name in METRICS])
        assert np.abs(ours - reference(*scene(seed))).max() <= 1e-12


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """Weights as they are drawn: they find next to nothing."""
    torch.manual_seed(0)
    architecture = Architecture("hgnetv2_n", num_classes=3, num_queries=10, num_denoising=10)
    model = architecture.build()
    state = header("weights", architecture, model, class_names=("circle", "square", "triangle"))
    path = tmp_path / "trained" / "weights" / "best.pt"
    save_checkpoint(path, {**state, "model": model.state_dict(), "image_size": 64, "config": {}})
    return str(path)


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of training hits nothing; the way is tested, not the network."""
    monkeypatch.setattr("detector.calibrate.LEAST_HITS", 0)


def test_eval_with_three_ranks_gives_the_figures_of_one_and_its_status_says_how_far(
    start_ranks: Start, finish_ranks: Finish, tiny: str, trained: str, tmp_path: Path
) -> None:
    # One picture at a time, so that every picture's arithmetic is the same however they are dealt.
    command = ["-m", "detector", "eval", "--config", tiny, "--checkpoint", trained]
    command += ["--set", "evaluation.batch_size=1", "data.eval_samples=7"]
    folders = {world: tmp_path / f"ranks{world}" for world in (1, 3)}
    for world, folder in folders.items():
        ends = finish_ranks(start_ranks(command, world_size=world, RUN_DIR=str(folder)))
        assert [code for code, _ in ends] == [0] * world, ends
    one, three = (read(folder / "evaluation" / "metrics.json") for folder in folders.values())
    assert one == three
    assert one["images"] == 7
    drawn = [read(folder / "evaluation" / "predictions.json") for folder in folders.values()]
    assert drawn[0] == drawn[1]
    status = read(folders[3] / "status.json")
    assert (status["state"], status["progress"]) == ("completed", 1.0)
    assert (status["step"], status["steps_per_epoch"], status["total_epochs"]) == (3, 3, None)
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1, 2]
    assert status["metrics"] == one["metrics"]


def test_calibrate_writes_what_visualize_draws(
    lenient: None, tiny: str, trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, drawings = tmp_path / "calibration.json", tmp_path / "drawn"
    options = ["--config", tiny, "--checkpoint", trained]
    assert main(["calibrate", *options, "--output", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"saved={file}" in out
    assert "calibration images=4 detections=120" in out
    assert main(["eval", *options, "--calibrate", "--output", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "calibration.json").read_bytes() == file.read_bytes()
    capsys.readouterr()
    calibration = Calibration.load(file)
    assert calibration.overall.detections == 4 * 10 * 3  # pictures, queries, classes
    command = ["visualize", *options, "--calibration", str(file), "--output", str(drawings)]
    assert (
        main([*command, "--count", "3", "--min-score", "0", "--set", "evaluation.predictions=1"])
        == 0
    )
    assert "warning" not in capsys.readouterr().out
    pictures = sorted(drawings.iterdir())
    assert len(pictures) == 1  # an override wins
    with Image.open(pictures[0]) as picture:
        assert "left the ground truth (" in picture.info["Description"]


def test_visualize_draws_as_many_as_asked(tiny: str, trained: str, tmp_path: Path) -> None:
    command = ["visualize", "--config", tiny, "--checkpoint", trained]
    assert main([*command, "--count", "70", "--output", str(tmp_path / "drawn")]) == 0
    assert len(list((tmp_path / "drawn").iterdir())) == 70


def test_a_calibration_of_other_weights_is_said(
    lenient: None, tiny: str, trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "calibration.json"
    options = ["--config", tiny, "--checkpoint", trained]
    assert main(["calibrate", *options, "--output", str(file)]) == 0
    document = read(file)
    file.write_text(json.dumps({**document, "weights_sha256": "0" * 64}))
    capsys.readouterr()
    assert main(["visualize", *options, "--calibration", str(file), "--count", "1"]) == 0
    assert f"warning: {file} was made with other weights than {trained}" in capsys.readouterr().out


def test_what_is_wrong_with_a_calibration_is_one_sentence(
    tiny: str, trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", tiny, "--checkpoint", trained]
    (tmp_path / "bad.json").write_text("{}")
    for command, says in (
        (["calibrate", *options], "of 120 detections in synthetic"),
        (["calibrate", *options, "--output", str(tmp_path)], "is a folder; give a file"),
        (["visualize", *options, "--calibration", str(tmp_path / "bad.json")], "is no calibration"),
        (["visualize", *options, "--calibration", "none.json"], "cannot be read: No such file"),
    ):
        capsys.readouterr()
        assert main(command) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert says in line


def test_ranks_that_cannot_calibrate_end_alike(
    start_ranks: Start, finish_ranks: Finish, tiny: str, trained: str
) -> None:
    command = ["-m", "detector", "calibrate", "--config", tiny, "--checkpoint", trained]
    ends = finish_ranks(start_ranks(command))
    assert [code for code, _ in ends] == [1, 1]
    assert "a calibration needs 20" in ends[0][1]


def test_a_long_evaluation_says_how_far_it_is(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from detector.config import load_config
    from detector.runtime import Runtime
    from detector.validate import TELL_SECONDS, Validator

    ticks = count(0, TELL_SECONDS / 2)
    validator = Validator(load_config(tiny), Runtime(), clock=lambda: next(ticks))
    nothing = (np.zeros((0, 4)), np.zeros(0), np.zeros(0, int))
    monkeypatch.setattr(
        validator, "_detect", lambda _model, batch: [nothing] * len(batch.image_ids)
    )
    seen: list[int] = []
    assert validator.collect(SimpleNamespace(eval=lambda: None), on_batch=seen.append) is not None
    assert seen == [1, 2]
    assert capsys.readouterr().out.splitlines() == ["eval_batch=2/2"]
