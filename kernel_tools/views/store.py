"""What a store holds and what a machine must hold, shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kernel_tools.views import facts
from kernel_tools.views.static import FactsView, Stack, TableView, View

if TYPE_CHECKING:
    from kernel_tools.datasets.inventory import Inventory, Stored
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.datasets.sizing import DiskNeed

MOST_ROWS: Final = 200


def inventory_view(
    inventory: Inventory, *, price: float | None = None, removing: bool = False
) -> View:
    """Show objects, whose they are and what they cost a month; `price` as in `Inventory.cost`."""
    from kernel_tools.datasets.inventory import DEFAULT_PRICE

    price = DEFAULT_PRICE if price is None else price
    count = "1 object" if len(inventory.rows) == 1 else f"{len(inventory.rows)} objects"
    heading = f"{inventory.where}: {count}, {facts.size(inventory.size_bytes)}, "
    heading += f"{_dollars(inventory.cost(price))} a month at ${price:g} a GB"
    if removing:
        gone = "removed" if inventory.removed else "would be removed; --yes removes them"
        heading += f"; {gone}"
    rows = tuple(_row(row) for row in inventory.rows[:MOST_ROWS])
    header = ("object", "size", "written", "belongs to", "needed by")
    objects = TableView(heading, header, rows, right=(1,))
    owners = inventory.by_owner()
    if len(owners) < 2:
        return objects
    sums = tuple(
        (owner or "other", facts.size(size), _dollars(size / 1e9 * price))
        for owner, size in owners.items()
    )
    by_owner = TableView("By run and data set", ("whose", "size", "a month"), sums, right=(1, 2))
    return Stack((objects, by_owner))


def rent_view(views: Sequence[View], references: Sequence[DatasetReference]) -> Stack:
    """Show several data sets, and the disk that a run on all of them needs."""
    from kernel_tools.datasets.sizing import disk_to_rent

    need = disk_to_rent(reference.disk for reference in references)
    together = FactsView(
        f"A run on all {len(references)}",
        (
            ("archives", facts.size(need.staged_bytes)),
            ("unpacked", facts.size(need.extracted_bytes)),
            ("checkpoints", facts.size(need.checkpoints_bytes)),
            ("disk to rent", facts.size(need.total_bytes)),
        ),
        " ".join(f"--dataset {reference.name}" for reference in references),
    )
    return Stack((*views, together))


def dataset_view(reference: DatasetReference, *, standing: str = "is staged") -> FactsView:
    """Show a data set, where it stands in words, and the disk that a run on it needs."""
    pairs = (
        (
            "object",
            reference.object
            if not reference.bucket
            else f"{reference.store}/{reference.bucket}/{reference.object}",
        ),
        ("archive", facts.size(reference.size_bytes)),
        ("files", "not counted" if reference.file_count is None else str(reference.file_count)),
        ("unpacks to", reference.expected_root),
        ("disk needed", _disk(reference.disk)),
        ("SHA-256", reference.sha256),
    )
    heading = f"Data set {reference.name} {standing}"
    return FactsView(heading, pairs, f"--dataset {reference.name}")


def _dollars(amount: float) -> str:
    return f"${amount:.2f}" if amount >= 0.01 else "under $0.01"


def _row(row: Stored) -> tuple[str, ...]:
    written = "" if row.modified is None else f"{row.modified:%Y-%m-%d %H:%M}"
    return (
        row.key,
        facts.size(row.size_bytes),
        "unfinished upload" if row.upload_id is not None else written,
        row.owner or "",
        row.needed_by or "",
    )


def _disk(need: DiskNeed) -> str:
    parts = (
        ("archive", need.staged_bytes),
        ("unpacked", need.extracted_bytes),
        ("checkpoints", need.checkpoints_bytes),
    )
    told = ", ".join(f"{name} {facts.size(size)}" for name, size in parts)
    return f"{facts.size(need.total_bytes)} ({told}, and 30 %)"
