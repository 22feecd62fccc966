"""A JupyterLab on loopback, and a browser that talks to nobody else."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.lab import READY, Lab, jupyterlab

# What the front end itself says of a widget whose kernel is gone.
GONE = "widget model not found"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    root = folder / "root"
    root.mkdir()
    with jupyterlab(folder, root) as one:
        yield one


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

    def said(message: Any) -> None:
        if message.type == "error" and GONE not in message.text:
            errors.append(message.text)

    context.on("console", said)
    yield context.new_page()
    if folder := os.environ.get("E2E_PICTURES"):
        for number, one in enumerate(context.pages):
            one.screenshot(path=Path(folder, f"last-{number}.png"))
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


def pictures(page: Any, name: str = "live", *, of: Any = None) -> Iterator[tuple[str, Any]]:
    """Show the page in light and dark, wide and narrow, scrolled to the locator `of`.

    They are kept in `E2E_PICTURES` where that is set.
    """
    folder = os.environ.get("E2E_PICTURES")
    for theme in ("Dark", "Light"):
        page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })",
            f"JupyterLab {theme}",
        )
        for width in (800, 1400):
            page.set_viewport_size({"width": width, "height": 1300})
            page.wait_for_timeout(300)  # the browser lays it out anew
            if of is not None:
                of.scroll_into_view_if_needed()
            label = f"{name}-{theme.lower()}-{width}"
            if folder:
                page.screenshot(path=Path(folder, f"{label}.png"))
            yield label, page


def figures(cell: Any) -> dict[str, str]:
    """The tokens that a cell's panel shows, {} before there is one."""
    found = cell.locator("code:visible", has_text="sync_size_mb=")
    text = found.first.inner_text() if found.count() else ""
    return dict(re.findall(r"(\w+)=(\S+)", text))


def shows_steps(cell: Any) -> int:
    """The optimizer steps among them, 0 before there are any."""
    return int(figures(cell).get("optimizer_steps", 0))


CLIPPED = """() => [...document.querySelectorAll('.kt-view, .kt-view *, .widget-button')]
  .filter(e => e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1)
  .filter(e => !['auto', 'scroll'].includes(getComputedStyle(e).overflowX))
  .map(e => `${e.tagName}.${e.className} ${e.scrollWidth} > ${e.clientWidth}: ${e.textContent.slice(0, 40)}`)"""


def clipped(page: Any) -> list[str]:
    """Return the elements of ours whose text is cut off, and stays so when the page has been laid out."""
    found: list[str] = []
    for _ in range(25):
        found = page.evaluate(CLIPPED)
        if not found:
            break
        page.wait_for_timeout(200)
    return found
