"""Weights and pictures in, boxes in the pictures' own pixels out."""

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
from torch import Tensor

from detector.checkpoint import LoadedDetector, load_detector
from detector.config import ConfigError
from detector.data.augment import resize
from detector.data.index import Image, decode, encode_png
from detector.files import replacing
from detector.models.deploy import deployed
from detector.models.detector import postprocess
from detector.pictures import Picture, listed_pictures, load_picture
from detector.visualize import DrawnBox, draw_boxes, png_name

BATCH: Final = 8


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was found in one picture, best first.

    Attributes:
        file: the path as given; empty where it was no file.
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
    """A network ready to be asked, as often as there are pictures.

    Example:
        >>> predictor = Predictor("runs/coins/weights/best.pt")  # doctest: +SKIP
        >>> for found in predictor(["a.jpg", "b.jpg"], min_score=0.5):  # doctest: +SKIP
        ...     print(found.file, found.names, found.boxes)
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str], *, device: torch.device | str = "cpu"
    ) -> None:
        """Load the averaged weights of a run, or an exported `.safetensors` file.

        Raises:
            CheckpointError: the file is absent, damaged, or not for this version.
            ConfigError: there is no such device here.
        """
        self.device = _device(device)
        self.detector: LoadedDetector = load_detector(os.fspath(checkpoint), device=self.device)
        self._network = deployed(self.detector.model)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of labels 0 to C-1."""
        return self.detector.class_names

    def __call__(
        self,
        pictures: Picture | Iterable[Picture],
        *,
        min_score: float = 0.0,
        top_k: int = 300,
        batch_size: int = BATCH,
    ) -> Iterator[Prediction]:
        """Detect in each picture, `batch_size` at a time, in order; lazily, so there may be any number.

        Args:
            pictures: one or many; see `load_picture` for what one may be.
            min_score: leave out what scores less.
            top_k: detections a picture, at most.
            batch_size: pictures that the network sees at once.

        Raises:
            ConfigError: a number that makes no sense.
            DataError: one is no readable picture.
        """
        for name, value in (("batch_size", batch_size), ("top_k", top_k)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        return self._batches(listed_pictures(pictures), min_score, top_k, batch_size)

    def _batches(
        self, left: Iterator[Picture], min_score: float, top_k: int, batch_size: int
    ) -> Iterator[Prediction]:
        while batch := list(islice(left, batch_size)):
            images = [load_picture(picture) for picture in batch]
            for picture, image, found in zip(
                batch, images, self._detect(images, top_k), strict=True
            ):
                file = os.fspath(picture) if isinstance(picture, str | os.PathLike) else ""
                yield self._named(file, image, *found).above(min_score)

    @torch.inference_mode()
    def _detect(self, images: list[Image], top_k: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Boxes, scores and labels of each."""
        size = self.detector.image_size
        pixels = np.stack([resize(image, size).transpose(2, 0, 1) for image in images])
        inputs = torch.from_numpy(pixels).to(self.device).float().div_(255)
        sizes = torch.tensor([(image.shape[1], image.shape[0]) for image in images])
        logits, boxes = self._network(inputs).final
        return postprocess(logits, boxes, sizes, top_k=top_k)

    def _named(
        self, file: str, image: Image, boxes: Tensor, scores: Tensor, labels: Tensor
    ) -> Prediction:
        classes = labels.cpu().numpy()
        return Prediction(
            file=file,
            width=image.shape[1],
            height=image.shape[0],
            boxes=boxes.double().cpu().numpy(),
            scores=scores.double().cpu().numpy(),
            labels=classes,
            names=tuple(self.class_names[label] for label in classes),
        )


def predict(
    detector: Predictor | str | os.PathLike[str],
    pictures: Picture | Iterable[Picture],
    *,
    min_score: float = 0.5,
    top_k: int = 300,
    batch_size: int = BATCH,
    device: torch.device | str | None = None,
) -> list[Prediction]:
    """Find objects in one picture or many: a list with a `Prediction` for each, in order.

    Args:
        detector: a run's weights, or a `Predictor` that has loaded them already.
        pictures: one or many; see `load_picture` for what one may be.
        min_score: leave out what scores less.
        top_k: detections a picture, at most.
        batch_size: pictures that the network sees at once.
        device: to load the weights on (default: a CUDA card where there is one).

    Raises:
        CheckpointError, ConfigError, DataError: as `Predictor` says.

    Example:
        >>> found = predict("runs/coins/weights/best.pt", ["a.jpg", array])  # doctest: +SKIP
        >>> found[0].boxes, found[0].scores, found[0].names  # doctest: +SKIP
    """
    if not isinstance(detector, Predictor):
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        detector = Predictor(detector, device=device)
    elif device is not None and _device(device) != detector.device:
        raise ConfigError(f"This Predictor is on {detector.device}; make another one for {device}.")
    return list(detector(pictures, min_score=min_score, top_k=top_k, batch_size=batch_size))


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is no device: give cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"There is no device {name} here: {torch.cuda.device_count()} CUDA cards."
        )
    return device


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
