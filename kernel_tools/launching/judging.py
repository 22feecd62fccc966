"""What an evaluation is started with: a run's weights, its configuration and its data.

It finds out and decides; nothing is launched here. The weights stay where they are on the remote; a
file from this machine travels with the code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.errors import FetchError, InvalidArgumentError, RunNotFoundError
from kernel_tools.launching.launch import LaunchOptions, LaunchRequest, detector_request
from kernel_tools.results.fetch import LISTING_SECONDS
from kernel_tools.settings import Settings

if TYPE_CHECKING:
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.run import Run
    from kernel_tools.runs.known_runs import KnownRuns

COMMANDS: Final = ("eval", "visualize", "calibrate")  # those that look at weights and make none
WEIGHTS: Final = "weights"
# Where files from this machine lie in the run's tree.
TRAVELS_TO: Final = "given"


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint as the trainer is told of it.

    Attributes:
        path: as it reads from the work folder of the new run, or absolute on the remote.
        travels: the file here, where it must be sent.
    """

    path: str
    travels: Path | None = None


@dataclass(frozen=True, slots=True)
class Judging:
    """What was asked for.

    Attributes:
        command: `eval` or `visualize`.
        config: None for the configuration that the weights were trained with.
        checkpoint: as `find_weights` takes it.
        overrides: `section.key=value`.
        arguments: further words of the command.
        files: further files that travel, by their path in the run's tree.
        options: how it is launched.
    """

    command: str
    config: str | None
    checkpoint: str | None
    overrides: tuple[str, ...]
    arguments: tuple[str, ...]
    files: Mapping[str, Path]
    options: LaunchOptions

    @property
    def needs_run(self) -> bool:
        """True where a run has to be found: for its weights, or for its configuration."""
        return self.config is None or is_of_a_run(self.checkpoint)

    def request(
        self,
        source: Run | None,
        *,
        references: Sequence[DatasetReference],
        again: Sequence[DatasetReference],
        project_dir: Path,
        settings: Settings,
    ) -> LaunchRequest:
        """Return what is to be launched, checked.

        Args:
            source: the run that the weights, or the configuration, are of.
            references: data sets that were named.
            again: the run's own, where none were named.
            project_dir: where a configuration is looked for.
            settings: what `${NAME}` in it may stand for.

        Raises:
            InvalidArgumentError: there are no such weights, or there is no configuration.
            ConfigurationError: the configuration or an override does not fit.
        """
        weights = find_weights(self.checkpoint, source)
        options, files = self.options, dict(self.files)
        if weights.travels is not None:
            files[weights.path] = weights.travels
            options = replace(options, allow_large=True)  # weights are larger than code may be
        config = self.config
        if config is None:
            if source is None:
                raise AssertionError("a configuration is taken from a run")
            config = str(configuration_of(source))
        request = detector_request(
            self.command,
            config,
            overrides=self.overrides,
            # The run's own configuration says where in its data it looks.
            references=references or (again if self.config is not None else ()),
            options=options,
            project_dir=project_dir,
            settings=settings,
            arguments=("--checkpoint", weights.path, *self.arguments),
            files=files,
        )
        title = request.name if source is None else source.record.name
        return replace(
            request,
            name=options.name or f"{self.command}-{title}",
            references=tuple(references or again),
            images_root=None if source is None else source.record.images_root,
        )


def is_of_a_run(checkpoint: str | None) -> bool:
    """True for what names weights inside a run's folder; False for a file here or a path there."""
    return checkpoint is None or not (checkpoint.startswith("/") or _is_here(checkpoint))


def find_weights(checkpoint: str | None, source: Run | None) -> Weights:
    """Return the weights meant by `--checkpoint`.

    Args:
        checkpoint: None for the run's `best.pt`, else its `last.pt`; `best`, `last`, `epoch_3`; a path in
            the run's folder; a file of this machine; an absolute path on the remote.
        source: the run.

    Raises:
        InvalidArgumentError: there are no such weights.
    """
    if checkpoint is not None and not is_of_a_run(checkpoint):
        here = Path(checkpoint).expanduser()
        if here.is_file():
            return Weights(f"{TRAVELS_TO}/{here.name}", here)
        return Weights(checkpoint)
    if source is None:
        raise AssertionError("weights inside a run need the run")
    path = _named(checkpoint, source) if checkpoint else _newest(source)
    return Weights(f"../../{source.id}/{path}")  # from runs/<new run>/work


