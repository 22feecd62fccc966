from __future__ import annotations

import os
from pathlib import Path

import pytest

from detector.cpus import cgroup_quota, usable_cpus


def tree(root: Path, **files: str) -> Path:
    """Write files whose names stand for paths: `__` is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("cfs_", "cpu.cfs_").replace(
            "cpumax", "cpu.max"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


TOP = "sys__fs__cgroup"


def test_without_a_cgroup_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(root=tmp_path) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200000 100000", 2.0), ("150000 100000", 1.5), ("max 100000", None), ("", None)],
)
def test_version_2_at_the_top_of_a_container(
    tmp_path: Path, text: str, expected: float | None
) -> None:
    assert cgroup_quota(root=tree(tmp_path, **{f"{TOP}__cpumax": text})) == expected


def test_version_2_takes_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="0::/pod/box\n",
        **{
            f"{TOP}__pod__box__cpumax": "max 100000",
            f"{TOP}__pod__cpumax": "300000 100000",
            f"{TOP}__other__cpumax": "100000 100000",
        },
    )
    assert cgroup_quota(root=root) == 3.0


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_version_1_in_its_own_folder_and_at_the_top(tmp_path: Path, folder: str) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="4:memory:/m\n3:cpu,cpuacct:/docker/x\n",
        **{
            f"{TOP}__{folder}__docker__x__cfs_quota_us": "400000\n",
            f"{TOP}__{folder}__docker__x__cfs_period_us": "100000\n",
            f"{TOP}__{folder}__cfs_quota_us": "-1\n",
            f"{TOP}__{folder}__cfs_period_us": "100000\n",
        },
    )
    assert cgroup_quota(root=root) == 4.0


def test_the_quota_bounds_the_affinity_and_never_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cpus(root=tmp_path) == 8
    assert usable_cpus(root=tree(tmp_path, **{f"{TOP}__cpumax": "250000 100000"})) == 2
    assert usable_cpus(root=tree(tmp_path, **{f"{TOP}__cpumax": "50000 100000"})) == 1
    assert usable_cpus(root=tree(tmp_path, **{f"{TOP}__cpumax": "9900000 100000"})) == 8


def test_a_rank_takes_its_share_of_the_quota_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from detector import runtime

    before = torch.get_num_threads()
    monkeypatch.setattr(runtime, "usable_cpus", lambda: 8)
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert (runtime.set_threads(1), runtime.set_threads(2), runtime.set_threads(16)) == (
            8,
            4,
            1,
        )
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert runtime.set_threads(2) == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
