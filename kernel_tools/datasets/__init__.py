"""Data sets: packed, hashed, uploaded once, and referred to by name."""

from __future__ import annotations

from kernel_tools.datasets.reference import (
    DatasetReference,
    DatasetRegistry,
    input_of,
    inputs_for,
)
from kernel_tools.datasets.sizing import DiskNeed, disk_need, disk_to_rent
from kernel_tools.datasets.staging import stage

__all__ = [
    "DatasetReference",
    "DatasetRegistry",
    "DiskNeed",
    "disk_need",
    "disk_to_rent",
    "input_of",
    "inputs_for",
    "stage",
]