def source_of(run: Run) -> str | None:
    """Return the id of the run that made the weights which `run` has to do with: often its own.

    None where it looked at weights that no run made.
    """
    words = tuple(run.record.argv or run.document("job.json").get("argv") or ())
    if words[:2] != ("-m", "detector") or words[2:3] not in {(name,) for name in COMMANDS}:
        return run.id
    for option, value in pairwise(words):
        parts = str(value).split("/")
        if option == "--checkpoint" and parts[:2] == ["..", ".."] and len(parts) > 2:
            return parts[2]
    return None


def trained(runs: KnownRuns, run_id: str | None, *, on: str | None) -> Run:
    """Return the run that made the weights which the named run, or the last one, has to do with.

    Raises:
        RunNotFoundError: there is no such run, or no run made them.
    """
    run = runs.get(run_id, on=on)
    made_by = source_of(run)
    if made_by is None and run_id is None:  # it looked at a file; what was there before it?
        earlier = [known for known in runs.newest_first if known.link is run.link]
        made_by = next(filter(None, map(source_of, earlier)), None)
    if made_by is None:
        raise RunNotFoundError(
            f"{run.id} looked at weights that no run made.", hint="Name another: --run RUN."
        )
    return run if made_by == run.id else runs.get(made_by, on=on)


def calibration_of(runs: KnownRuns, named: str, *, on: str | None) -> Path:
    """Return the calibration here that is meant: by its path, or as what a run left.

    Raises:
        InvalidArgumentError: there is none.
    """
    path = runs.project.resolve(named)
    if path.is_file():
        return path
    try:
        return runs.get(named, on=on).bring("evaluation/calibration.json")
    except (RunNotFoundError, FetchError, InvalidArgumentError) as error:
        raise InvalidArgumentError(
            f"there is no calibration {named}, neither a file nor of a run.",
            hint="%remote_eval --calibrate makes one; then give that run's id.",
        ) from error


def configuration_of(run: Run) -> Path:
    """Bring the resolved configuration that a run trained with here.

    Raises:
        InvalidArgumentError: it left none.
    """
    try:
        return run.bring("config.yaml")
    except FetchError as error:
        raise InvalidArgumentError(
            f"{run.id} left no config.yaml: it is no training by `detector`, or it ended too early.",
            hint="Name the configuration: %remote_eval CONFIG.",
        ) from error


def inputs_of(run: Run, known: Sequence[DatasetReference], store: Any) -> list[DatasetReference]:
    """Return the data sets that a run was started on; see `references_of`."""
    return references_of(run.document("job.json").get("inputs") or (), known, store)


def references_of(
    inputs: Sequence[Mapping[str, Any]], known: Sequence[DatasetReference], store: Any
) -> list[DatasetReference]:
    """Return references to the inputs of a job.

    Args:
        inputs: as they stand in `job.json`.
        known: the project's references; what they say of an archive wins.
        store: where those are that the project does not know.
    """
    from kernel_tools.datasets.reference import DatasetReference

    by_hash = {reference.sha256: reference for reference in known}
    found = []
    for one in inputs:
        reference = by_hash.get(str(one.get("sha256")))
        if reference is not None:
            found.append(replace(reference, expected_root=str(one["dest"])))
            continue
        found.append(
            DatasetReference(
                name=str(one["name"]),
                object=str(one["object"]),
                size_bytes=int(one["size_bytes"]),
                sha256=str(one["sha256"]),
                expected_root=str(one["dest"]),
                format=str(one["format"]),
                file_count=one.get("file_count"),
                content_bytes=one.get("content_bytes"),
                store=store.name,
                bucket=store.bucket,
                source_path=None,
            )
        )
    return found


def _is_here(checkpoint: str) -> bool:
    """A bare name, or one below `weights/`, means the run's; any other path that leads to a file is ours."""
    path = Path(checkpoint).expanduser()
    return len(path.parts) > 1 and path.parts[0] != WEIGHTS and path.is_file()


def _newest(source: Run) -> str:
    status = source.status()
    told = status.get("checkpoints") or {}
    path = told.get("best") or told.get("last")
    if path is None:
        raise InvalidArgumentError(
            f"{source.id} has no weights yet ({status['state']}).",
            hint="Wait for its first epoch, or name another: --run RUN.",
        )
    return str(path)


def _named(checkpoint: str, source: Run) -> str:
    path = checkpoint if "/" in checkpoint else f"{WEIGHTS}/{checkpoint}"
    path = path if path.endswith(".pt") else f"{path}.pt"
    listed = source.link.call(
        "files",
        remote_dir=source.record.remote_dir,
        run_id=source.id,
        patterns=[path],
        timeout_seconds=LISTING_SECONDS,
    )["files"]
    if path not in [str(file["path"]) for file in listed]:
        raise InvalidArgumentError(
            f"{source.id} has no {path}, and there is no such file here.",
            hint="--checkpoint takes best, last, epoch_<N>, or a file's path.",
        )
    return path
