"""The quickstart as its reader meets it: the committed notebook, a browser, the keyboard, torch on two ranks.

In JupyterLab it is gone through from the first cell to the last picture; in Notebook 7 the training is
stopped. What a cell does is waited for by what the page shows, as a person would.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import nbformat
import pytest

from tests.e2e.conftest import clipped, figures, pictures, shows_steps
from tests.e2e.lab import ROOT, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

NOTEBOOK = ROOT / "notebooks/quickstart.ipynb"
CELLS = nbformat.read(NOTEBOOK, as_version=4).cells
PLACES = {cell.id: place for place, cell in enumerate(CELLS)}
ATTACH = ("%load_ext kernel_tools\n%remote_connect local", "again = %remote_attach hgnetv2")
GOES_ON = re.compile("training|validating")
IDLE = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
# A person stops one run on a machine of his own; here others may be at work.
STOPS_WITHIN_SECONDS = 10.0


class Reader:
    """Somebody with a keyboard before a notebook; cells are named by their ids in the file."""

    def __init__(self, page, address):
        self.page = page
        self._inserted = []  # places of cells that the reader has added
        page.goto(address)
        page.locator(IDLE).first.wait_for(timeout=90_000)

    def cell(self, name):
        """A cell of the committed notebook."""
        place = PLACES[name]
        return self.page.locator(".jp-Cell").nth(place + sum(at <= place for at in self._inserted))

    def rewrite(self, name, text):
        """Put other text into a cell, by keyboard."""
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.type(text)

    def run(self, name):
        """Run a cell that may go on for a while."""
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def run_through(self, first, last, *, seconds=120):
        """Press Shift+Enter from one cell to another; each has ended when the next begins."""
        self.cell(first).locator(".cm-content").click()
        for cell in CELLS[PLACES[first] : PLACES[last] + 1]:
            self.page.keyboard.press("Shift+Enter")
            if cell.cell_type == "code":
                self.ended(cell.id, seconds=seconds)

    def ended(self, name, *, seconds):
        """Wait until a cell has its number."""
        prompt = self.cell(name).locator(".jp-InputPrompt")
        wait_until(lambda: re.search(r"\[\d+\]", prompt.text_content()), seconds=seconds)

    def text(self, name):
        """All that a cell says, laid out or not: JupyterLab lays out only what is near."""
        return self.cell(name).text_content()

    def insert_below(self, name, text):
        """Add a cell and run it; return it."""
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")
        self.page.keyboard.press("Enter")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Shift+Enter")
        added = self.cell(name).locator("xpath=following-sibling::*[1]")
        self._inserted.append(PLACES[name] + 1)
        return added

    def save(self, path, told):
        """Save, and wait until the file has been written and says `told`."""
        before = path.stat().st_mtime_ns
        self.page.keyboard.press("Control+S")
        wait_until(
            lambda: path.stat().st_mtime_ns > before and told in path.read_text("utf-8"),
            seconds=20,
        )


def copy(lab, name):
    shutil.copy(NOTEBOOK, lab.root / name)
    return lab.root / name


def display(path):
    """What the file keeps of the training's cell."""
    cells = {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}
    shown, nothing = [one for one in cells["train"].outputs if one.output_type == "display_data"]
    assert nothing.data == {"text/html": "", "text/plain": ""}
    return shown.data


def drawn(cell):
    """The pictures below a cell: how wide each is, and whether words stand for it."""
    return cell.locator(".jp-OutputArea img").evaluate_all(
        "all => all.map(one => [one.naturalWidth > 300, one.alt.length > 20])"
    )


