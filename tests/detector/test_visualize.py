"""Pictures of predictions: where the boxes go, which are drawn, and what they are called."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from detector import visualize
from detector.calibrate import Calibration, Curve
from detector.data.index import Annotated, encode_png, make_index
from detector.visualize import (
    DrawnBox,
    colour,
    draw_boxes,
    draw_predictions,
    score_text,
    side_by_side,
)

NAMES = ("coin", "düne", "船")


def index(files=("images/val/a.png", "images/val/deep/b.png"), width=240, height=120):
    rows = [
        Annotated(file, width, height, boxes=np.array([[60, 30, 180, 90.0]]), labels=np.array([0]))
        for file in files
    ]
    images = [np.full((height, width, 3), 100, np.uint8) for _ in files]
    return make_index(rows, name="set/val", root="", class_names=NAMES, images=images)


def document(predictions=(), files=("images/val/a.png",)):
    return {
        "classes": list(NAMES),
        "images": [
            {
                "file": file,
                "width": 240,
                "height": 120,
                "ground_truth": [[60, 30, 180, 90, 0]],
                "predictions": [list(p) for p in predictions],
            }
            for file in files
        ],
    }


def ink(image, label):
    """Pixels of the class's colour, `(H, W)` bool."""
    return (np.abs(image.astype(int) - colour(label)) < 3).all(2)


def test_files_are_named_after_their_pictures(tmp_path):
    files = index().files
    paths = draw_predictions(index(), document(files=files), to=tmp_path / "out")
    assert [path.name for path in paths] == ["images_val_a.png", "images_val_deep_b.png"]
    assert sorted(tmp_path.joinpath("out").iterdir()) == sorted(paths)
    assert draw_predictions(index(), document(files=files), to=tmp_path / "one", count=1)[1:] == []


def test_truth_is_left_and_predictions_right(tmp_path):
    (path,) = draw_predictions(
        index(), document([(60, 30, 180, 90, 1, 0.9), (0, 0, 40, 40, 2, 0.3)]), to=tmp_path
    )
    canvas = cv2.imread(str(path))[..., ::-1]
    half = canvas.shape[1] // 2
    body = canvas[:-60]  # without the legend
    assert ink(body[:, :half], 0).sum() > 500
    assert ink(body[:, half:], 1).sum() > 500
    assert not ink(body[:, half:], 0).any()
    assert not ink(canvas, 2).any()  # below the threshold


def test_a_lower_threshold_draws_more(tmp_path):
    predictions = [(60, 30, 180, 90, 1, 0.9), (0, 0, 40, 40, 2, 0.3)]
    (path,) = draw_predictions(index(), document(predictions), to=tmp_path, min_score=0.2)
    assert ink(cv2.imread(str(path))[..., ::-1], 2).any()


@pytest.mark.parametrize(
    ("names", "precision", "text"),
    [
        (["coin"], None, "raw=0.87"),
        (["coin"], 0.934, "raw=0.87 p=0.93"),
        (["coin", "ring"], 1.0, "ring raw=0.87 p=1.00"),
    ],
)
def test_a_prediction_says_its_score_and_its_precision_where_known(names, precision, text):
    assert score_text(names, len(names) - 1, 0.8712, precision) == text


def test_a_calibration_is_read_at_each_score_and_class(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        visualize, "side_by_side", lambda image, truth, found, **_: said.extend(found) or image
    )
    calibration = Calibration(
        class_names=NAMES,
        overall=Curve(100, 50, ((0.0, 0.0), (1.0, 0.5))),
        per_class=(Curve(60, 40, ((0.0, 0.5), (1.0, 1.0))), Curve(0, 0), Curve(0, 0)),
        images=9,
    )
    predictions = [(60, 30, 180, 90, 0, 0.8), (0, 0, 40, 40, 1, 0.6), (0, 0, 9, 9, 1, 0.1)]
    draw_predictions(index(), document(predictions), to=tmp_path, calibration=calibration)
    assert [box.text for box in said] == ["coin raw=0.80 p=0.90", "düne raw=0.60 p=0.30"]


def test_a_drawing_says_in_words_what_it_shows(tmp_path):
    from PIL import Image

    predictions = [(60, 30, 180, 90, 1, 0.9), (0, 0, 40, 40, 1, 0.8), (0, 0, 40, 40, 2, 0.3)]
    (path,) = draw_predictions(index(), document(predictions), to=tmp_path)
    with Image.open(path) as picture:
        picture.load()
        assert picture.info["Description"] == (
            "images/val/a.png: left the ground truth (1 coin), right the predictions with a score of"
            " 0.5 and above (2 düne)."
        )
    assert cv2.imread(str(path)) is not None


def test_boxes_are_scaled_with_the_picture():
    image = np.zeros((60, 120, 3), np.uint8)
    canvas = draw_boxes(image, [DrawnBox((30, 15, 90, 45), 0, "")])
    assert canvas.shape == (240, 480, 3)
    rows, columns = np.flatnonzero(ink(canvas, 0).any(1)), np.flatnonzero(ink(canvas, 0).any(0))
    assert abs(columns[0] - 120) <= 1
    assert abs(columns[-1] - 359) <= 1
    assert abs(rows[-1] - 179) <= 1


@pytest.mark.parametrize(("width", "expected"), [(100, 480), (700, 700), (4000, 900)])
def test_panels_have_a_legible_width(width, expected):
    assert draw_boxes(np.zeros((50, width, 3), np.uint8), []).shape[1] == expected


def test_the_picture_given_is_not_drawn_into():
    image = np.zeros((480, 480, 3), np.uint8)
    side_by_side(image, [DrawnBox((0, 0, 99, 99), 0, "coin")], [], class_names=NAMES)
    assert not image.any()


def test_boxes_at_and_beyond_the_edge_are_drawn():
    boxes = [
        DrawnBox((-30, -20, 700, 800), 1, "düne raw=0.50"),
        DrawnBox((470, 470, 480, 480), 2, "船"),
    ]
    canvas = side_by_side(np.zeros((480, 480, 3), np.uint8), [], boxes, class_names=NAMES)
    assert ink(canvas, 2).any()


def test_neighbouring_classes_have_different_colours():
    colours = [colour(label) for label in range(16)]
    for a in range(16):
        for b in range(a):
            assert max(abs(x - y) for x, y in zip(colours[a], colours[b], strict=True)) > 20


def test_a_document_about_other_pictures_is_refused(tmp_path):
    with pytest.raises(ValueError, match="other.png is not a picture of set/val"):
        draw_predictions(index(), document(files=("other.png",)), to=tmp_path)


@pytest.mark.parametrize(("width", "height"), [(1, 4000), (3000, 2), (1, 1), (8, 8)])
def test_a_strip_and_a_dot_are_drawn_at_a_size_that_can_be_saved(width, height):
    image = np.zeros((height, width, 3), np.uint8)
    box = DrawnBox((0, 0, width, height), 0, "raw=0.50")
    canvas = side_by_side(image, [box], [box], class_names=["dot"])
    assert canvas.shape[0] <= 4000 + 150
    assert canvas.shape[1] <= 2 * 900 + 50
    assert encode_png(canvas)[:4] == b"\x89PNG"
