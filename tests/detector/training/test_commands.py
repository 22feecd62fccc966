"""What a person types, and what is answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from detector.__main__ import main
from detector.data.index import encode_png

ROOT = Path(__file__).resolve().parents[3]
TrainHere = Callable[..., SimpleNamespace]


def picture(path: Path, width: int, height: int) -> str:
    rng = np.random.default_rng(width)
    path.write_bytes(encode_png(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))
    return str(path)


@pytest.fixture
def checkpoint(train_here: TrainHere) -> str:
    done = train_here("run", "solver.max_steps=1", "evaluation.interval=9")
    assert done.code == 0
    return str(done.run.last)


def test_predict_prints_one_line_a_picture_and_draws_it(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [picture(tmp_path / "a.png", 90, 60), picture(tmp_path / "b ü.png", 40, 50)]
    capsys.readouterr()
    command = ["predict", "--checkpoint", checkpoint, *images, "--min-score", "0"]
    assert main([*command, "--to", str(tmp_path / "drawn")]) == 0
    out, err = capsys.readouterr()
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["file"], first["width"], first["height"]) == (images[0], 90, 60)
    assert (second["file"], second["width"], second["height"]) == (images[1], 40, 50)
    assert len(first["predictions"]) == 10 * 3  # queries times classes
    assert first["predictions"][0].keys() == {"box", "score", "label", "name"}
    scores = [found["score"] for found in first["predictions"]]
    assert scores == sorted(scores, reverse=True)
    drawn = [Path(line.removeprefix("saved=")) for line in err.splitlines()]
    assert [path.parent for path in drawn] == [tmp_path / "drawn"] * 2
    assert all(cv2.imdecode(np.fromfile(path, np.uint8), 1) is not None for path in drawn)


def test_predict_shows_nothing_below_the_score(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = picture(tmp_path / "a.png", 90, 60)
    capsys.readouterr()
    assert main(["predict", "--checkpoint", checkpoint, image, "--min-score", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"] == []


def test_what_predict_cannot_read_is_one_sentence(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    for command, expected in (
        ([checkpoint, str(tmp_path / "none.png")], "cannot be read: No such file"),
        ([checkpoint, str(tmp_path / "a.txt")], "is not a picture"),
        ([str(tmp_path / "none.pt"), "a.png"], "There is no checkpoint"),
        ([checkpoint, "a.png", "a.jpg", "--to", str(tmp_path / "to")], "would be drawn as"),
        ([str(tmp_path / "a.txt"), "a.png"], "is damaged or no checkpoint"),
    ):
        capsys.readouterr()
        assert main(["predict", "--checkpoint", *command]) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert expected in err
        assert "Traceback" not in err


def test_an_output_that_cannot_be_written_is_said_before_training(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for output, expected in (
        (tmp_path, "is a folder; give a file"),
        (tmp_path / "file" / "final.pt", "cannot be a folder: "),
    ):
        assert main(["train", "--config", tiny, "--output", str(output)]) == 1
        assert expected in capsys.readouterr().err
    for command in ("eval", "visualize"):
        assert main([command, "--config", tiny, "--output", str(tmp_path / "file")]) == 1
        assert "cannot be a folder: " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_that_cannot_be_made_is_one_sentence(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    options = ["--config", tiny, "--set", f"runtime.output_dir={tmp_path / 'file'}"]
    assert main(["train", *options]) == 1
    err = capsys.readouterr().err
    assert "cannot be made: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.backbone_name=hgnetv2_s", "asks for hgnetv2_s with 3 classes, 10 queries"),
        ("model.num_denoising=20", "10 queries and num_denoising=20."),
        ("solver.batch_size=4", "resume with that, not 4."),
    ],
)
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    override: str, expected: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", tiny, "--set", "solver.max_steps=1", "evaluation.interval=9"]
    assert main(["train", *options]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["train", *options, override, "--resume", str(run)]) == 1
    assert expected in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "options",
    [
        ["visualize", "--config", "x", "--count", "0"],
        ["visualize", "--config", "x", "--min-score", "nan"],
        ["predict", "--checkpoint", "x", "a.png", "--min-score", "2"],
        ["prepare", "coins", "--to", "x", "--train", "-1"],
        ["prepare", "coins", "--to", "x", "--seed", "-1"],
    ],
)
def test_a_number_out_of_range_is_wrong_usage(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    assert f"argument {options[-2]}: must be" in capsys.readouterr().err


def test_a_folder_that_cannot_be_prepared_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["prepare", "synthetic", "--to", str(tmp_path / "file" / "set")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0)])
def test_nothing_and_help_name_the_commands_without_torch(arguments: list[str], code: int) -> None:
    program = "import sys; sys.modules['torch'] = None; from detector.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    for command in ("train", "eval", "visualize", "predict", "prepare"):
        assert f"\n    {command}" in (done.stderr if code else done.stdout)
    assert "Traceback" not in done.stderr
