"""What is done to a training picture, boxes always along with it; numpy and OpenCV.

Order and strengths after RT-DETR, D-FINE and DEIM: a mosaic of four, or a wider frame and a crop around
objects; stretched to the network's square; light and colour; flips; two pictures blended. What is drawn
is a pure function of the generator, and nothing is written into a picture that came in (it may live in a
cache). Where the picture goes is decided first and its pixels are moved once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

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
MOSAIC_SPLIT: Final = (0.35, 0.65)
"""Where the four pictures of a mosaic meet, as a part of the side."""

MIXUP_SHARE: Final = (0.45, 0.55)
"""How much of the first picture a blend has (DEIM, https://arxiv.org/abs/2412.04234)."""

HUE_DEGREES: Final = 18.0
MULTI_SCALE_STEP: Final = 32
MULTI_SCALE_REPEAT: Final = 3
"""How often the configured side stands among the sides to draw from (D-FINE's `base_size_repeat`)."""

_IDENTITY: Final = np.eye(3)
_GREY: Final = np.array([[0.299, 0.587, 0.114]] * 3)  # what a colour looks like without its hue
_ACROSS: Final = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / math.sqrt(3.0)

SIDE: Final = 3  # stream of random numbers, beside those of order, pixels and noise


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


Read: TypeAlias = Callable[[int, int], Sample]
"""Picture `position`, at least `least` pixels a side where the file has as many."""

Window: TypeAlias = tuple[int, int, int, int]
"""What of a picture is shown, xyxy in its pixels; may reach beyond it, into black."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """The training pipeline; every field is a probability."""

    horizontal_flip: float = 0.5
    vertical_flip: float = 0.0
    photometric: float = 0.0
    zoom_out: float = 0.0
    iou_crop: float = 0.0
    mosaic: float = 0.0
    mixup: float = 0.0

    @classmethod
    def from_config(cls, data: DataConfig) -> Augmentation:
        """As the `data` section says."""
        return cls(
            horizontal_flip=data.horizontal_flip,
            vertical_flip=data.vertical_flip,
            photometric=data.photometric,
            zoom_out=data.zoom_out,
            iou_crop=data.iou_crop,
            mosaic=data.mosaic,
            mixup=data.mixup,
        )

    def __call__(
        self, position: int, rng: np.random.Generator, *, read: Read, pictures: int, size: int
    ) -> Sample:
        """Make the sample of picture `position`, `size` by `size` pixels.

        Args:
            position: in the index.
            rng: everything is drawn from it.
            read: gives a picture and its boxes.
            pictures: how many there are to make mosaics and blends of.
            size: side of the sample.
        """
        draws = rng.random(7)  # all drawn always: switching one off leaves the others as they were
        if draws[5] < self.mosaic:
            others = rng.integers(pictures, size=3).tolist()
            sample = mosaic((position, *others), rng, read=read, size=size)
        else:
            sample = read(position, self.least_side(size))
            height, width = sample.image.shape[:2]
            window = (0, 0, width, height)
            if draws[1] < self.zoom_out:
                window = zoom_out(window, rng)
            kept = None
            if draws[2] < self.iou_crop:
                window, kept = iou_crop(window, sample.boxes, rng)
            sample = render(sample if kept is None else sample.keep(kept), window, size)
        if draws[0] < self.photometric:
            sample = photometric(sample, rng)
        if draws[3] < self.horizontal_flip:
            sample = flip_horizontal(sample)
        if draws[4] < self.vertical_flip:
            sample = flip_vertical(sample)
        if draws[6] < self.mixup:
            share = float(rng.uniform(*MIXUP_SHARE))
            alone = replace(self, mixup=0.0)
            other = alone(int(rng.integers(pictures)), rng, read=read, pictures=pictures, size=size)
            sample = mixup(sample, other, share)
        return sample

    def least_side(self, size: int) -> int:
        """How large a picture must be for a sample of `size` that is as sharp as it can be."""
        return 2 * size if self.iou_crop else size  # most crops keep half a side or more


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which augmentation an epoch has: all, then without mixing pictures, at last only flips.

    Attributes:
        full: at the start.
        mix_epochs: mosaic and mixup in epochs below this; None: in all.
        strong_epochs: everything but flips in epochs below this; None: in all.
    """

    full: Augmentation
    mix_epochs: int | None = None
    strong_epochs: int | None = None

    @classmethod
    def from_config(cls, data: DataConfig, *, epochs: int | None) -> Schedule:
        """As the `data` section says of a run of so many epochs (None: of one without an end)."""
        if epochs is None:
            return cls(Augmentation.from_config(data))
        return cls(
            Augmentation.from_config(data),
            mix_epochs=round(data.mix_until * epochs),
            strong_epochs=round(data.strong_until * epochs),
        )

    def is_strong(self, epoch: int) -> bool:
        """False in the epochs at the end that only flip."""
        return self.strong_epochs is None or epoch < self.strong_epochs

    def at(self, epoch: int) -> Augmentation:
        """The augmentation of an epoch, counted from 0."""
        if not self.is_strong(epoch):
            return Augmentation(self.full.horizontal_flip, self.full.vertical_flip)
        if self.mix_epochs is not None and epoch >= self.mix_epochs:
            return replace(self.full, mosaic=0.0, mixup=0.0)
        return self.full


def training_side(seed: int, *, epoch: int, step: int, image_size: int, spread: float) -> int:
    """The side that a step's pictures are resized to on the device, the same on every rank.

    Multiples of 32 within `image_size` times 1 - `spread` to 1 + `spread`, `image_size` itself
    `MULTI_SCALE_REPEAT` times as often as another.
    """
    reach = int(image_size * spread) // MULTI_SCALE_STEP
    sides = [image_size + MULTI_SCALE_STEP * k for k in range(-reach, reach + 1)]
    sides = [side for side in sides if side >= MULTI_SCALE_STEP]
    sides += [image_size] * (MULTI_SCALE_REPEAT - 1)
    rng = np.random.default_rng([seed, SIDE, epoch, step])
    return sides[int(rng.integers(len(sides)))]


# --- where it goes -------------------------------------------------------------------------------


def zoom_out(window: Window, rng: np.random.Generator) -> Window:
    """A frame of 1 to 4 times the sides, the picture anywhere in it."""
    x1, y1, x2, y2 = window
    width, height = x2 - x1, y2 - y1
    factor = rng.uniform(1.0, MAX_ZOOM_OUT)
    wide, high = int(width * factor), int(height * factor)
    left = x1 - int(rng.integers(0, wide - width, endpoint=True))
    top = y1 - int(rng.integers(0, high - height, endpoint=True))
    return left, top, left + wide, top + high


def iou_crop(
    window: Window, boxes: NDArray[np.float32], rng: np.random.Generator
) -> tuple[Window, NDArray[np.bool_] | None]:
    """A part of the window that overlaps some box well enough, and which boxes have their centre in it.

    Without boxes, or where no throw fits, the window as it was and None.
    """
    left, top, right, bottom = window
    least = float(rng.choice(CROP_OVERLAPS))
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    for _ in range(CROP_TRIES if len(boxes) else 0):
        w, h = (int(side * rng.uniform(0.3, 1.0)) for side in (right - left, bottom - top))
        if w < 1 or h < 1 or not 0.5 <= w / h <= 2.0:
            continue
        x = int(rng.integers(left, right - w, endpoint=True))
        y = int(rng.integers(top, bottom - h, endpoint=True))
        part = np.array([x, y, x + w, y + h], np.float32)
        inside = np.all((centres > part[:2]) & (centres < part[2:]), axis=1)
        if inside.any() and _overlap(boxes[inside], part).max() >= least:
            return (x, y, x + w, y + h), inside
    return window, None


def render(sample: Sample, window: Window, size: int) -> Sample:
    """Stretch what is in the window to a square, sides independently, and black around the picture.

    Stretching is the convention of the published weights.
    """
    height, width = sample.image.shape[:2]
    if window == (0, 0, width, height):
        return _visible(resize(sample.image, size), sample, window, (0, 0, size, size))
    x1, y1, x2, y2 = window
    shown = (max(x1, 0), max(y1, 0), min(x2, width), min(y2, height))
    image = np.zeros((size, size, 3), np.uint8)
    if shown[2] <= shown[0] or shown[3] <= shown[1]:  # a crop of the black around it
        return Sample(image, sample.boxes[:0], sample.labels[:0])
    scale = (size / (x2 - x1), size / (y2 - y1))
    left, right = (_pixel(edge - x1, scale[0]) for edge in (shown[0], shown[2]))
    top, bottom = (_pixel(edge - y1, scale[1]) for edge in (shown[1], shown[3]))
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    left, top = min(left, size - 1), min(top, size - 1)
    part = sample.image[shown[1] : shown[3], shown[0] : shown[2]]
    image[top:bottom, left:right] = resample(part, min(right, size) - left, min(bottom, size) - top)
    target = (left, top, min(right, size), min(bottom, size))
    return _visible(image, sample, shown, target)


def _pixel(offset: int, scale: float) -> int:
    return math.floor(offset * scale + 0.5)


def _visible(image: Image, sample: Sample, source: Window, target: Window) -> Sample:
    """Boxes of `sample` cut to `source` and moved along to `target`, on `image`; the rest is gone."""
    scale_x = (target[2] - target[0]) / (source[2] - source[0])
    scale_y = (target[3] - target[1]) / (source[3] - source[1])
    low, high = _corners(source)
    cut = np.minimum(np.maximum(sample.boxes, low), high)
    left, right = _corners(target)
    boxes = (cut - low) * np.array([scale_x, scale_y, scale_x, scale_y]) + left
    boxes = np.minimum(np.maximum(boxes, left), right)  # rounding
    moved = Sample(image, boxes.astype(np.float32), sample.labels)
    return moved.keep(np.all(boxes[:, 2:] - boxes[:, :2] >= MIN_SIDE, axis=1))


def _corners(window: Window) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least and the greatest that a box's four edges can be in a window."""
    x1, y1, x2, y2 = window
    return np.array([x1, y1, x1, y1], np.float64), np.array([x2, y2, x2, y2], np.float64)


def mosaic(positions: Sequence[int], rng: np.random.Generator, *, read: Read, size: int) -> Sample:
    """Four whole pictures, each stretched to a quarter around a point near the middle."""
    split_x, split_y = (round(part * size) for part in rng.uniform(*MOSAIC_SPLIT, 2).tolist())
    image = np.empty((size, size, 3), np.uint8)
    parts = []
    for quarter, position in enumerate(positions):
        left, right = (0, split_x) if quarter % 2 == 0 else (split_x, size)
        top, bottom = (0, split_y) if quarter < 2 else (split_y, size)
        tile = read(position, mosaic_side(size))
        height, width = tile.image.shape[:2]
        image[top:bottom, left:right] = resample(tile.image, right - left, bottom - top)
        parts.append(_visible(image, tile, (0, 0, width, height), (left, top, right, bottom)))
    return _together(image, parts)


def mosaic_side(size: int) -> int:
    """The longest side that a picture of a mosaic of this size can have."""
    return math.ceil(MOSAIC_SPLIT[1] * size)


def mixup(first: Sample, second: Sample, share: float) -> Sample:
    """Both pictures, seen through each other, and the boxes of both."""
    image = cv2.addWeighted(first.image, share, second.image, 1.0 - share, 0.0)
    return _together(image, (first, second))


def _together(image: Image, parts: Sequence[Sample]) -> Sample:
    return Sample(
        image,
        np.concatenate([part.boxes for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def flip_horizontal(sample: Sample) -> Sample:
    """Mirror left and right."""
    width = sample.image.shape[1]
    boxes = sample.boxes.copy()
    boxes[:, [0, 2]] = width - sample.boxes[:, [2, 0]]
    return Sample(cv2.flip(sample.image, 1), boxes, sample.labels)


def flip_vertical(sample: Sample) -> Sample:
    """Mirror top and bottom."""
    height = sample.image.shape[0]
    boxes = sample.boxes.copy()
    boxes[:, [1, 3]] = height - sample.boxes[:, [3, 1]]
    return Sample(cv2.flip(sample.image, 0), boxes, sample.labels)


def stretch(sample: Sample, size: int) -> Sample:
    """Resize to a square, sides independently; boxes that vanish are dropped."""
    height, width = sample.image.shape[:2]
    return render(sample, (0, 0, width, height), size)


def resize(image: Image, size: int) -> Image:
    """To `(size, size, 3)`."""
    return resample(image, size, size)


def resample(image: Image, width: int, height: int) -> Image:
    """To `(height, width, 3)`: halved while more than twice too large, then bilinear: skips no pixel."""
    high, wide = image.shape[:2]
    while wide > 2 * width or high > 2 * height:
        wide = wide // 2 if wide > 2 * width else wide
        high = high // 2 if high > 2 * height else high
        image = cv2.resize(image, (wide, high), interpolation=cv2.INTER_LINEAR)
    if (high, wide) == (height, width):
        return image
    resized: Image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    return resized


def _overlap(boxes: NDArray[np.float32], window: NDArray[np.float32]) -> NDArray[np.float32]:
    """IoU of `(K, 4)` boxes with one, `(K,)`."""
    sides = np.minimum(boxes[:, 2:], window[2:]) - np.maximum(boxes[:, :2], window[:2])
    shared = sides.clip(0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    iou: NDArray[np.float32] = shared / (areas + (window[2:] - window[:2]).prod() - shared)
    return iou


# --- how it looks --------------------------------------------------------------------------------


def photometric(sample: Sample, rng: np.random.Generator) -> Sample:
    """Change brightness, contrast, saturation and hue, each half of the time, all in one pass."""
    use = rng.random(4) < 0.5
    brightness, contrast, saturation = rng.uniform(0.5, 1.5, 3).tolist()
    degrees = float(rng.uniform(-HUE_DEGREES, HUE_DEGREES))
    if not use.any():
        return sample
    colour, offset = _IDENTITY, 0.0
    if use[0]:
        colour = colour * brightness
    if use[1]:
        colour, offset = colour * contrast, 128.0 * (1.0 - contrast)
    if use[2]:
        colour = (saturation * _IDENTITY + (1.0 - saturation) * _GREY) @ colour
    if use[3]:
        colour = _turn_hue(math.radians(degrees)) @ colour
    # A grey offset stays grey: saturation and hue leave it as it is.
    matrix = np.full((3, 4), offset)
    matrix[:, :3] = colour
    image = cv2.transform(sample.image, matrix)
    return Sample(image, sample.boxes, sample.labels)


def _turn_hue(angle: float) -> NDArray[np.float64]:
    """The rotation of RGB about its grey diagonal (Rodrigues), `(3, 3)`."""
    turned: NDArray[np.float64] = (
        math.cos(angle) * _IDENTITY + (1.0 - math.cos(angle)) / 3.0 + math.sin(angle) * _ACROSS
    )
    return turned