def test_the_quickstart_is_gone_through_in_jupyterlab(lab, page):
    path = copy(lab, "quickstart.ipynb")
    lab.write("second.ipynb", *ATTACH)
    reader = Reader(page, f"{lab.url}/lab/tree/{path.name}?token={lab.token}")
    other = page.context.new_page()
    # In a workspace of its own, or it opens what the first one has open.
    Reader(other, f"{lab.url}/lab/workspaces/second/tree/second.ipynb?token={lab.token}")
    reader.rewrite("parameters", "seed = 0\nepochs = 2\nranks = 2")
    reader.run_through("parameters", "train")

    # The figures move while it trains.
    panel = reader.cell("train")
    panel.locator(".kt-badge:visible", has_text="training").wait_for(timeout=90_000)
    wait_until(lambda: shows_steps(panel) > 0, seconds=60)
    seen = shows_steps(panel)
    wait_until(lambda: shows_steps(panel) > seen, seconds=60)
    told = figures(panel)
    assert told["world_size"] == "2"
    assert float(told["sync_size_mb"]) > 0
    assert int(told["sync_files"]) > 10

    # What is done meanwhile has its own output.
    mine = reader.insert_below("train", "sum(range(10))")
    mine.locator("text=45").wait_for(timeout=20_000)
    assert mine.locator(".jp-OutputArea-output").all_inner_texts() == ["45"]

    # A second notebook shows the same.
    other.locator(".jp-Cell .cm-content").first.click()
    other.keyboard.press("Shift+Enter")
    other.keyboard.press("Shift+Enter")
    its = other.locator(".jp-Cell").nth(1)
    its.locator(".kt-badge:visible", has_text=GOES_ON).first.wait_for(timeout=60_000)
    same = ("sync_files", "sync_size_mb", "world_size", "skipped_steps")
    wait_until(lambda: shows_steps(its) >= shows_steps(panel) > 0, seconds=30)
    assert [figures(its)[name] for name in same] == [figures(panel)[name] for name in same]

    # It ends, and its pictures are there.
    reader.run_through("wait", "predictions", seconds=400)
    for cell in (panel, its):
        cell.locator(".kt-badge:visible", has_text="completed").wait_for(timeout=30_000)
        cell.locator(".widget-button").first.wait_for(state="detached")
    assert "run_ended=completed" in reader.text("wait")
    assert "weights/best.pt" in reader.text("fetch")
    assert mine.locator(".jp-OutputArea-output").text_content().strip() == "45"

    # Saved and opened again, all of it is still there.
    last = figures(panel)
    reader.save(path, "AP50=")
    assert set(display(path)) == {"text/html", "text/plain"}
    assert path.stat().st_size < 1_000_000
    page.reload()
    page.locator(IDLE).first.wait_for(timeout=90_000)
    panel.scroll_into_view_if_needed()  # what is far away is not laid out
    panel.locator(".kt-badge:visible", has_text="completed").wait_for(timeout=30_000)
    wait_until(lambda: figures(panel) == last, seconds=10)
    for name in ("plot", "predictions"):
        assert drawn(reader.cell(name)) == [[True, True]], name
    for name, view in pictures(page, "quickstart", of=panel):
        assert clipped(view) == [], name
    reader.run("disconnect")
    reader.ended("disconnect", seconds=30)


def test_a_training_is_stopped_in_notebook_7(lab, page):
    path = copy(lab, "stopped.ipynb")
    reader = Reader(page, f"{lab.url}/notebooks/{path.name}?token={lab.token}")
    reader.rewrite("parameters", "seed = 0\nepochs = 50\nranks = 2")
    reader.run_through("parameters", "train")
    panel = reader.cell("train")
    panel.locator(".kt-badge:visible", has_text="training").wait_for(timeout=90_000)
    wait_until(lambda: shows_steps(panel) > 1, seconds=60)
    assert figures(panel)["world_size"] == "2"
    assert clipped(page) == []
    if folder := os.environ.get("E2E_PICTURES"):
        page.screenshot(path=Path(folder, "notebook7-live.png"))

    busy = os.getloadavg()[0] / (2 * (os.cpu_count() or 1))  # two ranks and a browser are 1
    panel.get_by_role("button", name="Stop", exact=True).focus()
    page.keyboard.press("Space")
    panel.get_by_role("button", name="Yes, stop it").focus()
    asked = time.monotonic()
    page.keyboard.press("Space")
    panel.locator(".kt-badge:visible", has_text="stopped").wait_for(timeout=60_000)
    took = time.monotonic() - asked
    print(f"stopped in {took:.1f} s, the machine {busy:.1f} times as busy as a person's")
    assert took < STOPS_WITHIN_SECONDS * max(1.0, busy)

    last = figures(panel)
    reader.save(path, "stopped by the user")
    assert set(display(path)) == {"text/html", "text/plain"}
    page.reload()
    page.locator(IDLE).first.wait_for(timeout=90_000)
    panel.scroll_into_view_if_needed()  # what is far away is not laid out
    panel.locator(".kt-badge:visible", has_text="stopped").wait_for(timeout=30_000)
    wait_until(lambda: figures(panel) == last, seconds=10)
    assert clipped(page) == []
