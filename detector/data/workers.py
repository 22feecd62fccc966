"""How many loader processes a rank starts: what was asked for or the cores allow, and memory holds."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Final

from detector.cpus import usable_cpus

if TYPE_CHECKING:
    from detector.config import DataConfig

PREFETCH: Final = 4
"""Batches that each process keeps ready."""
MOST: Final = 8
"""Processes a rank, where nobody asked for a number."""
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where Linux keeps what processes share


def with_workers(
    data: DataConfig, *, pictures: int, device: str, local_ranks: int = 1
) -> DataConfig:
    """Return `data` with `workers` as `loader_workers` has it; `device` is `cuda` or `cpu`."""
    on_card = device == "cuda"
    workers = loader_workers(data, pictures=pictures, on_card=on_card, local_ranks=local_ranks)
    return dataclasses.replace(data, workers=workers)


def loader_workers(
    data: DataConfig,
    *,
    pictures: int,
    on_card: bool,
    local_ranks: int = 1,
    shared_memory: str = SHARED_MEMORY,
) -> int:
    """Return the loader processes of this rank; 0 = batches are made in the training process.

    Batches travel in shared memory, of which a container often has 64 MB: a process that finds it full
    is killed by the system (SIGBUS), so no more are started than their batches have room there.

    Args:
        data: `workers` null stands for this rank's part of the cores on a card, and 0 on a CPU, whose
            cores the network itself fills.
        pictures: in one batch of this rank.
        on_card: the network runs on a GPU.
        local_ranks: ranks that share this machine.
        shared_memory: the folder whose free space counts.
    """
    wanted = data.workers
    if wanted is None:
        wanted = min(MOST, max(1, usable_cpus() // local_ranks)) if on_card else 0
    try:
        room = os.statvfs(shared_memory)
    except (AttributeError, OSError):  # Windows, macOS: batches travel another way
        return wanted
    batch = pictures * 3 * data.image_size**2  # bytes: one a pixel and colour
    # One more than the prefetched ones is on its way to the trainer.
    fitting = room.f_bavail * room.f_frsize // (batch * (PREFETCH + 1) * local_ranks)
    return min(wanted, fitting)
