"""The receipt of a run: what ran, on what, with which hashes; and how to run the same again.

The agent writes `receipt.json`; here it becomes a value that shows itself, and a launch request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.launching.launch import LaunchOptions, LaunchRequest, detector_request
from kernel_tools.launching.resuming import ResumePoint
from kernel_tools.settings import Settings

if TYPE_CHECKING:
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.sync import SyncPlan

# Where a receipt's configuration is laid here, to travel from.
FOLDER: Final = ".kernel_tools/receipts"
# What travels by itself, so that it need not be named again.
_DEFAULT_PATHS: Final = frozenset(
    {"kernel_tools_agent", "detector", "configs", "pyproject.toml", "README.md"}
)
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Receipt:
    """One run that has ended, as its `receipt.json` tells it.

    Attributes:
        run_id, state: of the run.
        code_sha256: over the sorted (path, mode, hash) of the code that ran.
        git_commit, git_dirty, git_diff_sha256: where the project stood; None outside a repository.
        config_sha256: of the resolved configuration; None for another program than the detector.
        inputs: name, object, destination, SHA-256 and size of each staged input.
        versions: of Python and packages there, by name.
        gpus: name and memory of each card.
        world_size, optimizer_steps: as trained.
        started_at, ended_at: ISO 8601, UTC.
        elapsed_seconds: between them.
        cost: money, None unless a price was known.
        artifacts: path, size and SHA-256 of each file.
        document: all of it, as the agent wrote it.
    """

    run_id: str
    state: str
    code_sha256: str | None
    git_commit: str | None
    git_dirty: bool | None
    git_diff_sha256: str | None
    config_sha256: str | None
    inputs: tuple[Mapping[str, Any], ...]
    versions: Mapping[str, Any]
    gpus: tuple[Mapping[str, Any], ...]
    world_size: int | None
    optimizer_steps: int | None
    started_at: str | None
    ended_at: str | None
    elapsed_seconds: float | None
    cost: float | None
    artifacts: tuple[Mapping[str, Any], ...]
    document: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Receipt:
        """Read a receipt's document.

        Raises:
            InvalidArgumentError: it is none.
        """
        if not isinstance(document.get("job"), dict) or "run_id" not in document:
            raise InvalidArgumentError("this is no receipt of a run: it has no job and no run_id.")
        code, config = document.get("code") or {}, document.get("config") or {}
        return cls(
            run_id=str(document["run_id"]),
            state=str(document.get("state")),
            code_sha256=document.get("code_sha256"),
            git_commit=code.get("git_commit"),
            git_dirty=code.get("git_dirty"),
            git_diff_sha256=code.get("git_diff_sha256"),
            config_sha256=config.get("sha256"),
            inputs=tuple(document.get("inputs") or ()),
            versions=dict(document.get("versions") or {}),
            gpus=tuple(document.get("gpus") or ()),
            world_size=document.get("world_size"),
            optimizer_steps=document.get("optimizer_steps"),
            started_at=document.get("started_at"),
            ended_at=document.get("ended_at"),
            elapsed_seconds=document.get("elapsed_seconds"),
            cost=document.get("cost"),
            artifacts=tuple(document.get("artifacts") or ()),
            document=dict(document),
        )

    @classmethod
    def read(cls, path: Path) -> Receipt:
        """Read a `receipt.json`.

        Raises:
            InvalidArgumentError: there is none, or it is damaged.
        """
        try:
            document = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise InvalidArgumentError(
                f"there is no receipt {path}.",
                hint="%remote_fetch RUN receipt.json brings one; a run's id does too.",
            ) from None
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"the receipt {path} cannot be read: {error}.") from error
        if not isinstance(document, dict):
            raise InvalidArgumentError(f"{path} is no receipt of a run.")
        return cls.from_json(document)

    @property
    def job(self) -> Mapping[str, Any]:
        """`job.json` of the run."""
        job: Mapping[str, Any] = self.document["job"]
        return job

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return (label, value) of what a person looks for, in reading order."""
        change = f"diff {self.git_diff_sha256[:12]}" if self.git_diff_sha256 else "new files"
        dirty = f", changed ({change})" if self.git_dirty else ""
        versions = ", ".join(f"{name} {one}" for name, one in self.versions.items() if one)
        hours = "" if self.elapsed_seconds is None else f", {self.elapsed_seconds:.1f} s"
        return (
            ("state", self.state),
            ("code", _short(self.code_sha256)),
            ("git", "no repository" if self.git_commit is None else self.git_commit[:12] + dirty),
            ("configuration", _short(self.config_sha256)),
            *(("data", f"{one['name']} {_short(one.get('sha256'))}") for one in self.inputs),
            ("versions", versions),
            ("GPUs", ", ".join(str(gpu.get("name")) for gpu in self.gpus) or "none"),
            ("world size", str(self.world_size)),
            ("optimizer steps", str(self.optimizer_steps)),
            ("time", f"{self.started_at} to {self.ended_at}{hours}"),
            ("cost", "no price known" if self.cost is None else f"{self.cost:.2f}"),
            ("artifacts", f"{len(self.artifacts)} files"),
        )

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        lines = [f"  {label:<{width}}  {value}" for label, value in self.rows()]
        return "\n".join([f"receipt of {self.run_id}", *lines])

    __repr__ = __str__

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, str]:
        from kernel_tools.views.static import FactsView

        view = FactsView(f"receipt of {self.run_id}", self.rows())
        return view._repr_mimebundle_(include, exclude)


