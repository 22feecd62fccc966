"""How many CPUs this process may use: its affinity, bounded by the quotas of its cgroups.

A container sees all cores of its host but may be held to a few by a quota; more threads than that
only wait for each other. No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(*, root: Path = Path("/")) -> int:
    """Return the CPUs this process may use, at least 1. `root` is where /proc and /sys are found."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        count = os.cpu_count() or 1
    quota = cgroup_quota(root=root)
    return max(1, count if quota is None else min(count, int(quota)))


def cgroup_quota(*, root: Path = Path("/")) -> float | None:
    """Return the CPUs that the tightest quota allows (1.5 = one and a half), None without any.

    Looked for in the process's own cgroup and all above it, of version 2 and of version 1: a limit on
    any of them holds.
    """
    limits = [limit for folder in _cgroup_folders(root) for limit in _limits(folder)]
    return min(limits, default=None)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's CPU cgroups and those above; in a container often the top."""
    mount = root / "sys" / "fs" / "cgroup"
    paths = {"": "/", "cpu": "/"}  # what is not readable below is there at the top of the mount
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            paths[""] = path
        elif "cpu" in controllers.split(","):
            paths["cpu"] = path
    for top, path in (
        (mount, paths[""]),
        (mount / "unified", paths[""]),
        (mount / "cpu", paths["cpu"]),
        (mount / "cpu,cpuacct", paths["cpu"]),
    ):
        parts = [part for part in path.split("/") if part not in {"", "..", "."}]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _limits(folder: Path) -> Iterator[float]:
    """Yield the quota that stands in a folder, in CPUs: `cpu.max` of version 2, `cpu.cfs_*` of version 1."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return
    if quota not in {"max", "-1"} and quota.isdigit() and period.isdigit() and int(period):
        yield int(quota) / int(period)
