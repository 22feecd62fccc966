"""A JupyterLab of its own on loopback, that asks nobody anything and leaves nothing running."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_notebook

from kernel_tools.services import ports

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR",
)  # fmt: skip
# True in the page once the notebook's kernel waits for a cell.
READY = """() => {
  const app = window.jupyterapp, panel = app && app.shell.currentWidget, context = panel && panel.context;
  return !!context && context.isReady && context.sessionContext.isReady
    && context.sessionContext.session?.kernel?.status === 'idle';
}"""


@dataclass(frozen=True)
class Lab:
    """A running server."""

    url: str
    token: str
    root: Path

    def write(self, name: str, *cells: str) -> Path:
        """Put a notebook into its folder."""
        spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = spec
        path = self.root / name
        nbformat.write(notebook, path)
        return path


@contextlib.contextmanager
def jupyterlab(folder: Path, root: Path) -> Iterator[Lab]:
    """Start it on the notebooks in `root`, with all else that it writes below `folder`."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KERNEL_TOOLS_STATE_DIR": str(folder / "state"),
        "KERNEL_TOOLS_IDLE_SECONDS": "5",  # what the notebooks started ends soon after them
        **{name: str(folder / name) for name in FOLDERS},
    }
    settings = folder / "JUPYTERLAB_SETTINGS_DIR/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    (port,) = ports.free(1)
    token = secrets.token_hex(16)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}",
        "--LabApp.extension_manager=readonly", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        one = Lab(f"http://127.0.0.1:{port}", token, root)
        wait_until(lambda: _answers(f"{one.url}/api?token={token}"), seconds=60)
        yield one
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        wait_until(lambda: not _started_in(folder), seconds=90)


def wait_until(true: Callable[[], object], *, seconds: float) -> None:
    """Wait for a condition; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def _started_in(folder: Path) -> list[int]:
    """Return the processes that name the folder."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False
