"""Every display object in an HTML page of nbconvert, opened with the network off."""

from __future__ import annotations

import os

import nbconvert
import nbformat
import pytest

from tests.e2e.conftest import clipped
from tests.e2e.lab import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
EVIL = "<img src=x onerror=alert(1)>"
SHOW = """
import dataclasses
from pathlib import Path
from kernel_tools.views import Mode, follow
from kernel_tools.views.compare import Compared, Comparison
from kernel_tools.views.figures import plot_metrics
from kernel_tools.views.answers import files_table, runs_table
from kernel_tools.views.static import NoteView, ProgressView
from kernel_tools.views.summary import RunView
from tests.fakes.runs import FakeRun, ended, evaluation, snapshot, training

EVIL = "<img src=x onerror=alert(1)>"
steps = tuple({"optimizer_steps": 10 * i, "loss": 20 / i} for i in range(1, 60))
metrics = tuple({"epoch": i, "metrics": {"AP50": i / 20, "AP75": i / 30}} for i in range(1, 12))
told = dataclasses.replace(ended(), name=EVIL, steps=steps, metrics=metrics, log_tail=(EVIL,))
failed = ended("failed", error={"type": EVIL, "message": EVIL, "rank": 1})
other = dataclasses.replace(told, run_id="20260102-030405-other-90c1")
"""
CELLS = (
    SHOW,
    "follow.follow(FakeRun(snapshot(), told), mode=Mode.BATCH)",
    "RunView(failed)",
    "FakeRun(told)",
    "plot_metrics(told)",
    "Comparison((Compared(told, {'solver.lr': '1'}), Compared(other, {'solver.lr': EVIL})))",
    "evaluation('car', EVIL)",
    "files_table(FakeRun().fetch())",
    "runs_table(())",
    "ProgressView(EVIL, 12_000_000, 30_000_000, 3.0)",
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The page's path, and how many cells there are to look at."""
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    folder = tmp_path_factory.mktemp("page")
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert "widgets" not in notebook.metadata
    for cell in notebook.cells[1:]:
        for one in cell.outputs:
            if one.output_type != "stream":
                assert {"text/plain", "text/html"} <= set(one.data)
    quiet = dict.fromkeys(
        ("mathjax_url", "require_js_url", "mermaid_js_url"), ""
    )  # of nbconvert's own
    page, _ = nbconvert.HTMLExporter(**quiet).from_notebook_node(notebook)
    path = folder / "page.html"
    path.write_text(page, "utf-8")
    return path


def test_every_display_is_readable_with_the_network_off(browser, converted):
    context = browser.new_context(offline=True)
    errors, dialogs = [], []
    context.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page = context.new_page()
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(converted.as_uri())
    shown = page.locator(".jp-OutputArea-output")
    assert shown.count() >= len(CELLS) - 1
    for index in range(shown.count()):
        box = shown.nth(index).bounding_box()
        assert box["height"] > 15, shown.nth(index).inner_html()[:200]
        drawn = shown.nth(index).locator("img, svg")
        assert shown.nth(index).inner_text().strip() or drawn.count()
    sizes = page.evaluate(
        "[...document.images].map(i => [i.naturalWidth > 300, i.alt.length > 20])"
    )
    assert len(sizes) == 4
    assert all(map(all, sizes))
    assert page.locator("body").inner_text().count(EVIL) >= 6
    for width in (800, 1400):
        page.set_viewport_size({"width": width, "height": 1000})
        assert clipped(page) == []
        if folder := os.environ.get("E2E_PICTURES"):
            page.screenshot(path=f"{folder}/page-{width}.png", full_page=True)
    assert (errors, dialogs) == ([], [])
    context.close()
