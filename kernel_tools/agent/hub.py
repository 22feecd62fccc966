"""A run's weights into its model repository of the Hugging Face Hub, when the run has ended.

With HF_TOKEN of this machine's environment, and by huggingface_hub where that is installed; otherwise it is
left to the laptop, and `hub.json` says so. The token is in no argument, log or file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Callable, Mapping, Optional, Tuple

from .files import Json, file_size, sha256_file, write_json
from .job import Hub, Job
from .trainer import clean_environment

# Beside what a slow line takes for the weights.
_LEAST_SECONDS = 300.0
_SLOWEST_BYTES_A_SECOND = 500e3
_TOLD = "hub.json"
# Quiet, and by LFS, which every hub speaks; Xet would fill a cache of its own on this disk.
_CLIENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",
}


def deliver(
    run_dir: str, job: Job, *, log: Callable[[str], None], environment: Mapping[str, str]
) -> str:
    """Upload `best.pt`, or `last.pt` where there is none. Returns words for the run's message, or "".

    Args:
        run_dir: the run, none of whose processes is left.
        job: says where to; without a place nothing is done.
        log: takes one line for the run's log.
        environment: of the agent.
    """
    if job.hub is None:
        return ""
    found = _weights(run_dir)
    if found is None:
        return _left(run_dir, job.hub, None, "the run has left no weights", log)
    weights, path = found
    name = job.hub.path or weights + ".pt"
    token = (environment.get("HF_TOKEN") or "").strip()
    if not token:
        return _left(run_dir, job.hub, weights, "HF_TOKEN is not set there", log)
    notes = {"run": job.run_id, "sha256": sha256_file(path)[0]}
    problem = _upload(job.hub.repository, name, path, notes, environment)
    if problem:
        return _left(run_dir, job.hub, weights, problem, log)
    place = "hf://{}/{}".format(job.hub.repository, name)
    _tell(run_dir, {"state": "pushed", "place": place, "weights": weights, "why": ""})
    log(f"weights_pushed={place}")
    return ""


def _weights(run_dir: str) -> Optional[Tuple[str, str]]:
    for weights in ("best", "last"):
        path = os.path.join(run_dir, "weights", weights + ".pt")
        if os.path.isfile(path):
            return weights, path
    return None


def _upload(
    repository: str, name: str, path: str, notes: Json, environment: Mapping[str, str]
) -> str:
    """Run the upload; returns what went wrong, or ""."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hub_upload.py")
    child = subprocess.Popen(
        [sys.executable, program, repository, name, path, json.dumps(notes)],
        cwd="/", env=dict(clean_environment(environment), **_CLIENT), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    seconds = _LEAST_SECONDS + file_size(path) / _SLOWEST_BYTES_A_SECOND
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return f"the upload had not ended after {seconds:.0f} s"
    for line in reversed(output.decode("utf-8", "replace").splitlines()):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["problem"])
    return f"the upload ended with exit code {child.returncode}"


def _left(
    run_dir: str, hub: Hub, weights: Optional[str], why: str, log: Callable[[str], None]
) -> str:
    place = "hf://" + hub.repository + ("/" + hub.path if hub.path else "")
    _tell(run_dir, {"state": "left", "place": place, "weights": weights, "why": why})
    log(f"weights_not_pushed={place} {why}")
    if weights is None:
        return f"nothing went to {place}: {why}"
    return f"the weights are not in {place}: {why}; %remote_fetch puts them there from here"


def _tell(run_dir: str, document: Json) -> None:
    with contextlib.suppress(OSError):  # a full disk; the message says it too
        write_json(os.path.join(run_dir, _TOLD), dict(document, schema_version=1))
