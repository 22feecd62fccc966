"""What `--resume` means: a run's last checkpoint, there or in the store, a file of this machine or of the hub.

It finds out and refuses; sending is `launch`'s. A file from here lies on the remote as in a run's folder
of its own, with the rows and best weights that stand beside it, so that the history goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.errors import ConfigurationError, InvalidArgumentError, RunNotFoundError
from kernel_tools.results.fetch import LISTING_SECONDS, sha256_of
from kernel_tools.stores.hub import PREFIX, HubStore, parse_place

if TYPE_CHECKING:
    from kernel_tools.project import Project
    from kernel_tools.results.pushed import PushedSet
    from kernel_tools.run import Run
    from kernel_tools.runs.known_runs import KnownRuns
    from kernel_tools.stores.base import ObjectStore

# As `detector` keeps them: the newest checkpoint, and the one before, which takes over where it is torn.
LAST: Final = ("weights/last.pt", "weights/last.previous.pt")
# What a resume takes along from the folder that the checkpoint stands in.
_BESIDE: Final = ("best.pt", "best.pt.sha256")
_ROWS: Final = ("metrics.jsonl", "steps.jsonl")
# Where in the work folder what comes from the store is laid, as in a run's own folder.
_FROM_STORE: Final = "resumed"
# Where a checkpoint of the hub is laid here, to travel from.
_HUB_FOLDER: Final = ".kernel_tools/hub"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a training goes on from.

    Attributes:
        checkpoint: relative to the remote-dir, POSIX.
        run_id: the run it is of; None for a file of this machine.
        travels: files of this machine, by the path they are to have below the remote-dir.
        inputs: files that the remote brings from the store, each with its presigned URL; then
            `checkpoint` is relative to the new run's work folder.
    """

    checkpoint: str
    run_id: str | None = None
    travels: Mapping[str, Path] = field(default_factory=dict)
    inputs: tuple[tuple[Mapping[str, Any], str], ...] = field(default=(), repr=False)

    def to_json(self, new_run_id: str = "") -> dict[str, str]:
        """Return the value of `job.json`'s `resume` for a run of that id."""
        home = f"runs/{new_run_id}/work/" if self.inputs else ""
        told = {"checkpoint": home + self.checkpoint}
        return told if self.run_id is None else {**told, "run_id": self.run_id}


def find(
    resume: str | None, runs: KnownRuns, *, on: str | None
) -> tuple[Run | None, ResumePoint | None]:
    """Return what is resumed: a run and its checkpoint, or only a file of this machine.

    Raises:
        RunNotFoundError: neither the remote nor the store knows the run.
        InvalidArgumentError: there is no checkpoint, or the run still goes on.
        StoreError: the hub does not give the file.
    """
    if resume is None:
        return None, None
    if resume.startswith(PREFIX):
        return None, of_file(_from_hub(resume, runs.project))
    if is_file(resume):
        return None, of_file(runs.project.resolve(resume))
    try:
        source = runs.get(resume, on=on)
    except RunNotFoundError:  # another machine; is it in the store?
        return _find_in_store(resume, runs, on=on)
    return source, of_run(source)


def _from_hub(place: str, project: Project) -> Path:
    """Bring a checkpoint here from a model repository, as `--push-to` left it; return where it is."""
    repository, key = parse_place(place)
    key = key or Path(LAST[0]).name
    path = project.folder / _HUB_FOLDER / repository / key
    path.parent.mkdir(parents=True, exist_ok=True)
    HubStore.from_settings(project.settings(), repository, kind="model").get(key, path)
    return path


def is_file(text: str) -> bool:
    """True where `--resume` names a file or folder of this machine, and no run."""
    path = Path(text).expanduser()
    return path.suffix == ".pt" or len(path.parts) > 1 or (path.exists() and text not in {".", ""})


