from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import pytest
import torch

from detector.checkpoint import (
    Architecture,
    CheckpointError,
    check_architecture,
    file_sha256,
    header,
    load_checkpoint,
    load_detector,
    load_or_fall_back,
    newest_checkpoint,
    previous_of,
    save_checkpoint,
)
from detector.files import RowLog, replacing
from tests.detector.training.conftest import Forker

ARCHITECTURE = Architecture("hgnetv2_n", num_classes=2, num_queries=10, num_denoising=10)


def state_of(value: float) -> dict[str, object]:
    return {"format_version": 1, "kind": "training", "model": {"w": torch.full((1000,), value)}}


def weights_file(path: Path, architecture: Architecture = ARCHITECTURE) -> torch.nn.Module:
    torch.manual_seed(0)
    model = architecture.build()
    save_checkpoint(
        path,
        {
            **header("weights", architecture, model, class_names=("a", "b")),
            "model": model.state_dict(),
            "epoch": 3,
            "config": {"data": {"image_size": 64}},
        },
    )
    return model


def test_a_checkpoint_reads_back_and_its_hash_stands_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    digest = save_checkpoint(path, state_of(1.0))
    assert torch.equal(load_checkpoint(path)["model"]["w"], torch.ones(1000))
    assert digest == file_sha256(path)
    assert (tmp_path / "last.pt.sha256").read_text() == f"{digest}  last.pt\n"
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "last.pt.sha256"]


def test_a_torn_file_falls_back_to_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, state_of(1.0), previous=previous_of(path))
    save_checkpoint(path, state_of(2.0), previous=previous_of(path))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"last\.pt is damaged"):
        load_checkpoint(path)
    state, used = load_or_fall_back(path, previous_of(path))
    assert float(state["model"]["w"][0]) == 1.0
    assert used.name == "last.previous.pt"


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, state_of(1.0))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path)


def test_a_whole_file_with_the_hash_of_the_one_before_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, state_of(1.0))
    stale = (tmp_path / "last.pt.sha256").read_text()
    save_checkpoint(path, state_of(2.0))
    (tmp_path / "last.pt.sha256").write_text(stale)
    assert float(load_checkpoint(path)["model"]["w"][0]) == 2.0


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, state_of(1.0))

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert float(load_checkpoint(path)["model"]["w"][0]) == 1.0
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "last.pt.sha256"]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04"])
def test_what_is_no_checkpoint_is_said_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save_checkpoint(path, {**state_of(1.0), "format_version": 99})
    with pytest.raises(CheckpointError, match="has format 99; this version reads up to 1"):
        load_checkpoint(path)


def test_weights_come_back_as_a_detector_in_evaluation_mode(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    model = weights_file(path)
    loaded = load_detector(path)
    assert (loaded.class_names, loaded.image_size, loaded.info["epoch"]) == (("a", "b"), 64, 3)
    assert not loaded.model.training
    theirs = loaded.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def test_another_architecture_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    weights_file(path)
    other = Architecture("hgnetv2_n", num_classes=3, num_queries=10, num_denoising=10)
    with pytest.raises(CheckpointError) as caught:
        check_architecture(load_checkpoint(path), other.build(), other, path=path)
    assert str(caught.value) == (
        f"{path} holds hgnetv2_n with 2 classes, 10 queries and num_denoising=10, but the "
        "configuration asks for hgnetv2_n with 3 classes, 10 queries and num_denoising=10."
    )


def test_the_newest_run_is_found(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for age, name in ((100, "b"), (50, "a")):
        path = tmp_path / name / "weights" / "last.pt"
        save_checkpoint(path, state_of(1.0))
        os.utime(path, (time.time() - age,) * 2)
    assert newest_checkpoint(tmp_path) == tmp_path / "a" / "weights" / "last.pt"


def kill_writers(forker: Forker, tmp_path: Path, *, times: int) -> int:
    """Kill a writer so many times; returns how often it was in the middle of a file."""
    path = tmp_path / "weights" / "last.pt"
    announced = path.with_name("written")
    draw = random.Random(0)
    torn = 0
    for _ in range(times):
        with contextlib.suppress(FileNotFoundError):
            announced.unlink()
        pids = forker.run("write_checkpoints", str(path))
        deadline = time.monotonic() + 60
        while not announced.exists():
            assert time.monotonic() < deadline
        until = time.monotonic() + draw.random() * 0.02
        while time.monotonic() < until:
            pass
        written = int(announced.read_text() or 0)
        forker.kill(pids)
        state = load_checkpoint(path)
        assert state["count"] >= written
        assert float(state["model"]["w"].mean()) == state["count"]
        left = [name for name in path.parent.iterdir() if name.name.startswith(".last.pt.")]
        torn += bool(left)
        for name in left:
            name.unlink()
    return torn


def test_a_writer_killed_at_any_moment_leaves_a_checkpoint_that_loads(
    forker: Forker, tmp_path: Path
) -> None:
    assert kill_writers(forker, tmp_path, times=20) > 0


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_a_writer_killed_200_times_leaves_a_checkpoint_that_loads(
    forker: Forker, tmp_path: Path
) -> None:
    assert kill_writers(forker, tmp_path, times=200) > 20


def test_rows_are_whole_and_a_torn_last_one_is_left_out(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "steps.jsonl")
    for step in range(3):
        log.append({"step": step, "loss": float("nan")})
    with open(log.path, "a") as file:
        file.write('{"step": 3')
    assert [row["step"] for row in log.rows()] == [0, 1, 2]
    assert log.rows()[0]["loss"] is None
    log.keep(lambda row: row["step"] < 2)
    log.append({"step": 2})
    assert [row["step"] for row in log.rows()] == [0, 1, 2]
