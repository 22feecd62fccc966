"""`logging.sinks`: the rows of a run in TensorBoard, Weights & Biases or MLflow as well.

The packages are optional and imported in the sink's own thread only. Addresses and keys are the
packages' own environment variables (WANDB_*, MLFLOW_*); nothing of them is stored or printed here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from detector.events import CheckpointEvent, Event, Handler, Listener, ListenerError, StepEvent

PROJECT: Final = "detector"


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a tracker is told about the run when it opens."""

    run_dir: Path
    run_id: str
    config: Mapping[str, Mapping[str, Any]]
    first_step: (
        int  # optimizer steps done before: what is past them belongs to an attempt that died
    )


def figures(event: Event) -> dict[str, float]:
    """Return the numbers of an event by `step/loss`, `epoch/lr`, `eval/AP50`; empty for a checkpoint."""
    if isinstance(event, CheckpointEvent):
        return {}
    prefix = "step" if isinstance(event, StepEvent) else "epoch"
    found = dict(_numbers(prefix, event.row))
    if not isinstance(event, StepEvent) and event.metrics is not None:
        found.update(_numbers("eval", event.metrics))
    return found


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}/{name}", float(value)


class TensorBoardSink:
    """Scalars under `<run directory>/tensorboard`."""

    def __init__(self, context: SinkContext) -> None:
        _need("tensorboard")
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(
            log_dir=str(context.run_dir / "tensorboard"), purge_step=context.first_step + 1
        )

    def __call__(self, event: Event) -> None:
        for name, value in figures(event).items():
            self._writer.add_scalar(name, value, event.optimizer_steps)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases with the run's own id, so that a resume goes on in it."""

    def __init__(self, context: SinkContext) -> None:
        _need("wandb")
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=re.sub(r"[^\w-]", "-", context.run_id),
            name=context.run_id,
            resume="allow",
            dir=str(context.run_dir),
            config={section: dict(values) for section, values in context.config.items()},
        )
        # Its own step only grows; after a resume rows come again, so ours is a figure like the others.
        self._run.define_metric("optimizer_steps")
        self._run.define_metric("*", step_metric="optimizer_steps")

    def __call__(self, event: Event) -> None:
        if found := figures(event):
            self._run.log({**found, "optimizer_steps": event.optimizer_steps})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class MlflowSink:
    """A run of MLflow in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, context: SinkContext) -> None:
        _need("mlflow")
        mlflow = importlib.import_module("mlflow")
        entities = importlib.import_module("mlflow.entities")
        self._metric: Callable[[str, float, int, int], Any] = entities.Metric
        # A client, not mlflow.start_run: that one's current run belongs to a thread.
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run_id = self._client.create_run(number, run_name=context.run_id).info.run_id
        parameters = [
            entities.Param(f"{section}.{key}", str(value)[:500])
            for section, values in context.config.items()
            for key, value in values.items()
        ]
        self._client.log_batch(self._run_id, params=parameters[:100])
        if parameters[100:]:  # a request holds at most 100
            self._client.log_batch(self._run_id, params=parameters[100:200])

    def __call__(self, event: Event) -> None:
        now = int(time.time() * 1000)
        rows = [
            # its names hold no @
            self._metric(name.replace("@", "_"), value, now, event.optimizer_steps)
            for name, value in figures(event).items()
        ]
        if rows:
            self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


SINKS: Final[dict[str, Callable[[SinkContext], Handler]]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}


def sink_listeners(names: Sequence[str], context: SinkContext) -> list[Listener]:
    """Return a listener for each sink; what is wrong with one is said in the log, later."""
    return [Listener(name, partial(SINKS[name], context)) for name in dict.fromkeys(names)]


def _need(package: str) -> None:
    found = None
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(package)
    if found is None:
        raise ListenerError(
            f"the package {package} is not installed here (pip install {package}); "
            "the run goes on without it."
        )
