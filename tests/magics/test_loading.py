"""Loading is silent, light, and can be taken back."""

from __future__ import annotations

import json
import subprocess
import sys

from kernel_tools import load_ipython_extension, unload_ipython_extension

MAGICS = {
    "remote_attach",
    "remote_compare",
    "remote_connect",
    "remote_disconnect",
    "remote_eval",
    "remote_fetch",
    "remote_info",
    "remote_logs",
    "remote_run",
    "remote_runs",
    "remote_status",
    "remote_stop",
    "remote_sync",
    "remote_train",
    "remote_visualize",
    "remote_wait",
    "stage_dataset",
    "store_ls",
    "store_rm",
}

PROBE = """
import json, sys, time
began = time.process_time()
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
ready = time.process_time()
shell.run_line_magic("load_ext", "kernel_tools")
share = (time.process_time() - ready) / (ready - began)
heavy = [m for m in ("torch", "minio", "matplotlib", "ipywidgets", "cv2", "requests") if m in sys.modules]
print(json.dumps({"share": share, "heavy": heavy}))
"""


def ours(shell):
    return {
        n
        for n in shell.magics_manager.magics["line"]
        if n.startswith(("remote_", "stage_", "store_"))
    }


def probe():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_loading_is_silent_and_imports_nothing_heavy():
    assert probe()["heavy"] == []


def test_loading_costs_less_than_starting_ipython():
    """In CPU time, the best of three."""
    assert min(probe()["share"] for _ in range(3)) < 1


def test_loading_registers_the_magics(loaded):
    assert ours(loaded) == MAGICS


def test_loading_twice_changes_nothing(loaded):
    before = dict(loaded.magics_manager.magics["line"])
    matchers = list(loaded.Completer.custom_matchers)
    load_ipython_extension(loaded)
    assert loaded.magics_manager.magics["line"] == before
    assert loaded.Completer.custom_matchers == matchers


def test_unloading_removes_what_loading_added(shell):
    def state():
        return (
            set(shell.magics_manager.magics["line"]),
            set(shell.magics_manager.magics["cell"]),
            set(shell.magics_manager.registry),
            list(shell.configurables),
            list(shell.Completer.custom_matchers),
        )

    before = state()
    load_ipython_extension(shell)
    assert state() != before
    unload_ipython_extension(shell)
    assert state() == before


def test_unloading_leaves_a_magic_that_somebody_put_in_its_place(shell):
    shell.run_line_magic("load_ext", "kernel_tools")
    shell.register_magic_function(lambda line: line, magic_kind="line", magic_name="remote_runs")
    shell.run_line_magic("unload_ext", "kernel_tools")
    assert ours(shell) == {"remote_runs"}


def test_reloading_keeps_the_session_and_its_run(loaded, session):
    loaded.run_cell("run = %remote_train coins --no-wait").raise_error()
    loaded.run_line_magic("reload_ext", "kernel_tools")
    assert ours(loaded) == MAGICS
    loaded.run_cell("status = %remote_status").raise_error()
    assert loaded.user_ns["status"].snapshot.run_id == loaded.user_ns["run"].id
