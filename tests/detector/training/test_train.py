from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detector import resume as resume_module
from detector import state as state_module
from detector import train as train_module
from detector.checkpoint import load_checkpoint, load_detector
from detector.config import ConfigError
from detector.data.prepare import prepare
from detector.files import write_json
from detector.microbatches import check_batch_size
from detector.report import CLOCK_FIELDS, Reporter
from detector.status import STATUS_KEYS
from detector.validate import Validation

TrainHere = Callable[..., SimpleNamespace]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def without_clock(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in CLOCK_FIELDS} for row in rows]


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return where two checkpoints differ by as much as a bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b)
        return [
            d
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for d in differences(x, y, f"{path}/{i}")
        ]
    same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return [] if same else [path]


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the training die after so many steps, as if the power had gone: nothing is saved."""

    def arrange(steps: int) -> None:
        real = Reporter.step

        def step(self: Reporter, progress: Any, **figures: Any) -> None:
            real(self, progress, **figures)
            if progress.batches == steps:
                monkeypatch.undo()
                self._status.close()
                raise KeyboardInterrupt

        monkeypatch.setattr(Reporter, "step", step)

    return arrange


def test_a_run_leaves_what_the_run_directory_promises(
    train_here: TrainHere, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "artifacts" / "final.pt"
    done = train_here("run", "solver.save_interval=2", output=output)
    out, err = capsys.readouterr()
    run = done.run
    assert done.code == 0, err

    status = read(run.status)
    assert tuple(status) == STATUS_KEYS
    expected = {
        "state": "completed", "phase": "done", "total_epochs": 2, "completed_epochs": 2,
        "current_epoch": 2, "step": 4, "steps_per_epoch": 4, "optimizer_steps": 8, "progress": 1.0,
        "skipped_steps": 0, "world_size": 1, "distributed": False, "global_batch_size": 2,
        "batch_size": 2, "model_family": "dfine", "model_size": "n", "device": "cpu",
        "checkpoints": {"best": "weights/best.pt", "last": "weights/last.pt"}, "attempt": 1,
        "error": None, "exit_code": 0, "validated": True, "eta_seconds": 0.0,
        "ranks": [{"rank": 0, "local_rank": 0, "device": "cpu", "gpu_name": None}],
    }  # fmt: skip
    assert {key: status[key] for key in expected} == expected
    assert status["metrics"].keys() >= {"AP50", "AP75", "mAP@0.50:0.95"}

    assert [row["epoch"] for row in run.metrics.rows()] == [1, 2]
    assert [row["optimizer_steps"] for row in run.steps.rows()] == list(range(1, 9))
    with open(run.path / "results.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["epoch"] for row in table] == ["1", "2"]
    assert float(table[1]["AP50"]) == status["metrics"]["AP50"]
    assert read(run.path / "summary.json")["optimizer_steps"] == 8
    assert read(run.path / "reasons" / "rank0.json") == {
        "rank": 0, "reason": "completed", "exit_code": 0, "message": "completed", "error": None,
    }  # fmt: skip
    assert {path.name for path in run.evaluation.glob("*.json")} >= {
        "metrics.json",
        "predictions.json",
    }
    assert {path.name for path in run.weights.glob("*.pt")} == {
        "last.pt", "last.previous.pt", "best.pt", "epoch_2.pt",
    }  # fmt: skip

    ema = load_checkpoint(run.last)["ema"]["model"]
    final = load_detector(output).model.state_dict()
    assert all(torch.equal(value, final[name]) for name, value in ema.items())
    lines = out.splitlines()
    for token in (
        "distributed=False world_size=1", f"run_dir={run.path}", "device=cpu amp=False",
        "train_batches=4 eval_batches=2", f"checkpoint_saved={output}", "optimizer_steps=8",
    ):  # fmt: skip
        assert token in lines
    assert any(line.startswith("epoch=2 step=4/4 loss=") for line in lines)
    assert any(line.startswith('epoch=2 eval={"mAP@0.50:0.95"') for line in lines)
    assert any(line.startswith(f"best_checkpoint={run.best} metric=") for line in lines)


def test_killed_and_resumed_equals_uninterrupted(
    train_here: TrainHere, killed_after: Callable[[int], None]
) -> None:
    whole = train_here("whole", "solver.checkpoint_steps=3").run
    killed_after(7)
    with pytest.raises(KeyboardInterrupt):
        train_here("cut", "solver.checkpoint_steps=3")
    resumed = train_here("cut", "solver.checkpoint_steps=3", resume="auto")
    assert resumed.code == 0
    assert differences(load_checkpoint(whole.last), load_checkpoint(resumed.run.last)) == []
    assert differences(load_checkpoint(whole.best), load_checkpoint(resumed.run.best)) == []
    assert without_clock(whole.metrics.rows()) == without_clock(resumed.run.metrics.rows())
    assert without_clock(whole.steps.rows()) == without_clock(resumed.run.steps.rows())
    assert read(resumed.run.status)["attempt"] == 2


def test_a_stop_request_saves_at_a_step_boundary_and_the_resume_goes_on_elsewhere(
    train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_here("whole").run
    real = Reporter.step

    def step(self: Reporter, progress: Any, **figures: Any) -> None:
        real(self, progress, **figures)
        if progress.batches == 5:
            request = {"reason": "timed_out", "message": "budget used up"}
            write_json(self._run.stop_request, request)

    monkeypatch.setattr(Reporter, "step", step)
    stopped = train_here("first", supervised=True)
    assert stopped.code == 75
    reason = read(stopped.run.path / "reasons" / "rank0.json")
    assert (reason["reason"], reason["exit_code"], reason["message"]) == (
        "timed_out", 75, "budget used up",
    )  # fmt: skip
    status = read(stopped.run.status)
    assert (status["state"], status["exit_code"]) == ("stopping", None)
    progress = load_checkpoint(stopped.run.last)["progress"]
    assert (progress["epoch"], progress["step"], progress["optimizer_steps"]) == (1, 2, 6)

    resumed = train_here("second", resume=str(stopped.run.path), supervised=True)
    assert resumed.code == 0
    assert differences(load_checkpoint(whole.last), load_checkpoint(resumed.run.last)) == []
    assert without_clock(whole.steps.rows()) == without_clock(resumed.run.steps.rows())
    assert without_clock(whole.metrics.rows()) == without_clock(resumed.run.metrics.rows())
    assert read(resumed.run.status)["resumed_from"] == str(stopped.run.last)


def test_an_end_during_the_evaluation_loses_only_the_evaluation(
    train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Reporter.validating

    def validating(self: Reporter) -> None:
        real(self)
        write_json(self._run.stop_request, {"reason": "stopped", "message": "enough"})

    with monkeypatch.context() as patched:
        patched.setattr(Reporter, "validating", validating)
        assert train_here("run").code == 75
    resumed = train_here("run", resume="auto")
    assert resumed.code == 0
    assert [row["epoch"] for row in resumed.run.metrics.rows()] == [1, 2]


def test_rejected_steps_are_not_counted_and_move_neither_average_nor_rate(
    train_here: TrainHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rejected = 5

    class Refusing(torch.amp.GradScaler):
        """Lets nothing through for the first steps, as one whose scale overflows."""

        def __init__(self) -> None:
            super().__init__("cpu", init_scale=1.0, growth_interval=10_000)
            self.seen = 0

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return None if self.seen <= rejected else super().step(optimizer, *args, **kwargs)

    monkeypatch.setattr(state_module, "make_scaler", lambda *_, **__: Refusing())
    done = train_here("run")
    status = read(done.run.status)
    assert (status["optimizer_steps"], status["skipped_steps"]) == (3, 5)
    out = capsys.readouterr().out
    assert out.splitlines().count("scheduler_step_skipped=no_optimizer_step") == 1
    assert "optimizer_steps=3" in out.splitlines()
    state = load_checkpoint(done.run.last)
    assert state["ema"]["updates"] == 3
    assert int(next(iter(state["optimizer"]["state"].values()))["step"]) == 3
    rates = [row["lr"] for row in done.run.steps.rows()]
    assert rates[:2] == pytest.approx([4e-4, 8e-4])


def test_a_loss_that_is_not_finite_is_skipped_and_counted(
    train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train_module.Criterion.__call__
    calls = []

    def broken(self: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        losses = real(self, *args, **kwargs)
        calls.append(1)
        if len(calls) in {2, 3}:
            losses["total"] = losses["total"] * float("nan")
        return losses

    monkeypatch.setattr(train_module.Criterion, "__call__", broken)
    done = train_here("run")
    status = read(done.run.status)
    assert done.code == 0
    assert (status["optimizer_steps"], status["skipped_steps"]) == (6, 2)
    weights = load_checkpoint(done.run.last)["model"].values()
    assert all(torch.isfinite(value).all() for value in weights if value.is_floating_point())


def test_a_run_that_diverged_fails_with_advice(
    train_here: TrainHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = train_module.Criterion.__call__

    def broken(self: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        losses = real(self, *args, **kwargs)
        return {name: value * float("inf") for name, value in losses.items()}

    monkeypatch.setattr(train_module.Criterion, "__call__", broken)
    done = train_here("run", "solver.max_skipped_steps=3")
    status = read(done.run.status)
    assert done.code == 1
    assert (status["state"], status["skipped_steps"]) == ("failed", 3)
    assert status["error"]["type"] == "TrainingDivergedError"
    assert "3 steps in a row" in capsys.readouterr().err


def test_a_rank_that_raises_leaves_its_error(
    train_here: TrainHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(train_module, "reported", broken)
    done = train_here("run")
    assert done.code == 1
    recorded = read(done.run.path / "errors" / "rank0.json")
    assert (recorded["type"], recorded["message"], recorded["rank"]) == (
        "ValueError",
        "no such thing",
        0,
    )
    assert "in broken" in recorded["traceback"]
    status = read(done.run.status)
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["error"]["message"] == "no such thing"
    assert read(done.run.path / "reasons" / "rank0.json")["error"] == status["error"]
    assert "ValueError: no such thing" in capsys.readouterr().err


def test_max_steps_ends_early_and_is_evaluated(train_here: TrainHere) -> None:
    done = train_here("run", "solver.max_steps=3", "solver.epochs=50", "evaluation.interval=50")
    status = read(done.run.status)
    assert (status["optimizer_steps"], status["total_epochs"], status["progress"]) == (3, 1, 1.0)
    assert [row["metrics"] is not None for row in done.run.metrics.rows()] == [True]


def test_patience_ends_a_run_that_no_longer_gets_better(
    train_here: TrainHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = iter([0.1, 0.3, -1.0, 0.3, 0.25, 0.25])
    monkeypatch.setattr(
        train_module.Validator,
        "run",
        lambda *_, **__: Validation({"mAP@0.50:0.95": next(scores)}, None),
    )
    plan = ("solver.epochs=50", "solver.patience=2", "data.train_samples=2")
    done = train_here("run", *plan)
    message = "ended early after epoch 5: no better mAP@0.50:0.95 in 2 evaluations"
    assert done.code == 0
    assert f"early_stop={message}" in capsys.readouterr().out.splitlines()
    status = read(done.run.status)
    assert (status["state"], status["message"], status["best_epoch"]) == ("completed", message, 2)
    assert (status["completed_epochs"], status["progress"]) == (5, 1.0)
    again = train_here("run", *plan, resume="auto")
    assert again.code == 0
    assert [row["epoch"] for row in again.run.metrics.rows()] == [1, 2, 3, 4, 5]


def test_micro_batches_change_neither_steps_nor_losses(train_here: TrainHere) -> None:
    plan = ("solver.batch_size=4", "solver.max_steps=2", "model.freeze=norms", "solver.lr=0.0001")
    one = train_here("one", *plan).run.steps.rows()
    four = train_here("four", *plan, "solver.accumulate=4").run.steps.rows()
    for ours, theirs in zip(one, four, strict=True):
        assert (ours["optimizer_steps"], ours["lr"]) == (theirs["optimizer_steps"], theirs["lr"])
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)


def test_used_up_hours_end_the_run_with_a_checkpoint(train_here: TrainHere) -> None:
    done = train_here("run", "runtime.max_hours=0.0000001")
    assert done.code == 75
    assert read(done.run.status)["state"] == "timed_out"
    assert read(done.run.path / "reasons" / "rank0.json")["reason"] == "timed_out"
    assert load_checkpoint(done.run.last)["progress"]["batches"] == 1


def test_other_frozen_parts_are_refused_at_a_resume(
    train_here: TrainHere, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here("run", "solver.max_steps=1", "evaluation.interval=9")
    refused = train_here("run", "model.freeze=backbone", resume="auto")
    assert refused.code == 1
    assert "was saved with other parts of the network held fixed" in capsys.readouterr().err


def test_a_callback_that_is_not_there_ends_the_run_before_the_first_step(
    train_here: TrainHere, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train_here("run", "runtime.callbacks=no_such_module_here:push")
    assert done.code == 1
    err = capsys.readouterr().err
    assert err.startswith("error: runtime.callbacks: the module no_such_module_here of")
    assert "Traceback" not in err
    assert done.run.steps.rows() == []


def test_resuming_a_finished_run_changes_nothing(train_here: TrainHere) -> None:
    done = train_here("run", "solver.max_steps=3")
    before = load_checkpoint(done.run.last)
    again = train_here("run", "solver.max_steps=3", resume="auto")
    assert again.code == 0
    assert differences(before, load_checkpoint(again.run.last)) == []
    assert [row["epoch"] for row in again.run.metrics.rows()] == [1]


def test_resuming_with_another_batch_in_mid_epoch_is_refused(
    train_here: TrainHere, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here("run", "solver.max_steps=3")
    refused = train_here("run", "solver.batch_size=4", resume="auto")
    assert refused.code == 1
    assert "resume with that, not 4" in capsys.readouterr().err


def test_auto_without_anything_to_resume_is_a_fresh_start(train_here: TrainHere) -> None:
    done = train_here("run", "solver.max_steps=1", resume="auto")
    assert done.code == 0
    assert read(done.run.status)["resumed_from"] is None


def test_output_dir_becomes_a_link_to_the_run(train_here: TrainHere, tmp_path: Path) -> None:
    link = tmp_path / "runs" / "mine"
    done = train_here("run", "solver.max_steps=1", f"runtime.output_dir={link}")
    assert link.is_symlink()
    assert link.resolve() == done.run.path


def test_a_batch_that_cannot_be_divided_is_answered_with_two_that_can() -> None:
    check_batch_size(8, world_size=2)
    with pytest.raises(
        ConfigError, match="batch_size=7 cannot be divided over 2 ranks; 6 and 8 can"
    ):
        check_batch_size(7, world_size=2)
    with pytest.raises(ConfigError, match="1 cannot be divided over 4 ranks; 4 and 8 can"):
        check_batch_size(1, world_size=4)
    with pytest.raises(
        ConfigError,
        match="batch_size=8 cannot be divided over 2 ranks with solver.accumulate=3 micro-batches "
        "each; 6 and 12 can",
    ):
        check_batch_size(8, world_size=2, accumulate=3)


def test_a_configuration_error_is_recorded_where_a_supervisor_looks(train_here: TrainHere) -> None:
    done = train_here("run", "solver.epochs=banana", supervised=True)
    assert done.code == 1
    reason = read(done.run.path / "reasons" / "rank0.json")
    assert reason["reason"] == "failed"
    assert reason["message"].startswith("ConfigError: solver.epochs must be an integer")


def test_weights_alone_cannot_be_resumed(
    train_here: TrainHere, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train_here("run", "solver.max_steps=1")
    refused = train_here("other", resume=str(done.run.best))
    assert refused.code == 1
    assert "holds weights only and cannot be resumed" in capsys.readouterr().err
    assert resume_module.find_checkpoint(None, None) is None  # type: ignore[arg-type]


def test_eval_and_visualize_use_the_newest_run(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from detector.__main__ import main

    options = ["--config", tiny, "--set", "solver.max_steps=1"]
    assert main(["train", *options]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    trained = read(run / "evaluation" / "metrics.json")
    capsys.readouterr()
    assert main(["eval", *options, "--output", str(tmp_path / "judged")]) == 0
    assert read(tmp_path / "judged" / "metrics.json")["metrics"] == trained["metrics"]
    assert f"checkpoint={run / 'weights' / 'best.pt'}" in capsys.readouterr().out.splitlines()
    assert main(["visualize", *options, "--count", "2"]) == 0
    assert len(list((run / "visualizations").glob("*.png"))) == 2


def test_weights_for_other_classes_are_refused(
    tiny: str, train_here: TrainHere, capsys: pytest.CaptureFixture[str]
) -> None:
    from detector.__main__ import main

    done = train_here("run", "solver.max_steps=1", "evaluation.interval=9")
    options = ["--config", tiny, "--checkpoint", str(done.run.last), "--set", "data.format=coins"]
    assert main(["eval", *options]) == 1
    assert "but the data set has coin." in capsys.readouterr().err


def test_a_set_is_prepared_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from detector.__main__ import main

    command = ["prepare", "synthetic", "--to", str(tmp_path / "set"), "--train", "2", "--val", "1"]
    assert main(command) == 0
    assert len(list((tmp_path / "set" / "images" / "train").iterdir())) == 2
    assert main(command) == 1
    assert "is not empty" in capsys.readouterr().err


def test_what_was_repaired_is_said_and_nothing_to_find_gives_no_best(
    train_here: TrainHere, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = prepare("synthetic", to=tmp_path / "set", train=4, val=2)
    for path in (root / "labels" / "val").iterdir():
        path.write_text("")
    first = min((root / "labels" / "train").iterdir())
    first.write_text(first.read_text() + first.read_text().splitlines()[0] + "\n")
    done = train_here("run", f"data.root={root}", "solver.max_steps=1")
    out, err = capsys.readouterr()
    assert done.code == 0, err
    lines = out.splitlines()
    assert "data_note=set/train: 1 duplicate rows dropped" in lines
    assert "data_note=set/val: no box to find, so no best checkpoint" in lines
    assert not done.run.best.exists()
    status = read(done.run.status)
    assert (status["best_metric"], status["best_epoch"]) == (None, None)
    assert status["metrics"]["AP50"] == -1.0
