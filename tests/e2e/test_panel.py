"""The panel as a person meets it: JupyterLab in a browser, a real server, a run of the real agent.

One long visit, because starting JupyterLab costs more than all that is then looked at. The trainer needs
no torch.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import nbformat
import pytest

from tests.e2e.conftest import (
    clipped,
    command,
    figures,
    open_notebook,
    pictures,
    run_cell,
    shows_steps,
)
from tests.e2e.lab import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

CONNECT = "%load_ext kernel_tools\n%remote_connect local"
LAUNCH = (
    "run = %remote_run custom --command 'python trainer.py' --sync-path trainer.py"
    " --status-dir out --name watched"
)
MEANWHILE = "import time\nfor i in range(3):\n    print('mine', i)\n    time.sleep(0.5)"
WAIT = "%remote_wait"
RELOAD = "%reload_ext kernel_tools\nprint(run.state.value)"
AGAIN = f"{CONNECT}\nrun = %remote_attach watched\nprint(run.state.value)"
BUSY = "window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'busy'"
EVIL = "<img src=x onerror=alert(1)>"


def button(cell, name):
    return cell.get_by_role("button", name=name, exact=True)


def below_the_name(page):
    """What the stylesheet adds to the panel's head."""
    return page.evaluate(
        "() => getComputedStyle(document.querySelector('.jupyter-widgets .kt-head'), '::after').content"
    )


def interrupted(page, cell):
    """Interrupt, as a person does who sees nothing happen once more; return whether the cell says so."""
    command(page, "notebook:interrupt-kernel")
    page.wait_for_timeout(1000)
    return cell.locator("text=Detached").count() > 0


def outputs(path, index):
    """The outputs of a cell in the file; nothing while the server is writing it."""
    try:
        return nbformat.read(path, as_version=4).cells[index].outputs
    except nbformat.reader.NotJSONError:
        return []


