"""What a score is worth: known precision is found again, curves never fall, bad files are one sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detector.calibrate import (
    LEAST_HITS,
    Calibration,
    CalibrationError,
    Curve,
    fit,
    fit_knots,
    judge,
)
from detector.coco import Detections
from detector.data.index import Annotated, make_index

WORTH = {
    "square": lambda score: score**2,
    "overconfident": lambda score: 0.2 + 0.5 * score,
    "a step": lambda score: np.where(score < 0.6, 0.1, 0.8),
    "nothing": lambda score: np.full_like(score, 0.3),
}


def detections(boxes, scores, labels):
    return Detections(
        np.array(boxes, float).reshape(-1, 4), np.array(scores, float), np.array(labels, np.int64)
    )


def index_of(pictures, names=("car", "bus")):
    """An index of pictures given as lists of (box, label, crowd)."""
    rows = [
        Annotated(
            f"{number}.png",
            100,
            100,
            boxes=np.array([box for box, _, _ in objects], float).reshape(-1, 4),
            labels=np.array([label for _, label, _ in objects], np.int64),
            iscrowd=np.array([crowd for _, _, crowd in objects], bool),
        )
        for number, objects in enumerate(pictures)
    ]
    return make_index(rows, name="set/val", root="", class_names=names)


def drawn(worth, *, count, seed=0, label=0, classes=2):
    """Pictures with one detection each, right with the chance that `worth` gives its score."""
    rng = np.random.default_rng(seed)
    scores = rng.random(count)
    right = rng.random(count) < worth(scores)
    box, elsewhere = [10, 10, 50, 50], [60, 60, 90, 90]
    index = index_of([[(box, label, False)]] * count, names=[f"c{k}" for k in range(classes)])
    found = {
        k: detections([box if right[k] else elsewhere], [scores[k]], [label]) for k in range(count)
    }
    return index, found


@pytest.mark.parametrize("name", WORTH)
def test_a_known_precision_is_found_again(name):
    index, found = drawn(WORTH[name], count=8000)
    at = np.linspace(0.05, 0.95, 19)
    at = at[np.abs(at - 0.6) > 0.03]  # on the step itself nothing is known
    error = np.abs(fit(index, found).apply(at, np.zeros(len(at))) - WORTH[name](at))
    assert error.max() < 0.08
    assert error.mean() < 0.03


@pytest.mark.parametrize("seed", range(25))
def test_curves_rise_in_score_and_precision_and_stay_within_0_and_1(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 3000))
    scores = rng.choice([rng.random(count), rng.integers(0, 6, count) / 5, rng.random(count) ** 8])
    hit = rng.random(count) < rng.random()
    knots = np.array(fit_knots(scores, hit))
    assert (np.diff(knots[:, 0]) > 0).all()
    assert (np.diff(knots[:, 1]) >= 0).all()
    assert knots[0, 1] >= 0
    assert knots[-1, 1] <= 1
    curve = Curve(count, int(hit.sum()), tuple(map(tuple, knots.tolist())))
    asked = curve(np.sort(rng.uniform(-1, 2, 500)))
    assert (np.diff(asked) >= 0).all()


def test_the_whole_keeps_the_number_of_hits():
    """Pooling moves nothing: the curve's mean over the fitted scores is the share that is right."""
    rng = np.random.default_rng(3)
    scores = rng.random(5000)
    hit = rng.random(5000) < scores**3
    curve = Curve(5000, int(hit.sum()), fit_knots(scores, hit))
    assert curve(scores).mean() == pytest.approx(hit.mean(), abs=0.01)


def test_equal_scores_are_worth_the_same():
    knots = fit_knots(np.full(400, 0.5), np.arange(400) % 4 == 0)
    assert knots == ((0.5, 0.25),)


def test_one_lucky_detection_at_the_top_is_not_worth_1():
    scores = np.append(np.linspace(0, 0.9, 500), 0.99)
    hit = np.append(np.zeros(500, bool), True)
    assert fit_knots(scores, hit)[-1][1] <= 1 / 25


def test_a_class_with_few_hits_takes_the_curve_of_all():
    index, found = drawn(WORTH["overconfident"], count=2000)
    calibration = fit(index, found)
    assert calibration.per_class[0].knots == calibration.overall.knots
    assert calibration.per_class[1] == Curve(0, 0)
    scores = np.array([0.1, 0.5, 0.9])
    assert np.array_equal(
        calibration.apply(scores, [1, 1, 1]), calibration.apply(scores, [0, 0, 0])
    )


def test_classes_have_curves_of_their_own():
    good, found = drawn(WORTH["square"], count=3000, label=0)
    _, poor = drawn(lambda score: 0.1 * score, count=3000, seed=1, label=1)
    index = index_of([[([10, 10, 50, 50], 0, False), ([10, 10, 50, 50], 1, False)]] * len(good))
    both = {
        k: detections(
            np.concatenate([found[k].boxes, poor[k].boxes]),
            np.concatenate([found[k].scores, poor[k].scores]),
            [0, 1],
        )
        for k in found
    }
    first, second = fit(index, both).apply([0.9, 0.9], [0, 1])
    assert first == pytest.approx(0.81, abs=0.08)
    assert second == pytest.approx(0.09, abs=0.05)


