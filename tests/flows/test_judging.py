"""Weights are judged where they lie, on the data they were trained on, and what came out is shown here."""

from __future__ import annotations

import json

import pytest

from detector.data.prepare import prepare
from kernel_tools.errors import InvalidArgumentError, RunNotFoundError
from tests.notebooks.conftest import papermill

from .conftest import CONFIG, TINY, notebook
from .test_batch import LOAD, errors_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trained(session, project):
    """A run on a staged data set that has ended."""
    if not (project / "data/shapes").is_dir():
        prepare("synthetic", to="data/shapes", train=16, val=6, size=96)
    session.stage_dataset("data/shapes")
    run = session.train(CONFIG, overrides=TINY, datasets=["shapes"], nproc_per_node=1)
    return run.wait(300)


def test_an_evaluation_is_a_run_of_its_own_on_the_same_data(session, trained):
    said = []
    run = session.evaluate(run=trained.id, nproc_per_node=2, report=said.append)
    run.wait(300)
    assert run.id != trained.id
    status = run.status()
    assert (status["state"], status["world_size"], status["progress"]) == ("completed", 2, 1.0)
    assert "remote_dataset_ready=data/shapes" in run.logs(500)
    assert f"{trained.id}/weights/best.pt" in run.logs(500)
    found = run.evaluation()
    assert (found.images, found.epoch) == (4, None)
    assert [one.name for one in found.classes] == ["circle", "square", "triangle"]
    assert found.metrics["AP50"] == pytest.approx(trained.evaluation().metrics["AP50"], abs=0.05)
    assert sum(map(sum, found.confusion[:-1])) == sum(one.instances for one in found.classes)
    assert said[-1] == f"run_id={run.id}"


def test_pictures_come_back_with_their_words(session, trained, project):
    calibration = project / "calibration.json"
    knots = [[0.0, 0.25], [1.0, 0.25]]
    curve = {"detections": 100, "hits": 25, "knots": knots}
    names = ("circle", "square", "triangle")
    calibration.write_text(
        json.dumps(
            {
                "schema_version": 1,
                "kind": "detector-calibration",
                "iou": 0.5,
                "images": 4,
                "all": curve,
                "classes": [{"name": name, **curve, "knots": None} for name in names],
            }
        )
    )
    run = session.visualize(
        run=trained.id, count=2, min_score=0.0, calibration="calibration.json", device="cpu"
    )
    run.wait(300)
    one, two = run.pictures()
    assert one.path.name == "images_val_00000.png"
    assert one.path.is_relative_to(project / "artifacts" / "remote" / run.id)
    assert one.jpeg[:2] == b"\xff\xd8"
    assert "images/val/00001.png: left the ground truth (" in two.alt


def test_the_last_run_is_the_one_that_trained(session, trained):
    plan = session.evaluate(dry_run=True)  # after evaluations, and pictures
    assert f"../../{trained.id}/weights/best.pt" in plan.job.argv
    assert plan.job.inputs[0]["dest"] == "data/shapes"


def test_weights_from_here_travel(session, trained):
    (best,) = trained.fetch("weights/best.pt")
    run = session.evaluate(checkpoint=str(best.path), overrides=["data.eval_samples=2"])
    run.wait(300)
    assert "checkpoint=given/best.pt" in run.logs(500)
    assert run.evaluation().images == 2
    with pytest.raises(RunNotFoundError, match="looked at weights that no run made"):
        session.evaluate(run=run.id)


def test_weights_and_runs_that_are_not_there_are_named(session, trained):
    with pytest.raises(InvalidArgumentError, match=r"has no weights/epoch_9\.pt"):
        session.evaluate(run=trained.id, checkpoint="epoch_9")
    with pytest.raises(RunNotFoundError, match="no-such-run"):
        session.visualize(run="no-such-run")
    for nowhere in ("nowhere.json", trained.id):
        with pytest.raises(InvalidArgumentError, match="there is no calibration"):
            session.visualize(run=trained.id, calibration=nowhere)


def test_a_batch_notebook_shows_tables_figures_and_pictures(session, trained, project):
    path = notebook(
        project / "judged.ipynb",
        LOAD,
        f"judged = %remote_eval --run {trained.id}",
        f"drawn = %remote_visualize --run {trained.id} --count 2",
        "assert judged.evaluation().images == 4",
        "%remote_disconnect",
    )
    executed = project / "judged-done.ipynb"
    done = papermill(path, executed, cwd=project)
    assert done.returncode == 0, done.stderr
    book = json.loads(executed.read_text("utf-8"))
    shown = [[set(o.get("data", ())) for o in cell["outputs"]] for cell in book["cells"]]
    assert sum("image/png" in kinds for kinds in shown[1]) == 2
    assert sum("image/jpeg" in kinds for kinds in shown[2]) == 2
    text = json.dumps(book)
    for token in ("mAP@0.50:0.95", "Precision-recall curves at IoU 0.50", "Confusion matrix"):
        assert token in text
    assert "widgets" not in book["metadata"]


def test_an_evaluation_that_fails_fails_the_cell_in_one_line(session, trained, project):
    wrong = "--set data.classes=[circle]"  # the weights tell apart three
    path = notebook(project / "wrong.ipynb", LOAD, f"%remote_eval --run {trained.id} {wrong}")
    executed = project / "wrong-done.ipynb"
    assert papermill(path, executed, cwd=project).returncode != 0
    (error,) = errors_in(executed)
    assert error.ename == "RunFailed"
    assert "tells apart circle, square, triangle, but the data set has circle" in error.evalue
    assert "\n" not in error.evalue
