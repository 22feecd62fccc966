"""What machine this is: boot id, processors, memory, disk, cards. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Mapping, Optional, Tuple

_BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
# A card whose driver hangs must not hold up the heartbeat.
_NVIDIA_SMI_TIMEOUT_SECONDS = 10.0


_known_boot_id: Optional[str] = None


def boot_id() -> str:
    """Return an id that changes at every boot; empty where the system has none."""
    global _known_boot_id  # noqa: PLW0603 - no process outlives its boot, and a poll asks often
    if _known_boot_id is None:
        _known_boot_id = _read_boot_id()
    return _known_boot_id


def _read_boot_id() -> str:
    try:
        with open(_BOOT_ID_FILE, encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(
                ["sysctl", "-n", "kern.bootsessionuuid"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5, check=False,
            )  # fmt: skip
            return found.stdout.decode("ascii", "replace").strip()
    return ""


def cpu_count() -> int:
    """Return the processors this process may use: affinity and the control group's quota."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        count = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as stream:
            quota, period = stream.read().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # the older control groups
        quotas = [_group_figure(f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
        if quotas[0] > 0:
            count = min(count, max(1, quotas[0] // quotas[1]))
    return max(1, count)


def memory_bytes() -> Tuple[Optional[int], Optional[int]]:
    """Return (total, available) memory in bytes, within the control group's limit; None where unknown."""
    total, available = _machine_memory()
    for limit, used, unused in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError):  # also where it says "max"
            allowed = _group_figure(limit)
            if total is None or allowed < total:
                total = allowed
                left = allowed - _group_figure(used) + _inactive_file_bytes(unused)
                available = left if available is None else min(available, left)
    return total, None if available is None else max(0, available)


def _group_figure(name: str) -> int:
    with open("/sys/fs/cgroup/" + name, encoding="ascii") as stream:
        return int(stream.read())


def _inactive_file_bytes(name: str) -> int:
    """Cached files, which count as used and give way."""
    with open("/sys/fs/cgroup/" + name, encoding="ascii") as stream:
        for line in stream:
            key, _, count = line.partition(" ")
            if key in ("inactive_file", "total_inactive_file"):
                return int(count)
    return 0


def _machine_memory() -> Tuple[Optional[int], Optional[int]]:
    figures: Dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                name, _, rest = line.partition(":")
                figures[name] = int(rest.split()[0]) * 1024
        return figures.get("MemTotal"), figures.get("MemAvailable")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    return None, None


def oom_kills() -> Optional[int]:
    """Return how many processes the kernel has killed for memory in this control group, if told."""
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/memory.events", encoding="ascii") as stream:
            for line in stream:
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None


def disk_free_bytes(path: str) -> Optional[int]:
    """Return the free bytes of the file system of `path`."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _nvidia_smi(*arguments: str) -> Optional[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=_NVIDIA_SMI_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def driver_versions() -> Tuple[str, str]:
    """Return the NVIDIA driver's version and the CUDA that it can carry; "" each where nobody says."""
    page = _nvidia_smi() or ""
    found = [re.search(name + r" Version: *([0-9.]+)", page) for name in ("Driver", "CUDA")]
    driver, cuda = ("" if one is None else one.group(1) for one in found)
    return driver, cuda


def has_nvidia_smi() -> bool:
    """Return whether the driver's own tool is there to be asked."""
    return shutil.which("nvidia-smi") is not None


def gpus() -> List[Dict[str, Any]]:
    """Return one row a card: name, util (%), memory_used and memory_total (bytes), temperature (C)."""
    text = _nvidia_smi(
        "--query-gpu=name,utilization.gpu,memory.used,memory.total,temperature.gpu",
        "--format=csv,noheader,nounits",
    )
    rows = []
    for line in (text or "").splitlines():
        cells = [cell.strip() for cell in line.rsplit(",", 4)]
        if len(cells) == 5:
            numbers = [_number(cell) for cell in cells[1:]]
            rows.append(
                {
                    "name": cells[0],
                    "util": numbers[0],
                    "memory_used": None if numbers[1] is None else numbers[1] << 20,
                    "memory_total": None if numbers[2] is None else numbers[2] << 20,
                    "temperature": numbers[3],
                }
            )
    return rows


def _number(cell: str) -> Optional[int]:
    try:
        return int(float(cell))
    except ValueError:  # "[N/A]", as MIG slices answer
        return None


def visible_cards(environment: Mapping[str, str]) -> int:
    """Return how many CUDA cards a program started with `environment` would see."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        # CUDA stops at the first invalid entry; -1 is the usual way to say none.
        return next((i for i, name in enumerate(names) if name.startswith("-")), len(names))
    listed = _nvidia_smi("-L") or ""
    return sum(1 for line in listed.splitlines() if line.startswith("GPU "))


def inspect() -> Dict[str, Any]:
    """Return what a caller shows before anything is launched."""
    total, _ = memory_bytes()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu_count": cpu_count(),
        "memory_bytes": total,
        "disk_free_bytes": disk_free_bytes(os.getcwd()),
        "gpus": gpus(),
        "cwd": os.getcwd(),
        "boot_id": boot_id(),
        "kaggle": os.path.isdir("/kaggle/working"),
    }
