"""Session: the connections, the store and the runs of one notebook. Every surface calls it.

It lives outside the Magics class, so that `%reload_ext` keeps what is going on. It holds no training
logic and draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_tools.connect import open_connection
from kernel_tools.connection import Connection, open_store
from kernel_tools.errors import (
    AgentError,
    InvalidArgumentError,
    KernelToolsError,
    NotConnectedError,
    RunNotFoundError,
)
from kernel_tools.launch import (
    LaunchOptions,
    LaunchPlan,
    Report,
    detector_request,
    launch,
    plan_launch,
    silent,
)
from kernel_tools.mirror import RunMirror
from kernel_tools.registry import Registry, RunRecord
from kernel_tools.run import Run
from kernel_tools.settings import Settings, find_project_dir, load_settings

if TYPE_CHECKING:
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.sync import SyncPlan, SyncReport


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


class Session:
    """The state of one notebook or script."""

    def __init__(self, project_dir: Path | None = None) -> None:
        self._project_dir = project_dir
        self._connections: dict[str, Connection] = {}
        self._disconnected: dict[str, Connection] = {}  # runs go on being watched through these
        self._runs: dict[str, Run] = {}
        self._last_run: str | None = None

    @property
    def project_dir(self) -> Path:
        """The project of the current folder."""
        return self._project_dir or find_project_dir()

    @property
    def registry(self) -> Registry:
        """The runs that this project has launched."""
        return Registry(self.project_dir)

    def settings(self) -> Settings:
        """Read the environment and `.env` anew."""
        return load_settings(self.project_dir)

    # Connections -----------------------------------------------------------------------------

    def connect(
        self,
        target: str | None = None,
        *,
        token_env: str | None = None,
        kernel_name: str = "python3",
        attach: str | None = None,
        client: str = "pyrun",
        remote_dir: str | None = None,
        name: str | None = None,
    ) -> Connection:
        """Connect to a kernel and make it the default for what follows.

        Args:
            target: `local` for the embedded server, a server's URL, or None for `KAGGLE_PROXY_URL`,
                then `PYRUN_JUPYTER_URL`.
            token_env: the *name* of the variable that holds the server's token.
            kernel_name: which kernel specification to start.
            attach: the id of a running kernel to use instead; it is never interrupted or stopped.
            client: `pyrun` or `jupyter`.
            remote_dir: where everything of ours goes on the remote.
            name: the connection's name (default: `local`, or the host).

        Raises:
            ConfigurationError: no URL is set, or the token's variable is empty.
            KernelError: the server does not answer, refuses, or has no such kernel.
        """
        connection = open_connection(
            target,
            settings=self.settings(),
            token_env=token_env,
            kernel_name=kernel_name,
            attach=attach,
            client=client,
            remote_dir=remote_dir,
            name=name,
        )
        previous = self._connections.pop(connection.name, None)
        previous = previous or self._disconnected.pop(connection.name, None)
        if previous is not None:
            previous.take_over(connection)
            connection = previous
            for run in self._runs.values():
                if run.link is connection:
                    run.reconnected()
        self._connections[connection.name] = connection  # the last one made is the default
        return connection

    def connection(self, on: str | None = None) -> Connection:
        """Return a connection by name, or the last one made.

        Raises:
            NotConnectedError: there is none.
        """
        if on is None and self._connections:
            return next(reversed(self._connections.values()))
        if on is not None and on in self._connections:
            return self._connections[on]
        wanted = "there is no connection yet" if on is None else f"there is no connection {on!r}"
        known = f" (there are: {', '.join(self._connections)})" if self._connections else ""
        raise NotConnectedError(
            f"{wanted}{known}.", hint="%remote_connect local, or %remote_connect URL."
        )

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All connections, the default one last."""
        return tuple(self._connections.values())

    def disconnect(self, on: str | None = None) -> str:
        """Let go of a connection; runs go on. Returns a sentence that says what still runs."""
        connection = self.connection(on)
        alive = self._alive_on(connection)
        for run in self._runs.values():
            if run.link is connection:
                run.detach()
        del self._connections[connection.name]
        ended = " The local server and store were ended." if connection.close() else ""
        self._disconnected[connection.name] = connection
        if not alive:
            return f"Disconnected from {connection.name}; none of its runs is going on.{ended}"
        return (
            f"Disconnected from {connection.name}; still running there: {', '.join(alive)}. "
            f"%remote_connect{' local' if connection.local else ''} and "
            f"%remote_attach {alive[0]} come back."
        )

    def _alive_on(self, connection: Connection) -> list[str]:
        try:
            listed = connection.call("list_runs", remote_dir=connection.remote_dir)["runs"]
        except KernelToolsError:
            return [
                run.id
                for run in self._runs.values()
                if run.link is connection and not run.snapshot.terminal
            ]
        return [row["run_id"] for row in listed if row.get("agent_alive")]

    # Data ------------------------------------------------------------------------------------

    def stage_dataset(
        self,
        path: str | Path | None = None,
        *,
        name: str | None = None,
        object_name: str | None = None,
        expected_root: str | None = None,
        sha256: str | None = None,
        to: str = "s3",
        force: bool = False,
        dry_run: bool = False,
        on: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> DatasetReference:
        """Pack, hash and upload a data set once; return a reference that launches can name.

        Raises:
            StagingError: the folder or archive is not fit to be staged.
            StoreError: the store does not take it.
        """
        from kernel_tools.datasets import stage

        if to != "s3":
            raise InvalidArgumentError(
                f"--to {to!r} is not a store that data can be staged to.", hint="Give s3."
            )
        return stage(
            None if path is None else self._resolve(path),
            store=None
            if dry_run and path is not None and not self._reachable()
            else self._store(on),
            project_dir=self.project_dir,
            name=name,
            object_name=object_name,
            expected_root=expected_root,
            sha256=sha256,
            force=force,
            dry_run=dry_run,
            on_progress=on_progress,
        )

    def _reachable(self) -> bool:
        """True where a store can be asked: a connection brings one, or one is configured."""
        return bool(self._connections) or self.settings().get("MINIO_ENDPOINT") is not None

    def _store(self, on: str | None) -> Any:
        settings = self.settings()
        if self._connections or not settings.get("MINIO_ENDPOINT"):
            return self.connection(on).store(settings)
        return open_store(settings, local=False)

    def _resolve(self, path: str | Path) -> Path:
        """Relative paths are looked up in the current folder, then in the project."""
        path = Path(path).expanduser()
        return path.absolute() if path.exists() else self.project_dir / path

    # Code ------------------------------------------------------------------------------------

    def sync(
        self,
        *,
        sync_paths: Sequence[str] = (),
        exclude: Sequence[str] = (),
        allow_large: bool = False,
        dry_run: bool = False,
        on: str | None = None,
    ) -> SyncPlan | SyncReport:
        """Bring the code to the remote, or show what would travel."""
        from kernel_tools.sync import build_plan, sync

        plan = build_plan(
            self.project_dir, sync_paths=sync_paths, exclude=exclude, allow_large=allow_large
        )
        if dry_run:
            return plan
        connection = self.connection(on)
        return sync(connection.client, plan)

    # Runs ------------------------------------------------------------------------------------

    def train(
        self,
        config: str,
        *,
        overrides: Sequence[str] = (),
        datasets: Sequence[str] = (),
        dry_run: bool = False,
        on: str | None = None,
        report: Report = silent,
        **options: Any,
    ) -> Run | LaunchPlan:
        """Launch `detector train` on the remote: check, sync, launch, watch. Returns at once.

        Args:
            config: a configuration's path or name, such as `coins/hgnetv2_n`.
            overrides: `section.key=value`, as `--set`.
            datasets: references staged before; the first becomes `data.root` unless that is set.
            dry_run: check and plan only; nothing is sent.
            on: the connection's name (default: the last one made).
            report: is handed each line worth printing (`sync_files=...`).
            options: the fields of `LaunchOptions`: `nproc_per_node=2`, `max_hours=8`, ...

        Raises:
            ConfigurationError: the configuration or an override does not fit; nothing was sent.
            SyncError, StoreError, KernelError, AgentError: what the name says.
        """
        request = detector_request(
            "train",
            config,
            overrides=overrides,
            references=[self._reference(ref) for ref in datasets],
            options=LaunchOptions.of(options),
            project_dir=self.project_dir,
            settings=self.settings(),
        )
        if dry_run:
            return plan_launch(request, project_dir=self.project_dir)
        connection = self.connection(on)
        store = self._store(on) if request.references else None
        run = launch(
            request,
            connection=connection,
            store=store,
            registry=self.registry,
            project_dir=self.project_dir,
            report=report,
        )
        return self._adopt(run)

    def run(self, run_id: str | None = None, *, on: str | None = None) -> Run:
        """Return a run of this session by id (or an unambiguous part), attaching to it if need be.

        Raises:
            RunNotFoundError: there is no such run, or none yet.
        """
        wanted = None if on is None else self.connection(on)
        if run_id is None:
            newest = sorted(self._runs.values(), key=lambda run: run.id == self._last_run)
            for run in reversed(newest):
                if wanted is None or run.link is wanted:
                    return run
            where = "" if on is None else f" on {on}"
            raise RunNotFoundError(
                f"no run was launched or attached to in this session{where}.",
                hint="%remote_runs lists the runs; %remote_attach RUN takes one up.",
            )
        run_id = self._complete(run_id)
        known = self._runs.get(run_id)
        if known is not None and (wanted is None or known.link is wanted):
            return known
        return self.attach(run_id, on=on)

    def attach(self, run_id: str, *, on: str | None = None) -> Run:
        """Take up a run again, from any notebook: its log, its figures, its end.

        Raises:
            RunNotFoundError: neither this project nor the remote knows it.
        """
        connection = self.connection(on)
        run_id = self._complete(run_id)
        known = self._runs.get(run_id)
        if known is not None and known.link is connection:
            known.refresh()
            self._last_run = run_id
            return known.watch()
        try:
            record = self.registry.load(run_id)
        except RunNotFoundError:
            record = self._record_from_remote(connection, run_id)
        run = Run(record, link=connection, mirror=RunMirror(self.registry.folder(record.run_id)))
        try:
            run.refresh()
        except (AgentError, RunNotFoundError) as error:
            raise RunNotFoundError(
                f"{connection.name} does not know the run {run_id}: {error}",
                hint="%remote_runs lists those it has.",
            ) from error
        return self._adopt(run)

    def runs(self, *, on: str | None = None) -> tuple[RunRow, ...]:
        """List this project's runs and the remote's, newest first."""
        rows = {}
        for run_id in self.registry.run_ids():
            record = self.registry.load(run_id)
            rows[run_id] = RunRow(run_id, record.name, "not seen", record.created_at, record.where)
        if self._connections or on is not None:
            connection = self.connection(on)
            for row in connection.call("list_runs", remote_dir=connection.remote_dir)["runs"]:
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
        return tuple(rows[run_id] for run_id in sorted(rows, reverse=True))

    # Inside ----------------------------------------------------------------------------------

    def _adopt(self, run: Run) -> Run:
        previous = self._runs.get(run.id)
        if previous is not None:
            previous.detach()
        self._runs[run.id] = run
        self._last_run = run.id
        return run.watch()

    def _complete(self, run_id: str) -> str:
        if run_id in self._runs:
            return run_id
        fitting = [known for known in self._runs if run_id in known]
        return fitting[0] if len(fitting) == 1 else self.registry.find(run_id)

    def _record_from_remote(self, connection: Connection, run_id: str) -> RunRecord:
        rows = connection.call("list_runs", remote_dir=connection.remote_dir)["runs"]
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
            artifact_dir=str(self.project_dir / "artifacts/remote"),
            sync=row.get("sync") or {},
            artifacts=tuple(row.get("artifacts") or ()),
        )

    def _reference(self, ref: str) -> DatasetReference:
        from kernel_tools.datasets.reference import DatasetRegistry

        return DatasetRegistry(self.project_dir).resolve(ref)


_default: Session | None = None


def default_session() -> Session:
    """Return the session that magics and module-level functions use; made at first use."""
    global _default  # noqa: PLW0603 - one notebook, one session
    if _default is None:
        _default = Session()
    return _default
