"""The evaluator against pycocotools, and what it does where there is little to judge."""

from __future__ import annotations

import builtins
import contextlib
import io
import json

import numpy as np
import pytest

from detector import coco
from detector.coco import METRICS
from detector.data.index import Annotated, make_index
from detector.evaluate import Evaluator

SIDE = 400


def scene(seed, *, classes=3, images=12):
    """Random truth and detections: ties, crowds, empty pictures, classes without instances, > 100."""
    rng = np.random.default_rng(seed)
    rows, found = [], {}
    ids = rng.permutation(images) * 7  # as in COCO: neither dense nor in the order of the files
    for position in range(images):
        count = int(rng.choice([0, 1, 3, 8]))
        low = rng.uniform(0, SIDE * 0.8, (count, 2))
        side = rng.choice([12.0, 50.0, 120.0], (count, 1)) * rng.uniform(0.7, 1.3, (count, 2))
        boxes = np.concatenate([low, np.minimum(low + side, SIDE)], 1)
        labels = rng.integers(0, classes - (seed % 2), count)
        rows.append(
            Annotated(
                f"images/{position}.png",
                SIDE,
                SIDE,
                boxes=boxes,
                labels=labels,
                iscrowd=rng.random(count) < 0.15,
                image_id=int(ids[position]),
            )
        )
        if rng.random() < 0.2:
            continue
        guesses = int(rng.choice([0, 5, 40, 350]))
        near = boxes[rng.integers(0, count, guesses)] if count else np.zeros((0, 4))
        far = rng.uniform(0, SIDE / 2, (guesses, 4))
        far[:, 2:] += far[:, :2]
        jitter = rng.normal(0, 6, (len(near), 4))
        boxes = np.concatenate([near + jitter, far])
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 0.5)
        scores = rng.integers(0, 12, len(boxes)) / 11  # many ties
        found[position] = (boxes, scores, rng.integers(0, classes, len(boxes)))
    index = make_index(rows, name="scene", root="", class_names=[f"c{k}" for k in range(classes)])
    return index, found


def reference(index, found):
    """pycocotools' twelve figures, fed through its own `loadRes`."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = [
        {
            "id": row + 1,
            "image_id": int(index.image_ids[position]) + 1,
            "category_id": int(index.labels[row]) + 1,
            "bbox": xywh(index.boxes[row]),
            "area": float(index.areas[row]),
            "iscrowd": int(index.iscrowd[row]),
        }
        for position in range(len(index))
        for row in range(*index.rows(position).indices(len(index.boxes)))
    ]
    results = []
    for position, (boxes, scores, labels) in sorted(found.items()):
        order = np.argsort(-scores, kind="stable")[:300]
        results += [
            {
                "image_id": int(index.image_ids[position]) + 1,
                "category_id": int(labels[k]) + 1,
                "bbox": xywh(boxes[k]),
                "score": float(scores[k]),
            }
            for k in order
        ]
    with contextlib.redirect_stdout(io.StringIO()):
        table = COCO()
        table.dataset = {
            "info": {},
            "images": [{"id": int(k) + 1, "width": SIDE, "height": SIDE} for k in index.image_ids],
            "categories": [{"id": k + 1, "name": n} for k, n in enumerate(index.class_names)],
            "annotations": truth,
        }
        table.createIndex()
        judge = COCOeval(table, table.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return np.array(judge.stats)


def xywh(box):
    x1, y1, x2, y2 = (float(edge) for edge in box)
    return [x1, y1, x2 - x1, y2 - y1]


def judged(index, found, *, ranks=1):
    """The result on rank 0 where `ranks` ranks were dealt the pictures in turn."""
    shares = []
    for rank in range(ranks):
        mine = [k for k in range(rank, len(index), ranks) if k in found]
        shares.append(Evaluator(index))
        shares[-1].add([index.image_ids[k] for k in mine], [found[k] for k in mine])
    shares[0].gather(FakeRuntime([share.found for share in shares[1:]]))
    return shares[0].summarize()


class FakeRuntime:
    """What rank 0 gets of the others."""

    def __init__(self, others):
        self.others = others

    def all_gather(self, value):
        return [value, *self.others]


@pytest.fixture(params=["faster-coco-eval", "pycocotools"])
def backend(request, monkeypatch):
    if request.param == "pycocotools":
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        monkeypatch.setattr(coco, "coco_backend", lambda: (COCO, COCOeval, "pycocotools"))
    else:
        assert coco.coco_backend()[2] == request.param
    return request.param


def distance(index, found, *, ranks=(1,)):
    """The greatest difference between our twelve figures and pycocotools'."""
    expected = reference(index, found)
    ours = [judged(index, found, ranks=count).metrics for count in ranks]
    return max(
        float(np.abs(np.array([metrics[name] for name in METRICS]) - expected).max())
        for metrics in ours
    )


