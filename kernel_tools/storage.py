"""Storage: which store is meant, and what of this project lies in it.

It finds the store (the one configured, the embedded one of a local connection, or a repository of the
hub) and the references of data sets. How bytes travel is in `stores/`, packing in `datasets/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.connecting.connection import Connection, open_store
from kernel_tools.connecting.connections import Connections
from kernel_tools.errors import InvalidArgumentError, RunNotFoundError
from kernel_tools.launching.judging import inputs_of, references_of
from kernel_tools.launching.launch import LaunchOptions
from kernel_tools.project import Project
from kernel_tools.run import Run

if TYPE_CHECKING:
    from kernel_tools.datasets.inventory import Claims
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.runs.known_runs import RunRow
    from kernel_tools.stores.base import ObjectStore

S3: Final = "s3"
HUB_SCHEME: Final = "hf://"


class Storage:
    """The stores of a project, as they are reached from one session."""

    def __init__(self, project: Project, connections: Connections) -> None:
        self._project = project
        self._connections = connections

    # Which store -----------------------------------------------------------------------------

    def store(self, on: str | None = None) -> Any:
        """Return the S3 store that is configured, else the embedded one of a connection.

        Raises:
            NotConnectedError: none is configured, and there is no such connection.
            ConfigurationError: none is configured, and the kernel is elsewhere.
        """
        settings = self._project.settings()
        if self._connections.open or not settings.get("MINIO_ENDPOINT"):
            return self._connections.named(on).store(settings)
        return open_store(settings, local=False)

    def hub(self, repository: str) -> ObjectStore:
        """Return a data set repository of the hub."""
        from kernel_tools.stores.hub import HubStore

        return HubStore.from_settings(self._project.settings(), repository)

    def at(self, to: str, on: str | None) -> ObjectStore:
        """Return the store that `s3` or `hf://ORG/REPO` names.

        Raises:
            InvalidArgumentError: it names none.
        """
        if to.startswith(HUB_SCHEME):
            from kernel_tools.stores.hub import parse_place

            return self.hub(parse_place(to)[0])
        if to != S3:
            raise InvalidArgumentError(f"{to!r} is no store.", hint="Give s3 or hf://ORG/REPO.")
        store: ObjectStore = self.store(on)
        return store

    def for_data(
        self, references: Iterable[DatasetReference], connection: Connection
    ) -> ObjectStore | None:
        """Return the store that a run's data sets come from; None where none is in a bucket."""
        from kernel_tools.stores.base import HUB

        in_bucket = any(reference.store != HUB for reference in references)
        return self.store(connection.name) if in_bucket else None

    def for_pushes(
        self, options: LaunchOptions, store: ObjectStore | None, connection: Connection
    ) -> ObjectStore | None:
        """Return the store that a run's files go to: where one is at hand, or was asked for.

        Args:
            options: how the run is launched.
            store: the one that its data comes from.
            connection: where it runs.
        """
        at_hand = store is not None or self._configured()
        if options.push is False or (options.push is None and not at_hand):
            return None
        return self.store(connection.name) if store is None else store

    def opener(self, connection: Connection) -> Callable[[], ObjectStore] | None:
        """Return what opens the store that is configured; None where none is. Nothing is started."""
        return (lambda: self.store(connection.name)) if self._configured() else None

    # Data sets -------------------------------------------------------------------------------

    def stage(
        self,
        path: str | Path | None = None,
        *,
        name: str | None = None,
        object_name: str | None = None,
        expected_root: str | None = None,
        sha256: str | None = None,
        config: str | None = None,
        to: str = S3,
        force: bool = False,
        dry_run: bool = False,
        on: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> DatasetReference:
        """Stage as `Session.stage_dataset` says; see there."""
        from kernel_tools.datasets import stage
        from kernel_tools.datasets.configured import archive_of

        project_dir = self._project.folder
        if config is not None:
            given = archive_of(config, project_dir=project_dir, settings=self._project.settings())
            name, object_name = name or given.name, object_name or given.object
            expected_root, sha256 = expected_root or given.root, sha256 or given.sha256
        if to.startswith(HUB_SCHEME):
            from kernel_tools.stores.hub import parse_place

            repository, key = parse_place(to)
            object_name, store = object_name or key, self.hub(repository)
        elif to != S3:
            raise InvalidArgumentError(
                f"--to {to!r} is not a store that data can be staged to.",
                hint="Give s3 or hf://ORG/REPO.",
            )
        elif dry_run and path is not None and not (self._connections.open or self._configured()):
            store = None  # a plan for a folder here needs none
        else:
            store = self.store(on)
        return stage(
            None if path is None else self._project.resolve(path),
            store=store,
            project_dir=project_dir,
            name=name,
            object_name=object_name,
            expected_root=expected_root,
            sha256=sha256,
            force=force,
            dry_run=dry_run,
            on_progress=on_progress,
        )

    def references(self, refs: Iterable[str]) -> list[DatasetReference]:
        """Return the data sets that launches name; a file of the hub is one at its first use."""
        return [self._reference(ref) for ref in refs]

    def known(self, refs: Iterable[str] | None) -> tuple[DatasetReference, ...]:
        """Return the data sets of this project that are named; None names all of them."""
        if refs is None:
            return self._known()
        return tuple(self._project.datasets.resolve(ref) for ref in refs)

    def inputs_of(self, run: Run, connection: Connection | None) -> list[DatasetReference]:
        """Return the data sets that a run was started on; none without a connection to it."""
        if connection is None or not run.document("job.json").get("inputs"):
            return []
        return inputs_of(run, self._known(), self.store(connection.name))

    def references_of(
        self, inputs: Sequence[Mapping[str, Any]], on: str | None
    ) -> list[DatasetReference]:
        """Return references to the inputs of a job, as they stand in `job.json`."""
        return references_of(inputs, self._known(), self.store(on)) if inputs else []

    def claims(self, runs: Iterable[RunRow]) -> Claims:
        """Return which of the runs go on and what they read, as far as this project knows."""
        from kernel_tools.datasets.inventory import Claims, may_be_live

        live: dict[str, tuple[str, ...] | None] = {}
        for row in runs:
            if may_be_live(row.state, row.created_at):
                try:
                    live[row.run_id] = self._project.registry.load(row.run_id).inputs
                except RunNotFoundError:  # another project's
                    live[row.run_id] = None
        return Claims(live, self._known())

    def _reference(self, ref: str) -> DatasetReference:
        known = self._project.datasets
        if ref.startswith(HUB_SCHEME) and not known.knows(ref):
            return self.stage(to=ref)
        return known.resolve(ref)

    def _known(self) -> tuple[DatasetReference, ...]:
        return tuple(self._project.datasets.load().values())

    def _configured(self) -> bool:
        return self._project.settings().get("MINIO_ENDPOINT") is not None
