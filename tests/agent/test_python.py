"""The agent's promise to the host: the standard library alone, Python 3.8."""

import ast
import glob
import json
import os
import subprocess
import sys

import pytest

from .conftest import AGENT_FOLDER, STUB

MODULES = sorted(name for name in os.listdir(AGENT_FOLDER) if name.endswith(".py"))
# What Python 3.8 and every later one have and the agent uses; anything new is to be thought about.
STANDARD = {
    "__future__", "base64", "concurrent", "contextlib", "ctypes", "dataclasses", "datetime", "email",
    "errno", "fcntl", "fnmatch", "glob", "gzip", "hashlib", "http", "importlib", "io", "json", "math",
    "mmap", "os", "platform", "re", "select", "shutil", "signal", "socket", "ssl", "stat", "struct", "subprocess", "sys",
    "threading", "time", "traceback", "typing", "unicodedata", "urllib", "zipfile", "zlib",
}  # fmt: skip


def parse(name):
    with open(os.path.join(AGENT_FOLDER, name), encoding="utf-8") as stream:
        return ast.parse(stream.read(), name, feature_version=(3, 8))


@pytest.mark.parametrize("name", MODULES)
def test_only_the_standard_library_and_itself_are_imported(name):
    for node in ast.walk(parse(name)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= STANDARD
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1 or (node.level == 0 and node.module.split(".")[0] in STANDARD)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_python_3_8(name):
    tree = parse(name)
    calls = {
        n.func.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    assert not calls & {"removeprefix", "removesuffix", "pidfd_open", "bit_count"}
    # Annotations must stay text: `int | None` is no value in 3.8.
    assert name == "__init__.py" or tree.body[1].module == "__future__"


def test_vermin_reports_python_3_8_as_the_minimum():
    pytest.importorskip("vermin")
    run = "from vermin.main import main; main()"
    command = [sys.executable, "-c", run, "--no-tips", "--target=3.8-", AGENT_FOLDER]
    told = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=False)
    assert told.returncode == 0, told.stdout.decode()
    (minimum,) = [row for row in told.stdout.decode().splitlines() if row.startswith("Minimum")]
    assert minimum.split()[-1] == "3.8"


def oldest_python():
    """The oldest interpreter from 3.8 on that can be had here, other than the one that runs the tests."""
    folders = glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin"))
    folders += os.environ.get("PATH", "").split(os.pathsep)
    for minor in range(8, sys.version_info[1]):
        for folder in folders:
            path = os.path.join(folder, f"python3.{minor}")
            if os.path.exists(path):  # a version manager's shim may be there for nothing
                works = subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL, check=False)
                if works.returncode == 0:
                    return path
    return None


WHOLE_RUN = """
import importlib.util, json, os, sys, time
folder, remote_dir, stub = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "kernel_tools_agent", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
module = importlib.util.module_from_spec(spec)
sys.modules["kernel_tools_agent"] = module
spec.loader.exec_module(module)
from kernel_tools_agent import api
job = {"run_id": "old", "kind": "command", "argv": [sys.executable, stub, "--steps", "3", "--ranks", "2",
       "--fault", "crash-once"], "max_restarts": 1, "artifacts": ["artifacts/x.pt"]}
api.launch(remote_dir, job, {"files": {}})
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    told = api.poll(remote_dir, "old")
    if told["artifacts"] and not told["agent_alive"]:
        break
    time.sleep(0.05)
print(json.dumps([told["status"]["state"], told["status"]["attempt"], sys.version_info[1]]))
"""


def test_a_whole_run_goes_through_on_the_oldest_python_that_is_here(tmp_path):
    python = oldest_python()
    if python is None:
        pytest.skip("no Python from 3.8 on that is older than this one is installed")
    command = [python, "-c", WHOLE_RUN, AGENT_FOLDER, str(tmp_path / "remote dir"), STUB]
    told = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr.decode()
    state, attempt, minor = json.loads(told.stdout.decode())
    assert (state, attempt) == ("completed", 2)
    assert 8 <= minor < sys.version_info[1]
