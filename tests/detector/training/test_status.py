from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from detector.status import STATUS_KEYS, StatusWriter, blank_status, utc_now


def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def test_a_blank_status_has_every_key() -> None:
    assert tuple(blank_status()) == STATUS_KEYS
    assert len(STATUS_KEYS) == len(set(STATUS_KEYS)) == 49


def test_the_time_is_utc_in_whole_seconds() -> None:
    assert utc_now().endswith("+00:00")
    assert len(utc_now()) == len("2026-01-01T00:00:00+00:00")


def test_what_the_launcher_wrote_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    launched = {**blank_status(), "run_id": "r1", "attempt": 3, "started_at": "then"}
    path.write_text(json.dumps(launched))
    writer = StatusWriter(path, supervised=True)
    writer.flush(state="training")
    written = read(path)
    assert (written["run_id"], written["attempt"], written["started_at"]) == ("r1", 3, "then")
    assert tuple(written) == STATUS_KEYS


def test_a_figure_that_is_no_key_is_refused(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "status.json", supervised=False)
    with pytest.raises(KeyError, match="loss"):
        writer.update(loss=1.0)


def test_progress_never_goes_back(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "status.json", supervised=False)
    writer.update(progress=0.5)
    writer.update(progress=0.2)
    assert writer.snapshot()["progress"] == 0.5


def test_under_a_supervisor_the_final_state_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    writer = StatusWriter(path, supervised=True)
    writer.flush(state="training")
    writer.finish("completed", exit_code=0, message="completed")
    assert (read(path)["state"], read(path)["exit_code"]) == ("training", None)


def test_without_one_it_is(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    writer = StatusWriter(path, supervised=False)
    writer.finish("completed", exit_code=0, message="completed")
    assert (read(path)["state"], read(path)["exit_code"]) == ("completed", 0)
    assert read(path)["phase"] == "done"


def test_a_figure_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusWriter(path, supervised=False).flush(train_loss=float("nan"))
    assert read(path)["train_loss"] is None


def test_figures_reach_the_file_within_two_seconds_and_no_read_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    writer = StatusWriter(path, supervised=False)
    writer.start()
    reads = 0
    try:
        writer.update(step=7)
        deadline = time.monotonic() + 2.0
        while read(path)["step"] != 7:
            assert tuple(read(path)) == STATUS_KEYS
            reads += 1
            assert time.monotonic() < deadline
    finally:
        writer.close()
    assert reads > 10
    assert "status" not in {thread.name for thread in threading.enumerate()}


def test_the_agent_knows_the_same_keys() -> None:
    from kernel_tools.agent import status as agent

    assert tuple(agent.STATUS_KEYS) == STATUS_KEYS
    assert agent.blank_status() == blank_status()
