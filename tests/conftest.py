"""What every test may use: a state folder of its own, and the photographs beside the project if there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Real servers, real training and whole networks: each test is short, together they are minutes.
SLOW_PLACES = (
    "tests/detector/models/test_parity.py",
    "tests/detector/models/test_weights.py",
    "tests/detector/training",
    "tests/kernel",
    "tests/services",
    "tests/store",
)
PHOTOGRAPHS = ROOT.parent / "shared" / "data" / "coco128"

# A shell that starts the tests in the background has SIGINT ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(ROOT).as_posix().startswith(SLOW_PLACES):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("shared") and not PHOTOGRAPHS.is_dir():
            item.add_marker(pytest.mark.skip(reason=f"{PHOTOGRAPHS} is absent"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA card here"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def coco128() -> Path:
    """The folder with photographs in YOLO layout; tests that use it are marked `shared`."""
    return PHOTOGRAPHS


@pytest.fixture(autouse=True)
def own_state_dir(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Give each test a state folder and no settings of the machine's user."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("KERNEL_TOOLS_STATE_DIR", str(folder))
    for name in (
        "KAGGLE_PROXY_URL",
        "PYRUN_JUPYTER_URL",
        "KERNEL_TOOLS_MODE",
        "KERNEL_TOOLS_ENV_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in [n for n in os.environ if n.startswith("MINIO_")]:
        monkeypatch.delenv(name)
    return folder
