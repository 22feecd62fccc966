"""From a request to a live run: check it here, sync the code, send the secrets, start the agent.

Nothing is sent before everything that can be checked here has been. The agent starts a run id at most
once, so that a launch whose reply was lost may be tried again.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.agent.job import Hub
from kernel_tools.errors import ConfigurationError, InvalidArgumentError
from kernel_tools.interrupts import without_frames
from kernel_tools.job import (
    JobSpec,
    Limits,
    check_artifacts,
    check_device,
    check_overrides,
    new_run_id,
    parse_processes,
)
from kernel_tools.launching.pushing import PushPolicy, checkpoint_bytes, life_seconds, sign_targets
from kernel_tools.redact import register_secret
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import Registry, RunRecord
from kernel_tools.settings import Settings
from kernel_tools.stores.base import HUB
from kernel_tools.stores.hub import parse_place
from kernel_tools.travel.source import source_state

if TYPE_CHECKING:
    from kernel_tools.connecting.connection import Connection
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.launching.resuming import ResumePoint
    from kernel_tools.stores.base import ObjectStore
    from kernel_tools.sync import SyncPlan

Report = Callable[[str], None]

# Of one size: the last and the one before it; best and epochs hold less.
KEPT_CHECKPOINTS: Final = 4

# Variables whose value is shown nowhere; the others are paths and numbers.
_CREDENTIAL: Final = re.compile(r"TOKEN|SECRET|PASSWORD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY")


def silent(_line: str) -> None:
    """Report nothing."""


# Each push to the hub is a commit, and a repository keeps what every commit had.
HUB_MINUTES: Final = Hub.minutes


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a job is launched, whatever it runs.

    Attributes:
        nproc_per_node: ranks, or `auto` (the cards seen; 1 on CPU).
        device: auto, cpu, cuda, or cards such as `0,2`.
        artifacts: globs of further files to bring back, relative to the work folder.
        artifact_dir: where fetched files go here.
        sync_paths, exclude, allow_large: what travels beside the default (see `sync`).
        timeout, max_hours, stall_minutes: limits that the agent enforces.
        max_restarts: how often a trainer that crashed is started again, from its last checkpoint.
        push: whether its files go to the store; None: where a store is configured, or data comes from one.
        push_epochs, push_minutes: how often, besides at every best and at the end.
        push_to: `hf://ORG/REPO`: the weights go to this model repository of the hub, at the end and every
            half hour on the way (or every `push_minutes`, where that is longer).
        name: part of the run id (default: the configuration's name).
    """

    nproc_per_node: int | str = "auto"
    device: str = "auto"
    artifacts: Sequence[str] = ()
    artifact_dir: str = "artifacts/remote"
    sync_paths: Sequence[str] = ()
    exclude: Sequence[str] = ()
    allow_large: bool = False
    timeout: float | None = None
    max_hours: float | None = None
    stall_minutes: float = 30.0
    max_restarts: int = 0
    push: bool | None = None
    push_epochs: int = 1
    push_minutes: float = 10.0
    push_to: str | None = None
    name: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LaunchOptions:
        """Build from keywords.

        Raises:
            InvalidArgumentError: one is unknown or does not fit.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidArgumentError(
                    f"{name!r} is no option of a launch.", hint=f"There are: {', '.join(known)}."
                )
        return cls(**options)

    def __post_init__(self) -> None:
        parse_processes(self.nproc_per_node)
        check_device(self.device)
        check_artifacts(self.artifacts)
        if isinstance(self.max_restarts, bool) or self.max_restarts < 0:
            raise InvalidArgumentError(
                f"max_restarts is {self.max_restarts}; it must be a whole number from 0."
            )
        self.limits()
        self.push_policy()
        self.hub_place()

    def hub_place(self) -> Mapping[str, Any] | None:
        """Return the value of `job.json`'s `hub`, checked."""
        if self.push_to is None:
            return None
        repository, path = parse_place(self.push_to)
        return {
            "repository": repository,
            "path": path,
            "minutes": max(HUB_MINUTES, self.push_minutes),
        }

    def push_policy(self) -> PushPolicy:
        """Return when files go to the store, checked."""
        return PushPolicy(self.push_epochs, self.push_minutes)

    def limits(self) -> Limits:
        """Return the limits, checked."""
        return Limits(self.timeout, self.max_hours, self.stall_minutes)


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What is to run, checked as far as it can be here."""

    argv: tuple[str, ...]
    kind: str
    options: LaunchOptions
    references: tuple[DatasetReference, ...] = ()
    images_root: str | None = None  # the data set's folder here, where no reference says it
    extra_files: Mapping[str, Path] = field(default_factory=dict)
    secret_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)  # stands in job.json
    script: str | None = None  # its folder travels
    status_dir: str | None = None
    resume: ResumePoint | None = None
    name: str = "run"
    checkpoint_bytes: int = 0  # about how large one will be


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a dry run returns: everything that would travel; nothing was sent."""

    job: JobSpec
    sync: SyncPlan

    def __str__(self) -> str:
        return "\n".join(
            (
                f"would run: {' '.join(self.job.argv)}",
                f"would sync: {len(self.sync.files)} files, {self.sync.bytes / 1e6:.2f} MB",
                *self.sync.warnings,
                *(
                    [f"would resume from: {self.job.resume['checkpoint']}"]
                    if self.job.resume
                    else ()
                ),
                *(f"would use: {one['object']} as {one['dest']}" for one in self.job.inputs),
                *(
                    [f"would push the weights to: hf://{self.job.hub['repository']}"]
                    if self.job.hub
                    else ()
                ),
            )
        )

    __repr__ = __str__

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, str]:
        from kernel_tools.views.answers import plan_view

        return plan_view(self)._repr_mimebundle_(include, exclude)