def test_a_run_is_watched_stopped_and_found_again(lab, page):
    shutil.copy(Path(__file__).with_name("trainer.py"), lab.root)
    path = lab.write("watch.ipynb", CONNECT, LAUNCH, MEANWHILE, WAIT, RELOAD)
    lab.write("second.ipynb", CONNECT, "again = %remote_attach watched")
    open_notebook(page, lab, path.name)
    panel, mine, waiting, reloading = (page.locator(".jp-CodeCell").nth(i) for i in range(1, 5))
    run_cell(page, 0)
    run_cell(page, 1)
    panel.locator(".kt-badge:visible", has_text="training").wait_for(timeout=60_000)

    # Its figures move, and what the trainer says of itself is shown as text.
    wait_until(lambda: shows_steps(panel) > 1, seconds=30)
    seen = shows_steps(panel)
    wait_until(lambda: shows_steps(panel) > seen + 3, seconds=20)
    shown = figures(panel)
    assert shown["world_size"] == "2"
    assert float(shown["sync_size_mb"]) > 0
    assert panel.locator(".kt-curves svg:visible").count() == 1
    assert panel.locator("img").count() == 0
    assert EVIL in panel.locator(".kt-log:visible").inner_text()
    assert EVIL in panel.locator("dl:visible").first.inner_text()
    bars = panel.get_by_role("progressbar")
    assert bars.count() == 2
    assert 0 <= int(bars.first.get_attribute("aria-valuenow")) <= 100

    # Cells that run meanwhile have their own output, and waiting can be interrupted.
    run_cell(page, 2)
    mine.locator("text=mine 2").wait_for(timeout=20_000)
    own = mine.locator(".jp-OutputArea-output").inner_text()
    assert own.split() == ["mine", "0", "mine", "1", "mine", "2"]
    run_cell(page, 3)
    page.wait_for_function(BUSY)
    wait_until(lambda: interrupted(page, waiting), seconds=30)
    run_cell(page, 4)
    reloading.locator("text=training").wait_for(timeout=20_000)

    # Nothing is cut off, in either theme, wide or narrow.
    for name, view in pictures(page):
        assert clipped(view) == [], name
    # The newest line is in sight.
    assert page.evaluate(
        "() => { const e = document.querySelector('.widget-vbox .kt-log').closest('.widget-vbox');"
        " return e.scrollHeight > e.clientHeight && Math.abs(e.scrollTop) < 2; }"
    )

    # A second notebook takes the run up and shows the same.
    other = page.context.new_page()
    open_notebook(other, lab, "second.ipynb")
    run_cell(other, 0)
    run_cell(other, 1)
    second = other.locator(".jp-CodeCell").nth(1)
    second.locator(".kt-badge:visible", has_text="training").wait_for(timeout=60_000)
    wait_until(lambda: abs(shows_steps(second) - shows_steps(panel)) <= 10, seconds=20)
    same = ("sync_files", "sync_size_mb", "world_size", "skipped_steps")
    assert [figures(second)[name] for name in same] == [figures(panel)[name] for name in same]

    # Its tab is closed and opened again: the panel lives on, and the keyboard reaches every button.
    command(other, "docmanager:save")
    wait_until(lambda: outputs(lab.root / "second.ipynb", 1), seconds=20)
    open_notebook(other, lab, "second.ipynb")
    wait_until(lambda: shows_steps(second) > 0, seconds=30)
    seen = shows_steps(second)
    wait_until(lambda: shows_steps(second) > seen + 3, seconds=20)
    button(second, "Stop").focus()
    for name in ("Fetch best", "Detach", "Copy log path"):
        other.keyboard.press("Tab")
        assert other.evaluate("document.activeElement.textContent") == name
    button(second, "Stop").focus()
    other.keyboard.press("Space")
    button(second, "Keep it running").focus()
    other.keyboard.press("Space")
    button(second, "Keep it running").wait_for(state="hidden")

    # Its kernel is restarted: the panel says that it is dead. Saved and opened again, what it last showed
    # is there, and running the cells once more takes the run up.
    other.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    wait_until(lambda: "kernel behind this panel is gone" in below_the_name(other), seconds=30)
    command(other, "docmanager:save")
    open_notebook(other, lab, "second.ipynb")
    second.locator("text=as it stood at").wait_for(timeout=30_000)
    assert shows_steps(second) > 0
    assert second.locator("text=model not found").is_hidden()
    run_cell(other, 0)
    run_cell(other, 1)
    second.locator(".kt-badge:visible", has_text="training").wait_for(timeout=60_000)
    seen = shows_steps(second)
    wait_until(lambda: shows_steps(second) > seen, seconds=20)

    # Stop asks, and ends it: both notebooks say so.
    button(panel, "Stop").click()
    asked = time.monotonic()
    button(panel, "Yes, stop it").click()
    panel.locator(".kt-badge:visible", has_text="stopped").wait_for(timeout=30_000)
    assert time.monotonic() - asked < 10
    second.locator(".kt-badge:visible", has_text="stopped").wait_for(timeout=20_000)
    for cell in (panel, second):
        cell.locator(".widget-button").first.wait_for(state="detached")

    # What is saved is static, and is there after reopening; a new kernel goes on from it.
    last = figures(panel)
    assert f"epoch {last['optimizer_steps']}" in panel.locator(".kt-curves").inner_html()
    command(page, "docmanager:save")
    wait_until(
        lambda: f"optimizer_steps={last['optimizer_steps']}" in str(outputs(path, 1)), seconds=20
    )
    display, nothing = [one for one in outputs(path, 1) if one.output_type == "display_data"]
    assert set(display.data) == {"text/html", "text/plain"}
    assert nothing.data == {"text/html": "", "text/plain": ""}
    assert EVIL in display.data["text/plain"]
    assert path.stat().st_size < 60_000
    open_notebook(page, lab, path.name)
    panel.locator(".kt-badge:visible", has_text="stopped").wait_for(timeout=60_000)
    assert figures(panel) == last
    assert panel.locator("img").count() == 0
    for name, view in pictures(page, "ended"):
        assert clipped(view) == [], name
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    page.evaluate(
        "code => window.jupyterapp.shell.currentWidget.content.widgets[4].model.sharedModel.setSource(code)",
        AGAIN,
    )
    run_cell(page, 4)
    reloading.locator("text=stopped").first.wait_for(timeout=60_000)