def again(
    receipt: Receipt,
    *,
    references: Sequence[DatasetReference],
    options: Mapping[str, Any],
    project_dir: Path,
    settings: Settings,
) -> LaunchRequest:
    """Return what runs the same again: job, resolved configuration, threads and ranks.

    Args:
        receipt: of the run.
        references: its data sets.
        options: fields of `LaunchOptions` that are to differ.
        project_dir: whose code runs; see `differing`.
        settings: what `${NAME}` in the configuration stands for.

    Raises:
        InvalidArgumentError: the receipt lacks what is needed.
        ConfigurationError: the configuration does not fit this code.
    """
    job = receipt.job
    kind, argv = str(job.get("kind") or "detector"), [str(word) for word in job.get("argv") or ()]
    chosen = LaunchOptions.of({**_options(receipt), **options})
    request = (
        _detector(receipt, argv, chosen, references, project_dir, settings)
        if kind == "detector"
        else LaunchRequest(
            argv=tuple(argv),
            kind=kind,
            options=replace(chosen, sync_paths=_paths(job, project_dir)),
            references=tuple(references),
            script=argv[0] if kind == "script" else None,
            status_dir=job.get("status_dir"),
        )
    )
    resume = job.get("resume") or {}
    point = ResumePoint(resume["checkpoint"], resume.get("run_id")) if resume else None
    # Sums in another order are other sums: as many threads a rank as then.
    threads = (receipt.document.get("command") or {}).get("environment", {}).get("OMP_NUM_THREADS")
    environment = dict(job.get("env") or {})
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    name = chosen.name or str(job.get("name") or "run")
    return replace(request, name=name, resume=point, environment=environment)


def differing(receipt: Receipt, plan: SyncPlan) -> tuple[str, ...]:
    """Return the code files that are not those of the receipt: changed, new or gone; sorted."""
    then = (receipt.document.get("code") or {}).get("files") or {}
    now = {file.path: file.sha256 for file in plan.files}
    paths = {path for path in {*then, *now} if not path.startswith("configs/")}
    return tuple(sorted(path for path in paths if then.get(path) != now.get(path)))


def warning(receipt: Receipt, paths: Sequence[str]) -> str:
    """Return the line that says so, "" where nothing differs."""
    if not paths:
        return ""
    shown = ", ".join(paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
    at = f"; the receipt is of commit {receipt.git_commit[:12]}" if receipt.git_commit else ""
    return f"code_differs={len(paths)} {shown}{at}"


def _detector(
    receipt: Receipt,
    argv: Sequence[str],
    options: LaunchOptions,
    references: Sequence[DatasetReference],
    project_dir: Path,
    settings: Settings,
) -> LaunchRequest:
    text = (receipt.document.get("config") or {}).get("text")
    if not text or argv[:2] != ["-m", "detector"]:
        raise InvalidArgumentError(
            f"the receipt of {receipt.run_id} holds no configuration: the run ended before it had one.",
            hint="Launch it by its configuration: %remote_train CONFIG.",
        )
    path = project_dir / FOLDER / f"{receipt.run_id}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return detector_request(
        argv[2],
        str(path),
        overrides=(),
        references=references,
        options=options,
        project_dir=project_dir,
        settings=settings,
        arguments=_rest(argv[3:]),
    )


def _options(receipt: Receipt) -> dict[str, Any]:
    job = receipt.job
    limits = job.get("limits") or {}
    ranks = receipt.world_size or job.get("nproc_per_node") or "auto"
    return {
        "nproc_per_node": ranks if job.get("kind") != "command" else "auto",
        "device": str(job.get("device") or "auto"),
        "artifacts": tuple(
            one for one in job.get("artifacts") or () if one != job.get("status_dir")
        ),
        "timeout": limits.get("timeout_seconds"),
        "max_hours": limits.get("max_hours"),
        "stall_minutes": limits.get("stall_minutes") or 30.0,
        "max_restarts": int(job.get("max_restarts") or 0),
        **_pushes(job),
    }


def _pushes(job: Mapping[str, Any]) -> dict[str, Any]:
    """How its files went to the store and to the hub; where they did not, what is set up today decides."""
    options: dict[str, Any] = {}
    push, hub = job.get("push") or {}, job.get("hub") or {}
    if push:
        options |= {"push_epochs": push.get("epochs"), "push_minutes": push.get("minutes")}
    if hub:
        options["push_to"] = f"hf://{hub['repository']}" + (
            f"/{hub['path']}" if hub.get("path") else ""
        )
    return {name: value for name, value in options.items() if value is not None}


def _paths(job: Mapping[str, Any], project_dir: Path) -> tuple[str, ...]:
    """What travelled beside the default, as far as it is still there."""
    paths = [str(path) for path in (job.get("sync") or {}).get("paths") or ()]
    return tuple(
        path for path in paths if path not in _DEFAULT_PATHS and (project_dir / path).exists()
    )


def _rest(words: Sequence[str]) -> list[str]:
    """The words of a command without its configuration and overrides, which are resolved."""
    rest, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in {"--config", "--set"}:
            skip = True
        else:
            rest.append(word)
    return rest


def _short(digest: object) -> str:
    return str(digest)[:12] if digest else "unknown"
