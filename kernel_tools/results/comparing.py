"""Bring what is known of several runs together, for `%remote_compare`.

A run that has ended is read from what is kept on this machine, so that it can be compared without a
connection, weeks later. Drawing is in `views/compare.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kernel_tools.errors import InvalidArgumentError, KernelToolsError, RunNotFoundError
from kernel_tools.run import Run
from kernel_tools.runs.mirror import METRICS, STEPS, RunMirror
from kernel_tools.runs.registry import Registry, RunRecord
from kernel_tools.state import RunSnapshot, RunState, thinned
from kernel_tools.views.compare import Compared, Comparison, settings_of

if TYPE_CHECKING:
    from kernel_tools.runs.known_runs import KnownRuns


def comparison(runs: KnownRuns, run_ids: Sequence[str], *, on: str | None) -> Comparison:
    """Return runs beside each other: those named, or all trainings and programs of the session.

    Raises:
        InvalidArgumentError: they are fewer than two.
        RunNotFoundError: there is no such run.
    """
    named = run_ids or [run_id for run_id in runs.ids if not _judges(runs.get(run_id).record)]
    wanted = dict.fromkeys(runs.complete(run_id) for run_id in named)
    if len(wanted) < 2:
        raise InvalidArgumentError(
            "two runs or more are needed to compare them.", hint="%remote_runs lists the runs."
        )
    found = []
    for run_id in wanted:
        ended = None if run_id in runs.ids else kept(runs.project.registry, run_id)
        found.append(ended or compared(runs.get(run_id, on=on)))
    return Comparison(tuple(found))


def _judges(record: RunRecord) -> bool:
    """True for a run that looks at another's weights: beside trainings it has nothing to compare."""
    return record.argv[:2] == ("-m", "detector") and "train" not in record.argv[:3]


def compared(run: Run) -> Compared:
    """Return a run as it stands now, with what its command line set."""
    run.status()
    argv = run.record.argv
    if not argv:  # launched from elsewhere
        with contextlib.suppress(KernelToolsError, TypeError):
            argv = tuple(map(str, run.document("job.json").get("argv") or ()))
    return Compared(run.snapshot, settings_of(argv))


def kept(registry: Registry, run_id: str) -> Compared | None:
    """Return a run as this machine saw it end; None where it did not, or knows no such run."""
    try:
        record = registry.load(run_id)
    except RunNotFoundError:
        return None
    mirror = RunMirror(registry.folder(run_id))
    try:
        status = json.loads((mirror.folder / "status.json").read_text("utf-8"))
        state = RunState(status["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not state.terminal:
        return None
    return Compared(_snapshot(record, mirror, status, state), settings_of(record.argv))


def _snapshot(
    record: RunRecord, mirror: RunMirror, status: Mapping[str, Any], state: RunState
) -> RunSnapshot:
    return RunSnapshot(
        run_id=record.run_id,
        name=record.name,
        state=state,
        status=MappingProxyType(dict(status)),
        sync=record.sync or None,
        where=record.where,
        local_dir=mirror.folder,
        metrics=mirror.rows(METRICS),
        steps=thinned(mirror.rows(STEPS)),
        message=str(status.get("message") or ""),
    )
