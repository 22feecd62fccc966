"""How good the boxes are: COCO average precision in original pixels, and the figures around it.

Detections come in raw: no threshold, no suppression, the best 300 a picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from detector.coco import METRICS, NOTHING, RECALLS, Detections, coco_figures
from detector.data.index import DataIndex, Image, encode_png
from detector.files import replacing, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from detector.runtime import Runtime

TOP_K: Final = 300
"""Detections kept a picture, best first; COCO looks at the best 100 of each class."""

SHOWN_SCORE: Final = 0.05
SHOWN_BOXES: Final = 100
"""What `predictions.json` holds of a picture: the best boxes above a score."""

CONFUSION_SCORE: Final = 0.3
CONFUSION_IOU: Final = 0.5

Array: TypeAlias = "NDArray[Any] | Tensor"


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One class. -1 where it has no instance.

    Attributes:
        name: of the class.
        ap50: average precision at IoU 0.50.
        ap: mean over IoU 0.50 to 0.95.
        instances: boxes to find, crowds left out.
        best_f1: greatest F1 along the precision-recall curve at IoU 0.50.
        best_score: the score threshold that gives it.
    """

    name: str
    ap50: float
    ap: float
    instances: int
    best_f1: float
    best_score: float


@dataclass(frozen=True, slots=True)
class EvalResult:
    """All that is known after one evaluation.

    Attributes:
        metrics: by the names in `METRICS`.
        per_class: one a class, in label order.
        curves: precision and score at recall 0, 0.01, ... 1 and IoU 0.50, by class name.
        confusion: `(C + 1, C + 1)` counts, rows what is there, columns what was found; the last row
            is found where nothing is, the last column not found.
        predictions: the document of `predictions.json`.
        pictures: by file, those in `predictions` that exist in memory only.
        images: pictures evaluated.
    """

    metrics: Mapping[str, float]
    per_class: tuple[ClassResult, ...]
    curves: Mapping[str, Mapping[str, list[float]]]
    confusion: NDArray[np.int64]
    predictions: Mapping[str, Any]
    pictures: Mapping[str, Image]
    images: int

    def write(self, folder: Path, *, epoch: int | None = None) -> None:
        """Write metrics.json, predictions.json, pr_curve.json and confusion.json, each whole.

        Pictures that no data set folder holds are written too, once, below `pictures`.
        """
        classes = [result.name for result in self.per_class]
        write_json(
            folder / "metrics.json",
            {
                "metrics": dict(self.metrics),
                "per_class": [
                    {
                        "name": result.name,
                        "AP50": result.ap50,
                        "mAP@0.50:0.95": result.ap,
                        "instances": result.instances,
                        "best_f1": result.best_f1,
                        "best_score": result.best_score,
                    }
                    for result in self.per_class
                ],
                "epoch": epoch,
                "images": self.images,
            },
            indent=2,
        )
        write_json(folder / "predictions.json", self.predictions)
        write_json(
            folder / "pr_curve.json",
            {"iou": 0.5, "recall": RECALLS.tolist(), "classes": dict(self.curves)},
        )
        write_json(
            folder / "confusion.json",
            {
                "classes": [*classes, "background"],
                "score": CONFUSION_SCORE,
                "iou": CONFUSION_IOU,
                "matrix": self.confusion.tolist(),
            },
        )
        for file, image in self.pictures.items():
            target = folder / "pictures" / file
            if not target.exists():
                with replacing(target) as stream:
                    stream.write(encode_png(image))


class Evaluator:
    """Collects detections of an index's pictures, over all ranks, and judges them.

    Every picture of the index counts, found or not: one that never came has no detections.
    """

    def __init__(self, index: DataIndex) -> None:
        self.index = index
        self._position = {int(id_): place for place, id_ in enumerate(index.image_ids)}
        self._found: dict[int, Detections] = {}

    def __len__(self) -> int:
        """Pictures that came so far."""
        return len(self._found)

    @property
    def found(self) -> Mapping[int, Detections]:
        """What came so far, by position in the index."""
        return self._found

    def add(
        self, image_ids: Iterable[int] | Array, results: Iterable[tuple[Array, Array, Array]]
    ) -> None:
        """Take the raw results of a batch.

        Args:
            image_ids: `(B,)`, ids of the index.
            results: a picture's boxes `(K, 4)` xyxy in original pixels, scores `(K,)` and labels
                `(K,)`; the best 300 are kept, and those with a score that is not a number dropped.

        Raises:
            ValueError: an id is not of this index, came before, or has boxes and scores that differ
                in number.
        """
        for id_, (boxes, scores, labels) in zip(_numbers(image_ids), results, strict=True):
            position = self._position.get(id_)
            if position is None:
                raise ValueError(f"image id {id_} is not in {self.index.name}")
            if position in self._found:
                raise ValueError(f"image id {id_} of {self.index.name} came twice")
            self._found[position] = _detections(boxes, scores, labels)

    def gather(self, runtime: Runtime) -> None:
        """Give every rank what the others collected. All ranks must call it.

        Raises:
            ValueError: two ranks evaluated the same picture.
        """
        shares = runtime.all_gather(self._found)
        merged = {position: found for share in shares for position, found in share.items()}
        if len(merged) != sum(len(share) for share in shares):
            raise ValueError(f"two ranks evaluated the same picture of {self.index.name}")
        self._found = merged

    def summarize(self, *, predictions: int = 64) -> EvalResult:
        """Judge what was collected; the first `predictions` pictures go into `predictions.json`."""
        index = self.index
        stats, precision, scores = coco_figures(index, self._found)
        curves, per_class = {}, []
        for label, name in enumerate(index.class_names):
            at50, reached = precision[0, :, label], scores[0, :, label]
            real = (index.labels == label) & ~index.iscrowd
            curves[name] = {"precision": at50.tolist(), "score": reached.tolist()}
            f1 = 2 * at50 * RECALLS / np.maximum(at50 + RECALLS, 1e-12)
            best = int(f1.argmax())
            known = bool(at50.max() > -1)
            per_class.append(
                ClassResult(
                    name=name,
                    ap50=_mean(at50),
                    ap=_mean(precision[:, :, label]),
                    instances=int(real.sum()),
                    best_f1=float(f1[best]) if known else -1.0,
                    best_score=float(reached[best]) if known else -1.0,
                )
            )
        return EvalResult(
            metrics=dict(zip(METRICS, stats, strict=True)),
            per_class=tuple(per_class),
            curves=curves,
            confusion=_confusion(index, self._found),
            predictions=_predictions(index, self._found, predictions),
            pictures={}
            if index.images is None
            else dict(zip(index.files[:predictions], index.images[:predictions], strict=True)),
            images=len(index),
        )