def test_each_object_is_hit_once_by_the_best_of_its_class():
    index = index_of([[([0, 0, 40, 40], 0, False), ([50, 50, 90, 90], 0, False)]])
    found = {
        0: detections(
            [[0, 0, 40, 40], [0, 0, 40, 38], [50, 50, 90, 90], [50, 50, 90, 89]],
            [0.9, 0.8, 0.7, 0.6],
            [0, 0, 1, 0],
        )
    }
    scores, labels, hit = judge(index, found)
    assert sorted(zip(scores, labels, hit, strict=True)) == [
        (0.6, 0, True), (0.7, 1, False), (0.8, 0, False), (0.9, 0, True),
    ]  # fmt: skip


def test_what_lies_on_a_crowd_is_neither_right_nor_wrong():
    index = index_of([[([0, 0, 80, 80], 0, True), ([0, 0, 20, 20], 0, False)]])
    found = {
        0: detections(
            [[0, 0, 20, 20], [30, 30, 60, 60], [85, 85, 99, 99]], [0.9, 0.8, 0.7], [0] * 3
        )
    }
    scores, _, hit = judge(index, found)
    assert (scores.tolist(), hit.tolist()) == ([0.9, 0.7], [True, False])


def test_a_file_gives_back_what_was_saved(tmp_path):
    index, found = drawn(WORTH["square"], count=2000)
    calibration = fit(index, found, weights="ab" * 32)
    calibration.save(tmp_path / "deep" / "calibration.json")
    assert Calibration.load(tmp_path / "deep" / "calibration.json") == calibration


def test_too_few_hits_are_refused_with_what_to_do():
    index, found = drawn(lambda score: 0 * score, count=50)
    with pytest.raises(CalibrationError, match=rf"Only 0 of 50 .* needs {LEAST_HITS}: use more"):
        fit(index, found)
    with pytest.raises(CalibrationError, match="Only 0 of 0"):
        fit(index, {})


@pytest.fixture
def document():
    index, found = drawn(WORTH["square"], count=600)
    return fit(index, found).as_dict()


def put(document, keys, value):
    *path, last = keys
    for key in path:
        document = document[key]
    if value is None:
        del document[last]
    else:
        document[last] = value


DAMAGE = [
    (("kind",), "recipe", "is no calibration"),
    (("kind",), None, "is no calibration"),
    (("schema_version",), 2, "is of version 2, this is for 1"),
    (("iou",), None, "'iou' is missing"),
    (("iou",), 1.5, "iou is 1.5"),
    (("all",), None, "'all' is missing"),
    (("all",), [1], "is damaged"),
    (("all", "knots"), [], "all has no knots"),
    (("all", "knots"), [[0.1]], "is damaged"),
    (("all", "knots"), [[0.1, 0.2, 0.3]], "is damaged"),
    (("all", "knots"), [["a", 0.2]], "is damaged"),
    (("all", "knots"), 5, "is damaged"),
    (("all", "knots"), [[0.1, 1.2]], "a precision is in 0..1"),
    (("all", "knots"), [[float("nan"), 0.2]], "a precision is in 0..1"),
    (("all", "knots"), [[0.5, 0.2], [0.4, 0.3]], "do not rise"),
    (("all", "knots"), [[0.4, 0.3], [0.5, 0.2]], "falls from 0.3 to 0.2"),
    (("all", "hits"), -1, "has the count -1"),
    (("images",), "many", "has the count 'many'"),
    (("classes",), [], "no list of classes"),
    (("classes",), "car", "no list of classes"),
    (("classes", 0), 3, "is damaged"),
    (("classes", 0, "name"), None, "'name' is missing"),
]


@pytest.mark.parametrize(("keys", "value", "says"), DAMAGE)
def test_a_damaged_file_is_one_sentence_with_its_name(tmp_path, document, keys, value, says):
    put(document, keys, value)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(document))
    with pytest.raises(CalibrationError) as caught:
        Calibration.load(path)
    said = str(caught.value)
    assert says in said
    assert str(path) in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read: No such file"), ("{", "is no JSON"), ("[]", "is no calibration")],
)
def test_a_file_that_is_none_is_one_sentence(tmp_path, content, says):
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CalibrationError, match=says):
        Calibration.load(path)


def test_a_calibration_of_other_classes_is_refused(document, tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(document))
    calibration = Calibration.load(path)
    calibration.check_classes(["c0", "c1"], where="x")
    with pytest.raises(CalibrationError, match="of c0, c1, but the weights tell apart coin"):
        calibration.check_classes(["coin"], where="calibration.json")
