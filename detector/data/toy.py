"""Built-in sets: real pixels out of installed packages, or shapes; nothing is downloaded.

    coins      crops of scikit-image's photograph of 24 coins; train and val share no coin, no pixel
    digits     scikit-learn's handwritten digits on scikit-image's textures; no writer's sample in both
    synthetic  circles, squares and triangles; numpy and OpenCV only

Picture i of a split is a pure function of (set, split, seed, size, i). They show that a trainer learns
and an evaluator measures; they are no benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from detector.data.index import (
    Annotated,
    DataError,
    DataIndex,
    Image,
    MissingPackageError,
    Split,
    listed,
    make_index,
    nearest,
)

SIZE: Final = 192
"""Side of a picture in pixels, unless told otherwise."""

Drawn: TypeAlias = tuple[Image, NDArray[np.float64], NDArray[np.int64]]
"""Picture `(S, S, 3)`, boxes `(K, 4)` xyxy pixels, labels `(K,)`."""

Painter: TypeAlias = Callable[[Split, np.random.Generator, int], Drawn]


@dataclass(frozen=True, slots=True)
class ToySet:
    """How one built-in set is made.

    Attributes:
        class_names: names of labels 0 to C-1.
        train: pictures in the train split unless told otherwise.
        val: the same for val.
        paint: draws one picture from a generator of its own.
    """

    class_names: tuple[str, ...]
    train: int
    val: int
    paint: Painter


def make(
    name: str, split: Split, *, count: int | None = None, seed: int = 0, size: int = SIZE
) -> DataIndex:
    """Draw `count` pictures of `size` by `size` pixels, in memory.

    Raises:
        DataError: there is no such set.
        MissingPackageError: it needs a package that is not installed.
    """
    if name not in SETS:
        raise DataError(
            f"There is no built-in set {name!r}{nearest(name, SETS)}; there are "
            f"{listed(tuple(SETS))}."
        )
    toy = SETS[name]
    if count is None:
        count = toy.train if split == "train" else toy.val
    images, rows = [], []
    for position in range(count):
        rng = np.random.default_rng([seed, ("train", "val").index(split), position])
        image, boxes, labels = toy.paint(split, rng, size)
        images.append(image)
        rows.append(
            Annotated(f"images/{split}/{position:05d}.png", size, size, boxes=boxes, labels=labels)
        )
    return make_index(
        rows, name=f"{name}/{split}", root="", class_names=toy.class_names, images=images
    )


# --- coins ---------------------------------------------------------------------------------------

COIN_BORDER: Final = 244
"""Column of the photograph where train ends and val begins; one coin lies across and is in neither."""

COIN_CROP: Final = (80, 140)
"""Side of a crop, pixels of the photograph."""

COIN_SEEN: Final = (0.02, 0.25)
"""Less of a coin than the first is nothing, more than the second a coin; a crop between is not used."""


@dataclass(frozen=True, slots=True)
class CoinPhotograph:
    """The photograph and where its coins are.

    Attributes:
        grey: `(303, 384)` uint8.
        owner: `(303, 384)` int32, number of the coin that a pixel belongs to, 0 for the table.
        boxes: `(24, 4)` int64 xyxy; coin k + 1 has row k.
    """

    grey: NDArray[np.uint8]
    owner: NDArray[np.int32]
    boxes: NDArray[np.int64]


@lru_cache(maxsize=1)
def coin_photograph() -> CoinPhotograph:
    """Find the coins: even out the light, threshold (Otsu), close, drop what touches the border."""
    grey = _skimage("coins", "coins")
    kernel = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (75, 75))  # larger than any coin
    table = cv2.morphologyEx(cv2.medianBlur(grey, 5), cv2.MORPH_OPEN, kernel)
    flat = cv2.subtract(grey, cv2.GaussianBlur(table, (0, 0), 15))
    _, mask = cv2.threshold(flat, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    mask = cv2.morphologyEx(mask, cv2.MORPH_CLOSE, np.ones((3, 3), np.uint8))
    _, parts, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=8)
    height, width = grey.shape
    owner = np.zeros(grey.shape, np.int32)
    boxes = []
    for part, (x, y, w, h, area) in enumerate(stats[1:].tolist(), start=1):
        inside = x > 0 and y > 0 and x + w < width and y + h < height
        if inside and area > 600:  # the smallest coin has 968 pixels, the largest speck far fewer
            boxes.append((x, y, x + w, y + h))
            owner[parts == part] = len(boxes)
    return CoinPhotograph(grey, owner, np.array(boxes, np.int64))


def _paint_coins(split: Split, rng: np.random.Generator, size: int) -> Drawn:
    photograph = coin_photograph()
    height, width = photograph.grey.shape
    left, right = (0, COIN_BORDER) if split == "train" else (COIN_BORDER, width)
    across = (photograph.boxes[:, 0] < COIN_BORDER) & (photograph.boxes[:, 2] > COIN_BORDER)
    whole = np.bincount(photograph.owner.ravel(), minlength=len(photograph.boxes) + 1)
    while True:  # about two in three crops are good
        side = int(rng.integers(COIN_CROP[0], COIN_CROP[1], endpoint=True))
        x = int(rng.integers(left, right - side, endpoint=True))
        y = int(rng.integers(0, height - side, endpoint=True))
        if _touches(photograph.boxes[across], x, y, side, margin=3):
            continue
        owner = photograph.owner[y : y + side, x : x + side]
        seen = np.bincount(owner.ravel(), minlength=len(whole))[1:] / whole[1:]
        nothing, enough = COIN_SEEN
        if seen.max() < enough or ((seen > nothing) & (seen < enough)).any():
            continue
        boxes = [_extent(owner == coin + 1) for coin in np.flatnonzero(seen >= enough)]
        crop = photograph.grey[y : y + side, x : x + side]
        image = cv2.resize(crop, (size, size), interpolation=cv2.INTER_CUBIC)
        return (
            cv2.cvtColor(image, cv2.COLOR_GRAY2RGB),
            np.array(boxes, np.float64) * (size / side),
            np.zeros(len(boxes), np.int64),
        )


def _touches(boxes: NDArray[np.int64], x: int, y: int, side: int, *, margin: int) -> bool:
    return bool(
        (
            (boxes[:, 0] - margin < x + side)
            & (boxes[:, 2] + margin > x)
            & (boxes[:, 1] - margin < y + side)
            & (boxes[:, 3] + margin > y)
        ).any()
    )


# --- digits --------------------------------------------------------------------------------------

DIGITS_TRAIN: Final = 1297
"""The first 1,297 of 1,797 samples are for train, the other 500 for val."""

TEXTURES: Final = ("brick", "grass", "gravel")
TEXTURE_BORDER: Final = 320
"""Column of a 512 px texture where train ends and val begins."""


@lru_cache(maxsize=1)
def _digit_samples() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """`(1797, 8, 8)` in 0..1, and `(1797,)`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            "The digits set needs scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    samples = load_digits()
    return (samples.images / 16).astype(np.float32), samples.target.astype(np.int64)


