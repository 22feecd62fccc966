"""What a run needs to push its files to a store without keys: objects, presigned URLs, their renewal.

Signed at launch for max-hours and a day, seven days at most; signed anew at contact when half of that is
over or the parted uploads are used up. What was begun in parts and never used goes when the run has ended.
The agent's side is `agent/targets.py`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from kernel_tools.errors import InvalidArgumentError, KernelToolsError
from kernel_tools.stores.base import MAX_EXPIRY_SECONDS, KeepsUnfinished, ObjectStore

if TYPE_CHECKING:
    from kernel_tools.connecting.connection import Connection
    from kernel_tools.state import RunSnapshot

PREFIX: Final = "runs"
# Each has two objects in turn under its own name; what else there is shares the spare ones.
SLOT_FILES: Final = (
    "weights/last.pt", "weights/best.pt", "metrics.jsonl", "steps.jsonl", "train.log", "status.json",
    "config.yaml", "job.json", "results.csv", "summary.json", "receipt.json", "artifacts.json",
)  # fmt: skip
LARGE_FILES: Final = SLOT_FILES[:2]
SPARE_OBJECTS: Final = 40
SLOTS: Final = ("a", "b")
# A checkpoint above this goes in parts of it; each part is one URL.
PART_BYTES: Final = 64 << 20
UPLOADS_A_SLOT: Final = 4
# Checkpoints grow a little over what the parameters alone take.
SPARE_PARTS: Final = 2
DAY_SECONDS: Final = 24 * 3600
RENEW_PAUSE_SECONDS: Final = 600.0
# Millions, by what a configuration calls the network; weights, average and AdamW's two moments are kept.
PARAMETERS: Final[Mapping[str, float]] = {
    "dfine_n": 3.8, "dfine_s": 10.3, "dfine_m": 19.6, "dfine_l": 31.2, "dfine_x": 62.7,
    "hgnetv2_n": 3.8, "hgnetv2_s": 10.3, "hgnetv2_m": 19.6, "hgnetv2_l": 31.2, "hgnetv2_x": 62.7,
    "rtdetrv2_r18": 20.2, "rtdetrv2_r34": 31.4, "rtdetrv2_r50": 42.9,
    "resnet18": 20.2, "resnet34": 31.4, "resnet50": 42.9,
}  # fmt: skip
BYTES_PER_PARAMETER: Final = 16


@runtime_checkable
class SignsUploads(Protocol):
    """A store that can hand out uploads without its keys; `S3Store` is one."""

    def presign_get(self, key: str, *, expires_seconds: int) -> str:
        """Return a URL that reads the object."""

    def presign_put(self, key: str, *, expires_seconds: int) -> str:
        """Return a URL that writes the object."""

    def begin_upload(self, key: str) -> str:
        """Begin an upload in parts; return its id."""

    def presign_part(self, key: str, upload_id: str, number: int, *, expires_seconds: int) -> str:
        """Return a URL that writes one part, from 1."""

    def presign_completion(self, key: str, upload_id: str, *, expires_seconds: int) -> str:
        """Return a URL that makes the object of its parts."""


@dataclass(frozen=True, slots=True)
class PushPolicy:
    """When a run pushes besides at every best and at its end.

    Attributes:
        epochs: every so many; None for never.
        minutes: every so many; None for never.
    """

    epochs: int | None = 1
    minutes: float | None = 10.0

    def __post_init__(self) -> None:
        for name, value in (("push_epochs", self.epochs), ("push_minutes", self.minutes)):
            if value is not None and value <= 0:
                raise InvalidArgumentError(f"{name} is {value}; it must be above 0.")

    def to_json(self) -> dict[str, Any]:
        """Return the value of `job.json`'s `push`."""
        return {"epochs": self.epochs, "minutes": self.minutes}


def life_seconds(max_hours: float | None) -> int:
    """Return for how long a run's URLs are signed: its longest time and a day, at most seven days."""
    if max_hours is None:
        return MAX_EXPIRY_SECONDS
    return min(MAX_EXPIRY_SECONDS, round(max_hours * 3600) + DAY_SECONDS)


def checkpoint_bytes(backbone_name: str) -> int:
    """Return about how large `last.pt` of a network will be; that of the largest where it is unknown."""
    millions = PARAMETERS.get(backbone_name, max(PARAMETERS.values()))
    return round(millions * 1e6) * BYTES_PER_PARAMETER


def key_of(run_id: str, name: str) -> str:
    """Return the object of a run in the bucket."""
    return f"{PREFIX}/{run_id}/{name}"


def manifest_key(run_id: str) -> str:
    """Return the object that names a run's files."""
    return key_of(run_id, "manifest.json")


