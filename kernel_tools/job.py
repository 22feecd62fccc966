"""What is to run: `JobSpec`, its limits and inputs, and how a run is named.

A JobSpec travels as `job.json` and holds no secret. It knows nothing of kernels, stores or the
detector's configuration; the session puts it together.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kernel_tools.agent.files import clean_relative
from kernel_tools.errors import InvalidArgumentError

SCHEMA_VERSION: Final = 1
LONGEST_NAME: Final = 40  # a run_id is a folder name, and shows in tables


@dataclass(frozen=True, slots=True)
class Limits:
    """When the agent ends a run by itself. None means no such limit."""

    timeout_seconds: float | None = None
    max_hours: float | None = None
    stall_minutes: float = 30.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        for limit in dataclasses.fields(self):
            value = getattr(self, limit.name)
            if value is not None and value <= 0:
                raise InvalidArgumentError(f"{limit.name} is {value}; it must be above 0.")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One launch, complete but for its secrets; the shape of `job.json`."""

    run_id: str
    name: str
    created_at: str
    argv: tuple[str, ...]
    kind: str = "detector"  # detector | script | command
    nproc_per_node: int | str = "auto"
    device: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[Mapping[str, Any], ...] = ()
    artifacts: tuple[str, ...] = ()
    limits: Limits = Limits()
    max_restarts: int = 0
    resume: Mapping[str, str] | None = None
    sync: Mapping[str, Any] = field(default_factory=dict)
    datasets_dir: str | None = None
    status_dir: str | None = None  # where another trainer writes its status, in the work folder
    source: Mapping[str, Any] | None = None  # where the project stood in git
    push: Mapping[str, Any] | None = None  # when files go to the store; None: never
    hub: Mapping[str, Any] | None = None  # the model repository that the weights go to
    checkpoint_bytes: int = 0  # what the checkpoints will take on the remote's disk

    def to_json(self) -> dict[str, Any]:
        """Return the content of `job.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "limits": dataclasses.asdict(self.limits),
            "argv": list(self.argv),
            "inputs": [dict(one) for one in self.inputs],
            "artifacts": list(self.artifacts),
            "env": dict(self.env),
            "sync": dict(self.sync),
        }


def new_run_id(name: str, *, now: dt.datetime | None = None, entropy: str | None = None) -> str:
    """Return `YYYYMMDD-HHMMSS-<name>-<4 hex>` (UTC); sorts by time, safe as a folder name."""
    now = dt.datetime.now(dt.timezone.utc) if now is None else now
    entropy = secrets.token_hex(2) if entropy is None else entropy
    return f"{now:%Y%m%d-%H%M%S}-{slug(name)}-{entropy}"


def slug(text: str) -> str:
    """Return `text` as lower-case letters, digits and single hyphens; `run` if nothing is left.

    Accents are dropped, so that `Läufer` is `laufer`; what no plain letter stands for is a hyphen.
    """
    letters = unicodedata.normalize("NFKD", text.lower().replace("ł", "l"))
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    plain = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    return plain[:LONGEST_NAME].rstrip("-") or "run"


def parse_processes(value: int | str) -> int | str:
    """Check `--nproc-per-node`: a whole number from 1, or `auto`.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if value == "auto":
        return value
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise InvalidArgumentError(
            f"--nproc-per-node {value!r} is not a number of processes.",
            hint="Give a whole number from 1, or auto (the cards seen; 1 on CPU).",
        )
    return count


def check_device(value: str) -> str:
    """Check `--device`: auto, cpu, cuda, or a list of cards such as `0,2`.

    Raises:
        InvalidArgumentError: it is none of these.
    """
    if value in {"auto", "cpu", "cuda"} or re.fullmatch(r"\d+(,\d+)*", value):
        return value
    raise InvalidArgumentError(
        f"--device {value!r} is not a device.", hint="Give auto, cpu, cuda, or cards such as 0,2."
    )


def check_artifacts(patterns: Sequence[str]) -> tuple[str, ...]:
    """Check that each `--artifact` stays in the work folder, as the agent does.

    Raises:
        InvalidArgumentError: one is absolute or escapes.
    """
    for pattern in patterns:
        if clean_relative(pattern) is None:
            raise InvalidArgumentError(
                f"--artifact {pattern!r} must be a relative pattern inside the run's work folder.",
                hint="For instance --artifact 'artifacts/*.json'.",
            )
    return tuple(patterns)


def check_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Check that each `--set` reads `section.key=value`.

    Raises:
        InvalidArgumentError: one does not.
    """
    for override in overrides:
        if not re.match(r"[\w.]+=", override):
            raise InvalidArgumentError(
                f"--set {override!r} does not read section.key=value.",
                hint="For instance --set solver.epochs=5.",
            )
    return tuple(overrides)
