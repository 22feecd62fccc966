"""KnownRuns: the runs of one session, and how one is found again: here, on the remote, in the store.

It knows ids and takes runs up; it launches none. What a run can do is in `run.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel_tools.connecting.connection import Connection
from kernel_tools.connecting.connections import Connections
from kernel_tools.errors import (
    AgentError,
    KernelConnectionError,
    KernelTimeoutError,
    KernelToolsError,
    RunNotFoundError,
)
from kernel_tools.project import Project
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord
from kernel_tools.storage import Storage


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of `%remote_runs`."""

    run_id: str
    name: str
    state: str
    created_at: str
    where: str
    world_size: int | None = None
    optimizer_steps: int | None = None


class KnownRuns:
    """The runs that were launched or taken up in one session.

    Attributes:
        project: whose records complete ids.
        connections: through which the remote is asked.
    """

    def __init__(self, project: Project, connections: Connections, storage: Storage) -> None:
        self.project = project
        self.connections = connections
        self._storage = storage
        self._held: dict[str, Run] = {}
        self._last: str | None = None

    # Held here -------------------------------------------------------------------------------

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of this session's runs, the first one first."""
        return tuple(self._held)

    @property
    def newest_first(self) -> tuple[Run, ...]:
        """The runs of this session, the last one launched or taken up first."""
        ordered = sorted(self._held.values(), key=lambda run: run.id == self._last)
        return tuple(reversed(ordered))

    def on(self, connection: Connection) -> list[Run]:
        """Return the runs of this session that are watched through a connection."""
        return [run for run in self._held.values() if run.link is connection]

    def hold(self, run: Run) -> None:
        """Count a run among this session's, as the last one, in place of another of its id."""
        previous = self._held.get(run.id)
        if previous is not None:
            previous.detach()
        self._held[run.id] = run
        self._last = run.id

    def adopt(self, run: Run) -> Run:
        """Hold a run, watch it, and keep the links that it pushes by alive; return it."""
        self.hold(run)
        if isinstance(run.link, Connection):
            self._renew_links(run, run.link)
        return run.watch()

    # Found again -----------------------------------------------------------------------------

    def complete(self, run_id: str) -> str:
        """Return the whole id that a part fits, of this session's runs or else of the project's.

        Raises:
            RunNotFoundError: it fits more than one.
        """
        if run_id in self._held:
            return run_id
        fitting = [known for known in self._held if run_id in known]
        return fitting[0] if len(fitting) == 1 else self.project.registry.find(run_id)

    def get(self, run_id: str | None = None, *, on: str | None = None) -> Run:
        """Return a run by id or a part of it (default: the last one), taking it up if need be.

        Raises:
            RunNotFoundError: there is no such run, or none yet.
        """
        wanted = None if on is None else self.connections.named(on)
        if run_id is None:
            for run in self.newest_first:
                if wanted is None or run.link is wanted:
                    return run
            where = "" if on is None else f" on {on}"
            raise RunNotFoundError(
                f"no run was launched or attached to in this session{where}.",
                hint="%remote_runs lists the runs; %remote_attach RUN takes one up.",
            )
        run_id = self.complete(run_id)
        known = self._held.get(run_id)
        if known is not None and (wanted is None or known.link is wanted):
            return known
        return self.attach(run_id, on=on)

    def attach(self, run_id: str, *, on: str | None = None) -> Run:
        """Take up a run again, as this project or the remote remembers it.

        Raises:
            RunNotFoundError: neither knows it.
        """
        connection = self.connections.named(on)
        run_id = self.complete(run_id)
        known = self._held.get(run_id)
        if known is not None and known.link is connection:
            known.refresh()
            self._last = run_id
            return known.watch()
        registry = self.project.registry
        try:
            record = registry.load(run_id)
        except RunNotFoundError:
            record = self._record_from(connection, run_id)
        run = Run(record, link=connection, mirror=RunMirror(registry.folder(record.run_id)))
        try:
            run.refresh()
        except (AgentError, RunNotFoundError) as error:
            raise RunNotFoundError(
                f"{connection.name} does not know the run {run_id}: {error}",
                hint="%remote_runs lists those it has.",
            ) from error
        return self.adopt(run)

    def from_store(self, run_id: str | None = None, *, on: str | None = None) -> Run:
        """Return a run as its pushes left it in the store; it is not held.

        Raises:
            RunNotFoundError: the store has nothing of it.
            StoreError: the store does not answer, or refuses.
        """
        from kernel_tools.results.pushed import find_pushed, stored

        store = self._storage.store(on)
        if run_id is None:
            run_id = self.get(on=on).id
        link = find_pushed(store, self.complete(run_id))
        return stored(link, store, registry=self.project.registry)

    # Listed ----------------------------------------------------------------------------------

    def rows(self, on: str | None = None) -> tuple[RunRow, ...]:
        """List the runs of the remote and of this project, newest first; see `Session.runs`."""
        rows, silent_one = {}, None
        if self.connections.open or on is not None:
            connection = self.connections.named(on)
            try:
                listed = _listed(connection)
            except (KernelConnectionError, KernelTimeoutError):
                listed, silent_one = [], connection.name
            for row in listed:
                run_id = row["run_id"]
                rows[run_id] = RunRow(
                    run_id,
                    row["name"],
                    row["state"],
                    row["created_at"] or "",
                    connection.name,
                    row.get("world_size"),
                    row.get("optimizer_steps"),
                )
        registry = self.project.registry
        for run_id in registry.run_ids():
            if run_id not in rows:
                record, state = registry.load(run_id), registry.last_state(run_id)
                where = f"{record.where}, no answer" if record.where == silent_one else record.where
                rows[run_id] = RunRow(
                    run_id, record.name, state or "not seen", record.created_at, where
                )
        return tuple(rows[run_id] for run_id in sorted(rows, reverse=True))

    def alive_on(self, connection: Connection) -> list[str]:
        """Return the ids of the runs that go on there; what was last seen, if it does not answer."""
        try:
            listed = _listed(connection)
        except KernelToolsError:
            return [run.id for run in self.on(connection) if not run.snapshot.terminal]
        return [row["run_id"] for row in listed if row.get("agent_alive")]

    def _record_from(self, connection: Connection, run_id: str) -> RunRecord:
        rows = _listed(connection)
        fitting = [row for row in rows if row["run_id"] == run_id]
        fitting = fitting or [row for row in rows if run_id in row["run_id"]]
        if not fitting:
            raise RunNotFoundError(
                f"no run {run_id!r} is known here or on {connection.name}.",
                hint="%remote_runs lists them.",
            )
        if len(fitting) > 1:
            raise RunNotFoundError(
                f"{run_id!r} fits {len(fitting)} runs on {connection.name}.",
                hint=f"Type more of one: {fitting[0]['run_id']}.",
            )
        (row,) = fitting
        return RunRecord(
            run_id=row["run_id"],
            name=row["name"],
            created_at=row["created_at"] or "",
            where=connection.name,
            remote_dir=connection.remote_dir,
            artifact_dir=str(self.project.folder / "artifacts/remote"),
            sync=row.get("sync") or {},
            artifacts=tuple(row.get("artifacts") or ()),
        )

    def _renew_links(self, run: Run, connection: Connection) -> None:
        """Sign the links that the run pushes by anew, while there is contact and when it is time."""
        from kernel_tools.launching.pushing import Renewal

        renewal = Renewal(lambda: self._storage.store(connection.name), connection, run.id)
        run.subscribe(renewal)
        renewal(run.snapshot)  # one that has ended already changes no more


def _listed(connection: Connection) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = connection.call("list_runs", remote_dir=connection.remote_dir)[
        "runs"
    ]
    return rows
