"""What a remote is asked, and the report that is made of its answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.datasets.sizing import disk_to_rent
from kernel_tools.errors import KernelToolsError
from kernel_tools.interrupts import without_frames
from kernel_tools.preflight.links import clocks, no_store, stores
from kernel_tools.preflight.machine import (
    PACKAGES,
    machine,
    memory,
    places,
    shared_memory,
    versions,
)
from kernel_tools.preflight.report import Check, RemoteInfo
from kernel_tools.preflight.rooms import disks, to_rent
from kernel_tools.stores.base import HUB, ObjectStore

if TYPE_CHECKING:
    from kernel_tools.connecting.connection import Connection
    from kernel_tools.datasets.reference import DatasetReference

# Until the answer: the agent ends after a minute, and its first call has to bring the agent.
ANSWER_SECONDS: Final = 150.0
LINK_SECONDS: Final = 600
# Asked for where nothing is staged: it need not be there.
_NO_OBJECT: Final = "kernel_tools/preflight"


@dataclass(frozen=True, slots=True)
class Probe:
    """A store that the remote is to reach. `object` is None where it need not be there."""

    name: str
    url: str = field(repr=False)
    object: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as it travels; secret."""
        return {"name": self.name, "url": self.url, "object": self.object}


@without_frames
def look(
    connection: Connection,
    *,
    store: Callable[[], ObjectStore] | None,
    references: Sequence[DatasetReference],
    hub_endpoint: str | None = None,
) -> RemoteInfo:
    """Ask a remote what it can do.

    Args:
        connection: whose machine.
        store: opens the one that runs read from and push to; None where none is configured.
        references: the data sets that a run is to have.
        hub_endpoint: asked for too where a data set is on the hub (default: huggingface.co).

    Raises:
        KernelError, AgentError: there is no answer.
    """
    here, probes = _from_here(store, references, hub_endpoint)
    probes_file = None
    question = secrets.token_hex(8)
    if probes:
        payload = {"probes": [probe.to_json() for probe in probes]}
        probes_file = connection.put_secrets(f"info-{question}", payload)
    asked = time.time()
    answer = connection.call(
        "info",
        question=question,
        probes_file=probes_file,
        datasets=[reference.sha256 for reference in references],
        packages=list(PACKAGES),
        timeout_seconds=ANSWER_SECONDS,
    )
    return judge(
        answer, where=connection.name, references=references, here=here, asked=asked,
        answered=time.time(), has_store=store is not None, local=connection.local,
    )  # fmt: skip


def judge(
    answer: Mapping[str, Any],
    *,
    where: str,
    references: Sequence[DatasetReference] = (),
    here: Sequence[Check] = (),
    asked: float,
    answered: float,
    has_store: bool = True,
    local: bool = False,
) -> RemoteInfo:
    """Make checks of what the agent answered; pure.

    Args:
        answer: of the agent's `info`.
        where: the connection's name.
        references: the data sets that a run is to have.
        here: what was found out about the store from this machine.
        asked: this machine's clock before.
        answered: and after.
        has_store: whether one is at hand.
        local: whether the remote is this machine.
    """
    need = disk_to_rent(one.disk for one in references) if references else None
    checks = (
        machine(answer),
        *versions(answer),
        *places(answer),
        memory(answer),
        *shared_memory(answer),
        *disks(answer),
        to_rent(answer, references, need),
        *clocks(answer, asked, answered),
        *here,
        *stores(answer),
        *(() if has_store else (no_store(local),)),
    )
    return RemoteInfo(where, checks, need)


def _from_here(
    opening: Callable[[], ObjectStore] | None,
    references: Sequence[DatasetReference],
    hub_endpoint: str | None,
) -> tuple[list[Check], list[Probe]]:
    """Return what this machine sees of the store, and links for the remote to try."""
    checks: list[Check] = []
    probes: list[Probe] = []
    if opening is not None:
        try:
            store = opening()
            name = f"{store.name}/{store.bucket}"
            held = [r for r in references if (r.store, r.bucket) == (store.name, store.bucket)]
            key = held[0].object if held else _NO_OBJECT
            url = store.presign_get(key, expires_seconds=LINK_SECONDS)
            probes.append(Probe(name, url))
            there = store.stat(key)
        except KernelToolsError as error:
            hint = error.hint or ""
            checks.append(
                Check("store from here", "problem", str(error).removesuffix(hint).strip(), hint)
            )
        else:
            checks.append(Check("store from here", "ok", f"{name} answers"))
            if there is not None:
                probes[-1] = Probe(name, url, key)
            elif held:
                checks[-1] = Check(
                    "store from here", "problem", f"{name} answers, but has no {key} any more",
                    f"stage {held[0].name} again",
                )  # fmt: skip
    if any(reference.store == HUB for reference in references):
        probes.append(Probe("the hub", hub_endpoint or "https://huggingface.co"))
    return checks, probes
