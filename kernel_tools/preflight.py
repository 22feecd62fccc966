"""Preflight: what is checked on the remote before anything is paid for, and what to do where it is not well.

One question to the agent, in a kernel that it does not keep busy for more than a minute; what it answers is
judged here, each finding by itself. It changes nothing there and prices nothing that nobody has named.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kernel_tools.datasets.sizing import HEADROOM, DiskNeed, disk_to_rent
from kernel_tools.errors import KernelToolsError
from kernel_tools.interrupts import without_frames
from kernel_tools.stores.base import HUB, ObjectStore
from kernel_tools.views.facts import size

if TYPE_CHECKING:
    from kernel_tools.connection import Connection
    from kernel_tools.datasets.reference import DatasetReference

Standing = Literal["ok", "note", "problem"]

# Until the answer: the agent ends after a minute, and its first call has to bring the agent.
ANSWER_SECONDS: Final = 150.0
LINK_SECONDS: Final = 600
# S3 refuses what was signed 15 minutes off; a clock that is a minute off is on its way there.
MOST_SKEW_SECONDS: Final = 60.0
# What a container gets unless it is told otherwise; loaders and NCCL die in it of a bus error.
LEAST_SHARED_BYTES: Final = 256 << 20
OLDEST_PYTHON: Final = (3, 10)
# Modules that the detector imports, and what installs each.
PACKAGES: Final[Mapping[str, str]] = {
    "numpy": "numpy", "scipy": "scipy", "cv2": "opencv-python-headless", "PIL": "pillow",
    "yaml": "pyyaml", "safetensors": "safetensors", "faster_coco_eval": "faster-coco-eval",
    "pycocotools": "pycocotools",
}  # fmt: skip
# One of the two does.
_EVALUATORS: Final = ("faster_coco_eval", "pycocotools")
# Asked for where nothing is staged: it need not be there.
_NO_OBJECT: Final = "kernel_tools/preflight"
_CLOCK_ADVICE: Final = "for example: sudo timedatectl set-ntp true"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        standing: `ok`, `note` (worth knowing) or `problem`.
        found: what it is, or what is wrong with it.
        advice: what to do; empty where nothing is.
    """

    name: str
    standing: Standing
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class RemoteInfo:
    """What a remote is and can do.

    Attributes:
        where: the connection's name.
        checks: everything that was looked at, in reading order.
        disk_need: the disk that a run on the staged data sets takes; None where none is staged.
    """

    where: str
    checks: tuple[Check, ...]
    disk_need: DiskNeed | None = None

    @property
    def problems(self) -> tuple[Check, ...]:
        """What is to be put right before a run is worth its money."""
        return tuple(check for check in self.checks if check.standing == "problem")

    def find(self, name: str) -> Check | None:
        """Return a check by its name."""
        return next((check for check in self.checks if check.name == name), None)

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        from kernel_tools.views.preflight import info_view

        return info_view(self)._repr_mimebundle_(include, exclude)

    def __repr__(self) -> str:
        from kernel_tools.views.preflight import info_view

        return info_view(self).plain()


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
        _machine(answer),
        *_versions(answer),
        *_places(answer),
        _memory(answer),
        *_shared_memory(answer),
        *_disks(answer),
        _to_rent(answer, references, need),
        *_clocks(answer, asked, answered),
        *here,
        *_stores(answer),
        *(() if has_store else (_no_store(local),)),
    )
    return RemoteInfo(where, checks, need)


# -- what is asked ---------------------------------------------------------------------------------


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


# -- what was answered -----------------------------------------------------------------------------


def _machine(answer: Mapping[str, Any]) -> Check:
    kind = "a Kaggle session" if answer["kaggle"] else str(answer["platform"])
    return Check("machine", "ok", f"{kind}, {_count(answer['cpu_count'], 'CPU')}")


