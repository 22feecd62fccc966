"""A JupyterLab of its own on loopback, and a browser that talks to nobody else."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FOLDERS = (
    "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR",
)  # fmt: skip
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


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    root = folder / "root"
    root.mkdir()
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    switches = [
        "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update",
    ]  # fmt: skip
    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=switches)
        yield one
        one.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; afterwards: no page beside it asked any other machine, and none logged an error."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    hosts: set[str] = set()
    errors: list[str] = []
    context.on("request", lambda request: hosts.add(request.url.split("/")[2].partition(":")[0]))
    context.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    yield context.new_page()
    context.close()
    assert hosts <= {"127.0.0.1", ""}
    assert errors == []


def open_notebook(page: Any, lab: Lab, name: str) -> None:
    """Open a notebook and wait until its kernel is idle."""
    page.goto(f"{lab.url}/lab/tree/{name}?token={lab.token}")
    page.wait_for_function(READY, timeout=60_000)


def command(page: Any, name: str) -> None:
    """Start one of JupyterLab's commands; it may end later."""
    page.evaluate("name => { window.jupyterapp.commands.execute(name); }", name)


def run_cell(page: Any, index: int) -> None:
    """Run a cell as soon as those before it have ended; what it does may end later."""
    page.wait_for_function(READY, timeout=60_000)
    page.evaluate(
        """index => { const app = window.jupyterapp, notebook = app.shell.currentWidget.content;
        notebook.activeCellIndex = index; notebook.deselectAll();
        app.commands.execute('notebook:run-cell'); }""",
        index,
    )


def pictures(page: Any, name: str = "live") -> Iterator[tuple[str, Any]]:
    """Show the page in light and dark, wide and narrow; kept in `E2E_PICTURES` where that is set."""
    folder = os.environ.get("E2E_PICTURES")
    for theme in ("Dark", "Light"):
        page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })",
            f"JupyterLab {theme}",
        )
        for width in (800, 1400):
            page.set_viewport_size({"width": width, "height": 1300})
            page.wait_for_timeout(300)  # the browser lays it out anew
            label = f"{name}-{theme.lower()}-{width}"
            if folder:
                page.screenshot(path=Path(folder, f"{label}.png"))
            yield label, page


def clipped(page: Any) -> list[str]:
    """Return the elements of ours whose text is cut off."""
    return page.evaluate("""() => [...document.querySelectorAll('.kt-view, .kt-view *, .widget-button')]
      .filter(e => e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1)
      .filter(e => !['auto', 'scroll'].includes(getComputedStyle(e).overflowX))
      .map(e => `${e.tagName}.${e.className} ${e.scrollWidth} > ${e.clientWidth}: ${e.textContent.slice(0, 40)}`)""")


def wait_until(true: Any, *, seconds: float) -> None:
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
