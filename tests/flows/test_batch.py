"""Batch jobs: exit 0 on success; on failure a non-zero exit and one line that names what is wrong."""

from __future__ import annotations

import json

import pytest

from tests.notebooks.conftest import ROOT, outputs, papermill, pictures, texts

from .conftest import CONFIG, TINY, notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LOAD = "%load_ext kernel_tools\n%remote_connect local"
SETTINGS = " ".join(f"--set {one}" for one in TINY)
SMALL = " ".join(f"--set {one}" for one in TINY if not one.startswith(("model.", "solver.epochs")))
NOWHERE = "--set data.format=yolo --set data.root=data/nowhere"


def errors_in(path):
    return [output for output in outputs(path) if output.output_type == "error"]


def test_three_configurations_make_three_notebooks_and_the_one_that_fails_says_why(
    session, project
):
    """As a shell's loop would: each its own papermill, the second one wrong."""
    batch = ROOT / "notebooks/batch.ipynb"
    called = {
        "nano": {"config": "synthetic/hgnetv2_n", "seeds": [0, 1], "settings": SMALL},
        "wrong": {"config": CONFIG, "seeds": [0], "settings": f"{SMALL} {NOWHERE}"},
        "small": {"config": CONFIG, "seeds": [0], "settings": SMALL},
    }
    done = {
        name: papermill(batch, project / f"{name}.ipynb", cwd=project, epochs=1, ranks=1, **given)
        for name, given in called.items()
    }
    assert {name: one.returncode for name, one in done.items()} == {
        "nano": 0,
        "wrong": 1,
        "small": 0,
    }

    (error,) = errors_in(project / "wrong.ipynb")
    assert error.ename == "RunFailed"
    assert "data/nowhere" in error.evalue
    said = f"{error.ename}: {error.evalue}"
    assert [line for line in error.traceback if line.strip()] == [said]
    assert said in done["wrong"].stderr

    for name, runs in {"nano": 2, "small": 1}.items():
        path = project / f"{name}.ipynb"
        assert errors_in(path) == []
        assert texts(path).count("world_size=1 optimizer_steps=4  mAP@0.50:0.95=") == runs
        assert ("2 runs; they differ in runtime.seed" in texts(path)) == (runs == 2)
        assert "3 files fetched, each verified by SHA-256" in texts(path)
        book = json.loads(path.read_text("utf-8"))
        assert "widgets" not in book["metadata"]
        assert len(json.dumps(book)) < 150_000 * (runs + 1)
    assert pictures(project / "small.ipynb") == 1
    assert "data:image/png" in (project / "nano.ipynb").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"{CONFIG} {SETTINGS} --set solver.epochs=banana", "banana"),
        ("coins/no_such_model", "no_such_model"),
        (f"{CONFIG} --set solver.no_such_key=1", "no_such_key"),
        (f"{CONFIG} --no-such-option", "no-such-option"),
    ],
    ids=["wrong value", "unknown config", "unknown key", "unknown option"],
)
def test_what_is_wrong_is_named_in_one_line_and_the_job_fails(session, project, arguments, named):
    path = notebook(project / "bad.ipynb", LOAD, f"%remote_train {arguments}")
    executed = project / "bad-done.ipynb"
    done = papermill(path, executed, cwd=project)
    assert done.returncode != 0
    (error,) = errors_in(executed)
    assert named in error.evalue
    assert "\n" not in error.evalue
    said = f"{error.ename}: {error.evalue}"
    assert [line for line in error.traceback if line.strip()] == [said]
    assert said in done.stderr
