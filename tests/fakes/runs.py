"""Doubles of what magics and views call: a run whose story the test tells, a session that records."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kernel_tools.agent.status import blank_status
from kernel_tools.errors import RunFailed, RunNotFoundError, WaitTimeoutError
from kernel_tools.launching.launch import LaunchPlan
from kernel_tools.results.evaluation import Evaluation, JudgedClass
from kernel_tools.results.fetch import Fetched
from kernel_tools.run import StopAnswer
from kernel_tools.state import Contact, RunSnapshot, RunState
from kernel_tools.views.pictures import Picture
from kernel_tools.views.summary import summary_mimebundle

LAUNCHING = ("train", "evaluate", "visualize", "run_again", "run_script", "run_command")
RUN_ID = "20260102-030405-coins-hgnetv2-n-3f2a"


def status(**changes: Any) -> dict[str, Any]:
    return {**blank_status(), "run_id": RUN_ID, "state": "queued", **changes}


def training(**changes: Any) -> dict[str, Any]:
    return status(
        **{
            "state": "training",
            "phase": "train",
            "total_epochs": 10,
            "current_epoch": 4,
            "completed_epochs": 3,
            "progress": 0.35,
            "eta_seconds": 65.0,
            "elapsed_seconds": 40.2,
            "step": 14,
            "steps_per_epoch": 28,
            "optimizer_steps": 97,
            "skipped_steps": 1,
            "distributed": True,
            "world_size": 2,
            "device": "cpu",
            "images_per_second": 21.34,
            "lr": 8e-4,
            "train_loss": 17.4321,
            "metrics": {"AP50": 0.8123, "mAP@0.50:0.95": 0.61},
            "current_metric": 0.61,
            "current_metric_name": "mAP@0.50:0.95",
            "best_metric": 0.62,
            "best_metric_name": "mAP@0.50:0.95",
            "best_epoch": 2,
            **changes,
        }
    )


def snapshot(told: dict[str, Any] | None = None, **changes: Any) -> RunSnapshot:
    told = training() if told is None else told
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "name": "coins/hgnetv2_n",
        "state": RunState(told["state"]),
        "contact": Contact("live"),
        "status": told,
        "sync": {"paths": ["detector", "configs"], "files": 51, "bytes": 240_000, "uploaded": 3},
        "log_tail": tuple(f"epoch=4 step={i}/28 loss={20 - i * 0.1:.3f}" for i in range(1, 15)),
        "where": "local kernel on loopback",
        "local_dir": Path("/home/someone/project/.kernel_tools/runs") / RUN_ID,
        "message": str(told.get("message") or ""),
    }
    return RunSnapshot(**{**fields, **changes})


def ended(state: str = "completed", **changes: Any) -> RunSnapshot:
    told = training(
        state=state,
        phase="done",
        completed_epochs=10,
        progress=1.0,
        optimizer_steps=280,
        metrics={"AP50": 0.9321},
        **changes,
    )
    return snapshot(told)


def evaluation(*names: str, **changes: Any) -> Evaluation:
    """An evaluation of these classes, the first the best; half of each is found, a tenth confused."""
    names = names or ("car", "bus")
    count = len(names)
    recall = tuple(k / 100 for k in range(101))
    matrix = [[0] * (count + 1) for _ in range(count + 1)]
    for k in range(count):
        matrix[k][k], matrix[k][count] = 10, 8
        if count > 1:
            matrix[k][(k + 1) % count] = 2
        matrix[count][k] = k + 1
    classes = tuple(
        JudgedClass(
            name=name,
            instances=20,
            ap50=0.9 - 0.8 * k / count,
            ap=0.5 - 0.4 * k / count,
            best_f1=0.7,
            best_score=0.4,
            precision=tuple(max(0.0, 1 - r - k / count) for r in recall),
        )
        for k, name in enumerate(names)
    )
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "images": 12,
        "epoch": None,
        "metrics": {"mAP@0.50:0.95": 0.31, "AP50": 0.7, "AP_large": None},
        "classes": classes,
        "recall": recall,
        "iou": 0.5,
        "names": (*names, "background"),
        "confusion": tuple(map(tuple, matrix)),
        "confusion_score": 0.3,
    }
    return Evaluation(**{**fields, **changes})


class FakeRun:
    """Plays `story`: each `wait` slice moves one snapshot on."""

    def __init__(self, *story: RunSnapshot, interrupt_at: int | None = None) -> None:
        self.story = list(story) or [snapshot()]
        self.snapshot = self.story.pop(0)
        self.id = self.snapshot.run_id
        self.calls: list[tuple[Any, ...]] = []
        self.subscribers: list[Any] = []
        self.waits = 0
        self.interrupt_at = interrupt_at
        self.acted = threading.Event()

    def tell(self, told: RunSnapshot) -> None:
        self.snapshot = told
        for callback in tuple(self.subscribers):
            callback(told)

    def status(self) -> dict[str, Any]:
        self.calls.append(("status",))
        return dict(self.snapshot.status)

    def wait(self, timeout: float | None = None, *, check: bool = True) -> FakeRun:
        self.waits += 1
        if self.waits == self.interrupt_at:
            raise KeyboardInterrupt
        if not self.snapshot.terminal and self.story:
            self.tell(self.story.pop(0))
        if not self.snapshot.terminal:
            raise WaitTimeoutError(f"{self.id} goes on.")
        if check:
            self.raise_for_state()
        return self

    def raise_for_state(self) -> None:
        state = self.snapshot.state.value
        if state in {"failed", "timed_out"}:
            error = self.snapshot.figure("error")
            raise RunFailed(
                f"{self.id} {state}: {error['message'] if error else ''}.",
                run_id=self.id,
                state=state,
                remote_error=error,
            )

    def subscribe(self, callback: Any) -> Any:
        self.subscribers.append(callback)
        return lambda: self.subscribers.remove(callback)

    def logs(self, n: int = 50) -> str:
        return "\n".join(self.snapshot.log_tail[-n:])

    def log_path(self) -> Path:
        return self.snapshot.local_dir / "train.log"

    def stop(self, *, now: bool = False) -> StopAnswer:
        self.calls.append(("stop", now))
        self.acted.set()
        return StopAnswer(self.id, self.snapshot.state, asked=not self.snapshot.terminal)

    def fetch(self, *globs: str, to: str | None = None) -> tuple[Fetched, ...]:
        self.calls.append(("fetch", globs, to))
        self.acted.set()
        return (
            Fetched(Path("artifacts/remote") / self.id / "weights/best.pt", 15_100_000, "ab" * 32),
        )

    def evaluation(self) -> Evaluation:
        self.calls.append(("evaluation",))
        self.acted.set()
        return evaluation()

    def pictures(self) -> tuple[Picture, ...]:
        self.calls.append(("pictures",))
        self.acted.set()
        return tuple(
            Picture(
                Path(f"visualizations/{name}.png"), b"\xff\xd8jpeg", f"{name}.jpg: left and right"
            )
            for name in ("a", "b")
        )

    def __repr__(self) -> str:
        return f"<Run {self.id}: {self.snapshot.state.value}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return summary_mimebundle(self.snapshot, include=include, exclude=exclude)


class FakeSession:
    """Records every call as (name, positional, keywords) and hands out one run."""

    def __init__(self, run: FakeRun | None = None) -> None:
        self.the_run = run
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.connections: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            self.calls.append((name, args, keywords))
            report = keywords.get("report")
            if name in LAUNCHING and report is not None:
                report("sync_files=51")
            if keywords.get("dry_run") and name in LAUNCHING:
                return LaunchPlan(job=None, sync=None)
            if name in {*LAUNCHING, "run", "attach"}:
                if self.the_run is None:
                    raise RunNotFoundError(
                        "no run was launched.", hint="%remote_train launches one."
                    )
                return self.the_run
            return {"runs": (), "disconnect": "Disconnected from local."}.get(name)

        return call
