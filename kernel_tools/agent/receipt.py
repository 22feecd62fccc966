"""`receipt.json`: what ran, on what, with which hashes. Reads versions without importing anything."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from typing import Any, Dict, Optional, Sequence

from . import host
from .files import Json, read_json, utc_now, write_json
from .job import Job
from .outcome import Outcome

_PACKAGES = ("torch", "numpy", "scipy", "opencv-python-headless", "pillow", "faster-coco-eval")


def write_receipt(
    run_dir: str, job: Job, outcome: Outcome, status: Json, entries: Sequence[Json]
) -> None:
    """Write the receipt of a run that has ended; `entries` are its artifacts."""
    document = read_json(os.path.join(run_dir, "job.json")) or {}
    write_json(
        os.path.join(run_dir, "receipt.json"),
        {
            "schema_version": 1,
            "run_id": job.run_id,
            "created_at": utc_now(),
            "state": outcome.state,
            "message": outcome.message,
            "exit_code": outcome.exit_code,
            "job": document,
            "code_sha256": code_hash(run_dir),
            "inputs": [
                {
                    "name": one.name,
                    "object": one.object,
                    "sha256": one.sha256,
                    "size_bytes": one.size_bytes,
                }
                for one in job.inputs
            ],
            "versions": _versions(),
            "host": {
                "name": socket.gethostname(),
                "platform": platform.platform(),
                "cpu_count": host.cpu_count(),
                "boot_id": host.boot_id(),
            },
            "gpu_names": status.get("gpu_names"),
            "world_size": status.get("world_size"),
            "optimizer_steps": status.get("optimizer_steps"),
            "metrics": status.get("metrics"),
            "started_at": status.get("started_at"),
            "ended_at": utc_now(),
            "elapsed_seconds": status.get("elapsed_seconds"),
            "attempts": status.get("attempt"),
            "artifacts": list(entries),
        },
    )


def code_hash(run_dir: str) -> Optional[str]:
    """Return the SHA-256 over the sorted (path, mode, hash) of the code that ran."""
    manifest = read_json(os.path.join(run_dir, "manifest.json"))
    if manifest is None:
        return None
    text = json.dumps(manifest.get("files") or {}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _versions() -> Dict[str, Any]:
    from importlib import metadata

    versions: Dict[str, Any] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
