"""What an evaluation found, read from a run's `evaluation/` files: figures, curves, confusion matrix.

The files come from elsewhere, so that every number is checked before it is drawn. Drawing is in
`views/judged.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kernel_tools.errors import FetchError
from kernel_tools.results.fetch import read_document

FILES: Final = ("metrics.json", "pr_curve.json", "confusion.json")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JudgedClass:
    """One class.

    Attributes:
        name: of the class.
        instances: objects to find.
        ap50: average precision at IoU 0.50; None where there is no object to find.
        ap: mean over IoU 0.50 to 0.95; likewise.
        best_f1: greatest F1 along the curve; likewise.
        best_score: the score threshold that gives it; likewise.
        precision: at each of the evaluation's recalls; empty where there is no object.
    """

    name: str
    instances: int
    ap50: float | None
    ap: float | None
    best_f1: float | None
    best_score: float | None
    precision: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """One evaluation, whole. As a cell's value it shows its tables and figures.

    Attributes:
        run_id: whose.
        images: pictures evaluated.
        epoch: after which epoch of the training; None for an evaluation by itself.
        metrics: COCO's figures by name; None where there is nothing of that kind to find.
        classes: one a class, in label order.
        recall: where the precision of the classes is read off.
        iou: overlap of the curves and of the confusion matrix.
        names: of the rows and columns of the confusion matrix, the last one `background`.
        confusion: rows what is there, columns what was found.
        confusion_score: detections below are not in the confusion matrix.
    """

    run_id: str
    images: int
    epoch: int | None
    metrics: Mapping[str, float | None]
    classes: tuple[JudgedClass, ...]
    recall: tuple[float, ...]
    iou: float
    names: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    confusion_score: float

    def __repr__(self) -> str:
        ap50 = self.metrics.get("AP50")
        said = "" if ap50 is None else f", AP50 {ap50:.4f}"
        return f"<Evaluation of {self.run_id}: {self.images} pictures{said}>"

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, Any]:
        from kernel_tools.views.judged import evaluation_parts
        from kernel_tools.views.static import Stack

        return Stack(evaluation_parts(self))._repr_mimebundle_(include, exclude)


def read_evaluation(folder: Path, *, run_id: str) -> Evaluation:
    """Read `FILES` of a folder.

    Raises:
        FetchError: one is absent or not what it should be.
    """
    told, curves, confusion = (read_document(folder / name) for name in FILES)
    try:
        recall = tuple(float(value) for value in curves["recall"])
        classes = tuple(
            _class(entry, curves["classes"], len(recall)) for entry in told["per_class"]
        )
        names = tuple(str(name) for name in confusion["classes"])
        matrix = tuple(tuple(int(cell) for cell in row) for row in confusion["matrix"])
        if any(len(row) != len(names) for row in matrix) or len(matrix) != len(names):
            raise ValueError("the confusion matrix is not square")
        return Evaluation(
            run_id=run_id,
            images=int(told["images"]),
            epoch=None if told.get("epoch") is None else int(told["epoch"]),
            metrics={str(name): known(value) for name, value in told["metrics"].items()},
            classes=classes,
            recall=recall,
            iou=float(confusion["iou"]),
            names=names,
            confusion=matrix,
            confusion_score=float(confusion["score"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FetchError(
            f"the evaluation of {run_id} in {folder} is not what this version reads:"
            f" {type(error).__name__}: {error}.",
            hint="%remote_eval makes one anew.",
        ) from error


def known(value: Any) -> float | None:
    """Return a figure, None for COCO's -1 (nothing to find) and for what is no number."""
    return None if value is None or float(value) < 0 else float(value)


def _class(entry: Mapping[str, Any], curves: Mapping[str, Any], points: int) -> JudgedClass:
    name = str(entry["name"])
    precision = tuple(float(value) for value in curves[name]["precision"])
    if len(precision) != points:
        raise ValueError(f"the curve of {name} has {len(precision)} points, not {points}")
    return JudgedClass(
        name=name,
        instances=int(entry["instances"]),
        ap50=known(entry["AP50"]),
        ap=known(entry["mAP@0.50:0.95"]),
        best_f1=known(entry["best_f1"]),
        best_score=known(entry["best_score"]),
        precision=precision if max(precision, default=-1.0) > -1 else (),
    )