def _detections(boxes: Array, scores: Array, labels: Array) -> Detections:
    found = Detections(
        _numpy(boxes).astype(np.float64).reshape(-1, 4),
        _numpy(scores).astype(np.float64).reshape(-1),
        _numpy(labels).astype(np.int64).reshape(-1),
    )
    if not len(found.boxes) == len(found.scores) == len(found.labels):
        raise ValueError("boxes, scores and labels differ in number")
    usable = np.isfinite(found.scores) & np.isfinite(found.boxes).all(1)
    order = np.argsort(-found.scores, kind="stable")
    order = order[usable[order]][:TOP_K]
    return Detections(found.boxes[order], found.scores[order], found.labels[order])


def _numpy(values: Array | Sequence[Any]) -> NDArray[Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _numbers(values: Iterable[int] | Array) -> list[int]:
    return [int(value) for value in _numpy(values)]  # type: ignore[arg-type]


def _mean(values: NDArray[np.float64]) -> float:
    known = values[values > -1]
    return float(known.mean()) if known.size else -1.0


def _confusion(index: DataIndex, found: Mapping[int, Detections]) -> NDArray[np.int64]:
    """Pair boxes by IoU, best pair first, whatever their class; what is left has no partner."""
    background = index.num_classes
    matrix = np.zeros((background + 1, background + 1), np.int64)
    for position in range(len(index)):
        rows = index.rows(position)
        crowd = index.iscrowd[rows]
        truth = index.boxes[rows].astype(np.float64)[~crowd]
        labels = index.labels[rows][~crowd]
        detections = found.get(position, NOTHING)
        sure = detections.scores >= CONFUSION_SCORE
        guesses, guessed = detections.boxes[sure], detections.labels[sure]
        ignored = on_crowd(guesses, index.boxes[rows].astype(np.float64)[crowd])
        overlap = iou(truth, guesses)
        for _ in range(min(overlap.shape)):
            row, column = np.unravel_index(int(overlap.argmax()), overlap.shape)
            if overlap[row, column] < CONFUSION_IOU:
                break
            matrix[labels[row], guessed[column]] += 1
            overlap[row], overlap[:, column] = -1, -1
            labels[row], guessed[column] = -1, -1
        guessed[ignored] = -1  # what lies on a crowd and has no partner is no error
        matrix[:-1, -1] += np.bincount(labels[labels >= 0], minlength=background)
        matrix[-1, :-1] += np.bincount(guessed[guessed >= 0], minlength=background)
    return matrix


def iou(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """`(N, 4)` and `(M, 4)` xyxy boxes to `(N, M)` intersection over union; 0 without area."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low).clip(0).prod(2)
    areas = (a[:, 2:] - a[:, :2]).prod(1)[:, None] + (b[:, 2:] - b[:, :2]).prod(1)[None]
    union = areas - shared
    ratio: NDArray[np.float64] = shared / np.where(union > 0, union, 1)
    return ratio


def on_crowd(guesses: NDArray[np.float64], crowds: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of `(N, 4)` boxes have at least half of their own area on one of `(M, 4)` crowds."""
    low = np.maximum(guesses[:, None, :2], crowds[None, :, :2])
    high = np.minimum(guesses[:, None, 2:], crowds[None, :, 2:])
    shared = (high - low).clip(0).prod(2)
    areas = (guesses[:, 2:] - guesses[:, :2]).prod(1)[:, None]
    covered: NDArray[np.bool_] = ((shared > 0) & (shared >= CONFUSION_IOU * areas)).any(1)
    return covered


def _predictions(index: DataIndex, found: Mapping[int, Detections], count: int) -> dict[str, Any]:
    images = []
    for position in range(min(count, len(index))):
        rows = index.rows(position)
        detections = found.get(position, NOTHING)
        shown = slice(0, min(SHOWN_BOXES, int((detections.scores >= SHOWN_SCORE).sum())))
        width, height = (int(value) for value in index.sizes[position])
        images.append(
            {
                "file": index.files[position],
                "width": width,
                "height": height,
                "ground_truth": [
                    [*(round(float(edge), 2) for edge in box), int(label)]
                    for box, label in zip(index.boxes[rows], index.labels[rows], strict=True)
                ],
                "predictions": [
                    [*(round(float(edge), 2) for edge in box), int(label), round(float(score), 4)]
                    for box, score, label in zip(*(part[shown] for part in detections), strict=True)
                ],
            }
        )
    root = index.root or None
    return {"classes": list(index.class_names), "root": root, "images": images}
