"""What a preflight found: checks, each with what to do about it, and all of them together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from kernel_tools.datasets.sizing import DiskNeed

Standing = Literal["ok", "note", "problem"]


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
