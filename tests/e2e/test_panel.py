"""The panel as a person meets it: JupyterLab in a browser, with a run whose story is told."""

from __future__ import annotations

import nbformat
import pytest

from tests.e2e.conftest import command, open_notebook, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STORY = """
import threading
from tests.fakes.runs import FakeRun, ended, snapshot, training
from kernel_tools.views import Mode, follow

run = FakeRun(snapshot())

def tell():
    step = 100
    while not run.acted.wait(0.1):
        step += 1
        log = tuple(f"epoch=4 step={i}/400 loss=1.0" for i in range(step))
        run.tell(snapshot(training(optimizer_steps=step), log_tail=log))
    run.tell(ended("stopped"))

follow.show(run, mode=Mode.INTERACTIVE)
threading.Thread(target=tell, daemon=True).start()
"""
MEANWHILE = "import time\nfor i in range(3):\n    print('mine', i)\n    time.sleep(0.5)"


def steps(page):
    text = (
        page.locator(".jp-CodeCell").first.locator("code", has_text="optimizer_steps").inner_text()
    )
    return int(text.partition("optimizer_steps=")[2].split()[0])


def saved_outputs(path):
    """The first cell's outputs in the file; nothing while the server is writing it."""
    try:
        return nbformat.read(path, as_version=4).cells[0].outputs
    except nbformat.reader.NotJSONError:
        return []


def test_the_panel_lives_asks_before_it_stops_and_leaves_a_summary(lab, page):
    path = lab.write("panel.ipynb", STORY, MEANWHILE)
    open_notebook(page, lab, path.name)
    command(page, "notebook:run-cell-and-select-next")
    first, second = (page.locator(".jp-CodeCell").nth(i) for i in (0, 1))
    first.locator(".kt-badge", has_text="training").wait_for(timeout=30_000)
    before = steps(page)
    wait_until(lambda: steps(page) > before + 3, seconds=20)

    command(page, "notebook:run-cell-and-select-next")
    second.locator("text=mine 2").wait_for(timeout=20_000)
    assert second.locator(".jp-OutputArea-output").inner_text().split() == [
        "mine",
        "0",
        "mine",
        "1",
        "mine",
        "2",
    ]

    newest = "() => { const e = document.querySelector('.kt-log').closest('.widget-vbox');"
    newest += " return e.scrollHeight > e.clientHeight && Math.abs(e.scrollTop) < 2; }"
    assert page.evaluate(newest)

    first.get_by_role("button", name="Stop").click()
    first.get_by_role("button", name="Keep it running").click()
    first.get_by_role("button", name="Keep it running").wait_for(state="hidden")
    first.get_by_role("button", name="Stop").click()
    first.get_by_role("button", name="Yes, stop it").click()
    first.locator(".kt-badge", has_text="stopped").wait_for(timeout=20_000)
    assert first.locator(".widget-button").count() == 0
    command(page, "docmanager:save")
    wait_until(lambda: "optimizer_steps=280" in str(saved_outputs(path)), seconds=20)
    (output,) = saved_outputs(path)
    assert set(output.data) == {"text/html", "text/plain"}

    page.reload()
    page.locator(".kt-badge", has_text="stopped").first.wait_for(timeout=60_000)
    assert "optimizer_steps=280" in page.locator(".jp-CodeCell").first.inner_text()