def detector_request(
    command: str,
    config: str,
    *,
    overrides: Sequence[str],
    references: Sequence[DatasetReference],
    options: LaunchOptions,
    project_dir: Path,
    settings: Settings,
    arguments: Sequence[str] = (),
    files: Mapping[str, Path] | None = None,
) -> LaunchRequest:
    """Check a `detector` command against its configuration.

    Args:
        command: `train`, `eval`, ...
        config: path or name.
        overrides: `section.key=value`.
        references: data sets; the first becomes `data.root` unless that is set.
        options: how it is launched.
        project_dir: where the configuration is looked for.
        settings: what `${NAME}` in it may stand for.
        arguments: further words of the command.
        files: further files that travel, by their path in the run's tree.

    Raises:
        ConfigurationError: the configuration or an override does not fit.
    """
    overrides = check_overrides(overrides)
    if references and not any(o.startswith("data.root=") for o in overrides):
        overrides = (f"data.root={references[0].expected_root}", *overrides)
    remote_config, own_file, environment, network = _check_config(
        config, overrides, project_dir, settings
    )
    argv = ["-m", "detector", command, "--config", remote_config]
    for override in overrides:
        argv += ["--set", override]
    return LaunchRequest(
        argv=(*argv, *arguments),
        kind="detector",
        options=options,
        references=tuple(references),
        extra_files={**({} if own_file is None else {remote_config: own_file}), **(files or {})},
        secret_environment=environment,
        name=options.name or remote_config.removeprefix("configs/").rpartition(".")[0],
        checkpoint_bytes=checkpoint_bytes(network) if command == "train" else 0,
    )


def plan_launch(request: LaunchRequest, *, project_dir: Path) -> LaunchPlan:
    """Return what a launch would send."""
    from kernel_tools.datasets import input_of

    inputs = [input_of(reference) for reference in request.references]
    return LaunchPlan(_job(request, inputs), _plan_sync(request, project_dir))


@without_frames
def launch(
    request: LaunchRequest,
    *,
    connection: Connection,
    store: ObjectStore | None,
    registry: Registry,
    project_dir: Path,
    push_to: ObjectStore | None = None,
    hub: Callable[[str], ObjectStore] | None = None,
    report: Report = silent,
) -> Run:
    """Sync, send secrets, launch; return the run, not yet watched.

    Args:
        request: what is to run.
        connection: where.
        store: that the data comes from.
        registry: where the run is remembered.
        project_dir: whose code travels.
        push_to: the store that its files go to; None: they stay on the remote until they are fetched.
        hub: opens a repository of the hub, for data sets that are in one.
        report: is handed each line worth printing.

    Raises:
        SyncError, StoreError, KernelError, AgentError: what the name says.
    """
    from kernel_tools.datasets import inputs_for

    plan = _plan_sync(request, project_dir)
    inputs: list[Mapping[str, Any]] = []
    urls: dict[str, str] = {}
    for reference in request.references:
        its_store = hub(reference.bucket) if hub and reference.store == HUB else store
        described, presigned = inputs_for(reference, store=its_store)
        inputs.append(described)
        urls.update(presigned)
    if request.resume is not None:
        for one, url in request.resume.inputs:
            inputs.append(one)
            urls[one["object"]] = url
    drafted = _job(request, inputs, pushes=push_to is not None)
    targets = None
    if push_to is not None:
        targets = sign_targets(
            push_to,
            drafted.run_id,
            expires_seconds=life_seconds(request.options.max_hours),
            largest_bytes=request.checkpoint_bytes,
        )
    synced = connection.sync(plan)
    for line in (*synced.lines(), *synced.warnings):
        report(line)
    figures = {
        "paths": list(synced.paths), "files": synced.files,
        "bytes": synced.bytes, "uploaded": synced.uploaded,
    }  # fmt: skip
    source = source_state(project_dir)
    job = dataclasses.replace(
        drafted, sync=figures, source=None if source is None else source.to_json()
    )
    if request.resume is not None:
        for path, file in request.resume.travels.items():
            report(f"checkpoint_sent={path} size_mb={file.stat().st_size / 1e6:.2f}")
            connection.kernel.put_file(file, f"{connection.remote_dir}/{path}")
    secrets_file = _send_secrets(connection, job.run_id, urls, request.secret_environment, targets)
    record = RunRecord(
        run_id=job.run_id,
        name=job.name,
        created_at=job.created_at,
        where=connection.name,
        remote_dir=connection.remote_dir,
        artifact_dir=str(project_dir / request.options.artifact_dir),
        sync=figures,
        argv=job.argv,
        artifacts=job.artifacts,
        inputs=tuple(str(one["object"]) for one in inputs),
        images_root=request.references[0].source_path
        if request.references
        else request.images_root,
    )
    registry.save(record)  # first: a launch whose reply is lost can still be found again
    connection.call(
        "launch",
        remote_dir=connection.remote_dir,
        job=job.to_json(),
        manifest=synced.manifest,
        secrets_file=secrets_file,
        timeout_seconds=120.0,
    )
    report(f"run_id={job.run_id}")
    return Run(record, link=connection, mirror=RunMirror(registry.folder(job.run_id)))


