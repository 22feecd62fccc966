"""`job.json` as frozen, validated values. No secrets are in it, and none are let in."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Tuple, Union

from .errors import AgentError
from .files import Json, clean_relative, read_json

KINDS = ("detector", "script", "command")
FORMATS = ("tar", "tar.gz", "zip", "file")
# A path component, safe on every file system; run ids are made by the launcher.
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class Input:
    """One object to be in place before the trainer starts; `dest` is relative to the work folder."""

    kind: str
    name: str
    object: str
    dest: str
    format: str
    size_bytes: Optional[int] = None
    sha256: Optional[str] = None
    file_count: Optional[int] = None
    content_bytes: Optional[int] = None


@dataclass(frozen=True)
class Limits:
    """When the agent ends a run by itself. None means never.

    `timeout_seconds` counts from the start of the trainer, `max_hours` from the start of the run,
    staging included. `grace_seconds` is what the trainer has for saving before it gets SIGTERM.
    """

    timeout_seconds: Optional[float] = None
    max_hours: Optional[float] = None
    stall_minutes: Optional[float] = 30.0
    grace_seconds: float = 30.0


@dataclass(frozen=True)
class PushPolicy:
    """When the run's files go to the store besides at its end: every best, every N epochs, every M minutes."""

    epochs: Optional[int] = 1
    minutes: Optional[float] = 10.0


@dataclass(frozen=True)
class Hub:
    """The model repository that the weights go to, at the end and every so many minutes on the way.

    `path` names the file there; without it they have their own names.
    """

    repository: str
    path: Optional[str] = None
    minutes: float = 30.0


@dataclass(frozen=True)
class Job:
    """What is to be run. See `from_json` for the document."""

    run_id: str
    name: str
    kind: str
    argv: Tuple[str, ...]
    nproc_per_node: Union[int, str] = "auto"
    device: str = "auto"
    env: Tuple[Tuple[str, str], ...] = ()
    inputs: Tuple[Input, ...] = ()
    artifacts: Tuple[str, ...] = ()
    limits: Limits = Limits()
    max_restarts: int = 0
    resume_checkpoint: Optional[str] = None
    datasets_dir: Optional[str] = None
    status_dir: Optional[str] = None  # where another trainer writes its status, in the work folder
    checkpoint_bytes: int = 0  # what the checkpoints will take on disk
    push: Optional[PushPolicy] = None  # None: nothing goes to the store
    hub: Optional[Hub] = None  # None: nothing goes to the Hugging Face Hub

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Job:
        """Validate a JobSpec document. Raises AgentError naming the field that is wrong."""
        run_id = check_run_id(document.get("run_id"))
        if "X-Amz-Signature" in json.dumps(document):
            raise AgentError("the job holds a presigned URL, which belongs in the secrets file")
        kind = document.get("kind", "detector")
        _require(kind in KINDS, "kind", kind)
        argv = document.get("argv")
        _require(_is_strings(argv) and bool(argv), "argv", argv)
        nproc = document.get("nproc_per_node", "auto")
        _require(nproc == "auto" or (_is_int(nproc) and nproc > 0), "nproc_per_node", nproc)
        artifacts = document.get("artifacts") or []
        _require(_is_strings(artifacts), "artifacts", artifacts)
        for pattern in artifacts:
            _require(clean_relative(pattern) is not None, "artifacts", pattern)
        env = document.get("env") or {}
        _require(isinstance(env, dict) and _is_strings(list(env.values())), "env", env)
        restarts = document.get("max_restarts") or 0
        _require(_is_int(restarts) and restarts >= 0, "max_restarts", restarts)
        resume = document.get("resume") or {}
        status_dir = document.get("status_dir")
        _require(
            status_dir is None
            or (isinstance(status_dir, str) and clean_relative(status_dir) is not None),
            "status_dir", status_dir,
        )  # fmt: skip
        checkpoints = document.get("checkpoint_bytes") or 0
        _require(_is_int(checkpoints) and checkpoints >= 0, "checkpoint_bytes", checkpoints)
        return cls(
            run_id=run_id,
            name=str(document.get("name") or run_id),
            kind=str(kind),
            argv=tuple(argv or ()),
            nproc_per_node=nproc,
            device=str(document.get("device") or "auto"),
            env=tuple(sorted(env.items())),
            inputs=tuple(_input(entry) for entry in document.get("inputs") or ()),
            artifacts=tuple(artifacts),
            limits=_limits(document.get("limits") or {}),
            max_restarts=restarts,
            resume_checkpoint=resume.get("checkpoint"),
            datasets_dir=document.get("datasets_dir"),
            status_dir=None if status_dir is None else clean_relative(status_dir),
            checkpoint_bytes=checkpoints,
            push=_push(document.get("push")),
            hub=_hub(document.get("hub")),
        )

    @classmethod
    def of_run(cls, run_dir: str) -> Job:
        """Read the job of a run directory."""
        document = read_json(os.path.join(run_dir, "job.json"))
        if document is None:
            raise AgentError(f"there is no readable job.json in {run_dir}")
        return cls.from_json(document)


