"""Naming a store or a data set loads no SDK and starts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_importing_stores_data_sets_and_services_loads_no_sdk() -> None:
    code = (
        "import sys, kernel_tools.datasets, kernel_tools.stores, kernel_tools.services.service,"
        " kernel_tools.kernels.local, kernel_tools.stores.local, kernel_tools.stores.hub, kernel_tools.datasets.inventory;"
        "print([m for m in ('minio', 'huggingface_hub', 'urllib3', 'Crypto', 'torch', 'matplotlib', 'jupyter_server', 'fcntl_')"
        " if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )

    assert shown.stdout.strip() == "[]"