def sign_targets(
    store: ObjectStore,
    run_id: str,
    *,
    expires_seconds: int,
    largest_bytes: int,
    now: dt.datetime | None = None,
) -> dict[str, Any]:
    """Sign all that a run may write; the result is secret and travels as a file.

    Args:
        store: where to.
        run_id: the run.
        expires_seconds: how long the URLs live.
        largest_bytes: of a checkpoint, as far as is known; above `PART_BYTES` uploads in parts are begun.
        now: for tests.

    Raises:
        InvalidArgumentError: the store cannot hand out uploads.
        StoreError: it does not answer, or refuses.
    """
    if not isinstance(store, SignsUploads):
        raise InvalidArgumentError(
            f"the store {store.name} hands out no uploads, so a run cannot push to it.",
            hint="Set MINIO_ENDPOINT to an S3-compatible store, or launch with --no-push.",
        )
    signer: SignsUploads = store
    parts = 0
    if largest_bytes > PART_BYTES:
        parts = -(-largest_bytes // PART_BYTES) + SPARE_PARTS
    now = dt.datetime.now(dt.timezone.utc) if now is None else now

    def target(name: str, uploads: int = 0) -> dict[str, Any]:
        key = key_of(run_id, name)
        row: dict[str, Any] = {
            "object": key,
            "url": signer.presign_put(key, expires_seconds=expires_seconds),
        }
        if uploads:
            row["uploads"] = [upload(key) for _ in range(uploads)]
        return row

    def upload(key: str) -> dict[str, Any]:
        upload_id = signer.begin_upload(key)
        return {
            "parts": [
                signer.presign_part(key, upload_id, n, expires_seconds=expires_seconds)
                for n in range(1, parts + 1)
            ],
            "complete": signer.presign_completion(key, upload_id, expires_seconds=expires_seconds),
        }

    manifest = target("manifest.json")  # first, alone: it makes the bucket
    with ThreadPoolExecutor(max_workers=8) as pool:  # each begun upload is a round trip
        slots = {
            path: [
                pool.submit(
                    target, f"{slot}/{path}",
                    UPLOADS_A_SLOT if parts and path in LARGE_FILES else 0,
                )
                for slot in SLOTS
            ]
            for path in SLOT_FILES
        }  # fmt: skip
        spare = [pool.submit(target, f"more/{number:02}") for number in range(SPARE_OBJECTS)]
    return {
        "schema_version": 1,
        "expires_at": (now + dt.timedelta(seconds=expires_seconds)).isoformat(),
        "life_seconds": expires_seconds,
        "part_bytes": PART_BYTES,
        "manifest": manifest,
        "slots": {path: [one.result() for one in row] for path, row in slots.items()},
        "spare": [one.result() for one in spare],
    }


class Renewal:
    """Signs a run's URLs anew when contact with it shows that it is time; a subscriber of a run.

    They are signed for as long as at the launch, which the run itself tells. Once it has ended, what was
    begun for it in parts and not used is removed.

    Args:
        store: returns the store, when it is needed.
        connection: the way to the run's machine.
        run_id: the run.
    """

    def __init__(
        self,
        store: Callable[[], ObjectStore],
        connection: Connection,
        run_id: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._connection = connection
        self._run_id = run_id
        self._clock = clock
        self._next = 0.0
        self._cleared = False

    def __call__(self, snapshot: RunSnapshot) -> None:
        """Renew in a thread of its own, if it is time; what fails is tried again later."""
        if snapshot.contact.kind != "live":
            return
        if snapshot.terminal:
            if not self._cleared and self.may_clear(snapshot):
                self._cleared = True
                self._aside(lambda: clear_unused(self._store(), self._run_id))
            return
        if self.due(snapshot):
            self._next = self._clock() + RENEW_PAUSE_SECONDS
            largest, life = largest_pushed(snapshot), life_told(snapshot)
            self._aside(lambda: self.renew(largest, life))

    def may_clear(self, snapshot: RunSnapshot) -> bool:
        """Return whether uploads in parts may be left, and nobody is pushing any more."""
        told = (snapshot.agent or {}).get("push") or {}
        begun = bool(told.get("uploads_left")) or largest_pushed(snapshot) > PART_BYTES
        # The agent's last word, and not what was concluded from its silence.
        return begun and snapshot.status.get("phase") == "done"

    def due(self, snapshot: RunSnapshot) -> bool:
        """Return whether the run's URLs are to be signed anew."""
        told = (snapshot.agent or {}).get("push")
        if snapshot.terminal or not told or self._clock() < self._next:
            return False
        expires = told.get("expires_at")
        if expires is None:
            return True
        left = dt.datetime.fromisoformat(expires).timestamp() - self._clock()
        largest = largest_pushed(snapshot)
        # Before the first checkpoint nobody knows how many parts it takes better than the launch did.
        life = life_told(snapshot)
        least = life / 2 if largest else min(life, DAY_SECONDS) / 2
        return left < least or (largest > PART_BYTES and not told.get("uploads_left"))

    def renew(self, largest_bytes: int, life_seconds: int) -> None:
        """Sign anew and lay the URLs where the agent looks before each push.

        Raises:
            StoreError, KernelError, AgentError: what the name says.
        """
        signed = sign_targets(
            self._store(), self._run_id, expires_seconds=life_seconds, largest_bytes=largest_bytes
        )
        self._connection.put_secrets(f"{self._run_id}.push", signed)
        # A run that has ended meanwhile would never look, and the links would stay.
        self._connection.call("renewed", run_id=self._run_id)

    def _aside(self, action: Callable[[], object]) -> None:
        def quietly() -> None:
            # The next contact tries again; the run itself says when a push fails.
            with contextlib.suppress(KernelToolsError):
                action()

        threading.Thread(target=quietly, name=f"renew {self._run_id}", daemon=True).start()


def clear_unused(store: ObjectStore, run_id: str) -> int:
    """Remove what was begun in parts for a run that has ended, and never completed; return how many.

    Raises:
        StoreError: it does not answer, or does not let these keys do it.
    """
    if not isinstance(store, KeepsUnfinished):
        return 0
    left = store.unfinished(key_of(run_id, ""))
    for key, upload_id, _ in left:
        store.abort_upload(key, upload_id)
    return len(left)


def life_told(snapshot: RunSnapshot) -> int:
    """Return for how long a run's URLs were signed, in seconds; seven days where it does not tell."""
    told = (snapshot.agent or {}).get("push") or {}
    return int(told.get("life_seconds") or MAX_EXPIRY_SECONDS)


def largest_pushed(snapshot: RunSnapshot) -> int:
    """Return the size of the largest checkpoint that the run has pushed, 0 before the first."""
    told = (snapshot.agent or {}).get("push") or {}
    return int(told.get("largest_bytes") or 0)
