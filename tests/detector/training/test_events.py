"""Listeners: callbacks and sinks that raise, hang, are slow or absent never hurt the run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from detector.callbacks import callback_listeners, find_callback
from detector.config import ConfigError
from detector.events import (
    CheckpointEvent,
    EpochEvent,
    Listener,
    ListenerError,
    Listeners,
    StepEvent,
    left_behind,
)
from detector.sinks import MlflowSink, SinkContext, TensorBoardSink, WandbSink, figures

STEP = StepEvent(3, {"loss": 2.5, "lr": 1e-3, "epoch": 1, "gpu_memory_mb": None})


def epoch_event(run_dir: Path, epoch: int = 1) -> EpochEvent:
    return EpochEvent(
        run_dir, epoch, 4 * epoch, {"train_loss": 2.0, "metrics": {}},
        {"mAP@0.50:0.95": 0.25, "AP_large": float("nan")}, 0.25, epoch,
    )  # fmt: skip


class Recorder:
    """A handler that keeps what it is given, and may be told to misbehave."""

    def __init__(
        self, *, raising: BaseException | None = None, gate: threading.Event | None = None
    ):
        self.events: list[Any] = []
        self.closed = False
        self._raising = raising
        self._gate = gate

    def __call__(self, event: Any) -> None:
        if self._gate is not None:
            self._gate.wait(30)
        if self._raising is not None:
            raise self._raising
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


def test_events_arrive_in_order_and_the_handler_is_closed() -> None:
    handler = Recorder()
    listeners = Listeners([Listener("one", lambda: handler)])
    events = [StepEvent(n, {}) for n in range(50)]
    for event in events:
        listeners.send(event)
    listeners.close(timeout_seconds=30)
    assert handler.events == events
    assert handler.closed
    assert not left_behind()


@pytest.mark.parametrize("error", [RuntimeError("boo"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_listener_raises_is_logged_and_the_next_event_comes(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = Recorder(raising=error)
    listener = Listener("bad", lambda: handler)
    listener.send(STEP)
    listener.send(STEP)
    listener.close(timeout_seconds=30)
    out, err = capsys.readouterr()
    assert out.count(f"listener=bad failed: {type(error).__name__}") == 2
    assert "Traceback" in err


def test_one_that_always_fails_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    listener = Listener("bad", lambda: Recorder(raising=ListenerError("no disk.")))
    for _ in range(30):
        listener.send(STEP)
    listener.close(timeout_seconds=30)
    out, err = capsys.readouterr()
    assert out.count("listener=bad failed: no disk.") == 10
    assert "listener=bad is off after 10 failures in a row" in out
    assert err == ""


def test_one_that_hangs_is_left_behind_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    gate = threading.Event()
    listener = Listener("slow", lambda: Recorder(gate=gate), capacity=5)
    try:
        for _ in range(20):
            listener.send(STEP)
        began = time.monotonic()
        listener.close(timeout_seconds=0.2)
        assert time.monotonic() - began < 5
        assert left_behind()
        out = capsys.readouterr().out
        assert "listener=slow hangs and is left behind" in out
        assert listener.dropped >= 14
        assert f"listener=slow dropped={listener.dropped}" in out
    finally:
        gate.set()
        listener._events.put(None)
        listener._thread.join(30)


def test_one_that_hangs_while_it_opens_costs_nothing() -> None:
    gate = threading.Event()

    def open_handler() -> Recorder:
        gate.wait(30)
        return Recorder()

    began = time.monotonic()
    listener = Listener("never", open_handler)
    listener.send(STEP)
    listener.close(timeout_seconds=0.1)
    assert time.monotonic() - began < 5
    gate.set()
    listener._thread.join(30)


def test_callbacks_get_epochs_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_callbacks.py").write_text("seen = []\nclass A:\n    b = seen.append\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (listener,) = callback_listeners(["my_callbacks:A.b"])
    saved = CheckpointEvent(tmp_path, tmp_path / "last.pt", "last", 1, 4)
    for event in (STEP, saved, epoch_event(tmp_path)):
        listener.send(event)
    listener.close(timeout_seconds=30)
    assert sys.modules["my_callbacks"].seen == [saved, epoch_event(tmp_path)] or [
        type(event) for event in sys.modules["my_callbacks"].seen
    ] == [CheckpointEvent, EpochEvent]
    sys.modules.pop("my_callbacks")


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("no_such_module_here:f", "the module no_such_module_here of"),
        ("json:nothing", "json has no function nothing."),
        ("json:decoder", "json has no function decoder."),
    ],
)
def test_a_callback_that_is_not_there_is_one_sentence(reference: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        find_callback(reference)


def test_a_run_calls_back_and_goes_on_after_an_exception(
    train_here: Callable[..., SimpleNamespace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "noisy.py").write_text(
        "seen = []\n"
        "def hook(event):\n"
        "    seen.append((type(event).__name__, getattr(event, 'kind', None), event.epoch))\n"
        "    if len(seen) == 1: raise ValueError('from the callback')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = train_here(
        "run", "solver.max_steps=4", "solver.save_interval=1", "runtime.callbacks=noisy:hook",
        "logging.sinks=wandb",
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert done.code == 0
    assert sys.modules.pop("noisy").seen == [
        ("CheckpointEvent", "last", 1),
        ("CheckpointEvent", "epoch", 1),
        ("EpochEvent", None, 1),
        ("CheckpointEvent", "best", 1),
    ]
    assert "listener=noisy:hook failed: ValueError: from the callback" in out
    assert "ValueError: from the callback" in err
    assert "listener=wandb is off: the package wandb is not installed here" in out


def test_figures_are_the_finite_numbers_of_a_row(tmp_path: Path) -> None:
    assert figures(STEP) == {"step/loss": 2.5, "step/lr": 1e-3, "step/epoch": 1.0}
    assert figures(epoch_event(tmp_path)) == {"epoch/train_loss": 2.0, "eval/mAP@0.50:0.95": 0.25}
    assert figures(CheckpointEvent(tmp_path, tmp_path, "last", 1, 1)) == {}


def context(run_dir: Path, first_step: int = 0) -> SinkContext:
    return SinkContext(run_dir, "r 1", {"solver": {"lr": 0.1, "x": None}}, first_step=first_step)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_rows_and_after_a_resume_none_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(context(tmp_path))
    for step in (1, 2, 3):
        sink(StepEvent(step, {"loss": float(step)}))
    sink(epoch_event(tmp_path))
    sink.close()
    resumed = TensorBoardSink(context(tmp_path, first_step=2))
    resumed(StepEvent(3, {"loss": 30.0}))
    resumed.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("step/loss")] == [(1, 1), (2, 2), (3, 30)]
    assert [
        (e.step, e.value) for e in found.Scalars("eval/mAP@0.50:0.95")
    ] == []  # step 4 is redone


FAKE_MLFLOW = """
calls = []
class MlflowClient:
    def get_experiment_by_name(self, name): calls.append(("get", name))
    def create_experiment(self, name): calls.append(("create", name)); return "7"
    def create_run(self, number, run_name=None):
        from types import SimpleNamespace as N
        calls.append(("run", number, run_name)); return N(info=N(run_id="abc"))
    def log_batch(self, run_id, metrics=(), params=()):
        calls.append(("batch", run_id, [(m.key, m.value, m.step) for m in metrics],
                      [(p.key, p.value) for p in params]))
    def set_terminated(self, run_id): calls.append(("end", run_id))
