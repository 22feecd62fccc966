"""Launcher: from what was asked for to a run: its weights, data and connection found, then launched.

What a launch sends is in `launch.py`; here is decided what it is sent with, and where to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_tools.connecting.connection import Connection
from kernel_tools.connecting.connections import Connections
from kernel_tools.errors import InvalidArgumentError
from kernel_tools.launching import resuming
from kernel_tools.launching.judging import Judging, configuration_of, trained
from kernel_tools.launching.launch import (
    LaunchOptions,
    LaunchPlan,
    LaunchRequest,
    Report,
    detector_request,
    launch,
    plan_launch,
)
from kernel_tools.project import Project
from kernel_tools.run import Run
from kernel_tools.runs.known_runs import KnownRuns
from kernel_tools.storage import Storage

if TYPE_CHECKING:
    from kernel_tools.receipt import Receipt


class Launcher:
    """Launches for one session; each run it starts is one of the known ones.

    Every method takes `dry_run`, to check and plan only, which sends nothing and needs no connection of
    its own; `on`, a connection's name; and `report`, which is handed each line worth printing.
    """

    def __init__(
        self, project: Project, connections: Connections, storage: Storage, runs: KnownRuns
    ) -> None:
        self._project = project
        self._connections = connections
        self._storage = storage
        self._runs = runs

    def train(
        self,
        config: str | None,
        *,
        overrides: Sequence[str],
        datasets: Sequence[str],
        resume: str | None,
        options: LaunchOptions,
        dry_run: bool,
        on: str | None,
        report: Report,
    ) -> Run | LaunchPlan:
        """Train as `Session.train` says; see there."""
        source, point = resuming.find(resume, self._runs, on=on)
        if config is None:
            if source is None:
                raise InvalidArgumentError(
                    "a configuration is needed.",
                    hint="%remote_train coins/hgnetv2_n, or --resume RUN.",
                )
            config = str(configuration_of(source))
            options = replace(options, name=options.name or source.record.name)
        references = self._storage.references(datasets)
        connection = self._connections.of(source, on)
        if source is not None and not references:
            references = self._storage.inputs_of(source, connection)
        request = detector_request(
            "train",
            config,
            overrides=overrides,
            references=references,
            options=options,
            project_dir=self._project.folder,
            settings=self._project.settings(),
        )
        request = replace(request, resume=point)
        return self.carry_out(request, connection, dry_run=dry_run, on=on, report=report)

    def judge(
        self,
        asked: Judging,
        *,
        run: str | None,
        datasets: Sequence[str],
        dry_run: bool,
        on: str | None,
        report: Report,
    ) -> Run | LaunchPlan:
        """Look at the weights of `run` (default: the last one), as `Session.evaluate` says."""
        if asked.options.push_to is not None:
            raise InvalidArgumentError(
                f"detector {asked.command} writes no weights that could go to {asked.options.push_to}.",
                hint="%remote_fetch RUN --push-to puts those of the run that trained there.",
            )
        source = trained(self._runs, run, on=on) if run is not None or asked.needs_run else None
        connection = self._connections.of(source, on)
        references = self._storage.references(datasets)
        own = [] if datasets or source is None else self._storage.inputs_of(source, connection)
        request = asked.request(
            source,
            references=references,
            again=own,
            project_dir=self._project.folder,
            settings=self._project.settings(),
        )
        return self.carry_out(request, connection, dry_run=dry_run, on=on, report=report)

    def again(
        self,
        receipt: Receipt | str | Path,
        *,
        options: Mapping[str, Any],
        dry_run: bool,
        on: str | None,
        report: Report,
    ) -> Run | LaunchPlan:
        """Launch what a receipt tells once more, as `Session.run_again` says; see there."""
        from kernel_tools.receipt import Receipt, again, differing, warning

        if not isinstance(receipt, Receipt):
            path = self._project.resolve(receipt)
            named = path.suffix == ".json" or len(Path(receipt).parts) > 1
            receipt = Receipt.read(path) if named else self._runs.get(str(receipt), on=on).receipt
        request = again(
            receipt,
            references=self._storage.references_of(receipt.job.get("inputs") or (), on),
            options=options,
            project_dir=self._project.folder,
            settings=self._project.settings(),
        )
        plan = plan_launch(request, project_dir=self._project.folder)
        differs = warning(receipt, differing(receipt, plan.sync))
        if differs:
            report(differs)
        return plan if dry_run else self._launch(request, self._connections.named(on), report)

    def carry_out(
        self,
        request: LaunchRequest,
        connection: Connection | None = None,
        *,
        dry_run: bool,
        on: str | None,
        report: Report,
    ) -> Run | LaunchPlan:
        """Launch, or only plan; without a connection it is the one that `on` names."""
        if dry_run:
            return plan_launch(request, project_dir=self._project.folder)
        return self._launch(request, connection or self._connections.named(on), report)

    def _launch(self, request: LaunchRequest, connection: Connection, report: Report) -> Run:
        store = self._storage.for_data(request.references, connection)
        run = launch(
            request,
            connection=connection,
            store=store,
            registry=self._project.registry,
            project_dir=self._project.folder,
            push_to=self._storage.for_pushes(request.options, store, connection),
            hub=self._storage.hub,
            report=report,
        )
        return self._runs.adopt(run)
