"""A run's weights in a model repository of the hub, put there from this machine.

The agent does it by itself where its machine can (`agent/hub.py`); what it had to leave is found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernel_tools.errors import FetchError
from kernel_tools.stores.base import SHA256_KEY

if TYPE_CHECKING:
    from kernel_tools.run import Run
    from kernel_tools.settings import Settings

# Written by the agent where a launch named a repository.
TOLD: Final = "hub.json"


@dataclass(frozen=True, slots=True)
class Left:
    """Weights that the run's machine could not put where its launch said.

    Attributes:
        place: `hf://ORG/REPO`, or with a file's name.
        weights: `best` or `last`.
    """

    place: str
    weights: str


def left_by(run: Run) -> Left | None:
    """Return what a run that has ended has left to do here; None where there is nothing.

    Raises:
        KernelError, AgentError, StoreError: it cannot be asked.
    """
    listed = run.snapshot.artifacts  # of a run that is read from the store not known yet
    if listed is not None and not any(row["path"] == TOLD for row in listed["files"]):
        return None
    try:
        told = run.document(TOLD)
    except FetchError:
        return None
    if told.get("state") != "left" or not told.get("weights"):
        return None
    return Left(str(told["place"]), str(told["weights"]))


def push(run: Run, *, to: str, weights: str, settings: Settings) -> str:
    """Fetch a run's weights and put them there, unless they are there; return `hf://ORG/REPO/FILE`.

    Raises:
        InvalidArgumentError: `to` is no place on the hub.
        FetchError: the run has no such weights.
        StoreError: the hub does not take them.
    """
    from kernel_tools.stores.hub import HubStore, parse_place

    repository, key = parse_place(to)
    key = key or f"{weights}.pt"
    (file,) = run.fetch(f"weights/{weights}.pt")
    hub = HubStore.from_settings(settings, repository, kind="model")
    there = hub.stat(key)
    if there is None or there.sha256 != file.sha256:
        hub.put(file.path, key, metadata={SHA256_KEY: file.sha256, "run": run.id})
    return f"hf://{repository}/{key}"
