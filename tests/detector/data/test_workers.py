"""How many loader processes a rank starts."""

from __future__ import annotations

import os

import pytest

from detector.config import DataConfig
from detector.data import workers
from detector.data.workers import loader_workers


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Eight cores and plenty of shared memory."""
    monkeypatch.setattr(workers, "usable_cpus", lambda: 8)
    set_room(monkeypatch, 10**10)


def set_room(monkeypatch, size):
    room = os.statvfs_result(
        (4096, 4096, size // 4096, size // 4096, size // 4096, 0, 0, 0, 0, 255)
    )
    monkeypatch.setattr(os, "statvfs", lambda _: room)


@pytest.mark.parametrize(
    ("asked", "on_card", "local_ranks", "started"),
    [
        (None, False, 1, 0),
        (None, True, 1, 8),
        (None, True, 2, 4),
        (None, True, 16, 1),
        (0, True, 1, 0),
        (3, False, 2, 3),
    ],
)
def test_what_is_asked_for_or_the_cores_of_a_rank(asked, on_card, local_ranks, started):
    data = DataConfig(workers=asked)
    found = loader_workers(data, pictures=8, on_card=on_card, local_ranks=local_ranks)
    assert found == started


def test_no_more_than_their_batches_have_room_in_shared_memory(monkeypatch):
    data = DataConfig(workers=4, image_size=640)
    batch = 8 * 3 * 640**2  # 9.8 MB, of which 5 a process
    set_room(monkeypatch, 3 * 5 * batch + 5000)
    assert loader_workers(data, pictures=8, on_card=True) == 3
    assert loader_workers(data, pictures=8, on_card=True, local_ranks=2) == 1
    set_room(monkeypatch, 64 << 20)  # what a container has unless told
    assert loader_workers(data, pictures=8, on_card=True, local_ranks=2) == 0


def test_a_machine_without_shared_memory_of_that_kind_is_not_bounded(monkeypatch):
    monkeypatch.delattr(os, "statvfs")
    assert loader_workers(DataConfig(workers=4), pictures=8, on_card=True) == 4
