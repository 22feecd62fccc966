"""Every notebook of the project: clean in the tree, and executed to the end against real local parts."""

from __future__ import annotations

import json
import os
import shutil
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
    assert "quickstart" in {path.stem for path in NOTEBOOKS}


def test_it_is_valid_and_carries_no_outputs(notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert "widgets" not in notebook.metadata
    for cell in code(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


def test_it_teaches(notebook):
    assert len(code(notebook)) <= 10
    words = sum(len(c.source.split()) for c in notebook.cells if c.cell_type == "markdown")
    assert words >= 100
    (parameters,) = [c for c in code(notebook) if "parameters" in c.metadata.get("tags", [])]
    assert {"seed", "epochs"} <= {
        line.partition(" = ")[0] for line in parameters.source.splitlines()
    }


def test_no_credential_and_no_path_of_a_machine_is_in_it(notebook):
    source = "\n".join(cell.source for cell in notebook.cells)
    assert "/home/" not in source
    assert "/work" not in source
    assert "--minio-secret-key " not in source


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_runs_to_the_end_without_a_browser(tmp_path, monkeypatch):
    """In a copy of the project, so that the tree stays as it is."""
    project = tmp_path / "project"
    for name in ("kernel_tools", "detector", "configs", "notebooks"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, project / name)
    monkeypatch.setenv("PYTHONPATH", str(project))
    monkeypatch.setenv("KERNEL_TOOLS_IDLE_SECONDS", "5")
    import subprocess

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kernel_tools",
            "quickstart",
            "--to",
            str(tmp_path / "out"),
            "--set",
            "epochs=1",
        ],
        cwd=project,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    executed = json.loads((tmp_path / "out/quickstart.ipynb").read_text("utf-8"))
    assert "widgets" not in executed["metadata"]
    page = (tmp_path / "out/quickstart.html").read_text("utf-8")
    for token in ("sync_files=", "sync_size_mb=", "world_size=2", "optimizer_steps=", "AP50="):
        assert token in page
    assert "0 of" in page or "found" in page
    assert page.count('src="data:image/png;base64,') == 2
