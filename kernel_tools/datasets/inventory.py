"""What a store holds, whose it is, what it costs, and what may go: `%store_ls` and `%store_rm`.

Nothing that a live run reads or writes is ever removed; where it is not known what a live run reads, no
data set is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Final

from kernel_tools.datasets.reference import DatasetReference
from kernel_tools.errors import ObjectNotFoundError, StagingError, StoreError
from kernel_tools.launching.pushing import PREFIX as RUNS
from kernel_tools.state import TERMINAL_STATES, RunState
from kernel_tools.stores.base import HUB, MAX_EXPIRY_SECONDS, KeepsUnfinished, ObjectStore

# $ for 10^9 bytes and a month: S3 Standard in us-east-1, its list price in 2025.
DEFAULT_PRICE: Final = 0.023


@dataclass(frozen=True, slots=True)
class Claims:
    """What is known of who needs what.

    Attributes:
        live: by id of each run that goes on, the objects it reads; None where that is not known.
        references: the data sets of this project.
    """

    live: Mapping[str, Collection[str] | None]
    references: Sequence[DatasetReference] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """One object, or the parts of an unfinished upload.

    Attributes:
        key: its name in the bucket.
        size_bytes: its size.
        modified: time of its last write; None where the store does not say.
        owner: the run or data set it belongs to; None for anything else.
        needed_by: the live run that reads or writes it; None where it may go.
        upload_id: of an unfinished upload; None for an object.
    """

    key: str
    size_bytes: int
    modified: datetime | None = None
    owner: str | None = None
    needed_by: str | None = None
    upload_id: str | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a store holds.

    Attributes:
        where: `local/dataset`, `s3/dataset`, `hf://ORG/REPO`.
        rows: sorted by name.
        removed: whether they are gone.
    """

    where: str
    rows: tuple[Stored, ...]
    removed: bool = False

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return sum(row.size_bytes for row in self.rows)

    def cost(self, price: float = DEFAULT_PRICE) -> float:
        """Return what it costs a month, in $, at `price` for 10^9 bytes and a month."""
        return self.size_bytes / 1e9 * price

    def by_owner(self) -> dict[str, int]:
        """Return bytes by run or data set, the largest first; what belongs to neither is under ``""``."""
        sizes: dict[str, int] = {}
        for row in self.rows:
            sizes[row.owner or ""] = sizes.get(row.owner or "", 0) + row.size_bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def below(self, prefix: str) -> Inventory:
        """Return those whose name, or whose owner's name, begins so."""
        rows = (r for r in self.rows if r.key.startswith(prefix) or (r.owner or "") == prefix)
        return replace(self, rows=tuple(rows))

    def remove_from(self, store: ObjectStore) -> Inventory:
        """Remove them, a run's manifest first, so that nobody finds half of it whole."""
        for row in sorted(self.rows, key=lambda row: not row.key.endswith("/manifest.json")):
            if row.upload_id is None:
                store.remove(row.key)
            elif isinstance(store, KeepsUnfinished):
                store.abort_upload(row.key, row.upload_id)
        return replace(self, removed=True)


def take(store: ObjectStore, claims: Claims) -> Inventory:
    """List a store.

    Raises:
        StoreError: it does not answer, or refuses.
    """
    rows = [
        _row(claims, store, found.key, found.size_bytes, found.modified) for found in store.list()
    ]
    for key, upload_id, size_bytes in _unfinished(store):
        rows.append(replace(_row(claims, store, key, size_bytes, None), upload_id=upload_id))
    where = f"hf://{store.bucket}" if store.name == HUB else f"{store.name}/{store.bucket}"
    return Inventory(where, tuple(sorted(rows, key=lambda row: (row.key, row.upload_id or ""))))


def chosen(inventory: Inventory, names: Iterable[str]) -> Inventory:
    """Return what the names mean: objects, beginnings with a final `/`, runs, data sets.

    Raises:
        ObjectNotFoundError: one fits nothing.
        StagingError: a live run needs what one of them means.
    """
    found: dict[tuple[str, str | None], Stored] = {}
    for name in names:
        fits = [row for row in inventory.rows if _means(name, row)]
        if not fits:
            raise ObjectNotFoundError(
                f"Nothing in {inventory.where} is called {name}.",
                hint="%store_ls lists what there is.",
            )
        for row in fits:
            if row.needed_by is not None:
                raise StagingError(
                    f"{row.key} is needed by the run {row.needed_by}, which has not ended; nothing was removed.",
                    hint=f"%remote_stop {row.needed_by} ends it; then remove.",
                )
            found[row.key, row.upload_id] = row
    return replace(inventory, rows=tuple(found.values()))


def _unfinished(store: ObjectStore) -> tuple[tuple[str, str, int], ...]:
    if not isinstance(store, KeepsUnfinished):
        return ()
    try:
        return store.unfinished()
    except (
        StoreError
    ):  # keys that may list objects need not be allowed to list these, nor stores able
        return ()


def may_be_live(state: str, created_at: str, *, now: datetime | None = None) -> bool:
    """Tell whether a run may still read or write in the store.

    One that nobody saw end is taken for live as long as the links it was given can be: seven days.
    """
    if state in {one.value for one in TERMINAL_STATES}:
        return False
    if state in {one.value for one in RunState}:
        return True
    now = datetime.now(timezone.utc) if now is None else now
    try:
        begun = datetime.fromisoformat(created_at)
    except ValueError:
        return True
    begun = begun if begun.tzinfo else begun.replace(tzinfo=timezone.utc)
    return (now - begun).total_seconds() < MAX_EXPIRY_SECONDS


def _means(name: str, row: Stored) -> bool:
    return name in (row.key, row.owner) or (name.endswith("/") and row.key.startswith(name))


def _row(
    claims: Claims, store: ObjectStore, key: str, size_bytes: int, modified: datetime | None
) -> Stored:
    first, _, rest = key.partition("/")
    second = rest.partition("/")[0]
    if first == RUNS and second != rest:
        # Besides the run that writes it, one that resumes from it.
        readers = (run_id for run_id, objects in claims.live.items() if key in (objects or ()))
        needed = second if second in claims.live else next(readers, None)
        return Stored(key, size_bytes, modified, owner=second, needed_by=needed)
    of_ours = [
        one.name
        for one in claims.references
        if (one.store, one.bucket, one.object) == (store.name, store.bucket, key)
    ]
    owner = next(iter(of_ours), second if first == "datasets" and second != rest else None)
    data_set = bool(of_ours) or first == "datasets"
    reading = (
        run_id
        for run_id, objects in claims.live.items()
        if (data_set if objects is None else key in objects)
    )
    return Stored(key, size_bytes, modified, owner, needed_by=next(reading, None))
