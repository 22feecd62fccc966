"""Where a run's files may go in the store: presigned URLs by object, kept in the secrets folder.

Every file has two objects in turn, so that what the last manifest names is never overwritten. The
launcher signs them; a later contact lays newer ones beside the first.
"""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import dataclass, field
from typing import Any, Collection, Mapping, Optional, Tuple

from .files import Json, read_json
from .launch import discard_secrets, read_secrets, secrets_path
from .status import TERMINAL_STATES, complete


@dataclass(frozen=True)
class PartedUpload:
    """A multipart upload that the launcher began: a URL a part, and the one that completes it."""

    parts: Tuple[str, ...] = field(repr=False)
    complete: str = field(repr=False)


@dataclass(frozen=True)
class Target:
    """One object, and how it may be written. Each parted upload serves once."""

    object: str
    url: str = field(repr=False)
    uploads: Tuple[PartedUpload, ...] = ()


@dataclass(frozen=True)
class Targets:
    """All objects of one run."""

    manifest: Target
    slots: Mapping[str, Tuple[Target, ...]]
    spare: Tuple[Target, ...]
    part_bytes: int
    expires_at: str
    life_seconds: Optional[int] = None  # that they were signed for

    def choose(self, path: str, taken: Collection[str]) -> Optional[Target]:
        """Return an object for a file that is not among those `taken`; None where all are."""
        for target in (*self.slots.get(path, ()), *self.spare):
            if target.object not in taken:
                return target
        return None

    @property
    def expired(self) -> bool:
        """Whether the links have ended by this machine's clock."""
        try:
            end = dt.datetime.fromisoformat(self.expires_at)
        except ValueError:
            return False
        return end < dt.datetime.now(dt.timezone.utc)


def read_targets(run_dir: str) -> Optional[Targets]:
    """Return the newest targets of a run, None where it has none."""
    found = [read_secrets(run_dir).get("push"), read_json(renewal_path(run_dir))]
    documents = [document for document in found if isinstance(document, dict)]
    if not documents:
        return None
    return _targets(max(documents, key=lambda document: str(document.get("expires_at"))))


def renewal_path(run_dir: str) -> str:
    """Return where newer targets are laid: `secrets/<run_id>.push.json`."""
    return os.path.splitext(secrets_path(run_dir))[0] + ".push.json"


def keep_renewal(run_dir: str) -> bool:
    """Return whether newer targets, just laid, will be used; removes them where the run has ended."""
    status = complete(read_json(os.path.join(run_dir, "status.json")))
    if status["state"] not in TERMINAL_STATES or status["phase"] != "done":
        return True  # the agent removes them, last of all
    discard_secrets(run_dir)
    return False


def _targets(document: Json) -> Targets:
    return Targets(
        manifest=_target(document["manifest"]),
        slots={path: tuple(map(_target, rows)) for path, rows in document["slots"].items()},
        spare=tuple(map(_target, document["spare"])),
        part_bytes=int(document["part_bytes"]),
        expires_at=str(document["expires_at"]),
        life_seconds=document.get("life_seconds"),
    )


def _target(row: Any) -> Target:
    uploads = tuple(
        PartedUpload(tuple(one["parts"]), one["complete"]) for one in row.get("uploads") or ()
    )
    return Target(row["object"], row["url"], uploads)