def test_all_twelve_figures_equal_pycocotools_with_one_two_and_three_ranks():
    scenes = [scene(seed) for seed in range(20)]
    sizes = [len(boxes) for _, found in scenes for boxes, _, _ in found.values()]
    assert max(sizes) > 300
    assert sum(100 < size <= 300 for size in sizes) + sum(size > 300 for size in sizes) >= 20
    assert any(index.iscrowd.any() for index, _ in scenes)
    assert any(np.diff(index.offsets).min() == 0 for index, _ in scenes)  # empty pictures
    assert max(distance(*one, ranks=(1, 2, 3)) for one in scenes) <= 1e-12


@pytest.mark.campaign
def test_all_twelve_figures_equal_pycocotools_on_two_hundred_scenes():
    assert max(distance(*scene(seed), ranks=(1, 2, 3)) for seed in range(200)) <= 1e-12


def test_either_package_gives_the_same(backend):
    assert max(distance(*scene(seed)) for seed in range(3)) <= 1e-12


@pytest.mark.shared
def test_all_twelve_figures_equal_pycocotools_on_photographs(coco128):
    from detector.data import formats

    rng = np.random.default_rng(0)
    index = formats.read(coco128, "train")
    found = {}
    for position in range(len(index)):
        rows = index.rows(position)
        boxes = np.repeat(index.boxes[rows].astype(float), 6, axis=0)
        boxes += rng.normal(0, 0.15, boxes.shape) * np.tile(boxes[:, 2:] - boxes[:, :2], 2)
        labels = np.repeat(index.labels[rows], 6)
        wrong = rng.random(len(labels)) < 0.1
        labels[wrong] = rng.integers(0, 80, wrong.sum())
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
        found[position] = (boxes, rng.random(len(boxes)).round(2), labels)
    metrics = judged(index, found).metrics
    assert 0.05 < metrics["mAP@0.50:0.95"] < metrics["AP50"] < 0.9
    assert distance(index, found, ranks=(1, 2, 3)) <= 1e-12


def small_index(boxes=((10, 10, 50, 50),), labels=(0,), images=1):
    rows = [
        Annotated(
            "images/0.png",
            100,
            100,
            boxes=np.array(boxes, float).reshape(-1, 4),
            labels=np.array(labels, int),
        )
    ]
    rows += [
        Annotated(f"images/{k}.png", 100, 100, boxes=np.zeros((0, 4)), labels=np.zeros(0, int))
        for k in range(1, images)
    ]
    return make_index(rows, name="small", root="data/small", class_names=("car", "bus"))


def test_a_perfect_detector_scores_one():
    index = small_index([(10, 10, 50, 50), (60, 60, 90, 90)], [0, 1], images=2)
    found = {0: (index.boxes.astype(float), np.array([0.9, 0.8]), index.labels)}
    result = judged(index, found)
    assert result.metrics["mAP@0.50:0.95"] == pytest.approx(1.0)
    assert result.metrics["AP50"] == pytest.approx(1.0)
    assert [(c.name, c.ap50, c.instances) for c in result.per_class] == [
        ("car", pytest.approx(1.0), 1),
        ("bus", pytest.approx(1.0), 1),
    ]
    assert result.per_class[0].best_score == pytest.approx(0.9)
    assert result.confusion.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert result.images == 2


