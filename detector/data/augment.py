"""What is done to a training picture, boxes always along with it; numpy and OpenCV.

Order and strengths after RT-DETR and D-FINE: light and colour, zoom out, crop around objects,
stretch to the network's square, flip. Each function is pure: same sample and generator state, same result;
none writes into the picture it was given (it may live in a cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from detector.data.index import Image

if TYPE_CHECKING:
    from detector.config import DataConfig

MIN_SIDE: Final = 1.0
"""Boxes narrower or lower than this many pixels of the final picture are dropped."""

CROP_OVERLAPS: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
"""IoU that a crop must have with some box (SSD, https://arxiv.org/abs/1512.02325, section 2.2)."""

CROP_TRIES: Final = 40
MAX_ZOOM_OUT: Final = 4.0


class Sample(NamedTuple):
    """A picture and its boxes.

    Attributes:
        image: `(H, W, 3)` RGB uint8.
        boxes: `(K, 4)` float32 xyxy in its pixels.
        labels: `(K,)` int64.
    """

    image: Image
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]

    def keep(self, kept: NDArray[np.bool_]) -> Sample:
        """Only the boxes where `kept` `(K,)` is true."""
        return Sample(self.image, self.boxes[kept], self.labels[kept])


@dataclass(frozen=True, slots=True)
class Augmentation:
    """The training pipeline; every field is a probability."""

    horizontal_flip: float = 0.5
    vertical_flip: float = 0.0
    photometric: float = 0.0
    zoom_out: float = 0.0
    iou_crop: float = 0.0

    @classmethod
    def from_config(cls, data: DataConfig) -> Augmentation:
        """As the `data` section says."""
        return cls(
            horizontal_flip=data.horizontal_flip,
            vertical_flip=data.vertical_flip,
            photometric=data.photometric,
            zoom_out=data.zoom_out,
            iou_crop=data.iou_crop,
        )

    def __call__(self, sample: Sample, rng: np.random.Generator, *, size: int) -> Sample:
        """Augment, stretch to `size` by `size`, and drop boxes that vanished."""
        draws = rng.random(5)  # all drawn always: switching one off leaves the others as they were
        if draws[0] < self.photometric:
            sample = photometric(sample, rng)
        if draws[1] < self.zoom_out:
            sample = zoom_out(sample, rng)
        if draws[2] < self.iou_crop:
            sample = iou_crop(sample, rng)
        sample = stretch(sample, size)
        if draws[3] < self.horizontal_flip:
            sample = flip_horizontal(sample)
        if draws[4] < self.vertical_flip:
            sample = flip_vertical(sample)
        return sample


def flip_horizontal(sample: Sample) -> Sample:
    """Mirror left and right."""
    width = sample.image.shape[1]
    boxes = sample.boxes.copy()
    boxes[:, [0, 2]] = width - sample.boxes[:, [2, 0]]
    return Sample(sample.image[:, ::-1], boxes, sample.labels)


def flip_vertical(sample: Sample) -> Sample:
    """Mirror top and bottom."""
    height = sample.image.shape[0]
    boxes = sample.boxes.copy()
    boxes[:, [1, 3]] = height - sample.boxes[:, [3, 1]]
    return Sample(sample.image[::-1], boxes, sample.labels)


def photometric(sample: Sample, rng: np.random.Generator) -> Sample:
    """Change brightness, contrast, saturation and hue, each half of the time."""
    use = rng.random(4) < 0.5
    brightness, contrast, saturation = rng.uniform(0.5, 1.5, 3)
    hue = int(rng.integers(-9, 9, endpoint=True))  # of OpenCV's 180: 18 degrees either way
    levels = np.arange(256, dtype=np.float32)
    if use[0]:
        levels *= brightness
    if use[1]:
        levels = (levels - 128) * contrast + 128
    image = cv2.LUT(sample.image, levels.round().clip(0, 255).astype(np.uint8))
    if use[2] or use[3]:
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
        if use[2]:
            table = (np.arange(256) * saturation).round().clip(0, 255).astype(np.uint8)
            hsv[..., 1] = cv2.LUT(hsv[..., 1], table)
        if use[3]:
            table = ((np.arange(256) + hue) % 180).astype(np.uint8)
            hsv[..., 0] = cv2.LUT(hsv[..., 0], table)
        image = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    return Sample(image, sample.boxes, sample.labels)


def zoom_out(sample: Sample, rng: np.random.Generator) -> Sample:
    """Place the picture anywhere on a black canvas of 1 to 4 times its sides."""
    height, width = sample.image.shape[:2]
    factor = rng.uniform(1.0, MAX_ZOOM_OUT)
    wide, high = int(width * factor), int(height * factor)
    x = int(rng.integers(0, wide - width, endpoint=True))
    y = int(rng.integers(0, high - height, endpoint=True))
    canvas = np.zeros((high, wide, 3), np.uint8)
    canvas[y : y + height, x : x + width] = sample.image
    return Sample(canvas, sample.boxes + np.array([x, y, x, y], np.float32), sample.labels)


def iou_crop(sample: Sample, rng: np.random.Generator) -> Sample:
    """Cut out a part that overlaps some box well enough; boxes whose centre is outside are gone.

    A picture without boxes, or one where no throw fits, comes back as it was.
    """
    height, width = sample.image.shape[:2]
    least = float(rng.choice(CROP_OVERLAPS))
    for _ in range(CROP_TRIES if len(sample.boxes) else 0):
        w, h = (int(side * rng.uniform(0.3, 1.0)) for side in (width, height))
        if w < 1 or h < 1 or not 0.5 <= w / h <= 2.0:
            continue
        x = int(rng.integers(0, width - w, endpoint=True))
        y = int(rng.integers(0, height - h, endpoint=True))
        window = np.array([x, y, x + w, y + h], np.float32)
        centres = (sample.boxes[:, :2] + sample.boxes[:, 2:]) / 2
        inside = np.all((centres > window[:2]) & (centres < window[2:]), axis=1)
        if not inside.any() or _overlap(sample.boxes[inside], window).max() < least:
            continue
        kept = sample.keep(inside)
        boxes = np.clip(kept.boxes, np.tile(window[:2], 2), np.tile(window[2:], 2))
        return Sample(
            sample.image[y : y + h, x : x + w], boxes - np.tile(window[:2], 2), kept.labels
        )
    return sample


def stretch(sample: Sample, size: int) -> Sample:
    """Resize to a square, sides independently: the convention of the published weights."""
    height, width = sample.image.shape[:2]
    scale = np.array([size / width, size / height] * 2, np.float32)
    moved = Sample(resize(sample.image, size), sample.boxes * scale, sample.labels)
    return moved.keep(np.all(moved.boxes[:, 2:] - moved.boxes[:, :2] >= MIN_SIDE, axis=1))


def resize(image: Image, size: int) -> Image:
    """To `(size, size, 3)`: by area where it shrinks both ways, else bilinear."""
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    shrinks = height > size and width > size
    resized: Image = cv2.resize(
        image, (size, size), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    )
    return resized


def _overlap(boxes: NDArray[np.float32], window: NDArray[np.float32]) -> NDArray[np.float32]:
    """IoU of `(K, 4)` boxes with one, `(K,)`."""
    sides = np.minimum(boxes[:, 2:], window[2:]) - np.maximum(boxes[:, :2], window[:2])
    shared = sides.clip(0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    iou: NDArray[np.float32] = shared / (areas + (window[2:] - window[:2]).prod() - shared)
    return iou
