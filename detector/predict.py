"""A checkpoint and pictures in, boxes in the pictures' own pixels out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from detector.checkpoint import LoadedDetector, load_detector
from detector.data.augment import resize
from detector.data.index import Image, decode, encode_png
from detector.files import replacing
from detector.models.detector import postprocess
from detector.visualize import DrawnBox, draw_boxes, png_name

BATCH: Final = 8


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was found in one picture, best first.

    Attributes:
        file: the path as given.
        width: of the picture, pixels, EXIF rotation applied.
        height: pixels.
        boxes: `(K, 4)` float64 xyxy in the picture's pixels, not clipped.
        scores: `(K,)` float64, raw: not a probability.
        labels: `(K,)` int64.
        names: `K` class names.
    """

    file: str
    width: int
    height: int
    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    names: tuple[str, ...]

    def above(self, score: float) -> Prediction:
        """Only the boxes with at least this score."""
        count = int((self.scores >= score).sum())
        return Prediction(
            self.file,
            self.width,
            self.height,
            self.boxes[:count],
            self.scores[:count],
            self.labels[:count],
            self.names[:count],
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: `file`, `width`, `height`, and `predictions`, best first."""
        rows = zip(self.boxes, self.scores, self.labels, self.names, strict=True)
        return {
            "file": self.file,
            "width": self.width,
            "height": self.height,
            "predictions": [
                {
                    "box": [round(float(edge), 2) for edge in box],
                    "score": round(float(score), 4),
                    "label": int(label),
                    "name": name,
                }
                for box, score, label, name in rows
            ],
        }


class Predictor:
    """A network ready to be asked.

    Example:
        >>> predictor = Predictor("runs/coins/checkpoints/best.pt")  # doctest: +SKIP
        >>> for found in predictor(["a.jpg", "b.jpg"]):  # doctest: +SKIP
        ...     print(found.file, found.above(0.5).boxes)
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str], *, device: torch.device | str = "cpu"
    ) -> None:
        """Load the averaged weights.

        Raises:
            CheckpointError: the file is absent, damaged, or not for this version.
        """
        self.device = torch.device(device)
        self.detector: LoadedDetector = load_detector(os.fspath(checkpoint), device=self.device)

    def __call__(
        self, paths: Iterable[str | os.PathLike[str]], *, top_k: int = 300
    ) -> Iterator[Prediction]:
        """Detect in each picture, a few at a time, in order.

        Raises:
            DataError: a path is no readable picture.
        """
        left = iter(paths)
        while batch := list(islice(left, BATCH)):
            files = [os.fspath(path) for path in batch]
            yield from self._detect(files, [decode(file) for file in files], top_k)

    @torch.inference_mode()
    def _detect(self, files: list[str], images: list[Image], top_k: int) -> list[Prediction]:
        size = self.detector.image_size
        pixels = np.stack([resize(image, size).transpose(2, 0, 1) for image in images])
        inputs = torch.from_numpy(pixels).to(self.device).float().div_(255)
        sizes = torch.tensor([(image.shape[1], image.shape[0]) for image in images])
        logits, boxes = self.detector.model(inputs).final
        results = postprocess(logits, boxes, sizes, top_k=top_k)
        predictions = []
        for file, image, (corners, scores, labels) in zip(files, images, results, strict=True):
            classes = labels.cpu().numpy()
            predictions.append(
                Prediction(
                    file=file,
                    width=image.shape[1],
                    height=image.shape[0],
                    boxes=corners.double().cpu().numpy(),
                    scores=scores.double().cpu().numpy(),
                    labels=classes,
                    names=tuple(self.detector.class_names[label] for label in classes),
                )
            )
        return predictions


def draw_found(found: Prediction, *, to: Path) -> Path:
    """Draw the boxes on the picture; return the PNG file in the folder `to`.

    Raises:
        DataError: the picture cannot be read any more.
    """
    rows = zip(found.boxes.tolist(), found.labels.tolist(), found.scores, found.names, strict=True)
    boxes = [
        DrawnBox((x1, y1, x2, y2), label, f"{name} raw={score:.2f}")
        for (x1, y1, x2, y2), label, score, name in rows
    ]
    path = to / png_name(found.file)
    with replacing(path) as stream:
        stream.write(encode_png(draw_boxes(decode(found.file), boxes)))
    return path
