"""What a score is worth: the share of detections with about that score that are right.

A score of a detector ranks its boxes and is no probability. On held-out pictures it is counted which
detections hit (IoU 0.5, right class, each object once), and a curve that never falls is laid through
the counts: isotonic regression by pooling adjacent violators (Ayer et al. 1955), a class at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detector.coco import Detections
from detector.data.index import DataIndex
from detector.evaluate import iou, on_crowd
from detector.files import write_json

SCHEMA_VERSION: Final = 1
KIND: Final = "detector-calibration"
IOU: Final = 0.5
"""A detection is right from this overlap on."""

LEAST_HITS: Final = 20
"""A class with fewer right detections than this is read off the curve of all classes."""

BIN: Final = 25
MOST_BINS: Final = 4000
"""Detections that are counted together before the curve is laid: one alone says nothing."""

Knots = tuple[tuple[float, float], ...]
Floats = NDArray[np.float64]


class CalibrationError(ValueError):
    """A calibration cannot be fitted, or its file is not fit for use; one sentence."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Precision by score.

    Attributes:
        detections: counted, of any score.
        hits: those that are right.
        knots: (score, precision) in rising order of both; empty where `hits` are too few. Straight
            lines between them, constant beyond the first and the last.
    """

    detections: int
    hits: int
    knots: Knots = ()

    def __call__(self, scores: ArrayLike) -> Floats:
        """Return the precision at each score; the curve must have knots."""
        at, precision = np.array(self.knots, np.float64).T
        read: Floats = np.interp(np.asarray(scores, np.float64), at, precision)
        return read


@dataclass(frozen=True, slots=True)
class Calibration:
    """Curves for all classes together and for each.

    Attributes:
        class_names: in label order.
        overall: of all classes; always has knots.
        per_class: one a class; without knots where `overall` stands for it.
        images: pictures that were counted.
        iou: from which overlap on a detection counted as right.
        weights: SHA-256 of the weights that gave the scores; empty where unknown.
    """

    class_names: tuple[str, ...]
    overall: Curve
    per_class: tuple[Curve, ...]
    images: int
    iou: float = IOU
    weights: str = ""

    def apply(self, scores: ArrayLike, labels: ArrayLike) -> Floats:
        """Return the precision `(K,)`, in 0..1, of detections with these scores and labels `(K,)`."""
        scores = np.asarray(scores, np.float64)
        labels = np.asarray(labels, np.int64)
        precision = self.overall(scores)
        for label, curve in enumerate(self.per_class):
            if curve.knots and (mine := labels == label).any():
                precision[mine] = curve(scores[mine])
        return precision

    def check_classes(self, names: Sequence[str], *, where: str) -> None:
        """Raise CalibrationError unless these are the classes it was made for."""
        if tuple(names) != self.class_names:
            raise CalibrationError(
                f"{where} is a calibration of {', '.join(self.class_names)}, but the weights tell "
                f"apart {', '.join(names)}; make one with python -m detector calibrate."
            )

    def summary(self) -> str:
        """One line for a log."""
        own = sum(bool(curve.knots) for curve in self.per_class)
        return (
            f"calibration images={self.images} detections={self.overall.detections} "
            f"hits={self.overall.hits} classes={len(self.class_names)} with_own_curve={own}"
        )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(path, self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in the file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "iou": self.iou,
            "images": self.images,
            "weights_sha256": self.weights,
            "all": _curve_dict(self.overall),
            "classes": [
                {"name": name, **_curve_dict(curve)}
                for name, curve in zip(self.class_names, self.per_class, strict=True)
            ],
        }

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file.

        Raises:
            CalibrationError: it is absent, no calibration, of a newer version, or its curves fall.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise CalibrationError(f"{path} is no JSON: {_first_line(error)}.") from error
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise CalibrationError(
                f"{path} is no calibration; python -m detector calibrate writes one."
            )
        if document.get("schema_version") != SCHEMA_VERSION:
            raise CalibrationError(
                f"{path} is of version {document.get('schema_version')}, this is for {SCHEMA_VERSION}; "
                "make it anew with python -m detector calibrate."
            )
        try:
            return _read(document)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise CalibrationError(f"{path} is damaged: {_first_line(what)}.") from error


def fit(index: DataIndex, found: Mapping[int, Detections], *, weights: str = "") -> Calibration:
    """Lay the curves through what was found in the pictures of an index.

    Args:
        index: the pictures and their objects.
        found: raw detections by position in the index, without threshold.
        weights: SHA-256 of the weights they come from.

    Raises:
        CalibrationError: fewer than `LEAST_HITS` detections are right.
    """
    scores, labels, hit = judge(index, found)
    if hit.sum() < LEAST_HITS:
        raise CalibrationError(
            f"Only {int(hit.sum())} of {len(hit)} detections in {index.name} are right (IoU {IOU}); "
            f"a calibration needs {LEAST_HITS}: use more pictures (data.eval_samples) or better weights."
        )
    curves = []
    for label in range(index.num_classes):
        mine = labels == label
        enough = int(hit[mine].sum()) >= LEAST_HITS
        curves.append(
            Curve(
                int(mine.sum()),
                int(hit[mine].sum()),
                fit_knots(scores[mine], hit[mine]) if enough else (),
            )
        )
    overall = Curve(len(hit), int(hit.sum()), fit_knots(scores, hit))
    return Calibration(
        tuple(index.class_names), overall, tuple(curves), images=len(index), weights=weights
    )


def fit_knots(scores: Floats, hit: NDArray[np.bool_]) -> Knots:
    """Return the isotonic curve through (score, right or wrong), `(K,)` each, K at least 1."""
    at, right, count = _binned(scores, hit)
    blocks: list[list[float]] = []  # right, count, first bin, last bin
    for number, (yes, many) in enumerate(zip(right, count, strict=True)):
        blocks.append([yes, many, number, number])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            yes_, many_, _, last = blocks.pop()
            blocks[-1][0] += yes_
            blocks[-1][1] += many_
            blocks[-1][3] = last
    knots: dict[float, float] = {}
    for yes, many, first, last in blocks:
        for number in (int(first), int(last)):
            knots[round(float(at[number]), 6)] = round(yes / many, 6)
    return tuple(knots.items())


def judge(
    index: DataIndex, found: Mapping[int, Detections]
) -> tuple[Floats, NDArray[np.int64], NDArray[np.bool_]]:
    """Return score, label and right or wrong, `(K,)` each, of all detections.

    The best first takes the object of its class that it covers best; later ones on the same object are
    wrong. What lies on a crowd (or another region to be ignored) is neither, and left out.
    """
    scores, labels, hits = [np.zeros(0)], [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    for position in sorted(found):
        detections, rows = found[position], index.rows(position)
        for label in np.unique(detections.labels):
            mine = detections.labels == label
            there = index.labels[rows] == label
            crowd = index.iscrowd[rows]
            boxes = index.boxes[rows].astype(np.float64)
            hit = _hits(detections.boxes[mine], boxes[there & ~crowd])
            counted = hit | ~on_crowd(detections.boxes[mine], boxes[there & crowd])
            scores.append(detections.scores[mine][counted])
            labels.append(detections.labels[mine][counted])
            hits.append(hit[counted])
    return np.concatenate(scores), np.concatenate(labels), np.concatenate(hits)


def _hits(guesses: Floats, truth: Floats) -> NDArray[np.bool_]:
    """Which of the guesses, best first, take an object of their own."""
    hit = np.zeros(len(guesses), bool)
    overlap = iou(guesses, truth)
    for row in np.flatnonzero((overlap >= IOU).any(1)):
        column = int(overlap[row].argmax())
        if overlap[row, column] >= IOU:
            hit[row] = True
            overlap[:, column] = -1
    return hit


def _binned(
    scores: Floats, hit: NDArray[np.bool_]
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Mean score, right ones and number of neighbours in score; equal scores are never parted."""
    order = np.argsort(scores, kind="stable")
    scores, hit = scores[order], hit[order]
    size = max(BIN, len(scores) // MOST_BINS)
    # From the top down, so that what is left over joins the many at the bottom.
    wished = np.arange(len(scores) - size, size - 1, -size)
    cuts = np.unique(np.searchsorted(scores, scores[wished], side="left"))
    starts = np.concatenate([[0], cuts[cuts > 0]]).astype(np.int64)
    count = np.diff(np.append(starts, len(scores)))
    right = np.add.reduceat(hit.astype(np.int64), starts)
    return np.add.reduceat(scores, starts) / count, right, count


def _curve_dict(curve: Curve) -> dict[str, Any]:
    return {
        "detections": curve.detections,
        "hits": curve.hits,
        "knots": [list(knot) for knot in curve.knots] or None,
    }


def _read(document: Mapping[str, Any]) -> Calibration:
    classes = document["classes"]
    if not isinstance(classes, list) or not classes:
        raise TypeError("classes is no list of classes")
    overall = _read_curve(document["all"], "all")
    if not overall.knots:
        raise ValueError("all has no knots")
    iou_ = document["iou"]
    if not isinstance(iou_, float) or not 0 < iou_ <= 1:
        raise ValueError(f"iou is {iou_!r}, not a number in 0..1")
    return Calibration(
        class_names=tuple(str(entry["name"]) for entry in classes),
        overall=overall,
        per_class=tuple(_read_curve(entry, str(entry["name"])) for entry in classes),
        images=_count(document["images"], "images"),
        iou=iou_,
        weights=str(document.get("weights_sha256") or ""),
    )


def _read_curve(entry: Mapping[str, Any], name: str) -> Curve:
    knots = tuple(_knots(entry["knots"] or (), name))
    for (low, less), (high, more) in pairwise(knots):
        if not low < high:
            raise ValueError(f"the scores of {name} do not rise: {low}, {high}")
        if less > more:
            raise ValueError(f"the precision of {name} falls from {less} to {more}")
    return Curve(_count(entry["detections"], name), _count(entry["hits"], name), knots)


def _knots(knots: Any, name: str) -> Iterator[tuple[float, float]]:
    for knot in knots:
        score, precision = (float(value) for value in knot)
        if not math.isfinite(score) or not 0 <= precision <= 1:
            raise ValueError(f"{name} has the knot {knot!r}; a precision is in 0..1")
        yield score, precision


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{name} has the count {value!r}")
    return value


def _first_line(error: object) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
