"""What this machine can do, asked before anything is paid for: cards, versions, memory, disk, clock, store.

Reads and computes, writes nothing, and ends within a minute whatever hangs. Imports no torch: that is for
`proof.py`, in a process of its own.
"""

from __future__ import annotations

import contextlib
import email.utils
import importlib.util
import os
import platform
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence

from . import disk, host
from .child import Child
from .files import Json, read_json
from .presigned import LINE_ERRORS, Line, RefusedError, cause_of
from .stage import usual_datasets_dir

# The first import of torch on a cold network disk takes most of it.
PROOF_SECONDS = 60.0
STORE_SECONDS = 15.0
_SECRETS_PREFIX = "info-"
_SECRETS_SECONDS = 600.0
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only looked at

# The last answer: the same question is asked again where its answer was lost on the way.
_answered: Dict[str, Json] = {}


def info(
    remote_dir: str,
    question: str,
    probes_file: Optional[str] = None,
    datasets: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> Json:
    """Return what this machine is and can do.

    Args:
        remote_dir: folder of everything of ours.
        question: names this question; asked again, it is not worked out again.
        probes_file: of mode 0600, removed here: {"probes": [{"name", "object", "url"}]}.
        datasets: SHA-256 of archives that may be here already.
        packages: modules that a trainer needs, looked for and not imported.
    """
    if question not in _answered:
        _answered.clear()
        _answered[question] = _find_out(remote_dir, probes_file, datasets, packages)
    return _answered[question]


def _find_out(
    remote_dir: str,
    probes_file: Optional[str],
    datasets: Sequence[str],
    packages: Sequence[str],
) -> Json:
    asked_at = time.time()
    root = os.path.abspath(os.path.expanduser(remote_dir))
    probes = _take_probes(root, probes_file)
    reached: List[Json] = [{**_named(probe), "problem": _late()} for probe in probes]
    threads = [
        threading.Thread(target=_reach_into, args=(reached, number, probe), daemon=True)
        for number, probe in enumerate(probes)
    ]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    total, available = host.memory_bytes()
    driver, carried = host.driver_versions()
    staged = usual_datasets_dir(root)
    told = {
        "asked_at": asked_at,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "kaggle": os.path.isdir(disk.KAGGLE_WORKING),
        "cpu_count": host.cpu_count(),
        "memory_bytes": total,
        "memory_available_bytes": available,
        "shared_memory_bytes": _free(_SHARED_MEMORY),
        "gpus": host.gpus(),
        "driver": driver,
        "driver_cuda": carried,
        "disk": {"runs": _room(root), "datasets": _room(staged)},
        "staged": [one for one in datasets if _is_staged(staged, one)],
        "missing": [name for name in packages if not _is_there(name)],
        **_prove(),
    }
    for thread in threads:
        thread.join(max(0.0, STORE_SECONDS - (time.monotonic() - began)))
    told.update(stores=list(reached), answered_at=time.time())
    return told


# -- cards -----------------------------------------------------------------------------------------


def _prove() -> Json:
    """Return {"torch": first finding, "places": the others, "proof_problem": why there are no more}."""
    found, problem = Child("proof.py", (), os.environ).run(seconds=PROOF_SECONDS)
    torch = next((row for row in found if "torch" in row), None)
    places = [row for row in found if "place" in row]
    return {"torch": torch, "places": places, "proof_problem": problem}


# -- disk and modules ------------------------------------------------------------------------------


def _room(folder: str) -> Json:
    room = disk.room_of(folder)
    there = folder
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    return {
        "folder": folder,
        "place": room.place,
        "free_bytes": room.free_bytes,
        "quota_bytes": room.quota_bytes,
        "writable": os.access(there, os.W_OK),
    }


def _free(folder: str) -> Optional[int]:
    return host.disk_free_bytes(folder) if os.path.isdir(folder) else None


def _is_staged(folder: str, sha256: str) -> bool:
    return os.path.isfile(os.path.join(folder, sha256, "marker.json"))


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# -- store -----------------------------------------------------------------------------------------


def _take_probes(root: str, path: Optional[str]) -> List[Json]:
    """Read and remove the file of links, and what a question that was cut off has left."""
    folder = os.path.join(root, "secrets")
    document = (read_json(os.path.join(root, path)) or {}) if path else {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            full = os.path.join(folder, name)
            old = time.time() - os.stat(full).st_mtime > _SECRETS_SECONDS
            if name.startswith(_SECRETS_PREFIX) and (old or name == os.path.basename(path or "")):
                os.unlink(full)
    return list(document.get("probes") or ())


def _named(probe: Mapping[str, Any]) -> Json:
    return {"name": probe["name"], "object": probe.get("object")}


def _late() -> str:
    return f"no answer within {STORE_SECONDS:.0f} s"


def _reach_into(reached: List[Json], number: int, probe: Mapping[str, Any]) -> None:
    try:
        found = reach(probe["url"], probe.get("object"))
    except Exception as error:  # noqa: BLE001 - a row that says so, not a trace in the notebook
        found = {"problem": type(error).__name__}
    reached[number] = {**_named(probe), **found}


def reach(url: str, name: Optional[str]) -> Json:
    """Ask the store for one byte by a presigned URL.

    Args:
        url: the link.
        name: the object that is meant; None for one that need not be there.

    Returns:
        {"problem": "" or why not, "read": whether the object's bytes came, "ahead_seconds": by how much
        this machine's clock is ahead of the store's `Date`, None where it tells none}
    """
    line = Line(url)
    began, date, read, problem = time.time(), None, False, ""
    try:
        response = line.get({"Range": "bytes=0-0"})
        date, read = response.getheader("Date"), name is not None
        response.read(1)
    except RefusedError as error:
        date = error.date
        # What need not be there is not found, or not shown to keys that may not list: that is an answer.
        answered = name is None and (error.status == 404 or error.code == "AccessDenied")
        if not answered or error.expired:
            problem = error.sentence("download", name or "a link", again="type %remote_info again")
    except LINE_ERRORS as error:
        problem = cause_of(error)
    finally:
        line.close()
    ahead = None
    with contextlib.suppress(TypeError, ValueError, IndexError):
        # A Date names a whole second; the middle of it errs least.
        theirs = email.utils.parsedate_to_datetime(date or "").timestamp() + 0.5
        ahead = round((began + time.time()) / 2 - theirs, 1)
    return {"problem": problem, "read": read, "ahead_seconds": ahead}