def _job(
    request: LaunchRequest, inputs: Sequence[Mapping[str, Any]], *, pushes: bool = False
) -> JobSpec:
    now = dt.datetime.now(dt.timezone.utc)
    options = request.options
    run_id = new_run_id(request.name, now=now)
    return JobSpec(
        run_id=run_id,
        name=request.name,
        created_at=now.isoformat(timespec="seconds"),
        argv=request.argv,
        kind=request.kind,
        nproc_per_node=parse_processes(options.nproc_per_node),
        device=options.device,
        inputs=tuple(inputs),
        artifacts=_artifacts(request),
        limits=options.limits(),
        env=dict(request.environment),
        max_restarts=options.max_restarts,
        resume=None if request.resume is None else request.resume.to_json(run_id),
        status_dir=request.status_dir,
        push=options.push_policy().to_json() if pushes else None,
        hub=options.hub_place(),
        checkpoint_bytes=request.checkpoint_bytes * KEPT_CHECKPOINTS,
    )


def _artifacts(request: LaunchRequest) -> tuple[str, ...]:
    """What was named, and the folder that another trainer writes its status and weights to."""
    named = tuple(request.options.artifacts)
    return named if request.status_dir is None else (*named, request.status_dir)


def _plan_sync(request: LaunchRequest, project_dir: Path) -> SyncPlan:
    from kernel_tools.sync import build_plan

    options = request.options
    return build_plan(
        project_dir,
        script=request.script,
        sync_paths=options.sync_paths,
        exclude=options.exclude,
        allow_large=options.allow_large,
        extra_files=request.extra_files,
    )


def _send_secrets(
    connection: Connection,
    run_id: str,
    urls: Mapping[str, str],
    env: Mapping[str, str],
    targets: Mapping[str, Any] | None,
) -> str | None:
    """Put URLs and environment into the remote's 0700 folder; they never stand in a cell."""
    payload: dict[str, Any] = {"inputs": dict(urls), "env": dict(env)}
    if targets is not None:
        payload["push"] = dict(targets)
    return connection.put_secrets(run_id, payload) if any(payload.values()) else None


def _check_config(
    config: str, overrides: Sequence[str], project_dir: Path, settings: Settings
) -> tuple[str, Path | None, dict[str, str], str]:
    """Check a configuration before anything travels.

    Returns:
        its path on the remote; its file here, if it must travel by itself; the environment that it
        names as `${NAME}`; and the network's name.
    """
    from detector import config as detector_config

    environ = {**settings.dotenv, **settings.environ}
    try:
        found = detector_config.find_config(config, project_dir)
        names = detector_config.referenced_environment(found, overrides)
        for name in filter(_CREDENTIAL.search, names):
            register_secret(environ.get(name))  # before an error can quote its value
        loaded = detector_config.load_config(found, overrides, environ=environ)
    except detector_config.ConfigError as error:
        raise ConfigurationError(str(error)) from error
    environment = {n: _portable(environ[n]) for n in names if n in environ}
    found = found.resolve()
    own = (project_dir / "configs").resolve()
    packed = detector_config.packed_configs_dir().resolve()
    if found.is_relative_to(own):
        path = f"configs/{found.relative_to(own).as_posix()}"
        return path, None, environment, loaded.model.backbone_name
    # The packed ones travel as a whole only where the project has no configurations of its own.
    inside = found.is_relative_to(packed)
    path = f"configs/{found.relative_to(packed).as_posix() if inside else found.name}"
    own_file = None if inside and not own.is_dir() else found
    return path, own_file, environment, loaded.model.backbone_name


def _portable(value: str) -> str:
    """Make a relative folder absolute: the remote's work folder is another one."""
    path = Path(value)
    return str(path.resolve()) if not path.is_absolute() and path.is_dir() else value
