"""Whether what is to come has room, before it is paid for. Knows quotas that `df` does not show.

Kaggle keeps 20 GB of /kaggle/working and shows an overlay of terabytes for all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Tuple

from .errors import InputError

# What a system says where it has no room left, for all or for this user.
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Room for logs, caches, and a file system that is never filled to its end.
HEADROOM = 0.30
# The first is kept after the session and limited; elsewhere less than 60 GB were seen, and nothing is kept.
KAGGLE_WORKING, KAGGLE_SCRATCH = "/kaggle/working", "/kaggle/tmp"
KAGGLE_QUOTAS: Mapping[str, int] = {KAGGLE_WORKING: 20 * 10**9, KAGGLE_SCRATCH: 53 * 10**9}
# What the last words of a run take: status, heartbeat, receipt, the list of its files.
RESERVE_BYTES = 256 << 10
_RESERVE = os.path.join("control", "reserve")


@dataclass(frozen=True)
class Claim:
    """What will be written to one folder. `names` says for what; `bytes` is without headroom."""

    folder: str
    names: Tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Room:
    """What one file system, or one quota on it, still takes. `place` is the same for what shares it."""

    place: str
    free_bytes: int
    quota_bytes: Optional[int] = None


def check_room(claims: Sequence[Claim], *, quotas: Optional[Mapping[str, int]] = None) -> None:
    """Refuse what cannot fit: all claims on one place are added, and 30 % on top.

    Raises:
        InputError: one sentence that names what, how much and where.
    """
    places: List[str] = []
    for claim in claims:
        place = room_of(claim.folder, quotas=quotas).place
        if place not in places:
            places.append(place)
    for place in places:
        here = [c for c in claims if room_of(c.folder, quotas=quotas).place == place and c.bytes]
        need = round(sum(claim.bytes for claim in here) * (1 + HEADROOM))
        if not need:
            continue
        room = room_of(here[0].folder, quotas=quotas)
        if need > room.free_bytes:
            names = ", ".join(dict.fromkeys(name for claim in here for name in claim.names))
            limit = ""
            if room.quota_bytes is not None:
                limit = f" of its quota of {_gigabytes(room.quota_bytes)}"
            raise InputError(
                f"the disk is too small for {names}: it needs {_gigabytes(need)} with 30 % of headroom, "
                f"{_gigabytes(room.free_bytes)}{limit} are free in {here[0].folder}"
            )


def reserve(run_dir: str) -> None:
    """Lay room aside in a run directory, so that its end can be told where the disk has become full."""
    with contextlib.suppress(OSError), open(os.path.join(run_dir, _RESERVE), "wb") as stream:
        stream.write(os.urandom(RESERVE_BYTES))  # not zeros: some file systems would store none


def release(run_dir: str) -> None:
    """Give that room to who writes next."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, _RESERVE))


def room_of(folder: str, *, quotas: Optional[Mapping[str, int]] = None) -> Room:
    """Return what `folder`, which may not exist yet, still takes."""
    real = os.path.realpath(folder)
    there = real
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    free = shutil.disk_usage(there).free
    for limited, quota in (KAGGLE_QUOTAS if quotas is None else quotas).items():
        root = os.path.realpath(limited)
        if os.path.isdir(root) and (real + os.sep).startswith(root + os.sep):
            return Room(root, max(0, min(free, quota - used_bytes(root))), quota)
    return Room(str(os.stat(there).st_dev), free)


def used_bytes(folder: str) -> int:
    """Return what the files below a folder take on disk; a file with several names counts once."""
    total, seen = 0, set()
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(base, name))
            except OSError:
                continue
            if found.st_nlink > 1:
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            total += found.st_blocks * 512
    return total


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"