"""
FAKE_ENTITIES = """
class Metric:
    def __init__(self, key, value, timestamp, step):
        assert isinstance(timestamp, int)
        self.key, self.value, self.step = key, value, step
class Param:
    def __init__(self, key, value): self.key, self.value = key, value
"""
FAKE_WANDB = """
calls = []
class Run:
    def define_metric(self, name, step_metric=None): calls.append(("define", name, step_metric))
    def log(self, values): calls.append(("log", values))
    def finish(self): calls.append(("finish",))
def init(**options):
    calls.append(("init", options))
    return Run()
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages that record how they are called, in the place of the real ones."""
    for name, text in {
        "wandb/__init__.py": FAKE_WANDB,
        "mlflow/__init__.py": FAKE_MLFLOW,
        "mlflow/entities.py": FAKE_ENTITIES,
    }.items():
        (tmp_path / "fakes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fakes" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "fakes"))
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("wandb", "mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("wandb", "mlflow", "mlflow.entities"):
        sys.modules.pop(name, None)


def test_mlflow_gets_names_that_it_takes(fakes: Path) -> None:
    sink = MlflowSink(context(fakes))
    sink(epoch_event(fakes))
    sink.close()
    assert sys.modules["mlflow"].calls == [
        ("get", "detector"),
        ("create", "detector"),
        ("run", "7", "r 1"),
        ("batch", "abc", [], [("solver.lr", "0.1"), ("solver.x", "None")]),
        ("batch", "abc", [("epoch/train_loss", 2.0, 4), ("eval/mAP_0.50:0.95", 0.25, 4)], []),
        ("end", "abc"),
    ]


def test_wandb_goes_on_in_the_run_of_the_same_name(fakes: Path) -> None:
    sink = WandbSink(context(fakes))
    sink(STEP)
    sink.close()
    first, *rest = sys.modules["wandb"].calls
    assert (first[1]["id"], first[1]["name"], first[1]["resume"]) == ("r-1", "r 1", "allow")
    assert rest[:2] == [("define", "optimizer_steps", None), ("define", "*", "optimizer_steps")]
    assert rest[2][1] == {
        "step/loss": 2.5,
        "step/lr": 1e-3,
        "step/epoch": 1.0,
        "optimizer_steps": 3,
    }
    assert rest[3] == ("finish",)
