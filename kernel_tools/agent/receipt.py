"""`receipt.json`: what ran, on what, with which hashes. Reads versions without importing anything.

It holds all that is needed to run the same again: job, resolved configuration, threads, hashes of
code and data. Values that came from the environment stand in it by their names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import socket
from typing import Any, Dict, List, Mapping, Optional, Sequence

from . import host
from .files import Json, read_json, utc_now, write_json
from .job import Job
from .launch import read_secrets
from .outcome import Outcome

_PACKAGES = (
    "torch", "numpy", "scipy", "opencv-python-headless", "pillow", "safetensors", "faster-coco-eval",
    "pycocotools", "libreyolo",
)  # fmt: skip
_CUDA = re.compile(r"^cuda(?:: [^=]+)? = '([^']+)'", re.MULTILINE)
# A shorter value may stand anywhere by chance.
_LEAST_REPLACED = 4


def write_receipt(
    run_dir: str,
    job: Job,
    outcome: Outcome,
    status: Json,
    entries: Sequence[Json],
    *,
    attempts: Optional[List[Json]] = None,
) -> None:
    """Write the receipt of a run that has ended; `entries` are its artifacts.

    `attempts` are the starts of the trainer; None takes those that the heartbeat tells.
    """
    document = read_json(os.path.join(run_dir, "job.json")) or {}
    command = read_json(os.path.join(run_dir, "command.json")) or {}
    if attempts is None:
        agent = read_json(os.path.join(run_dir, "agent.json")) or {}
        attempts = agent.get("attempts") or []
    environment = dict(job.env, **(read_secrets(run_dir).get("env") or {}))
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
            "command": command,
            "code_sha256": code_hash(run_dir),
            "code": _code(run_dir, document),
            "config": _config(run_dir, environment),
            "inputs": [
                {
                    "name": one.name,
                    "object": one.object,
                    "dest": one.dest,
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
            "gpus": [
                {"name": gpu["name"], "memory_bytes": gpu["memory_total"]} for gpu in host.gpus()
            ],
            "gpu_names": status.get("gpu_names"),
            "world_size": status.get("world_size"),
            "optimizer_steps": status.get("optimizer_steps"),
            "metrics": status.get("metrics"),
            "started_at": status.get("started_at"),
            "ended_at": utc_now(),
            "elapsed_seconds": status.get("elapsed_seconds"),
            "cost": _cost(document, status.get("elapsed_seconds")),
            "attempts": attempts,
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


def _code(run_dir: str, document: Json) -> Json:
    """The files that ran, by hash, and where their project stood in git when they were sent."""
    files = (read_json(os.path.join(run_dir, "manifest.json")) or {}).get("files") or {}
    source = document.get("source") or {}
    return {
        "files": {path: entry[1] for path, entry in sorted(files.items())},
        "git_commit": source.get("git_commit"),
        "git_dirty": source.get("git_dirty"),
        "git_diff_sha256": source.get("git_diff_sha256"),
    }


def _config(run_dir: str, environment: Mapping[str, str]) -> Optional[Json]:
    """The resolved configuration, its values from the environment as `${NAME}` again."""
    path = os.path.join(run_dir, "config.yaml")
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, ValueError):
        return None
    for name, value in sorted(environment.items(), key=lambda pair: -len(pair[1])):
        if len(value) >= _LEAST_REPLACED:
            text = text.replace(value, "${" + name + "}")
    return {"text": text, "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest()}


def _cost(document: Json, seconds: Any) -> Optional[float]:
    """What the time cost, None unless a price is known."""
    price = document.get("price_per_hour")
    if not isinstance(price, (int, float)) or not isinstance(seconds, (int, float)):
        return None
    return round(price * seconds / 3600.0, 4)


def _versions() -> Dict[str, Any]:
    from importlib import metadata

    versions: Dict[str, Any] = {"python": platform.python_version(), "cuda": _cuda()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _cuda() -> Optional[str]:
    """The CUDA release that torch was built for, from its own file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        try:
            with open(os.path.join(folder, "version.py"), encoding="utf-8") as stream:
                found = _CUDA.search(stream.read())
        except OSError:
            continue
        return found.group(1) if found else None
    return None
