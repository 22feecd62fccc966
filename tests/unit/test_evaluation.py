"""What an evaluation wrote is read whole, or refused in one sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detector.data.index import Annotated, make_index
from detector.evaluate import Evaluator
from kernel_tools.errors import FetchError
from kernel_tools.results.evaluation import read_evaluation


@pytest.fixture
def written(tmp_path):
    rows = [
        Annotated("a.png", 100, 100, boxes=np.array([[10, 10, 50, 50.0]]), labels=np.array([0])),
    ]
    index = make_index(rows, name="set", root="", class_names=("car", "bus"))
    evaluator = Evaluator(index)
    evaluator.add([0], [(np.array([[10, 10, 50, 50.0]]), np.array([0.9]), np.array([0]))])
    evaluator.summarize().write(tmp_path, epoch=4)
    return tmp_path


def test_everything_is_read(written):
    judged = read_evaluation(written, run_id="run-1")
    assert (judged.images, judged.epoch, judged.iou) == (1, 4, 0.5)
    assert judged.metrics["AP50"] == pytest.approx(1.0)
    assert judged.metrics["AP_large"] is None  # nothing of that kind
    car, bus = judged.classes
    assert (car.name, car.instances, car.ap50) == ("car", 1, pytest.approx(1.0))
    assert len(car.precision) == len(judged.recall) == 101
    assert (bus.ap50, bus.best_score, bus.precision) == (None, None, ())
    assert judged.names == ("car", "bus", "background")
    assert judged.confusion == ((1, 0, 0), (0, 0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("metrics.json", {"per_class": None}),
        ("metrics.json", {"images": "many"}),
        ("metrics.json", {"metrics": {"AP50": "high"}}),
        ("pr_curve.json", {"classes": {}}),
        ("pr_curve.json", {"recall": [0.0, 1.0]}),
        ("confusion.json", {"matrix": [[1, 2]]}),
        ("confusion.json", {"matrix": [["<b>", 0, 0]] * 3}),
    ],
)
def test_what_does_not_fit_is_one_sentence(written, file, change):
    path = written / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FetchError) as caught:
        read_evaluation(written, run_id="run-1")
    assert "the evaluation of run-1" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_file_that_is_none_is_named(written, content):
    path = written / "pr_curve.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(FetchError, match=r"pr_curve\.json"):
        read_evaluation(written, run_id="run-1")