def _versions(answer: Mapping[str, Any]) -> Iterator[Check]:
    version = str(answer["python"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PYTHON:
        yield Check(
            "Python", "problem", f"{version} at {answer['executable']}; the detector needs 3.10",
            "start a kernel of a newer one: %remote_connect ... --kernel-name SPEC",
        )  # fmt: skip
    else:
        yield Check("Python", "ok", version)
    yield _torch(answer)
    missing = list(answer["missing"])
    if not all(name in missing for name in _EVALUATORS):
        missing = [name for name in missing if name not in _EVALUATORS]
    else:
        missing.remove("pycocotools")
    if missing:
        names = " ".join(PACKAGES[name] for name in missing)
        yield Check(
            "packages", "problem", f"the detector lacks {', '.join(missing)}",
            f"in a %%remote cell: %pip install {names}",
        )  # fmt: skip
    else:
        yield Check("packages", "ok", "all that the detector imports")


def _torch(answer: Mapping[str, Any]) -> Check:
    told, late = answer["torch"], str(answer["proof_problem"])
    install = "in a %%remote cell: %pip install torch"
    if told is None:
        return Check("torch", "problem", f"importing it failed: {late}", install)
    if told["torch"] is None:
        if told["problem"]:
            return Check("torch", "problem", f"it cannot be imported: {told['problem']}", install)
        return Check("torch", "problem", f"not installed for {answer['executable']}", install)
    driver = str(answer["driver"])
    built = f"built for CUDA {told['cuda']}" if told["cuda"] else "built without CUDA"
    carried = f", driver {driver} (CUDA up to {answer['driver_cuda'] or '?'})" if driver else ""
    found = f"{told['torch']}, {built}{carried}"
    listed, seen = len(answer["gpus"]), int(told["cards"])
    if listed > seen:
        advice = "CUDA_VISIBLE_DEVICES of the kernel hides some" if seen else (
            "install a torch that is built for the driver's CUDA: https://pytorch.org/get-started"
        )  # fmt: skip
        cards = f"the driver lists {_count(listed, 'card')}, torch sees {seen}"
        return Check("torch", "note" if seen else "problem", f"{found}; {cards}", advice)
    return Check("torch", "ok", found)


def _places(answer: Mapping[str, Any]) -> Iterator[Check]:
    """One row a card, or one for the processor: does it compute?"""
    told, late = answer["torch"], str(answer["proof_problem"])
    places = list(answer["places"])
    for row in places:
        yield _place(row)
    if told is None or told["torch"] is None:
        for number, gpu in enumerate(answer["gpus"]):
            memory = size(gpu["memory_total"])
            found = f"{gpu['name']}, {memory}; not tried, for want of torch"
            yield Check(f"cuda:{number}", "note", found)
    elif late:
        expected = [f"cuda:{number}" for number in range(int(told["cards"]))] or ["cpu"]
        for number, name in enumerate(expected[len(places) :]):
            why = late if number == 0 else "not tried: the one before it hangs"
            advice = "restart the session, or take another machine"
            yield Check(name, "problem", f"the product was not computed: {why}", advice)


def _place(row: Mapping[str, Any]) -> Check:
    name = str(row["place"])
    card = "no CUDA card" if name == "cpu" else str(row.get("name") or "a card")
    total, free = row.get("memory_total"), row.get("memory_free")
    memory = ""
    if total:
        memory = f", {size(total)}" if free is None else f", {size(free)} of {size(total)} free"
    if row["problem"]:
        advice = "restart the session, or take another machine"
        capability, built = row.get("capability"), row.get("built_for")
        if capability and built and capability not in built:
            advice = f"install a torch that is built for {capability}; this one is for {', '.join(built)}"
        return Check(name, "problem", f"{card}{memory}; fails: {row['problem']}", advice)
    found = f"{card}{memory}; a product of matrices is right, {row['seconds']:.2f} s"
    if total and free is not None and free < total / 2:
        return Check(
            name, "note", found, "another process holds it: !nvidia-smi in a %%remote cell"
        )
    return Check(name, "ok", found)


def _memory(answer: Mapping[str, Any]) -> Check:
    total, free = answer["memory_bytes"], answer["memory_available_bytes"]
    left = "" if free is None else f"{size(free)} of "
    return Check("memory", "ok", "unknown" if total is None else f"{left}{size(total)} free")


def _shared_memory(answer: Mapping[str, Any]) -> Iterator[Check]:
    free = answer["shared_memory_bytes"]
    if free is None:
        return
    if free < LEAST_SHARED_BYTES:
        yield Check(
            "shared memory", "problem", f"{size(free)} in /dev/shm: loaders and NCCL need more",
            "start the container with --shm-size=2g, or --set data.workers=0",
        )  # fmt: skip
    else:
        yield Check("shared memory", "ok", f"{size(free)} free")


def _disks(answer: Mapping[str, Any]) -> Iterator[Check]:
    runs, data = answer["disk"]["runs"], answer["disk"]["datasets"]
    if runs["place"] == data["place"]:
        yield _disk("disk", runs)
    else:
        yield _disk("disk for runs", runs)
        yield _disk("disk for data", data)


def _disk(name: str, room: Mapping[str, Any]) -> Check:
    quota = room["quota_bytes"]
    whole = "" if quota is None else f" of the quota of {size(quota)}"
    found = f"{size(room['free_bytes'])}{whole} free in {room['folder']}"
    if not room["writable"]:
        advice = "%remote_connect ... --remote-dir DIR takes another folder"
        return Check(name, "problem", f"{found}, which may not be written to", advice)
    return Check(name, "ok", found)


def _to_rent(
    answer: Mapping[str, Any], references: Sequence[DatasetReference], need: DiskNeed | None
) -> Check:
    if need is None:
        return Check(
            "disk to rent", "note", "no data set is staged in this project yet",
            "%stage_dataset PATH --dry-run tells what one takes",
        )  # fmt: skip
    here = [one for one in references if one.sha256 in answer["staged"]]
    coming = [one for one in references if one not in here]
    names = ", ".join(reference.name for reference in references)
    found = (
        f"{size(need.total_bytes)} for a run on {names}: archives {size(need.staged_bytes)}, "
        f"unpacked {size(need.extracted_bytes)}, checkpoints {size(need.checkpoints_bytes)}, and 30 %"
    )
    if here:
        found += f"; there already: {', '.join(one.name for one in here)}"
    if coming:
        left = disk_to_rent(one.disk for one in coming)
        short = _too_small(answer["disk"], left)
        if short:
            advice = f"rent a disk of {size(need.total_bytes)} or more, or free some"
            return Check("disk to rent", "problem", f"{found}; {short}", advice)
    return Check("disk to rent", "ok", found)


def _too_small(rooms: Mapping[str, Mapping[str, Any]], need: DiskNeed) -> str:
    """Say which place lacks room, as the agent itself will before a download."""
    data = need.staged_bytes + need.extracted_bytes
    wanted: dict[str, int] = {}
    for room, count in ((rooms["datasets"], data), (rooms["runs"], need.checkpoints_bytes)):
        wanted[room["place"]] = wanted.get(room["place"], 0) + count
    for room in (rooms["datasets"], rooms["runs"]):
        whole = round(wanted[room["place"]] * (1 + HEADROOM))
        if whole > room["free_bytes"]:
            free = size(room["free_bytes"])
            return f"{size(whole)} of it belong into {room['folder']}, where {free} are free"
    return ""


def _clocks(answer: Mapping[str, Any], asked: float, answered: float) -> Iterator[Check]:
    # As NTP does: both ways together; what they differ by is how little is known.
    out, back = answer["asked_at"] - asked, answer["answered_at"] - answered
    ahead, unsure = (out + back) / 2, abs(out - back) / 2
    off = abs(ahead) - unsure > MOST_SKEW_SECONDS
    yield Check(
        "clock", "problem" if off else "ok",
        _offset(ahead, "this machine's", unsure), f"set the one that is wrong, {_CLOCK_ADVICE}" if off else "",
    )  # fmt: skip
    told = [
        row["ahead_seconds"] for row in answer["stores"] if row.get("ahead_seconds") is not None
    ]
    for there in told[:1]:
        far = abs(there) > MOST_SKEW_SECONDS
        yield Check(
            "clock and store", "problem" if far else "ok", _offset(there, "the store's", 0.5),
            f"set the remote's clock, {_CLOCK_ADVICE}" if far else "",
        )  # fmt: skip
        mine = there - ahead
        if abs(mine) - unsure > MOST_SKEW_SECONDS:
            told_here = _offset(mine, "the store's", unsure)
            yield Check(
                "clock here", "problem",
                f"{told_here}: it will refuse what is signed here",
                f"set this machine's clock, {_CLOCK_ADVICE}",
            )  # fmt: skip


def _offset(ahead: float, whose: str, unsure: float) -> str:
    side = "ahead of" if ahead >= 0 else "behind"
    return f"{abs(ahead):.1f} s {side} {whose}, give or take {unsure:.1f} s"


def _stores(answer: Mapping[str, Any]) -> Iterator[Check]:
    for row in answer["stores"]:
        name, problem = str(row["name"]), str(row["problem"])
        if problem:
            advice = "" if "MINIO_PUBLIC_ENDPOINT" in problem else (
                "the remote must reach the store by the name it is signed for: set MINIO_PUBLIC_ENDPOINT to it"
            )  # fmt: skip
            if name == "the hub":
                advice = "switch the session's internet on, or stage to s3"
            yield Check("store from there", "problem", f"{name}: {problem}", advice)
        else:
            read = f", {row['object']} can be read" if row.get("read") else ""
            yield Check("store from there", "ok", f"{name} answers{read}")


def _no_store(local: bool) -> Check:
    if local:
        return Check("store", "ok", "the embedded one, on this machine too")
    return Check(
        "store", "note", "none is configured: data sets cannot be staged, and files come over the kernel",
        "set MINIO_ENDPOINT, MINIO_ACCESS_KEY and MINIO_SECRET_KEY, or stage to hf://ORG/REPO",
    )  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
