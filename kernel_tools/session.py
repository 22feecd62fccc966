"""Session: the connections, the store and the runs of one notebook. Every surface calls it.

It lives outside the Magics class, so that `%reload_ext` keeps what is going on. It holds no training
logic and draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_tools.connect import open_connection
from kernel_tools.connection import Connection, open_store
from kernel_tools.errors import (
    AgentError,
    ConfigurationError,
    FetchError,
    InvalidArgumentError,
    KernelConnectionError,
    KernelTimeoutError,
    KernelToolsError,
    NotConnectedError,
    RunNotFoundError,
)
from kernel_tools.judging import (
    TRAVELS_TO,
    Judging,
    configuration_of,
    inputs_of,
    references_of,
    source_of,
)
from kernel_tools.launch import (
    LaunchOptions,
    LaunchPlan,
    LaunchRequest,
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
    from kernel_tools.datasets.inventory import Claims, Inventory
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.kernels.base import CellOutput
    from kernel_tools.receipt import Receipt
    from kernel_tools.resuming import ResumePoint
    from kernel_tools.stores.base import ObjectStore
    from kernel_tools.sync import SyncPlan, SyncReport
    from kernel_tools.views.compare import Comparison


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
        client: str | None = None,
        remote_dir: str | None = None,
        name: str | None = None,
        password_env: str | None = None,
        keep_alive_minutes: float | None = None,
    ) -> Connection:
        """Connect to a kernel and make it the default for what follows.

        Args:
            target: `local` for the embedded server, a server's URL, or None for `KAGGLE_PROXY_URL`,
                then `PYRUN_JUPYTER_URL`.
            token_env: the *name* of the variable that holds the server's token.
            kernel_name: which kernel specification to start.
            attach: the id of a running kernel to use instead; it is never interrupted or stopped.
            client: `pyrun` or `jupyter` (default: `pyrun` where pyrun-jupyter is installed).
            remote_dir: where everything of ours goes on the remote.
            name: the connection's name (default: `local`, or the host).
            password_env: the *name* of the variable that holds the password of the server's login page.
            keep_alive_minutes: run an empty cell that often, so that an idle session is not ended.

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
            password_env=password_env,
            keep_alive_minutes=keep_alive_minutes,
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

    def execute(
        self,
        code: str,
        *,
        push: Mapping[str, Any] | None = None,
        bring: Sequence[str] = (),
        on: str | None = None,
        on_output: Callable[[CellOutput], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Run code on the remote kernel once, and return the variables of `bring`; see `remote_cell`.

        Raises:
            RemoteExecutionError: the code raised.
            InvalidArgumentError: a value is none that can travel.
            KernelError: the line or the kernel; the code is never sent twice.
        """
        from kernel_tools import remote_cell

        return remote_cell.execute(
            self.connection(on), code, push=push or {}, bring=bring, on_output=on_output
        )

    # Data ------------------------------------------------------------------------------------

    def stage_dataset(
        self,
        path: str | Path | None = None,
        *,
        name: str | None = None,
        object_name: str | None = None,
        expected_root: str | None = None,
        sha256: str | None = None,
        config: str | None = None,
        to: str = "s3",
        force: bool = False,
        dry_run: bool = False,
        on: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> DatasetReference:
        """Pack, hash and upload a data set once; return a reference that launches can name.

        Args:
            path: a folder or an archive; None for an object that is there already.
            name: what launches call it (default: from the file or folder name).
            object_name: the object's key (default: from name and hash; on the hub from the name).
            expected_root: where it unpacks to in a run's work folder (default: `data/<top folder>`).
            sha256: what the archive must have.
            config: a configuration whose `data.archive_object`, `archive_sha256` and `root` stand for what
                is not given.
            to: `s3` for the store that is configured or embedded, `hf://ORG/REPO` for a data set
                repository of the hub (made private), `hf://ORG/REPO/FILE` with the object's name.
            force: stage what looks like credentials; replace another object of that name.
            dry_run: read and hash, but send and record nothing.
            on: whose store.
            on_progress: bytes done, and in all.

        Raises:
            StagingError: the folder or archive is not fit to be staged.
            StoreError: the store does not take it.
        """
        from kernel_tools.datasets import stage
        from kernel_tools.datasets.configured import archive_of

        if config is not None:
            given = archive_of(config, project_dir=self.project_dir, settings=self.settings())
            name, object_name = name or given.name, object_name or given.object
            expected_root, sha256 = expected_root or given.root, sha256 or given.sha256
        if to.startswith("hf://"):
            from kernel_tools.stores.hub import parse_place

            repository, key = parse_place(to)
            object_name, store = object_name or key, self._hub(repository)
        elif to != "s3":
            raise InvalidArgumentError(
                f"--to {to!r} is not a store that data can be staged to.",
                hint="Give s3 or hf://ORG/REPO.",
            )
        elif dry_run and path is not None and not self._reachable():
            store = None
        else:
            store = self._store(on)
        return stage(
            None if path is None else self._resolve(path),
            store=store,
            project_dir=self.project_dir,
            name=name,
            object_name=object_name,
            expected_root=expected_root,
            sha256=sha256,
            force=force,
            dry_run=dry_run,
            on_progress=on_progress,
        )

    def store_objects(self, prefix: str = "", *, to: str = "s3", on: str | None = None) -> Inventory:
        """List what is in the store: whose each object is, what it costs, what a live run needs.

        Args:
            prefix: only objects whose names begin so, or those of a run or data set of that name.
            to: `s3`, or `hf://ORG/REPO`.
            on: whose store.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        from kernel_tools.datasets.inventory import take

        return take(self._store_at(to, on), self._claims(on)).below(prefix)

    def remove_objects(
        self, names: Sequence[str], *, dry_run: bool = True, to: str = "s3", on: str | None = None
    ) -> Inventory:
        """Remove objects, or all of a run or a data set, from the store; return what goes or would go.

        Args:
            names: object names, their beginnings with a final `/`, ids of runs, names of data sets.
            dry_run: only tell; nothing is removed.
            to: `s3`, or `hf://ORG/REPO`.
            on: whose store.

        Raises:
            ObjectNotFoundError: a name fits nothing.
            StagingError: a live run needs one of them; nothing was removed.
            StoreError: the store does not answer, or refuses.
        """
        from kernel_tools.datasets.inventory import chosen, take

        store = self._store_at(to, on)
        doomed = chosen(take(store, self._claims(on)), names)
        return doomed if dry_run else doomed.remove_from(store)

    def push_weights(
        self,
        run_id: str | None = None,
        *,
        to: str,
        weights: str = "best",
        source: str = "kernel",
        on: str | None = None,
    ) -> str:
        """Put a run's weights into a model repository of the hub, private where it is made.

        They come here first, verified; `HF_TOKEN` stays here.

        Args:
            run_id: an id or a part of it (default: the last run).
            to: `hf://ORG/REPO`, or `hf://ORG/REPO/FILE` for another name than `best.pt`.
            weights: `best`, `last` or `epoch_<N>`.
            source: `kernel`, or `store` where the run's machine is gone.
            on: the connection's name.

        Returns:
            Where they are: `hf://ORG/REPO/FILE`, as `model.weights` takes it.

        Raises:
            InvalidArgumentError: `to` is no place on the hub.
            FetchError: the run has no such weights.
            StoreError: the hub does not take them.
        """
        from kernel_tools.stores.base import SHA256_KEY
        from kernel_tools.stores.hub import HubStore, parse_place

        repository, key = parse_place(to)
        key = key or f"{weights}.pt"
        run = (self.stored_run if source == "store" else self.run)(run_id, on=on)
        (file,) = run.fetch(f"weights/{weights}.pt")
        hub = HubStore.from_settings(self.settings(), repository, kind="model")
        hub.put(file.path, key, metadata={SHA256_KEY: file.sha256, "run": run.id})
        return f"hf://{repository}/{key}"

    def _store_at(self, to: str, on: str | None) -> ObjectStore:
        if to.startswith("hf://"):
            from kernel_tools.stores.hub import parse_place

            return self._hub(parse_place(to)[0])
        if to != "s3":
            raise InvalidArgumentError(f"{to!r} is no store.", hint="Give s3 or hf://ORG/REPO.")
        store: ObjectStore = self._store(on)
        return store

    def _hub(self, repository: str) -> ObjectStore:
        from kernel_tools.stores.hub import HubStore

        return HubStore.from_settings(self.settings(), repository)

    def _claims(self, on: str | None) -> Claims:
        """Return which runs go on and what they read, as far as is known here and on the remote."""
        from kernel_tools.datasets.inventory import Claims, may_be_live

        live: dict[str, tuple[str, ...] | None] = {}
        for row in self.runs(on=on):
            if may_be_live(row.state, row.created_at):
                try:
                    live[row.run_id] = self.registry.load(row.run_id).inputs
                except RunNotFoundError:  # another project's
                    live[row.run_id] = None
        return Claims(live, self._known_references())

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
        from kernel_tools.sync import build_plan

        plan = build_plan(
            self.project_dir, sync_paths=sync_paths, exclude=exclude, allow_large=allow_large
        )
        if dry_run:
            return plan
        return self.connection(on).sync(plan)

    # Runs ------------------------------------------------------------------------------------

    def train(
        self,
        config: str | None = None,
        *,
        overrides: Sequence[str] = (),
        datasets: Sequence[str] = (),
        resume: str | None = None,
        dry_run: bool = False,
        on: str | None = None,
        report: Report = silent,
        **options: Any,
    ) -> Run | LaunchPlan:
        """Launch `detector train` on the remote: check, sync, launch, watch. Returns at once.

        Args:
            config: a configuration's path or name, such as `coins/hgnetv2_n`; may be left out with a
                run to resume, whose own it then is.
            overrides: `section.key=value`, as `--set`.
            datasets: references staged before; the first becomes `data.root` unless that is set.
            resume: go on from the last checkpoint of this run (an id or a part of it), or from this
                file of this machine.
            dry_run: check and plan only; nothing is sent.
            on: the connection's name (default: the last one made).
            report: is handed each line worth printing (`sync_files=...`).
            options: the fields of `LaunchOptions`: `nproc_per_node=2`, `max_hours=8`, ...

        Raises:
            ConfigurationError: the configuration or an override does not fit; nothing was sent.
            InvalidArgumentError: there is nothing to resume, or no configuration.
            SyncError, StoreError, KernelError, AgentError: what the name says.
        """
        chosen = LaunchOptions.of(options)
        source, point = self._resume_point(resume, on)
        if config is None:
            if source is None:
                raise InvalidArgumentError(
                    "a configuration is needed.",
                    hint="%remote_train coins/hgnetv2_n, or --resume RUN.",
                )
            config = str(configuration_of(source))
            chosen = replace(chosen, name=chosen.name or source.record.name)
        references = [self._reference(ref) for ref in datasets]
        connection = self._connection_of(source, on)
        if source is not None and not references:
            references = self._inputs_again(source, connection)
        request = detector_request(
            "train",
            config,
            overrides=overrides,
            references=references,
            options=chosen,
            project_dir=self.project_dir,
            settings=self.settings(),
        )
        request = replace(request, resume=point)
        return self._carry_out(request, connection, dry_run=dry_run, on=on, report=report)

    def run_again(
        self,
        receipt: Receipt | str | Path,
        *,
        dry_run: bool = False,
        on: str | None = None,
        report: Report = silent,
        **options: Any,
    ) -> Run | LaunchPlan:
        """Launch what a receipt tells once more: same configuration, data, ranks and threads.

        Args:
            receipt: a receipt, the path of a `receipt.json`, or a run's id.
            dry_run: check and plan only; nothing is sent.
            on: the connection's name.
            report: is handed each line worth printing; one says where the code differs.
            options: fields of `LaunchOptions` that are to differ from then.

        Raises:
            InvalidArgumentError: there is no such receipt, or it lacks what is needed.
            ConfigurationError: the configuration does not fit this code.
            SyncError, StoreError, KernelError, AgentError: what the name says.
        """
        from kernel_tools.receipt import Receipt, again, differing, warning

        if not isinstance(receipt, Receipt):
            path = self._resolve(receipt)
            named = path.suffix == ".json" or len(Path(receipt).parts) > 1
            receipt = Receipt.read(path) if named else self.run(str(receipt), on=on).receipt
        inputs = receipt.job.get("inputs") or ()
        request = again(
            receipt,
            references=self._references_of(inputs, on) if inputs else (),
            options=options,
            project_dir=self.project_dir,
            settings=self.settings(),
        )
        plan = plan_launch(request, project_dir=self.project_dir)
        differs = warning(receipt, differing(receipt, plan.sync))
        if differs:
            report(differs)
        return plan if dry_run else self._launch(request, self.connection(on), report)

    def run_script(
        self,
        script: str | Path,
        arguments: Sequence[str] = (),
        *,
        datasets: Sequence[str] = (),
        status_dir: str | None = None,
        dry_run: bool = False,
        on: str | None = None,
        report: Report = silent,
        **options: Any,
    ) -> Run | LaunchPlan:
        """Launch a Python file of the project under torchrun, as a run like any other.

        Args:
            script: relative to the project; its folder travels.
            arguments: its own.
            datasets: references; each lies at its expected root in the run's work folder.
            status_dir: folder in the work folder where it writes a `status.json` in LibreYOLO's manner
                (default: the run directory, which `RUN_DIR` names).
            dry_run: check and plan only; nothing is sent.
            on: the connection's name.
            report: is handed each line worth printing.
            options: the fields of `LaunchOptions`.

        Raises:
            InvalidArgumentError: there is no such file, or an option does not fit.
            SyncError, StoreError, KernelError, AgentError: what the name says.
        """
        from kernel_tools.programs import script_request

        request = script_request(
            script,
            arguments,
            options=LaunchOptions.of(options),
            project_dir=self.project_dir,
            references=[self._reference(ref) for ref in datasets],
            status_dir=status_dir,
        )
        return self._carry_out(request, None, dry_run=dry_run, on=on, report=report)

    def run_command(
        self,
        command: str | Sequence[str],
        arguments: Sequence[str] = (),
        *,
        datasets: Sequence[str] = (),
        status_dir: str | None = None,
        dry_run: bool = False,
        on: str | None = None,
        report: Report = silent,
        **options: Any,
    ) -> Run | LaunchPlan:
        """Launch any command line in the run's work folder, as a run like any other.

        `python` and installed programs are those of the kernel's environment. A string is split as a
        shell would; where it holds what only a shell understands, `sh` runs it. Else as `run_script`.
        """
        from kernel_tools.programs import command_request

        request = command_request(
            command,
            arguments,
            options=LaunchOptions.of(options),
            references=[self._reference(ref) for ref in datasets],
            status_dir=status_dir,
        )
        return self._carry_out(request, None, dry_run=dry_run, on=on, report=report)

    def evaluate(
        self,
        config: str | None = None,
        *,
        run: str | None = None,
        checkpoint: str | None = None,
        calibrate: bool = False,
        overrides: Sequence[str] = (),
        datasets: Sequence[str] = (),
        dry_run: bool = False,
        on: str | None = None,
        report: Report = silent,
        **options: Any,
    ) -> Run | LaunchPlan:
        """Launch `detector eval` on a run's weights, as a run of its own. Returns at once.

        When it has ended, `run.evaluation()` has what it found.

        Args:
            config: None for the configuration that the weights were trained with.
            run: whose weights, by id or a part of it (default: the last run).
            checkpoint: `best`, `last`, `epoch_3`, a file here, or an absolute path on the remote
                (default: the run's best weights, else its last).
            calibrate: also count what scores are worth, for `visualize(calibration=run.id)`.
            overrides: `section.key=value`, as `--set`.
            datasets: references (default: the data sets of the run).
            dry_run: check and plan only.
            on: the connection's name (default: the run's).
            report: is handed each line worth printing.
            options: the fields of `LaunchOptions`.

        Raises:
            RunNotFoundError: there is no such run, or none yet.
            InvalidArgumentError: it has no such weights.
            ConfigurationError: the configuration or an override does not fit; nothing was sent.
            SyncError, StoreError, KernelError, AgentError: what the name says.
        """
        return self._judge(
            "eval", config, run=run, checkpoint=checkpoint, overrides=overrides, datasets=datasets,
            dry_run=dry_run, on=on, report=report, options=options,
            arguments=("--calibrate",) if calibrate else (),
        )  # fmt: skip

    def visualize(
        self,
        config: str | None = None,
        *,
        run: str | None = None,
        checkpoint: str | None = None,
        count: int = 8,
        min_score: float = 0.5,
        calibration: str | Path | None = None,
        overrides: Sequence[str] = (),
        datasets: Sequence[str] = (),
        dry_run: bool = False,
        on: str | None = None,
        report: Report = silent,
        **options: Any,
    ) -> Run | LaunchPlan:
        """Launch `detector visualize` on a run's weights, as a run of its own. Returns at once.

        When it has ended, `run.pictures()` brings what it drew: the first `count` held-out pictures
        with the truth and the predictions from `min_score` on; with a `calibration` (a file of
        `detector calibrate`, or the id of an evaluation that calibrated) with their precision too.
        All else is as in `evaluate`.
        """
        arguments = ["--count", str(count), "--min-score", str(min_score)]
        files: dict[str, Path] = {}
        if calibration is not None:
            path = self._calibration(str(calibration), on)
            files[f"{TRAVELS_TO}/{path.name}"] = path
            arguments += ["--calibration", f"{TRAVELS_TO}/{path.name}"]
        return self._judge(
            "visualize", config, run=run, checkpoint=checkpoint, overrides=overrides,
            datasets=datasets, dry_run=dry_run, on=on, report=report, options=options,
            arguments=arguments, files=files,
        )  # fmt: skip

    def run(self, run_id: str | None = None, *, on: str | None = None) -> Run:
        """Return a run of this session by id (or an unambiguous part), attaching to it if need be.

        Raises:
            RunNotFoundError: there is no such run, or none yet.
        """
        wanted = None if on is None else self.connection(on)
        if run_id is None:
            for run in self._newest_first():
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

    def stored_run(self, run_id: str | None = None, *, on: str | None = None) -> Run:
        """Return a run as its pushes left it in the store, whether its machine is there or not.

        Its files, figures and log are those of the last push; it cannot be told anything.

        Args:
            run_id: an id, or a part that fits one run here or in the store (default: the last run).
            on: whose store (default: the one that is configured, or of the last connection made).

        Raises:
            RunNotFoundError: the store has nothing of it.
            StoreError: the store does not answer, or refuses.
        """
        from kernel_tools.pushed import find_pushed, stored

        store = self._store(on)
        if run_id is None:
            run_id = self.run(on=on).id
        return stored(find_pushed(store, self._complete(run_id)), store, registry=self.registry)

    def runs(self, *, on: str | None = None) -> tuple[RunRow, ...]:
        """List this project's runs and the remote's, newest first.

        What only this project knows is shown as it was last seen; so is everything where the remote
        does not answer, and `where` says so.
        """
        rows, silent_one = {}, None
        if self._connections or on is not None:
            connection = self.connection(on)
            try:
                listed = connection.call("list_runs", remote_dir=connection.remote_dir)["runs"]
            except (KernelConnectionError, KernelTimeoutError):
                listed, silent_one = (), connection.name
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
        for run_id in self.registry.run_ids():
            if run_id not in rows:
                record, state = self.registry.load(run_id), self.registry.last_state(run_id)
                where = f"{record.where}, no answer" if record.where == silent_one else record.where
                rows[run_id] = RunRow(
                    run_id, record.name, state or "not seen", record.created_at, where
                )
        return tuple(rows[run_id] for run_id in sorted(rows, reverse=True))

    def compare(self, *run_ids: str, on: str | None = None) -> Comparison:
        """Put runs beside each other: what differs in their settings, their figures, their curves.

        Those that this machine saw end need no connection.

        Args:
            run_ids: ids, or unambiguous parts (default: all runs of this session).
            on: the connection's name.

        Raises:
            InvalidArgumentError: they are fewer than two.
            RunNotFoundError: there is no such run.
        """
        from kernel_tools.comparing import compared, kept
        from kernel_tools.views.compare import Comparison

        wanted = dict.fromkeys(self._complete(run_id) for run_id in run_ids or self._runs)
        if len(wanted) < 2:
            raise InvalidArgumentError(
                "two runs or more are needed to compare them.", hint="%remote_runs lists the runs."
            )
        runs = []
        for run_id in wanted:
            ended = None if run_id in self._runs else kept(self.registry, run_id)
            runs.append(ended or compared(self.run(run_id, on=on)))
        return Comparison(tuple(runs))

    # Inside ----------------------------------------------------------------------------------

    def _carry_out(
        self,
        request: LaunchRequest,
        connection: Connection | None,
        *,
        dry_run: bool,
        on: str | None,
        report: Report,
    ) -> Run | LaunchPlan:
        """Launch, or only plan, which needs no connection; without one it is the one that `on` names."""
        if dry_run:
            return plan_launch(request, project_dir=self.project_dir)
        return self._launch(request, connection or self.connection(on), report)

    def _launch(self, request: LaunchRequest, connection: Connection, report: Report) -> Run:
        from kernel_tools.stores.base import HUB

        in_bucket = any(reference.store != HUB for reference in request.references)
        store = self._store(connection.name) if in_bucket else None
        run = launch(
            request,
            connection=connection,
            store=store,
            registry=self.registry,
            project_dir=self.project_dir,
            push_to=self._push_store(request.options, store, connection),
            hub=self._hub,
            report=report,
        )
        return self._adopt(run)

    def _push_store(
        self, options: LaunchOptions, store: ObjectStore | None, connection: Connection
    ) -> ObjectStore | None:
        """Return the store that a run's files go to: where one is at hand, or was asked for."""
        at_hand = store is not None or self.settings().get("MINIO_ENDPOINT") is not None
        if options.push is False or (options.push is None and not at_hand):
            return None
        return self._store(connection.name) if store is None else store

    def _judge(
        self,
        command: str,
        config: str | None,
        *,
        run: str | None,
        checkpoint: str | None,
        overrides: Sequence[str],
        datasets: Sequence[str],
        dry_run: bool,
        on: str | None,
        report: Report,
        options: Mapping[str, Any],
        arguments: Sequence[str] = (),
        files: Mapping[str, Path] | None = None,
    ) -> Run | LaunchPlan:
        """Launch a command of the detector that looks at weights."""
        asked = Judging(
            command, config, checkpoint, tuple(overrides), tuple(arguments), files or {},
            LaunchOptions.of(options),
        )  # fmt: skip
        source = self._trained(run, on=on) if run is not None or asked.needs_run else None
        connection = self._connection_of(source, on)
        references = [self._reference(ref) for ref in datasets]
        again = () if datasets or source is None else self._inputs_again(source, connection)
        request = asked.request(
            source, references=references, again=again,
            project_dir=self.project_dir, settings=self.settings(),
        )  # fmt: skip
        return self._carry_out(request, connection, dry_run=dry_run, on=on, report=report)

    def _calibration(self, named: str, on: str | None) -> Path:
        """Return the file here that is meant: by its path, or as what a run left."""
        path = self._resolve(named)
        if path.is_file():
            return path
        try:
            return self.run(named, on=on).bring("evaluation/calibration.json")
        except (RunNotFoundError, FetchError, InvalidArgumentError) as error:
            raise InvalidArgumentError(
                f"there is no calibration {named}, neither a file nor of a run.",
                hint="%remote_eval --calibrate makes one; then give that run's id.",
            ) from error

    def _trained(self, run_id: str | None, *, on: str | None) -> Run:
        """Return the run that made the weights which the named run, or the last one, has to do with."""
        run = self.run(run_id, on=on)
        made_by = source_of(run)
        if made_by is None and run_id is None:  # it looked at a file; what was there before it?
            earlier = [known for known in self._newest_first() if known.link is run.link]
            made_by = next(filter(None, map(source_of, earlier)), None)
        if made_by is None:
            raise RunNotFoundError(
                f"{run.id} looked at weights that no run made.", hint="Name another: --run RUN."
            )
        return run if made_by == run.id else self.run(made_by, on=on)

    def _connection_of(self, run: Run | None, on: str | None) -> Connection | None:
        """Return the run's own connection, so that its weights are at hand; None without a run."""
        if run is None:
            return None
        held = [connection for connection in self.connections if connection is run.link]
        return held[0] if held else self.connection(on)

    def _inputs_again(self, run: Run, connection: Connection | None) -> list[DatasetReference]:
        if connection is None or not run.document("job.json").get("inputs"):
            return []
        return inputs_of(run, self._known_references(), self._store(connection.name))

    def _resume_point(
        self, resume: str | None, on: str | None
    ) -> tuple[Run | None, ResumePoint | None]:
        """Return what is resumed: a run on the remote and its checkpoint, or a file of this machine."""
        from kernel_tools import resuming

        if resume is None:
            return None, None
        if resuming.is_file(resume):
            return None, resuming.of_file(self._resolve(resume))
        try:
            source = self.run(resume, on=on)
        except RunNotFoundError:  # another machine; is it in the store?
            return self._resume_from_store(resume, on)
        return source, resuming.of_run(source)

    def _resume_from_store(self, run_id: str, on: str | None) -> tuple[Run, ResumePoint]:
        """Return a run that this machine does not know, and its last checkpoint, from the store.

        Raises:
            RunNotFoundError: the store does not know it either.
        """
        from kernel_tools import resuming
        from kernel_tools.pushed import StoreLink
        from kernel_tools.pushing import life_seconds

        where = self.connection(on).name
        try:
            source = self.stored_run(run_id, on=on)
        except (RunNotFoundError, ConfigurationError) as error:
            raise RunNotFoundError(
                f"{where} does not know the run {run_id}, and no store has it: {error}"
            ) from error
        assert isinstance(source.link, StoreLink)
        point = resuming.of_pushed(
            source.link.pushed, source.link.store, expires_seconds=life_seconds(None)
        )
        return source, point

    def _references_of(
        self, inputs: Sequence[Mapping[str, Any]], on: str | None
    ) -> list[DatasetReference]:
        return references_of(inputs, self._known_references(), self._store(on))

    def _known_references(self) -> tuple[DatasetReference, ...]:
        from kernel_tools.datasets.reference import DatasetRegistry

        return tuple(DatasetRegistry(self.project_dir).load().values())

    def _adopt(self, run: Run) -> Run:
        previous = self._runs.get(run.id)
        if previous is not None:
            previous.detach()
        self._runs[run.id] = run
        self._last_run = run.id
        if isinstance(run.link, Connection):
            self._renew_links(run, run.link)
        return run.watch()

    def _renew_links(self, run: Run, connection: Connection) -> None:
        """Sign the links that the run pushes by anew, while there is contact and when it is time."""
        from kernel_tools.pushing import Renewal, life_seconds

        renewal = Renewal(
            lambda: self._store(connection.name), connection, run.id, life=life_seconds(None)
        )
        run.subscribe(renewal)

    def _newest_first(self) -> list[Run]:
        """The runs of this session, the last one launched or taken up first."""
        return sorted(self._runs.values(), key=lambda run: run.id == self._last_run)[::-1]

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

        known = DatasetRegistry(self.project_dir)
        if ref.startswith("hf://") and not known.knows(ref):
            return self.stage_dataset(to=ref)
        return known.resolve(ref)


_default: Session | None = None


def default_session() -> Session:
    """Return the session that magics and module-level functions use; made at first use."""
    global _default  # noqa: PLW0603 - one notebook, one session
    if _default is None:
        _default = Session()
    return _default
