"""Session: the connections, the store and the runs of one notebook. Every surface calls it.

It lives outside the Magics class, so that `%reload_ext` keeps what is going on. It holds no training
logic and draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_tools.connecting.connect import open_connection
from kernel_tools.connecting.connection import Connection
from kernel_tools.connecting.connections import Connections
from kernel_tools.launching.judging import TRAVELS_TO, Judging, calibration_of
from kernel_tools.launching.launch import LaunchOptions, LaunchPlan, Report, silent
from kernel_tools.launching.launcher import Launcher
from kernel_tools.project import Project
from kernel_tools.run import Run
from kernel_tools.runs.known_runs import KnownRuns, RunRow
from kernel_tools.runs.registry import Registry
from kernel_tools.settings import Settings
from kernel_tools.storage import Storage

if TYPE_CHECKING:
    from kernel_tools.datasets.inventory import Inventory
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.kernels.base import CellOutput
    from kernel_tools.preflight import RemoteInfo
    from kernel_tools.receipt import Receipt
    from kernel_tools.sync import SyncPlan, SyncReport
    from kernel_tools.views.compare import Comparison

__all__ = ["RunRow", "Session", "default_session"]


class Session:
    """The state of one notebook or script."""

    def __init__(self, project_dir: Path | None = None) -> None:
        self._project = Project(project_dir)
        self._connections = Connections()
        self._storage = Storage(self._project, self._connections)
        self._runs = KnownRuns(self._project, self._connections, self._storage)
        self._launcher = Launcher(self._project, self._connections, self._storage, self._runs)

    @property
    def project_dir(self) -> Path:
        """The project of the current folder."""
        return self._project.folder

    @property
    def registry(self) -> Registry:
        """The runs that this project has launched."""
        return self._project.registry

    def settings(self) -> Settings:
        """Read the environment and `.env` anew."""
        return self._project.settings()

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
        made = open_connection(
            target, settings=self.settings(), token_env=token_env, kernel_name=kernel_name,
            attach=attach, client=client, remote_dir=remote_dir, name=name,
            password_env=password_env, keep_alive_minutes=keep_alive_minutes,
        )  # fmt: skip
        connection = self._connections.add(made)
        for run in self._runs.on(connection):
            run.reconnected()
        return connection

    def connection(self, on: str | None = None) -> Connection:
        """Return a connection by name, or the last one made.

        Raises:
            NotConnectedError: there is none.
        """
        return self._connections.named(on)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All connections, the default one last."""
        return self._connections.open

    def disconnect(self, on: str | None = None) -> str:
        """Let go of a connection; runs go on. Returns a sentence that says what still runs."""
        connection = self.connection(on)
        running = self._runs.alive_on(connection)
        for run in self._runs.on(connection):
            run.detach()
        return self._connections.let_go(connection, running=running)

    def info(self, *, datasets: Sequence[str] | None = None, on: str | None = None) -> RemoteInfo:
        """Ask what a remote can do, before anything is paid for; it changes nothing there.

        Cards and whether each computes, versions, memory, disk and what to rent, clocks, and whether the
        store can be reached from there. What is not well is a row of the answer, not an error.

        Args:
            datasets: references that a run is to have (default: all that this project has staged).
            on: the connection's name.

        Raises:
            NotConnectedError: there is no connection.
            KernelError, AgentError: there is no answer.
        """
        from kernel_tools import preflight

        connection = self.connection(on)
        return preflight.look(
            connection,
            store=self._storage.opener(connection),
            references=self._storage.known(datasets),
            hub_endpoint=self.settings().get("HF_ENDPOINT"),
        )

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
        from kernel_tools.connecting import remote_cell

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
        return self._storage.stage(
            path, name=name, object_name=object_name, expected_root=expected_root, sha256=sha256,
            config=config, to=to, force=force, dry_run=dry_run, on=on, on_progress=on_progress,
        )  # fmt: skip

    def store_objects(
        self, prefix: str = "", *, to: str = "s3", on: str | None = None
    ) -> Inventory:
        """List what is in the store: whose each object is, what it costs, what a live run needs.

        Args:
            prefix: only objects whose names begin so, or those of a run or data set of that name.
            to: `s3`, or `hf://ORG/REPO`.
            on: whose store.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        from kernel_tools.datasets.inventory import take

        store = self._storage.at(to, on)
        return take(store, self._storage.claims(self.runs(on=on))).below(prefix)

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

        store = self._storage.at(to, on)
        doomed = chosen(take(store, self._storage.claims(self.runs(on=on))), names)
        return doomed if dry_run else doomed.remove_from(store)

    def push_weights(
        self,
        run_id: str | None = None,
        *,
        to: str | None = None,
        weights: str | None = None,
        source: str = "kernel",
        on: str | None = None,
    ) -> str | None:
        """Put a run's weights into a model repository of the hub, private where it is made.

        They come here first, verified; `HF_TOKEN` stays here. What is there already is not sent again.

        Args:
            run_id: an id or a part of it (default: the last run).
            to: `hf://ORG/REPO`, or `hf://ORG/REPO/FILE` for another name than `best.pt` (default: where
                the run's own `push_to` was to put them, if its machine could not).
            weights: `best`, `last` or `epoch_<N>` (default: best).
            source: `kernel`, or `store` where the run's machine is gone.
            on: the connection's name.

        Returns:
            Where they are: `hf://ORG/REPO/FILE`, as `model.weights` takes it; None without `to` where
            nothing was left to do.

        Raises:
            InvalidArgumentError: `to` is no place on the hub.
            FetchError: the run has no such weights.
            StoreError: the hub does not take them.
        """
        from kernel_tools.results import weights_hub

        run = (self.stored_run if source == "store" else self.run)(run_id, on=on)
        if to is None:
            left = weights_hub.left_by(run)
            if left is None:
                return None
            to, weights = left.place, weights or left.weights
        return weights_hub.push(run, to=to, weights=weights or "best", settings=self.settings())

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
                file of this machine or of the hub (`hf://ORG/REPO`, what `push_to` left there).
            dry_run: check and plan only; nothing is sent.
            on: the connection's name (default: the last one made).
            report: is handed each line worth printing (`sync_files=...`).
            options: the fields of `LaunchOptions`: `nproc_per_node=2`, `max_hours=8`, ...

        Raises:
            ConfigurationError: the configuration or an override does not fit; nothing was sent.
            InvalidArgumentError: there is nothing to resume, or no configuration.
            SyncError, StoreError, KernelError, AgentError: what the name says.
        """
        return self._launcher.train(
            config, overrides=overrides, datasets=datasets, resume=resume,
            options=LaunchOptions.of(options), dry_run=dry_run, on=on, report=report,
        )  # fmt: skip

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
        return self._launcher.again(receipt, options=options, dry_run=dry_run, on=on, report=report)

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
        from kernel_tools.launching.programs import script_request

        request = script_request(
            script, arguments, options=LaunchOptions.of(options), project_dir=self.project_dir,
            references=self._storage.references(datasets), status_dir=status_dir,
        )  # fmt: skip
        return self._launcher.carry_out(request, dry_run=dry_run, on=on, report=report)

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
        from kernel_tools.launching.programs import command_request

        request = command_request(
            command, arguments, options=LaunchOptions.of(options),
            references=self._storage.references(datasets), status_dir=status_dir,
        )  # fmt: skip
        return self._launcher.carry_out(request, dry_run=dry_run, on=on, report=report)

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
        asked = Judging(
            "eval", config, checkpoint, tuple(overrides), ("--calibrate",) if calibrate else (), {},
            LaunchOptions.of(options),
        )  # fmt: skip
        return self._launcher.judge(
            asked, run=run, datasets=datasets, dry_run=dry_run, on=on, report=report
        )

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
            path = calibration_of(self._runs, str(calibration), on=on)
            files[f"{TRAVELS_TO}/{path.name}"] = path
            arguments += ["--calibration", f"{TRAVELS_TO}/{path.name}"]
        asked = Judging(
            "visualize", config, checkpoint, tuple(overrides), tuple(arguments), files,
            LaunchOptions.of(options),
        )  # fmt: skip
        return self._launcher.judge(
            asked, run=run, datasets=datasets, dry_run=dry_run, on=on, report=report
        )

    def run(self, run_id: str | None = None, *, on: str | None = None) -> Run:
        """Return a run of this session by id (or an unambiguous part), attaching to it if need be.

        Raises:
            RunNotFoundError: there is no such run, or none yet.
        """
        return self._runs.get(run_id, on=on)

    def attach(self, run_id: str, *, on: str | None = None) -> Run:
        """Take up a run again, from any notebook: its log, its figures, its end.

        Raises:
            RunNotFoundError: neither this project nor the remote knows it.
        """
        return self._runs.attach(run_id, on=on)

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
        return self._runs.from_store(run_id, on=on)

    def runs(self, *, on: str | None = None) -> tuple[RunRow, ...]:
        """List this project's runs and the remote's, newest first.

        What only this project knows is shown as it was last seen; so is everything where the remote
        does not answer, and `where` says so.
        """
        return self._runs.rows(on)

    def compare(self, *run_ids: str, on: str | None = None) -> Comparison:
        """Put runs beside each other: what differs in their settings, their figures, their curves.

        Those that this machine saw end need no connection.

        Args:
            run_ids: ids, or unambiguous parts (default: all runs of this session that do not only judge
                another's weights).
            on: the connection's name.

        Raises:
            InvalidArgumentError: they are fewer than two.
            RunNotFoundError: there is no such run.
        """
        from kernel_tools.results.comparing import comparison

        return comparison(self._runs, run_ids, on=on)


_default: Session | None = None


def default_session() -> Session:
    """Return the session that magics and module-level functions use; made at first use."""
    global _default  # noqa: PLW0603 - one notebook, one session
    if _default is None:
        _default = Session()
    return _default