def test_nothing_found_is_zero_and_nothing_to_find_is_minus_one(backend):
    assert judged(small_index(), {}).metrics["AP50"] == 0.0
    empty = small_index((), (), images=2)
    assert judged(empty, {}).metrics["AP50"] == -1.0
    found = {1: (np.array([[1.0, 2, 3, 4]]), np.array([0.5]), np.array([1]))}
    assert judged(empty, found).metrics["mAP@0.50:0.95"] == -1.0
    assert judged(empty, found).per_class[1].best_score == -1.0


def test_per_class_figures_average_to_the_whole():
    index, found = scene(4, classes=4)
    result = judged(index, found)
    known = [c.ap for c in result.per_class if c.ap > -1]
    assert np.mean(known) == pytest.approx(result.metrics["mAP@0.50:0.95"], abs=1e-12)
    known = [c.ap50 for c in result.per_class if c.ap50 > -1]
    assert np.mean(known) == pytest.approx(result.metrics["AP50"], abs=1e-12)


def test_confusion_counts_wrong_class_missed_and_invented():
    index = small_index([(0, 0, 40, 40), (50, 50, 90, 90), (0, 60, 30, 90)], [0, 1, 1])
    found = {
        0: (
            np.array([[0, 0, 40, 40], [50, 50, 90, 88], [60, 0, 90, 30], [0, 60, 30, 90]], float),
            np.array([0.9, 0.8, 0.7, 0.1]),  # the last is below the threshold
            np.array([1, 1, 0, 1]),
        )
    }
    assert judged(index, found).confusion.tolist() == [[0, 1, 0], [0, 1, 1], [1, 0, 0]]


def test_a_crowd_is_neither_missed_nor_counted():
    rows = [
        Annotated(
            "a.png",
            100,
            100,
            boxes=np.array([[0, 0, 60, 60.0]]),
            labels=np.array([0]),
            iscrowd=np.array([True]),
        )
    ]
    index = make_index(rows, name="crowd", root="", class_names=("car",))
    result = judged(index, {0: (np.array([[5, 5, 25, 25.0]]), np.array([0.9]), np.array([0]))})
    assert result.metrics["AP50"] == -1.0
    assert result.per_class[0].instances == 0
    assert result.confusion[0].sum() == 0


def test_scores_that_are_no_numbers_are_dropped():
    index = small_index()
    boxes = np.array([[10, 10, 50, 50], [10, 10, 50, 50.0]])
    found = {0: (boxes, np.array([np.nan, 0.7]), np.array([0, 0]))}
    assert judged(index, found).metrics["AP50"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ids", "message"), [([5], "not in small"), ([0, 0], "came twice"), ([0], "differ in number")]
)
def test_wrong_results_are_refused(ids, message):
    evaluator = Evaluator(small_index())
    boxes = np.zeros((1, 4))
    scores = np.zeros(2 if message == "differ in number" else 1)
    with pytest.raises(ValueError, match=message):
        evaluator.add(ids, [(boxes, scores, np.zeros(1, int))] * len(ids))


def test_results_may_be_tensors():
    import torch

    index = small_index()
    evaluator = Evaluator(index)
    evaluator.add(
        torch.tensor([0]),
        [(torch.tensor([[10, 10, 50, 50.0]]), torch.tensor([0.5]), torch.tensor([0]))],
    )
    assert evaluator.summarize().metrics["AP50"] == pytest.approx(1.0)


def test_without_either_package_the_pip_line_is_said(monkeypatch):
    real = builtins.__import__

    def without(wanted, *arguments, **keywords):
        if wanted.split(".")[0] in {"faster_coco_eval", "pycocotools"}:
            raise ImportError(wanted)
        return real(wanted, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match="pip install faster-coco-eval"):
        coco.coco_backend()


def test_a_picture_that_two_ranks_judged_is_refused():
    index, found = scene(7)
    one, two = Evaluator(index), Evaluator(index)
    for evaluator in (one, two):
        evaluator.add([index.image_ids[k] for k in found], list(found.values()))
    with pytest.raises(ValueError, match="same picture"):
        one.gather(FakeRuntime([two.found]))