def check_run_id(value: Any) -> str:
    """Return a run id that is safe as a folder's name. Raises AgentError."""
    if not isinstance(value, str) or not _RUN_ID.match(value):
        raise AgentError(f"not a run id: {value!r}")
    return value


def same_job(first: Json, second: Json) -> bool:
    """Return whether two documents ask for the same run; how much was synced may differ on a retry."""
    return _comparable(first) == _comparable(second)


def _comparable(document: Json) -> Json:
    return {key: value for key, value in document.items() if key not in ("sync", "created_at")}


def _input(entry: Mapping[str, Any]) -> Input:
    names = {field.name for field in dataclasses.fields(Input)}
    values = {key: value for key, value in entry.items() if key in names}
    values.setdefault("format", "file")
    values.setdefault("kind", "file" if values["format"] == "file" else "dataset")
    values.setdefault("name", values.get("object"))
    for key in ("name", "object", "dest"):
        _require(isinstance(values.get(key), str) and bool(values[key]), "inputs." + key, entry)
    _require(clean_relative(values["dest"]) is not None, "inputs.dest", values["dest"])
    _require(values["format"] in FORMATS, "inputs.format", values["format"])
    digest = values.get("sha256")
    _require(digest is None or bool(_SHA256.match(str(digest))), "inputs.sha256", digest)
    for key in ("size_bytes", "file_count", "content_bytes"):
        value = values.get(key)
        _require(value is None or (_is_int(value) and value >= 0), "inputs." + key, value)
    values["dest"] = clean_relative(values["dest"])
    return Input(**values)


def _push(document: Any) -> Optional[PushPolicy]:
    if document is None:
        return None
    _require(isinstance(document, dict), "push", document)
    epochs, minutes = document.get("epochs"), document.get("minutes")
    _require(epochs is None or (_is_int(epochs) and epochs > 0), "push.epochs", epochs)
    good = minutes is None or (isinstance(minutes, (int, float)) and not isinstance(minutes, bool))
    _require(good and (minutes is None or minutes > 0), "push.minutes", minutes)
    return PushPolicy(epochs, minutes)


def _hub(document: Any) -> Optional[Hub]:
    if document is None:
        return None
    _require(isinstance(document, dict), "hub", document)
    repository, path = document.get("repository"), document.get("path")
    good = isinstance(repository, str) and bool(_REPOSITORY.match(repository))
    _require(good, "hub.repository", repository)
    clean = path is None or (isinstance(path, str) and clean_relative(path) == path)
    _require(clean, "hub.path", path)
    minutes = document.get("minutes", Hub.minutes)
    good = isinstance(minutes, (int, float)) and not isinstance(minutes, bool) and minutes > 0
    _require(good, "hub.minutes", minutes)
    return Hub(str(repository), path, minutes)


def _limits(document: Mapping[str, Any]) -> Limits:
    values = {}
    for field in dataclasses.fields(Limits):
        value = document.get(field.name, field.default)
        good = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
        _require(good and (value is None or value >= 0), "limits." + field.name, value)
        values[field.name] = value
    if values["grace_seconds"] is None:
        values["grace_seconds"] = Limits.grace_seconds
    return Limits(**values)


def _require(condition: bool, field: str, value: Any) -> None:
    if not condition:
        raise AgentError(f"the job's {field} is not valid: {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
