"""COCO's twelve figures for an index and what was found in it.

The matching is faster-coco-eval's, or pycocotools' where that is what is installed (they agree to the
last bit); this module feeds it and names what comes out.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detector.data.index import DataIndex

METRICS: Final = (
    "mAP@0.50:0.95",
    "AP50",
    "AP75",
    "AP_small",
    "AP_medium",
    "AP_large",
    "AR_1",
    "AR_10",
    "AR_100",
    "AR_small",
    "AR_medium",
    "AR_large",
)
"""COCO's twelve figures in COCO's order. -1: there is nothing of that kind to find."""

RECALLS: Final = np.linspace(0.0, 1.0, 101)
"""Where precision is read off."""


class Detections(NamedTuple):
    """What was found in one picture, best first.

    Attributes:
        boxes: `(K, 4)` float64 xyxy in original pixels, neither clipped nor rounded.
        scores: `(K,)` float64.
        labels: `(K,)` int64.
    """

    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]


NOTHING: Final = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))


def coco_backend() -> tuple[Any, Any, str]:
    """The classes COCO and COCOeval, and the package they come from.

    Raises:
        ModuleNotFoundError: neither package is installed.
    """
    with contextlib.suppress(ImportError):
        from faster_coco_eval import COCO, COCOeval_faster

        return COCO, COCOeval_faster, "faster-coco-eval"
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ModuleNotFoundError(
            "Evaluation needs faster-coco-eval (or pycocotools): pip install faster-coco-eval"
        ) from error
    return COCO, COCOeval, "pycocotools"


def coco_figures(
    index: DataIndex, found: Mapping[int, Detections]
) -> tuple[list[float], NDArray[np.float64], NDArray[np.float64]]:
    """The figures in the order of `METRICS`; precision and score `(10, 101, C)`, all areas.

    The axes are IoU 0.50 to 0.95, recall (`RECALLS`) and class; -1 where a class has no instance.
    `found` is by position in the index.
    """
    coco, evaluation, _ = coco_backend()
    # Equal scores in two pictures count in the order of COCO's own ids, which files need not have.
    order = np.argsort(index.image_ids, kind="stable")
    image_number = np.empty(len(index), np.int64)
    image_number[order] = np.arange(1, len(index) + 1)
    # both packages take 0 for "no match" somewhere: numbers of pictures, classes and boxes start at 1
    boxes = index.boxes.astype(np.float64)
    truth = []
    for position in range(len(index)):
        rows = index.rows(position)
        truth += [
            _annotation(
                number,
                int(image_number[position]),
                boxes[number - 1],
                int(index.labels[number - 1]),
                iscrowd=int(index.iscrowd[number - 1]),
                area=float(index.areas[number - 1]),
            )
            for number in range(rows.start + 1, rows.stop + 1)
        ]
    results: list[dict[str, Any]] = []
    for position in sorted(found):
        detections = found[position]
        for box, score, label in zip(*detections, strict=True):
            width, height = box[2] - box[0], box[3] - box[1]
            results.append(
                _annotation(
                    len(results) + 1,
                    int(image_number[position]),
                    box,
                    int(label),
                    iscrowd=0,
                    area=float(width * height),
                    score=float(score),
                )
            )
    frame = {
        "info": {},
        "images": [
            {"id": int(number), "width": int(width), "height": int(height)}
            for number, (width, height) in zip(image_number, index.sizes, strict=True)
        ],
        "categories": [{"id": k + 1, "name": name} for k, name in enumerate(index.class_names)],
    }
    with contextlib.redirect_stdout(io.StringIO()):  # both talk
        tables = []
        for annotations in (truth, results):
            table = coco()
            table.dataset = {**frame, "annotations": annotations}
            table.createIndex()
            tables.append(table)
        judge = evaluation(*tables, "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    stats = [float(value) for value in judge.stats[: len(METRICS)]]
    shape = (len(judge.params.iouThrs), len(RECALLS), index.num_classes, 4, 3)
    every_area, hundred = 0, 2
    precision = np.asarray(judge.eval["precision"], np.float64).reshape(shape)
    scores = np.asarray(judge.eval["scores"], np.float64).reshape(shape)
    return stats, precision[..., every_area, hundred], scores[..., every_area, hundred]


def _annotation(
    number: int, image: int, box: NDArray[np.float64], label: int, **more: float
) -> dict[str, Any]:
    x1, y1, x2, y2 = (float(edge) for edge in box)
    return {
        "id": number,
        "image_id": image,
        "category_id": label + 1,
        "bbox": [x1, y1, x2 - x1, y2 - y1],
        **more,
    }
