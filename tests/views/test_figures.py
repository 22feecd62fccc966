"""Figures: right numbers in words, pictures that are pictures, nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from PIL import Image

from kernel_tools.errors import FetchError
from kernel_tools.views.figures import f1, iou, plot_metrics, show_predictions
from tests.fakes.runs import ended, snapshot

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def evaluated(tmp_path):
    """Two pictures of one class: the first all found, the second missed with one extra."""
    images = []
    for name, guess in (("a.png", [10, 10, 30, 30, 0, 0.9]), ("b.png", [60, 60, 80, 80, 0, 0.8])):
        Image.new("RGB", (96, 64), (90, 90, 90)).save(tmp_path / name)
        images.append(
            {
                "file": name,
                "width": 96,
                "height": 64,
                "ground_truth": [[10, 10, 31, 31, 0]],
                "predictions": [guess, [0, 0, 5, 5, 0, 0.1]],
            }
        )
    path = tmp_path / "predictions.json"
    path.write_text(json.dumps({"classes": ["coin"], "images": images}))
    return path


def test_curves_are_told_in_words():
    told = dataclasses.replace(
        ended(),
        steps=({"optimizer_steps": 10, "loss": 25.0}, {"optimizer_steps": 280, "loss": 4.5}),
        metrics=(
            {"epoch": 1, "metrics": None},
            {"epoch": 2, "metrics": {"AP50": 0.7, "mAP@0.50:0.95": 0.4}},
            {"epoch": 4, "metrics": {"AP50": 0.6, "mAP@0.50:0.95": 0.5}},
        ),
    )
    figure = plot_metrics(told)
    assert figure.png.startswith(PNG)
    assert "loss went from 25 at step 10 to 4.5 at step 280" in figure.alt
    assert "AP50 is 0.600 at epoch 4, at best 0.700" in figure.alt


def test_a_run_without_rows_gives_a_figure_that_says_so():
    figure = plot_metrics(snapshot())
    assert figure.png.startswith(PNG)
    assert "Nothing has been evaluated yet." in figure.alt


def test_predictions_are_counted(evaluated):
    figure = show_predictions(evaluated, evaluated.parent, 4)
    assert figure.png.startswith(PNG)
    assert "a.png: 1 of 1 found, 0 extra. b.png: 0 of 1 found, 1 extra." in figure.alt


def test_worst_first_begins_with_the_worst(evaluated):
    figure = show_predictions(evaluated, evaluated.parent, 1, worst_first=True)
    assert "b.png: 0 of 1 found, 1 extra." in figure.alt
    assert "a.png" not in figure.alt


def test_a_photograph_that_is_not_here_is_named(evaluated):
    (evaluated.parent / "b.png").unlink()
    with pytest.raises(FetchError, match=r"b\.png"):
        show_predictions(evaluated, evaluated.parent, 2)


def test_a_name_that_leaves_the_folder_is_refused(evaluated):
    told = json.loads(evaluated.read_text())
    told["images"][0]["file"] = "../secret.png"
    evaluated.write_text(json.dumps(told))
    Image.new("RGB", (8, 8)).save(evaluated.parent.parent / "secret.png")
    with pytest.raises(FetchError):
        show_predictions(evaluated, evaluated.parent, 1)


@pytest.mark.parametrize("size", [(640, 480), (480, 640)], ids=["landscape", "portrait"])
@pytest.mark.parametrize("place", [(-3, -3), (0.9, -3), (-3, 0.9), (0.9, 0.9), (0.4, 0.4)])
def test_a_label_is_whole_wherever_its_box_is(evaluated, monkeypatch, place, size):
    wide, high = size
    x, y = (share * side if share > 0 else share for share, side in zip(place, size, strict=True))
    box = [x, y, x + 0.11 * wide, y + 0.11 * high]
    told = json.loads(evaluated.read_text())
    told["classes"] = ["bus", "train"]
    told["images"] = [
        {
            "file": "a.png", "width": wide, "height": high,
            "ground_truth": [[*box, 0]], "predictions": [[*box, 1, 0.9]],
        }
    ]  # fmt: skip
    evaluated.write_text(json.dumps(told))
    Image.new("RGB", size).save(evaluated.parent / "a.png")
    labels = []

    def draw(figure):
        figure.canvas.draw()
        for axes in figure.axes:
            around = axes.get_window_extent().padded(1.0)
            for text in axes.texts:
                own = text.get_window_extent()
                assert around.x0 <= own.x0 < own.x1 <= around.x1
                assert around.y0 <= own.y0 < own.y1 <= around.y1
                labels.append(text.get_text())
        return b""

    monkeypatch.setattr("kernel_tools.views.figures.png", draw)
    show_predictions(evaluated, evaluated.parent, 1)
    assert labels == ["bus", "train 0.90"]


def test_names_of_classes_and_files_are_escaped_in_the_alternative_text(evaluated):
    told = json.loads(evaluated.read_text())
    evil = "$_{$<img src=x onerror=alert(1)>.png"
    (evaluated.parent / "a.png").rename(evaluated.parent / evil)
    told["images"][0]["file"] = evil
    told["classes"] = [evil, "$\\frac{$"]
    told["images"][0]["ground_truth"].append([1, 1, 9, 9, 1])
    evaluated.write_text(json.dumps(told))
    markup = show_predictions(evaluated, evaluated.parent, 2)._repr_mimebundle_()["text/html"]
    assert markup.count("<img") == 1


def test_a_figure_shows_itself_with_alternative_text(evaluated, tmp_path):
    figure = show_predictions(evaluated, evaluated.parent, 1)
    bundle = figure._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/png"}
    assert 'alt="1 validation pictures' in bundle["text/html"]
    assert figure.save(tmp_path / "figure.png").read_bytes() == figure.png


def test_pyplot_is_never_imported(evaluated):
    code = (
        "import sys, pathlib\n"
        "from kernel_tools.views.figures import show_predictions\n"
        f"path = pathlib.Path({str(evaluated)!r})\n"
        "show_predictions(path, path.parent, 2)\n"
        "print('matplotlib.pyplot' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("other", "value"),
    [([0, 0, 10, 10], 1.0), ([5, 0, 15, 10], 1 / 3), ([10, 0, 20, 10], 0.0), ([0, 0, 10, 5], 0.5)],
)
def test_iou(other, value):
    assert iou([0, 0, 10, 10], other) == pytest.approx(value)


def test_f1_counts_each_truth_once_and_respects_the_class():
    truth = [[0, 0, 10, 10, 0]]
    twice = {"ground_truth": truth, "predictions": [[0, 0, 10, 10, 0, 0.9], [0, 0, 10, 9, 0, 0.8]]}
    other = {"ground_truth": truth, "predictions": [[0, 0, 10, 10, 1, 0.9]]}
    nothing = {"ground_truth": [], "predictions": []}
    assert f1(twice, min_score=0.5) == pytest.approx(2 / 3)
    assert f1(other, min_score=0.5) == 0.0
    assert f1(nothing, min_score=0.5) == 1.0
