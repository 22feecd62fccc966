"""Every notebook of the project: clean in the tree, and executed to the end against real local parts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"quickstart", "kaggle_two_t4", "batch"}


def test_it_is_valid_and_carries_no_outputs(notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert "widgets" not in notebook.metadata
    for cell in code(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


def test_it_teaches(notebook):
    assert len(code(notebook)) <= 12
    words = sum(len(c.source.split()) for c in notebook.cells if c.cell_type == "markdown")
    assert words >= 100
    (parameters,) = [c for c in code(notebook) if "parameters" in c.metadata.get("tags", [])]
    names = {line.partition(" = ")[0] for line in parameters.source.splitlines()}
    assert {"epochs", "ranks"} <= names
    later = "\n".join(c.source for c in code(notebook) if c is not parameters)
    assert [name for name in names if not re.search(rf"\b{name}\b", later)] == []


def test_no_credential_and_no_path_of_a_machine_is_in_it(notebook):
    source = "\n".join(cell.source for cell in notebook.cells)
    assert "/home/" not in source
    assert "/work" not in source
    assert "--minio-secret-key " not in source


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_the_quickstart_learns_and_its_page_is_readable_without_a_network(tmp_path, monkeypatch):
    """In a copy of the project, so that the tree stays as it is."""
    project = tmp_path / "project"
    for name in ("kernel_tools", "detector", "configs", "notebooks"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, project / name)
    monkeypatch.setenv("PYTHONPATH", str(project))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    done = subprocess.run(
        [sys.executable, "-m", "kernel_tools", "quickstart", "--to", str(tmp_path / "out")],
        cwd=project, env=dict(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    executed = json.loads((tmp_path / "out/quickstart.ipynb").read_text("utf-8"))
    assert "widgets" not in executed["metadata"]
    (metrics,) = (project / "artifacts/remote").glob("*/evaluation/metrics.json")
    assert json.loads(metrics.read_text("utf-8"))["metrics"]["AP50"] >= 0.85
    text, pictures, asked = read_offline(tmp_path / "out/quickstart.html")
    for token in ("sync_files=", "sync_size_mb=", "world_size=2", "AP50="):
        assert token in text
    assert int(re.findall(r"optimizer_steps=(\d+)", text)[-1]) > 0
    assert len(pictures) == 2
    assert all(width > 300 for width in pictures)
    assert asked == []


def read_offline(page):
    """Open a page in Chromium with the network off; return its text, pictures' widths, and requests."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    asked = []
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        context = browser.new_context(offline=True)
        tab = context.new_page()
        tab.on("request", lambda r: asked.append(r.url) if r.url.startswith("http") else None)
        tab.goto(page.as_uri())
        text = tab.inner_text("body")
        widths = tab.evaluate("[...document.images].map(image => image.naturalWidth)")
        browser.close()
    return text, widths, asked
