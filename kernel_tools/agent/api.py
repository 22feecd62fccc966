"""What the laptop calls through the kernel: JSON-able keywords in, a JSON-able dict out.

Every function returns at once or within seconds and keeps the kernel free. Expected trouble is
`AgentError`.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence

from . import artifacts, host
from . import info as _info
from . import launch as _launch
from . import monitor as _monitor
from . import stopping as _stopping
from . import targets as _targets
from .errors import AgentError
from .files import Json

__all__ = [
    "AgentError", "files", "info", "inspect_remote", "launch", "list_runs", "pack_log", "poll",
    "renewed", "stop",
]  # fmt: skip


def launch(
    remote_dir: str, job: Json, manifest: Mapping[str, Any], secrets_file: Optional[str] = None
) -> Dict[str, Any]:
    """Start a run at most once: {"run_id", "run_dir", "started", "state"}; see `launch.launch`."""
    return _launch.launch(remote_dir, job, manifest, secrets_file)


def poll(
    remote_dir: str,
    run_id: str,
    log_offset: int = 0,
    metrics_offset: int = 0,
    steps_offset: int = 0,
    max_bytes: int = 262144,
) -> Dict[str, Any]:
    """Return the run and what is new since the offsets; see `monitor.poll`."""
    return _monitor.poll(remote_dir, run_id, log_offset, metrics_offset, steps_offset, max_bytes)


def pack_log(
    remote_dir: str, run_id: str, key: str, offset: int, length: int = 16 << 20
) -> Dict[str, Any]:
    """Lay a compressed piece of the log to be fetched as a file; see `monitor.pack_log`."""
    return _monitor.pack_log(remote_dir, run_id, key, offset, length)


def stop(
    remote_dir: str, run_id: str, message: str = "stopped by the user", now: bool = False
) -> Dict[str, Any]:
    """Ask a run to end: {"state", "asked"}; see `stopping.stop`."""
    return _stopping.stop(remote_dir, run_id, message=message, now=now)


def list_runs(remote_dir: str) -> Dict[str, Any]:
    """Return {"runs": [...]}, newest first."""
    return _monitor.list_runs(remote_dir)


def files(remote_dir: str, run_id: str, patterns: Sequence[str]) -> Dict[str, Any]:
    """Return {"files": [{path, size_bytes, sha256}]} of what matches in the run directory now."""
    return artifacts.files(_launch.run_dir_of(remote_dir, run_id), patterns)


def renewed(remote_dir: str, run_id: str) -> Dict[str, Any]:
    """Take note of newer links to the store: {"kept": whether the run will still use them}."""
    return {"kept": _targets.keep_renewal(_launch.run_dir_of(remote_dir, run_id))}


def inspect_remote() -> Dict[str, Any]:
    """Return what machine this is."""
    return host.inspect()


def info(
    remote_dir: str,
    question: str,
    probes_file: Optional[str] = None,
    datasets: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> Dict[str, Any]:
    """Return what this machine can do, within a minute or so; see `info.info`."""
    return _info.info(remote_dir, question, probes_file, datasets, packages)
