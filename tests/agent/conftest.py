"""The agent under the name it travels by, and a remote folder to run it in.

It is loaded from its folder and not through `kernel_tools`, so that these tests also pass on the
oldest Python that the agent supports.
"""

import base64
import importlib.util
import os
import sys
import time
import zlib

import pytest

FOLDER = os.path.abspath(os.path.dirname(__file__))
AGENT_FOLDER = os.path.join(os.path.dirname(os.path.dirname(FOLDER)), "kernel_tools", "agent")
STUB = os.path.join(FOLDER, "stub_trainer.py")
TERMINAL = ("completed", "failed", "stopped", "timed_out")


def load_agent(name, folder):
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if "kernel_tools_agent" not in sys.modules:
    load_agent("kernel_tools_agent", AGENT_FOLDER)

from kernel_tools_agent import api, processes  # noqa: E402


def wait_until(condition, seconds=30.0, what="the condition"):
    """Return the first true value of `condition()`; fail after the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"still not true: {what}")
        time.sleep(0.02)


class Remote:
    """A remote folder and short ways to run the stub trainer in it."""

    def __init__(self, root):
        self.root = str(root)
        self.runs = []

    def job(self, run_id, *stub_arguments, **fields):
        job = {
            "schema_version": 1,
            "run_id": run_id,
            "name": run_id,
            "created_at": "2026-01-01T00:00:00+00:00",
            "kind": "command",
            "argv": [sys.executable, STUB] + list(stub_arguments),
            "limits": {"grace_seconds": 5, "stall_minutes": None},
        }
        job.update(fields)
        return job

    def launch(self, run_id, *stub_arguments, **fields):
        return self.launch_job(self.job(run_id, *stub_arguments, **fields))

    def launch_job(self, job, **keywords):
        self.runs.append(job["run_id"])
        return api.launch(
            remote_dir=self.root,
            job=job,
            manifest=keywords.pop("manifest", {"files": {}}),
            **keywords,
        )

    def dir(self, run_id):
        return os.path.join(self.root, "runs", run_id)

    def text(self, run_id, name):
        with open(os.path.join(self.dir(run_id), name), encoding="utf-8") as stream:
            return stream.read()

    def poll(self, run_id, **offsets):
        return api.poll(remote_dir=self.root, run_id=run_id, **offsets)

    def status(self, run_id):
        return self.poll(run_id)["status"]

    def stop(self, run_id, **keywords):
        return api.stop(remote_dir=self.root, run_id=run_id, **keywords)

    def wait_end(self, run_id, seconds=40.0):
        """Return the terminal status, once the agent has gone too."""

        def ended():
            document = self.poll(run_id)
            return (
                document["status"]
                if document["status"]["state"] in TERMINAL and not document["agent_alive"]
                else None
            )

        return wait_until(ended, seconds, f"run {run_id} has ended")

    def wait_steps(self, run_id, steps=2):
        def stepped():
            return (self.status(run_id)["optimizer_steps"] or 0) >= steps

        wait_until(stepped, what=f"run {run_id} trains")

    def agent(self, run_id):
        return wait_until(lambda: self.poll(run_id)["agent"], what="the agent's heartbeat")

    def processes(self, run_id):
        """Pids of the run's own processes, the agent's not among them."""
        return sorted(processes.of_run(self.dir(run_id)))

    def all_processes(self, run_id):
        """Also the agent and its watchdog, by their command lines."""
        found = list(self.processes(run_id))
        for row in processes.table().values():
            try:
                with open(f"/proc/{row.pid}/cmdline", "rb") as stream:
                    words = stream.read().split(b"\0")
            except OSError:
                continue
            if self.dir(run_id).encode() in words and not row.gone:
                found.append(row.pid)
        return sorted(set(found))


def log_text(document):
    data = document["log"]["data"]
    return zlib.decompress(base64.b64decode(data)).decode("utf-8", "replace") if data else ""


@pytest.fixture
def store():
    """A store of its own on loopback."""
    from .small_store import Store  # children of tests import this file outside its package

    place = Store()
    yield place
    place.close()


@pytest.fixture
def remote(tmp_path):
    place = Remote(tmp_path / "remote dir")
    yield place
    for run_id in set(place.runs):
        if os.path.isdir(place.dir(run_id)):
            place.stop(run_id, now=True)
            wait_until(lambda r=run_id: not place.all_processes(r), what="all processes are gone")
