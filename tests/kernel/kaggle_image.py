"""The Jupyter server of Kaggle's image in an environment of its own, made once and kept in a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

# docker-python's image pins the server, its base image the rest.
PINS = (
    "jupyter_server==2.12.5",
    "ipykernel==6.17.1",
    "ipython==7.34.0",
    "jupyter_client==7.4.9",
    "tornado==6.5.1",
    "setuptools<81",
    "numpy",
)


def python_of_kaggle() -> str:
    """Return the interpreter of the environment, made now if need be (a minute, from PyPI).

    Raises:
        RuntimeError: no Python that ipython 7 runs on, or nothing to install from.
    """
    named = os.environ.get("KERNEL_TOOLS_TEST_KAGGLE_PYTHON")
    if named:
        return named
    base = _base_python()
    name = hashlib.sha256("\n".join((base, *PINS)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "remote-kernel-tools-tests"
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"kaggle-{name}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "made").exists():
            shutil.rmtree(place, ignore_errors=True)
            _run(base, "-m", "venv", str(place))
            _run(str(place / "bin/python"), "-m", "pip", "install", "--quiet", *PINS)
            (place / "made").touch()
    return str(place / "bin/python")


def _base_python() -> str:
    """ipython 7.34 runs on 3.10 to 3.12."""
    if sys.version_info < (3, 13):
        return sys.executable
    for name in ("python3.12", "python3.11", "python3.10"):
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError("ipython 7.34 needs a Python from 3.10 to 3.12, and none is installed")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:5])} ...: {done.stderr[-500:]}")
