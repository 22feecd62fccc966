"""What may go from a store, and what it costs; no store here."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from kernel_tools.datasets.inventory import Claims, Inventory, Stored, chosen, may_be_live, take
from kernel_tools.errors import ObjectNotFoundError, StagingError
from kernel_tools.stores.base import ObjectInfo
from kernel_tools.views.store import inventory_view

NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)


class Listed:
    """A store that only lists and remembers what was removed."""

    name, bucket = "s3", "dataset"

    def __init__(self, *keys: str) -> None:
        self.keys = keys
        self.removed: list[str] = []

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (ObjectInfo(key, 1_000_000_000) for key in self.keys)

    def remove(self, key: str) -> None:
        self.removed.append(key)


def taken(claims: Claims, *keys: str) -> Inventory:
    store: Any = Listed(*keys)
    return take(store, claims)


def needs(claims: Claims, *keys: str) -> dict[str, str | None]:
    return {row.key: row.needed_by for row in taken(claims, *keys).rows}


def test_a_live_run_needs_its_own_objects_and_what_it_reads() -> None:
    claims = Claims({"r1": ("datasets/a/1.tar", "other/x.bin")})
    keys = (
        "datasets/a/1.tar",
        "datasets/b/2.tar",
        "other/x.bin",
        "runs/r1/m",
        "runs/r2/m",
        "runs/r1",
    )

    assert needs(claims, *keys) == {
        "datasets/a/1.tar": "r1",
        "datasets/b/2.tar": None,
        "other/x.bin": "r1",
        "runs/r1/m": "r1",
        "runs/r2/m": None,
        "runs/r1": None,  # an object that only is called so
    }


def test_a_run_needs_the_objects_of_the_run_that_it_resumes_from() -> None:
    claims = Claims({"r2": ("runs/r1/a/weights/last.pt",), "r3": None})

    assert needs(claims, "runs/r1/a/weights/last.pt", "runs/r1/a/train.log") == {
        "runs/r1/a/weights/last.pt": "r2", "runs/r1/a/train.log": None,
    }  # fmt: skip


def test_where_it_is_not_known_what_a_live_run_reads_every_data_set_stays() -> None:
    claims = Claims({"r1": None})

    assert needs(claims, "datasets/a/1.tar", "notes.txt") == {
        "datasets/a/1.tar": "r1", "notes.txt": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "age_days", "live"),
    [
        ("training", 30, True),
        ("queued", 0, True),
        ("completed", 0, False),
        ("timed_out", 0, False),
        ("not seen", 6.9, True),
        ("not seen", 7.1, False),
    ],
)
def test_a_run_that_nobody_saw_end_is_live_as_long_as_its_links(
    state: str, age_days: float, live: bool
) -> None:
    begun = (NOW - timedelta(days=age_days)).isoformat()
    assert may_be_live(state, begun, now=NOW) is live


def test_a_run_of_unknown_age_is_taken_for_live() -> None:
    assert may_be_live("not seen", "", now=NOW)


def test_names_mean_objects_owners_and_beginnings() -> None:
    keys = ("runs/r1/a", "runs/r1/manifest.json", "runs/r12/a", "datasets/a/1.tar")
    everything = taken(Claims({}), *keys)

    def meant(*names: str) -> set[str]:
        return {row.key for row in chosen(everything, names).rows}

    assert meant("r1") == {"runs/r1/a", "runs/r1/manifest.json"}
    assert meant("runs/r12/a", "a") == {"runs/r12/a", "datasets/a/1.tar"}
    assert meant("runs/") == set(keys[:3])
    with pytest.raises(ObjectNotFoundError, match="called runs/r"):
        meant("runs/r")
    assert everything.below("runs/r1").size_bytes == 3_000_000_000


def test_one_that_is_needed_keeps_all_from_going() -> None:
    everything = taken(Claims({"r1": ()}), "runs/r1/a", "runs/r2/a")
    with pytest.raises(StagingError, match="runs/r1/a is needed by the run r1.*%remote_stop r1"):
        chosen(everything, ["r2", "r1"])


def test_the_manifest_goes_first() -> None:
    store: Any = Listed("runs/r1/a", "runs/r1/manifest.json")
    gone = take(store, Claims({})).remove_from(store)

    assert store.removed == ["runs/r1/manifest.json", "runs/r1/a"]
    assert gone.removed


def test_the_month_is_told_for_all_and_for_each() -> None:
    rows = (
        Stored("runs/r1/a", 40_000_000_000, owner="r1"),
        Stored("datasets/a/1.tar", 1_000_000, owner="a", needed_by="r1"),
        Stored("datasets/a/2.tar", 8 << 20, owner="a", upload_id="u"),
    )
    page = inventory_view(Inventory("s3/dataset", rows), price=0.02).plain()

    assert "3 objects, 40.01 GB, $0.80 a month at $0.02 a GB" in page
    assert "unfinished upload" in page
    sums = [line.split() for line in page.splitlines() if line.endswith(("$0.80", "$0.01"))]
    assert sums == [["r1", "40.00", "GB", "$0.80"], ["a", "9.39", "MB", "under", "$0.01"]]
    planned = inventory_view(Inventory("s3/dataset", rows[:1]), removing=True).plain()
    assert "1 object, 40.00 GB, $0.92 a month at $0.023 a GB; would be removed; --yes" in planned
