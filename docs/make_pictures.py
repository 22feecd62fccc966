"""Make the pictures of these pages from a real run, watched in a real JupyterLab.

    python docs/make_pictures.py [--epochs 5] [--to docs/images]

It needs the extra `test` and Chromium, and takes some minutes: the quickstart's coins, two ranks on CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import nbformat
from PIL import Image

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.lab import READY, jupyterlab, wait_until  # noqa: E402

COLOURS: Final = 128  # of a picture's palette: enough for text and curves, small for a repository
CELLS: Final = {
    "connect": "%load_ext kernel_tools\n%remote_connect local",
    "data": "from detector.data.prepare import prepare\n"
    "prepare('coins', to='data/coins')\n%stage_dataset data/coins",
    "train": "run = %remote_train coins/hgnetv2_n --dataset coins --nproc-per-node 2"
    " --set solver.epochs={epochs}",
    "wait": "%remote_wait",
    "curves": "run.plot()",
    "predictions": "run.show_predictions(4)",
    "judge": "judged = %remote_eval --wait",
    "evaluation": "judged.evaluation()",
}
# Cells whose output is a picture as soon as they have ended.
SHOWN: Final = ("curves", "predictions", "evaluation")
RUN: Final = """index => { const app = window.jupyterapp, notebook = app.shell.currentWidget.content;
  notebook.activeCellIndex = index; notebook.deselectAll(); app.commands.execute('notebook:run-cell'); }"""


def main() -> None:
    """Run the notebook as a person would, and take pictures of its outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--to", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="coins-") as folder:
        project = Path(folder, "project")
        project.mkdir()
        (project / "pyproject.toml").write_text("[project]\nname = 'coins'\n", "utf-8")
        cells = [nbformat.v4.new_code_cell(one) for one in CELLS.values()]
        cells[2].source = cells[2].source.replace("{epochs}", str(options.epochs))
        spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
        book = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec})
        nbformat.write(book, project / "pictures.ipynb")
        with jupyterlab(Path(folder), project) as lab, browser_page() as page:
            page.goto(f"{lab.url}/lab/tree/pictures.ipynb?token={lab.token}")
            page.wait_for_function(READY, timeout=90_000)
            page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
            take(page, options.to, half=max(1, options.epochs // 2))


def take(page: Any, to: Path, *, half: int) -> None:
    """Run the cells one after another; the panel is taken after `half` epochs, the others at their end."""
    names = list(CELLS)
    training = page.locator(".jp-CodeCell").nth(names.index("train"))
    for index, name in enumerate(names):
        page.evaluate(RUN, index)
        cell = page.locator(".jp-CodeCell").nth(index)
        if name == "train":
            wait_until(lambda: _epoch(training) > half, seconds=1800)
            save(training.locator(".jp-OutputArea").first.screenshot(), to / "panel.png")
        elif name == "wait":
            wait_until(lambda: "completed" in training.inner_text(), seconds=3600)
        else:
            done = f"index => window.jupyterapp.shell.currentWidget.content.widgets[{index}]"
            done += ".model.executionCount > 0"
            page.wait_for_function(done, timeout=900_000)
        page.wait_for_function(READY, timeout=900_000)
        page.wait_for_timeout(1500)  # the browser draws it
        if name in SHOWN:
            save(cell.locator(".jp-OutputArea").first.screenshot(), to / f"{name}.png")
        print(f"{name} done", flush=True)


def save(png: bytes, path: Path) -> None:
    """Write a picture with a palette, as small as it looks."""
    with Image.open(io.BytesIO(png)) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def _epoch(cell: Any) -> int:
    found = re.search(r"epoch (\d+) of", cell.inner_text())
    return int(found.group(1)) if found else 0


@contextlib.contextmanager
def browser_page() -> Iterator[Any]:
    """Open a page in Chromium, as wide as a laptop's half."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    switches = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=switches)
        yield browser.new_page(viewport={"width": 1000, "height": 2000})
        browser.close()


if __name__ == "__main__":
    main()