@lru_cache(maxsize=1)
def _textures() -> tuple[NDArray[np.uint8], ...]:
    return tuple(_skimage(texture, "digits") for texture in TEXTURES)


def _paint_digits(split: Split, rng: np.random.Generator, size: int) -> Drawn:
    samples, targets = _digit_samples()
    first, last = (0, DIGITS_TRAIN) if split == "train" else (DIGITS_TRAIN, len(samples))
    texture = _textures()[int(rng.integers(len(TEXTURES)))]
    left, right = (0, TEXTURE_BORDER) if split == "train" else (TEXTURE_BORDER, texture.shape[1])
    side = int(rng.integers(96, 192, endpoint=True))
    x = int(rng.integers(left, right - side, endpoint=True))
    y = int(rng.integers(0, texture.shape[0] - side, endpoint=True))
    ground = cv2.resize(texture[y : y + side, x : x + side], (size, size))
    image = ground[..., None].astype(np.float32) * rng.uniform(0.55, 1.0, 3).astype(np.float32)

    boxes: list[tuple[int, int, int, int]] = []
    labels = []
    for _ in range(int(rng.integers(1, 6, endpoint=True))):
        sample = int(rng.integers(first, last))
        edge = int(rng.integers(size // 7, size // 3, endpoint=True))
        ink = cv2.resize(samples[sample], (edge, edge), interpolation=cv2.INTER_CUBIC)
        ink = ink.clip(0, 1)
        x1, y1, x2, y2 = _extent(ink > 0.3)
        place = _free_place(rng, boxes, x2 - x1, y2 - y1, size)
        if place is None:
            continue
        px, py = place
        window = image[py : py + y2 - y1, px : px + x2 - x1]
        bright = float(window.mean()) < 110
        colour = rng.uniform(190, 255, 3) if bright else rng.uniform(0, 50, 3)
        alpha = ink[y1:y2, x1:x2, None]
        window[:] = window * (1 - alpha) + alpha * colour.astype(np.float32)
        boxes.append((px, py, px + x2 - x1, py + y2 - y1))
        labels.append(int(targets[sample]))
    return image.round().clip(0, 255).astype(np.uint8), _table(boxes), np.array(labels, np.int64)


# --- synthetic -----------------------------------------------------------------------------------

SHAPES: Final = ("circle", "square", "triangle")


def _paint_shapes(split: Split, rng: np.random.Generator, size: int) -> Drawn:  # noqa: ARG001
    corners = rng.uniform(30, 225, (2, 2, 3)).astype(np.float32)
    image = cv2.resize(corners, (size, size), interpolation=cv2.INTER_LINEAR)
    image += rng.normal(0, 6, image.shape).astype(np.float32)
    image = image.round().clip(0, 255).astype(np.uint8)

    boxes: list[tuple[int, int, int, int]] = []
    labels = []
    for _ in range(int(rng.integers(1, 5, endpoint=True))):
        label = int(rng.integers(len(SHAPES)))
        edge = int(rng.integers(size // 9, size // 3, endpoint=True))
        mask = _shape_mask(SHAPES[label], edge)
        x1, y1, x2, y2 = _extent(mask)
        place = _free_place(rng, boxes, x2 - x1, y2 - y1, size)
        if place is None:
            continue
        px, py = place
        window = image[py : py + y2 - y1, px : px + x2 - x1]
        colour = rng.integers(0, 256, 3).astype(np.uint8)
        if float(np.abs(window.mean((0, 1)) - colour).max()) < 60:
            colour = np.uint8(255) - colour
            if float(np.abs(window.mean((0, 1)) - colour).max()) < 60:
                colour = np.full(3, 0 if window.mean() > 127 else 255, np.uint8)
        window[mask[y1:y2, x1:x2]] = colour
        boxes.append((px, py, px + x2 - x1, py + y2 - y1))
        labels.append(label)
    return image, _table(boxes), np.array(labels, np.int64)


def _shape_mask(shape: str, edge: int) -> NDArray[np.bool_]:
    mask = np.zeros((edge, edge), np.uint8)
    if shape == "circle":
        cv2.circle(mask, (edge // 2, edge // 2), (edge - 1) // 2, 1, -1)
    elif shape == "square":
        mask[:] = 1
    else:
        points = np.array([(edge // 2, 0), (edge - 1, edge - 1), (0, edge - 1)], np.int32)
        cv2.fillPoly(mask, [points], 1)
    return mask.astype(bool)


# --- shared --------------------------------------------------------------------------------------


def _extent(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """The smallest box around the true pixels: xyxy, the right and lower edge exclusive."""
    xs, ys = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return int(xs[0]), int(ys[0]), int(xs[-1]) + 1, int(ys[-1]) + 1


def _free_place(
    rng: np.random.Generator,
    taken: list[tuple[int, int, int, int]],
    width: int,
    height: int,
    size: int,
    *,
    gap: int = 2,
) -> tuple[int, int] | None:
    """A corner from which a box touches no taken one; None where thirty throws find none."""
    for _ in range(30):
        x = int(rng.integers(0, size - width, endpoint=True))
        y = int(rng.integers(0, size - height, endpoint=True))
        if all(
            x + width + gap <= x1 or x >= x2 + gap or y + height + gap <= y1 or y >= y2 + gap
            for x1, y1, x2, y2 in taken
        ):
            return x, y
    return None


def _table(boxes: list[tuple[int, int, int, int]]) -> NDArray[np.float64]:
    return np.array(boxes, np.float64).reshape(-1, 4)


def _skimage(picture: str, purpose: str) -> Any:
    try:
        from skimage import data
    except ImportError as error:
        raise MissingPackageError(
            f"The {purpose} set needs scikit-image, which is not installed: pip install scikit-image"
        ) from error
    return getattr(data, picture)()


SETS: Final[Mapping[str, ToySet]] = {
    "coins": ToySet(("coin",), train=400, val=60, paint=_paint_coins),
    "digits": ToySet(tuple("0123456789"), train=800, val=100, paint=_paint_digits),
    "synthetic": ToySet(SHAPES, train=200, val=40, paint=_paint_shapes),
}
