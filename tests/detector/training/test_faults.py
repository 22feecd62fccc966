"""Full disks and lost pictures: a run ends or goes on as documented, and never with a torn file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detector.checkpoint import load_checkpoint, previous_of
from detector.data.prepare import prepare
from detector.files import RowLog, keep_going, write_json
from detector.rundir import RunDirectory
from detector.status import StatusWriter
from tests.detector.training.conftest import Forker


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture
def small_disk(forker: Forker) -> Iterator[Path]:
    """A file system of its own, room for one checkpoint and a half."""
    path = forker.folder / "small"
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def whole_files(run: RunDirectory) -> None:
    """Every checkpoint loads, every row is whole, nothing half-written lies about."""
    for path in run.weights.iterdir():
        assert not path.name.startswith("."), path
        if path.suffix == ".pt":
            load_checkpoint(path)
    for log in (run.metrics, run.steps):
        if log.path.exists():
            assert len(log.path.read_text().splitlines()) == len(log.rows())
    for path in run.path.glob("*.json"):
        read(path)


def test_a_full_disk_ends_the_run_with_the_checkpoint_before_and_room_lets_it_go_on(
    forker: Forker, small_disk: Path
) -> None:
    name = f"{small_disk.name}/run"
    plan = ("solver.epochs=2", "solver.batch_size=4")
    codes = forker.train(name, *plan)
    log = forker.log(name)
    run = RunDirectory(forker.folder / name)
    assert codes == [1], log
    sentence = (
        f"error: {run.last} cannot be written: No space left on device; the one before is whole, "
        "go on from it when there is room."
    )
    assert sentence in log.splitlines()
    assert "Traceback" not in log
    whole_files(run)
    assert load_checkpoint(run.last)["progress"]["batches"] == 2
    status = read(run.status)
    assert (status["state"], status["error"]["type"]) == ("failed", "CheckpointError")
    assert read(run.path / "reasons" / "rank0.json")["reason"] == "failed"

    more = ["mount", "-o", "remount,size=400m", str(small_disk)]
    subprocess.run(more, check=True)
    assert forker.train(name, *plan, resume="auto") == [0], forker.log(name)
    assert load_checkpoint(run.last)["progress"]["batches"] == 4
    assert [row["epoch"] for row in run.metrics.rows()] == [1, 2]
    whole_files(run)


def test_a_file_that_may_not_grow_is_one_sentence(forker: Forker) -> None:
    """The same without the right to mount: a limit on the size of files."""
    codes = forker.train("limited", "solver.max_steps=1", hook="limit")
    log = forker.log("limited")
    run = RunDirectory(forker.folder / "limited")
    assert codes == [1], log
    assert f"error: {run.last} cannot be written: File too large; start again when" in log
    assert list(run.weights.iterdir()) == []
    assert read(run.status)["state"] == "failed"


def test_a_row_that_does_not_fit_is_left_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RowLog(tmp_path / "steps.jsonl")
    log.append({"step": 1})
    real = os.strerror

    class Short:
        """A file that takes three bytes more."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            return self.file.write(data[:3])

    with monkeypatch.context() as patched:
        patched.setattr(
            "builtins.open", lambda *a, _open=open, **k: Short(_open(*a, **k)), raising=True
        )
        with keep_going("steps.jsonl"):
            log.append({"step": 2})
    assert capsys.readouterr().out == f"not_written=steps.jsonl: {real(28)}\n"
    log.append({"step": 3})
    assert [row["step"] for row in log.rows()] == [1, 3]


def test_a_status_that_cannot_be_written_is_said_once_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StatusWriter(tmp_path / "status.json", supervised=False)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("detector.status.write_json", full)
        writer.flush(step=1)
        writer.flush(step=2)
    assert capsys.readouterr().out == "not_written=status.json: No space left on device\n"
    writer.flush()
    assert read(tmp_path / "status.json")["step"] == 2


def test_the_reserve_is_given_back_and_a_new_attempt_clears_what_was_torn(tmp_path: Path) -> None:
    from detector.config import Config
    from detector.rundir import create_run_directory

    run = create_run_directory(tmp_path / "run", Config(), environ={})
    assert (run.path / ".reserve").stat().st_size == 256 * 1024
    torn = run.weights / ".last.pt.abc"
    torn.write_bytes(b"half")
    write_json(run.path / "errors" / "rank1.json", {"rank": 1})
    create_run_directory(tmp_path / "run", Config(), environ={})
    assert not torn.exists()
    assert run.first_error() is None
    run.release_reserve()
    run.release_reserve()
    assert not (run.path / ".reserve").exists()


def pictures(tmp_path: Path, *, count: int = 8) -> tuple[Path, list[Path]]:
    root = prepare("synthetic", to=tmp_path / "set", train=count, val=2)
    return root, sorted((root / "images" / "train").iterdir())


def test_pictures_lost_while_training_are_replaced_and_said(forker: Forker, tmp_path: Path) -> None:
    root, files = pictures(tmp_path)
    codes = forker.train(
        "lost", f"data.root={root}", "data.format=yolo", "data.max_unreadable=0.5",
        "solver.epochs=2", hook="lose", MISSING=str(files[0]), TORN=str(files[1]),
    )  # fmt: skip
    log = forker.log("lost")
    assert codes == [0], log
    told = [line for line in log.splitlines() if line.startswith("picture_unreadable=")]
    assert {name for name in files[:2] if any(str(name) in line for line in told)} == set(files[:2])
    assert len(told) == 2
    run = RunDirectory(forker.folder / "lost")
    assert read(run.status)["optimizer_steps"] == 8
    whole_files(run)


def test_more_lost_pictures_than_allowed_end_the_run_in_one_sentence(
    forker: Forker, tmp_path: Path
) -> None:
    root, files = pictures(tmp_path)
    codes = forker.train(
        "gone", f"data.root={root}", "data.format=yolo", "data.max_unreadable=0",
        "solver.epochs=2", "solver.checkpoint_steps=1", hook="lose",
        MISSING=str(files[0]), TORN=str(files[1]),
    )  # fmt: skip
    log = forker.log("gone")
    assert codes == [1], log
    (sentence,) = (line for line in log.splitlines() if line.startswith("error: "))
    assert "cannot be read" in sentence
    assert any(str(name) in sentence for name in files[:2])
    assert "Traceback" not in log
    run = RunDirectory(forker.folder / "gone")
    assert read(run.status)["error"]["type"] == "DataError"
    whole_files(run)


def test_a_torn_checkpoint_gives_way_to_the_one_before_and_says_so(forker: Forker) -> None:
    plan = ("solver.max_steps=3", "solver.checkpoint_steps=1", "evaluation.interval=9")
    plan = (*plan, "logging.log_interval=1", "evaluation.predictions=0")
    assert forker.train("torn", *plan) == [0], forker.log("torn")
    run = RunDirectory(forker.folder / "torn")
    rows = [row["loss"] for row in run.steps.rows()]
    run.last.write_bytes(run.last.read_bytes()[:-1000])
    assert forker.train("torn", *plan, resume="auto") == [0], forker.log("torn")
    before = previous_of(run.last)
    told = f"resume_fallback={before} reason=damaged_or_missing path={run.last}"
    assert told in forker.log("torn").splitlines()
    assert [row["loss"] for row in run.steps.rows()] == rows
    assert load_checkpoint(run.last)["progress"]["optimizer_steps"] == 3
