"""Whether the disks hold what a run on the staged data sets takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_tools.datasets.sizing import HEADROOM, DiskNeed, disk_to_rent
from kernel_tools.preflight.report import Check
from kernel_tools.views.facts import size

if TYPE_CHECKING:
    from kernel_tools.datasets.reference import DatasetReference


def disks(answer: Mapping[str, Any]) -> Iterator[Check]:
    """Tell how much is free, and whether it may be written to."""
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


def to_rent(
    answer: Mapping[str, Any], references: Sequence[DatasetReference], need: DiskNeed | None
) -> Check:
    """Tell the disk that a run takes, and judge whether what is still to come fits."""
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