def of_file(text: str | Path) -> ResumePoint:
    """Return the point that a checkpoint file here, or a fetched run's folder, stands for.

    Raises:
        InvalidArgumentError: there is no checkpoint.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / LAST[0]
    digest = sha256_of(path)
    if digest is None:
        raise InvalidArgumentError(
            f"there is no checkpoint {text} here.",
            hint="--resume takes a run's id, or the path of its fetched weights/last.pt.",
        )
    home = f"checkpoints/{digest[:12]}"
    travels = {f"{home}/weights/{path.name}": path}
    for name in (f"{path.name}.sha256", *_BESIDE):
        beside = path.with_name(name)
        if beside.is_file():
            travels[f"{home}/weights/{name}"] = beside
    if path.parent.name == "weights":
        travels |= {
            f"{home}/{name}": path.parent.parent / name
            for name in _ROWS
            if (path.parent.parent / name).is_file()
        }
    return ResumePoint(f"{home}/weights/{path.name}", travels=travels)


def of_run(run: Run) -> ResumePoint:
    """Return the last checkpoint of a run on the same remote.

    Raises:
        InvalidArgumentError: it still goes on, or has left no checkpoint.
    """
    if not run.refresh().terminal:
        raise InvalidArgumentError(
            f"{run.id} still goes on ({run.state.value}), so it cannot be resumed.",
            hint=f"%remote_stop {run.id} ends it with a checkpoint.",
        )
    listed = run.link.call(
        "files",
        remote_dir=run.record.remote_dir,
        run_id=run.id,
        patterns=list(LAST),
        timeout_seconds=LISTING_SECONDS,
    )["files"]
    if not listed:
        raise InvalidArgumentError(
            f"{run.id} has left no weights/last.pt to resume from.",
            hint="It ended before its first checkpoint; start it anew without --resume.",
        )
    return ResumePoint(f"runs/{run.id}/{LAST[0]}", run_id=run.id)


def of_pushed(pushed: PushedSet, store: ObjectStore, *, expires_seconds: int) -> ResumePoint:
    """Return the last checkpoint that a run has pushed; the remote brings it from the store by itself.

    Raises:
        InvalidArgumentError: it pushed none.
        StoreError: the store cannot sign.
    """
    names = (LAST[0], f"{LAST[0]}.sha256", *(f"weights/{name}" for name in _BESIDE), *_ROWS)
    inputs = []
    for name in names:
        file = pushed.find(name)
        if file is None:
            continue
        described = {
            "kind": "file",
            "name": f"{pushed.run_id}/{name}",
            "object": file.object,
            "size_bytes": file.size_bytes,
            "sha256": file.sha256,
            "dest": f"{_FROM_STORE}/{name}",
            "format": "file",
        }
        inputs.append((described, store.presign_get(file.object, expires_seconds=expires_seconds)))
    if not inputs or inputs[0][0]["dest"] != f"{_FROM_STORE}/{LAST[0]}":
        raise InvalidArgumentError(
            f"{pushed.run_id} has pushed no {LAST[0]} to resume from.",
            hint="It ended before its first checkpoint; start it anew without --resume.",
        )
    return ResumePoint(f"{_FROM_STORE}/{LAST[0]}", run_id=pushed.run_id, inputs=tuple(inputs))


def _find_in_store(run_id: str, runs: KnownRuns, *, on: str | None) -> tuple[Run, ResumePoint]:
    """Return a run that this machine does not know, and the last checkpoint that it pushed."""
    from kernel_tools.launching.pushing import life_seconds
    from kernel_tools.results.pushed import StoreLink

    where = runs.connections.named(on).name
    try:
        source = runs.from_store(run_id, on=on)
    except (RunNotFoundError, ConfigurationError) as error:
        raise RunNotFoundError(
            f"{where} does not know the run {run_id}, and no store has it: {error}"
        ) from error
    assert isinstance(source.link, StoreLink)
    link = source.link
    return source, of_pushed(link.pushed, link.store, expires_seconds=life_seconds(None))