def test_the_best_three_hundred_are_kept_whatever_their_score():
    index = small_index()
    boxes = np.tile([10.0, 10, 50, 50], (400, 1))
    boxes[:, 2] += np.linspace(0, 2000, 400)  # far out of the picture: neither clipped nor rounded
    evaluator = Evaluator(index)
    scores = np.linspace(1e-9, 1e-7, 400)
    evaluator.add([0], [(boxes, scores, np.zeros(400, int))])
    kept = evaluator.found[0]
    assert len(kept.scores) == 300
    assert np.array_equal(kept.scores, scores[::-1][:300])
    assert np.array_equal(kept.boxes, boxes[::-1][:300])


def test_boxes_are_judged_in_the_pixels_of_the_picture():
    import torch

    from detector.models.detector import postprocess

    index = small_index([(10, 20, 50, 60)])
    logits = torch.full((1, 3, 2), -12.0)
    logits[0, 1, 0] = -9.0  # the best is far below any threshold
    shares = torch.tensor([[[0.5, 0.5, 1, 1], [0.3, 0.4, 0.4, 0.4], [0.9, 0.9, 0.1, 0.1]]])
    evaluator = Evaluator(index)
    evaluator.add([0], postprocess(logits, shares, torch.tensor([[100, 100]])))
    assert len(evaluator.found[0].scores) == 6  # every query and class
    assert evaluator.found[0].boxes[0] == pytest.approx([10, 20, 50, 60], abs=1e-5)
    assert evaluator.summarize().metrics["mAP@0.50:0.95"] == pytest.approx(1.0)


def test_a_detection_on_a_crowd_is_no_invention():
    rows = [
        Annotated(
            "a.png",
            100,
            100,
            boxes=np.array([[0, 0, 60, 60.0]]),
            labels=np.array([0]),
            iscrowd=np.array([True]),
        )
    ]
    index = make_index(rows, name="crowd", root="", class_names=("car",))
    boxes = np.array([[5, 5, 25, 25.0], [70, 70, 90, 90]])
    result = judged(index, {0: (boxes, np.array([0.9, 0.8]), np.zeros(2, int))})
    assert result.confusion.tolist() == [[0, 0], [1, 0]]


def test_written_files_hold_what_readers_expect(tmp_path):
    index = small_index([(10, 10, 50, 50), (0, 0, 5, 5)], [0, 1], images=3)
    boxes = np.array([[10, 10, 50, 51.234], [1, 1, 9, 9], [2, 2, 9, 9]])
    result = judged(index, {0: (boxes, np.array([0.2, 0.91239, 0.01]), np.array([0, 1, 1]))})
    result.write(tmp_path, epoch=3)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["epoch"] == 3
    assert metrics["images"] == 3
    assert set(metrics["metrics"]) == set(METRICS)
    assert metrics["per_class"][0]["instances"] == 1
    predictions = json.loads((tmp_path / "predictions.json").read_text())
    assert predictions["classes"] == ["car", "bus"]
    assert predictions["root"] == "data/small"
    assert len(predictions["images"]) == 3
    assert predictions["images"][0] == {
        "file": "images/0.png",
        "width": 100,
        "height": 100,
        "ground_truth": [[10, 10, 50, 50, 0], [0, 0, 5, 5, 1]],
        "predictions": [[1, 1, 9, 9, 1, 0.9124], [10, 10, 50, 51.23, 0, 0.2]],
    }
    curve = json.loads((tmp_path / "pr_curve.json").read_text())
    assert len(curve["recall"]) == len(curve["classes"]["car"]["precision"]) == 101
    confusion = json.loads((tmp_path / "confusion.json").read_text())
    assert confusion["classes"] == ["car", "bus", "background"]
    assert np.array(confusion["matrix"]).shape == (3, 3)


def test_pictures_that_exist_in_memory_only_are_written_beside_the_predictions(tmp_path):
    import cv2

    from detector.data import toy

    index = toy.make("synthetic", "val", count=3)
    result = judged(index, {})
    result.write(tmp_path)
    document = json.loads((tmp_path / "predictions.json").read_text())
    assert document["root"] is None
    picture = cv2.imread(str(tmp_path / "pictures" / document["images"][2]["file"]))
    assert np.array_equal(picture[..., ::-1], index.images[2])
