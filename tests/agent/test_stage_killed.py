"""SIGKILL at random moments of staging: a data set has its marker or is not there, and what came is kept."""

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys

import pytest

from .archives import tar_of
from .conftest import AGENT_FOLDER
from .small_store import Store

SIZE = 24 << 20
LATE_BYTES = 1 << 20
# So small that the slots on disk serve for several parts each.
PART_BYTES = 1 << 20

STAGE = """
import importlib.util, json, os, sys
folder, run_dir, job, urls = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "kernel_tools_agent", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
module = importlib.util.module_from_spec(spec)
sys.modules["kernel_tools_agent"] = module
spec.loader.exec_module(module)
from kernel_tools_agent import partfile, stage
partfile.PART_BYTES = 1 << 20
from kernel_tools_agent.job import Job
print("begun", flush=True)
stage.stage_inputs(run_dir, Job.from_json(json.loads(job)), urls=json.loads(urls), log=lambda line: None,
                   progress=lambda rows: None, should_stop=lambda: False, stall_seconds=60)
print("done", flush=True)
"""


def tree(count):
    """Small files, and in their middle one of several parts."""
    generator = random.Random(7)
    sizes = [SIZE // 2 if n == count // 2 else SIZE // 2 // (count - 1) for n in range(count)]
    return {f"ds/{n:03}.bin": generator.randbytes(size) for n, size in enumerate(sizes)}


class Machine:
    """A remote folder and a store, and staging in a process that can be killed."""

    def __init__(self, root):
        self.files = tree(200)
        self.data = tar_of(self.files)
        self.sha256 = hashlib.sha256(self.data).hexdigest()
        self.root = root
        self.run_dir = os.path.join(root, "runs", "r")
        os.makedirs(os.path.join(self.run_dir, "work"))
        self.store = Store()
        self.store.objects["ds.tar"] = self.data

    def stage(self):
        job = {
            "run_id": "r", "kind": "command", "argv": ["true"],
            "inputs": [{
                "name": "ds", "object": "ds.tar", "dest": "data/ds", "format": "tar",
                "size_bytes": len(self.data), "sha256": self.sha256,
                "file_count": len(self.files), "content_bytes": sum(map(len, self.files.values())),
            }],
        }  # fmt: skip
        urls = {"ds.tar": self.store.url("ds.tar")}
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                STAGE,
                AGENT_FOLDER,
                self.run_dir,
                json.dumps(job),
                json.dumps(urls),
            ],
            stdout=subprocess.PIPE,
        )
        assert process.stdout.readline() == b"begun\n"
        return process

    def sets(self):
        folder = os.path.join(self.root, "datasets")
        return (
            [n for n in os.listdir(folder) if not n.startswith(".")]
            if os.path.isdir(folder)
            else []
        )

    def kept(self):
        """Bytes that a killed staging left: unpacked, in the journal, and by its record of the parts."""
        part = os.path.join(self.root, "datasets", f".part-{self.sha256}")
        if not os.path.exists(part + ".journal"):
            return 0
        there = os.path.getsize(part + ".journal")
        for base, _, names in os.walk(os.path.join(self.root, "datasets", f".new-{self.sha256}")):
            there += sum(os.path.getsize(os.path.join(base, name)) for name in names)
        with open(part + ".map", "rb") as stream:
            records = stream.read()[512:]
        kept = there
        for number, count in struct.iter_unpack("<QQ", records):
            start = number * PART_BYTES
            kept += max(0, start + count - max(start, there))
        return kept

    def check_sets(self):
        """Whatever has a data set's name is complete."""
        for name in self.sets():
            folder = os.path.join(self.root, "datasets", name)
            with open(os.path.join(folder, "marker.json")) as stream:
                assert json.load(stream)["sha256"] == self.sha256 == name
            for path, data in self.files.items():
                with open(os.path.join(folder, "content", path), "rb") as stream:
                    assert stream.read() == data


def kill_once(root, seed):
    """Kill one staging at a random moment, stage again; everything is there and little came twice."""
    machine = Machine(root)
    generator = random.Random(seed)
    store, moment = machine.store, generator.random()
    try:
        process = machine.stage()
        if moment < 0.8:  # while it comes: after so many bytes of the store's
            store.gate_at = int(len(machine.data) * moment / 0.8)
            store.reached.wait(60)
        else:  # while it is unpacked and named
            for _ in range(int((moment - 0.8) * 2000)):
                if process.poll() is not None:
                    break
                os.sched_yield()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        machine.check_sets()
        store.open_gate()
        before, was_there, kept = store.sent, bool(machine.sets()), machine.kept()
        process = machine.stage()
        assert process.communicate(timeout=120)[0] == b"done\n"
        assert process.returncode == 0
        machine.check_sets()
        assert machine.sets() == [machine.sha256]
        assert (
            sorted(
                n for n in os.listdir(os.path.join(root, "datasets")) if "part" in n or "new" in n
            )
            == []
        )
        again = store.sent - before
        assert not (was_there and again)
        # Not a byte that was on disk comes again; four lines of the killed one may swallow a little late.
        assert again <= len(machine.data) - kept + LATE_BYTES
    finally:
        store.open_gate()
        store.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_staging_leaves_nothing_half_and_goes_on(tmp_path, seed):
    kill_once(str(tmp_path), seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(5, 50))
def test_a_killed_staging_leaves_nothing_half_and_goes_on_in_fifty_cases(tmp_path, seed):
    kill_once(str(tmp_path), seed)
