"""Which of many contents a remote lacks, asked without naming them all: the cost follows what changed.

Files fall into groups by their path's hash. A group's listing (its digests, 32 bytes each) is content of
its own, named by its hash, so a remote that has it knows the group from one name; where a file changed,
one listing did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kernel_tools.kernels.rpc import AgentClient, Blob

# Up to so many contents are simply named: 64 characters each, inside one cell.
NAMED_AT_MOST: Final = 512
GROUP_FILES: Final = 64


@dataclass(frozen=True, slots=True)
class Lacking:
    """What is to be sent.

    Attributes:
        digests: contents that the remote lacks.
        listings: to be sent along with them, so that it can be asked by name the next time.
    """

    digests: frozenset[str]
    listings: tuple[Blob, ...] = ()


def lacking(client: AgentClient, digests: Mapping[str, str]) -> Lacking:
    """Ask which contents are missing, in one round trip, or two where groups have changed.

    Args:
        client: the way there.
        digests: SHA-256 by path.
    """
    if len(digests) <= NAMED_AT_MOST:
        return Lacking(frozenset(client.missing(digests.values())))
    groups = _groups(digests)
    found = client.look((), groups)
    missing = set(found.missing)
    if found.unknown:
        changed = [digest for name in found.unknown for digest in groups[name]]
        missing.update(client.missing(changed))
    listings = tuple(Blob.of(_listing(groups[name])) for name in found.unknown)
    return Lacking(frozenset(missing), listings)


def _groups(digests: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the groups by the SHA-256 of their listing."""
    count = 1
    while count * GROUP_FILES < len(digests):
        count *= 2
    sorted_in: dict[int, set[str]] = {}
    for path, digest in digests.items():
        where = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % count
        sorted_in.setdefault(where, set()).add(digest)
    groups = (tuple(sorted(group)) for group in sorted_in.values())
    return {hashlib.sha256(_listing(group)).hexdigest(): group for group in groups}


def _listing(group: tuple[str, ...]) -> bytes:
    return b"".join(map(bytes.fromhex, group))
