"""An evaluation as tables and figures: the right numbers, in words too, and no name can break a page."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from kernel_tools.results.evaluation import JudgedClass
from kernel_tools.views.judged import (
    MOST_CELLS,
    MOST_ROWS,
    class_table,
    confusion_matrix,
    evaluation_parts,
    metrics_table,
    pr_curve,
)
from kernel_tools.views.static import Stack
from tests.fakes.runs import RUN_ID, evaluation

MANY = tuple(f"class {k}" for k in range(80))


def pixels(figure):
    return np.asarray(Image.open(io.BytesIO(figure.png)).convert("RGB"))


def test_the_figures_of_coco_have_a_meaning_beside_them():
    table = metrics_table(evaluation())
    assert table.caption == f"{RUN_ID}: 12 pictures evaluated"
    assert table.rows[1] == ("AP50", "0.7000", "at IoU 0.50")
    assert table.rows[2] == ("AP_large", "none to find", "objects above 96 x 96 pixels")
    assert "after epoch 3" in metrics_table(evaluation(epoch=3)).caption


def test_classes_stand_in_their_order():
    table = class_table(evaluation("car", "bus", "tram"))
    assert [row[0] for row in table.rows] == ["car", "bus", "tram"]
    assert table.rows[0] == ("car", "20", "0.9000", "0.5000", "0.7000", "0.4000")


def test_of_very_many_classes_the_weakest_are_shown():
    table = class_table(evaluation(*MANY))
    assert len(table.rows) == MOST_ROWS
    assert table.rows[0][0] == "class 79"
    assert f"The {MOST_ROWS} weakest of 80 classes" in table.caption


def test_a_class_without_objects_says_so():
    one = JudgedClass("tram", 0, None, None, None, None)
    judged = dataclasses.replace(evaluation("car"), classes=(*evaluation("car").classes, one))
    assert class_table(judged).rows[1][2:] == ("none to find",) * 4
    assert "of 1 class:" in pr_curve(judged).alt


def test_curves_are_told_in_words():
    alt = pr_curve(evaluation()).alt
    assert alt == (
        "Precision-recall curves at IoU 0.50 of 2 classes: car AP50 0.9000, best F1 0.7000 at score"
        " 0.4000; bus AP50 0.5000, best F1 0.7000 at score 0.4000. Mean AP50 0.7000."
    )


def test_of_many_curves_the_best_and_the_worst_are_named():
    alt = pr_curve(evaluation(*MANY)).alt
    assert "of 80 classes, the best and the worst 3 named: class 0 AP50 0.9000" in alt
    assert "class 79" in alt
    assert "class 40" not in alt


def test_with_nothing_to_find_the_figure_says_so():
    judged = evaluation(classes=())
    assert pr_curve(judged).alt.endswith("there is no object to find.")
    assert pr_curve(judged).png[:4] == b"\x89PNG"


def test_confusion_is_told_in_words():
    alt = confusion_matrix(evaluation()).alt
    assert (
        "of 40 objects 20 are found as what they are, 16 are missed; 3 detections are of nothing"
        in alt
    )
    assert "car taken for bus: 2; bus taken for car: 2." in alt


def test_one_class_has_a_matrix_too():
    alt = confusion_matrix(evaluation("coin")).alt
    assert "taken for" not in alt
    assert "of 18 objects 10" in alt


def test_of_many_classes_those_with_most_errors_have_cells_and_the_whole_is_kept():
    from kernel_tools.views.judged import _reduced

    judged = evaluation(*MANY)
    names, matrix = _reduced(judged.names, judged.confusion)
    assert len(names) == MOST_CELLS + 1
    assert names[-2:] == [f"{80 - MOST_CELLS + 1} others", "background"]
    assert sum(map(sum, matrix)) == sum(map(sum, judged.confusion))
    assert pixels(confusion_matrix(judged)).shape[1] < 1100


@pytest.mark.parametrize("draw", [pr_curve, confusion_matrix])
def test_the_page_is_white_whatever_the_theme(draw):
    image = pixels(draw(evaluation()))
    assert (image[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()
    assert (image < 60).all(2).any()  # dark ink on it


def test_curves_differ_in_more_than_colour():
    from kernel_tools.views.judged import HUES, LINES, MARKERS

    assert len(set(HUES)) == len(set(map(str, LINES))) == len(set(MARKERS)) == 7


def test_every_hue_stands_out_from_the_page():
    from kernel_tools.views.judged import HUES

    def luminance(colour):
        channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert min(1.05 / (luminance(hue) + 0.05) for hue in HUES) > 2.2  # lines 1.7 wide, marked


def test_names_of_classes_break_no_page():
    evil = "$_{$<img src=x onerror=alert(1)>"
    judged = evaluation(evil, "$\\frac{$")
    markup = Stack(evaluation_parts(judged)).html()
    assert markup.count("<img") == 2
    assert "onerror=alert(1)&gt;" in markup


def test_an_evaluation_shows_itself():
    bundle = evaluation()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/html"].count('<img alt="') == 2
    assert "Precision-recall" in bundle["text/plain"]
    assert repr(evaluation()) == f"<Evaluation of {RUN_ID}: 12 pictures, AP50 0.7000>"


def test_a_run_that_only_evaluates_counts_batches_and_no_epochs():
    from kernel_tools.views import facts
    from tests.fakes.runs import snapshot, status

    told = snapshot(
        status(state="validating", phase="eval", step=4, steps_per_epoch=10, progress=0.4)
    )
    assert facts.bars(told) == (("batches evaluated 4 of 10", 0.4),)
    assert "state=validating eval_batch=4/10" in facts.line(told)
