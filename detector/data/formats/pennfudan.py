"""Penn-Fudan pedestrians: photographs with a mask each, which says whose every pixel is.

    PNGImages/FudanPed00001.png
    PedMasks/FudanPed00001_mask.png     0 is the street, 1 to n are people

See https://www.cis.upenn.edu/~jshi/ped_html/. A box is the extent of a person's pixels in the mask as it
lies on disk. The set has no splits: a fifth of the pictures, drawn by `data.seed`, are for val.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image as PillowImage

from detector.data.formats.pictures import (
    Header,
    Object,
    annotate,
    find_pictures,
    read_headers,
    relative,
    sentences,
)
from detector.data.index import DataError, DataIndex, Split, make_index

PICTURES: Final = "PNGImages"
MASKS: Final = "PedMasks"
CLASS_NAMES: Final = ("person",)
VAL_SHARE: Final = 0.2
MANY_PEOPLE: Final = 255  # a mask with more different values is a photograph or an outline


def is_pennfudan(root: Path) -> bool:
    """True where the folder has pictures and masks as the original has."""
    return (root / PICTURES).is_dir() and (root / MASKS).is_dir()


def read(root: Path, split: Split, *, seed: int = 0, limit: int | None = None) -> DataIndex:
    """Read one split of the folder `root`, at most its first `limit` pictures by name.

    Raises:
        DataError: in one sentence, naming the picture or mask.
    """
    for folder in (root / PICTURES, root / MASKS):
        if not folder.is_dir():
            raise DataError(f"{root} is not the Penn-Fudan set: there is no {folder}.")
    everything = sorted(find_pictures(root / PICTURES))
    orphans = {path.stem for path in find_pictures(root / MASKS)} - {
        f"{path.stem}_mask" for path in everything
    }
    if not everything or orphans:
        what = f"no picture for the mask {min(orphans)}" if orphans else "no picture"
        raise DataError(f"{root / PICTURES} has {what}; unpack the archive anew.")
    pictures = split_of(everything, split, seed=seed)[:limit]
    if not pictures:
        raise DataError(f"{root} has {len(everything)} pictures, too few for two splits.")
    notes: Counter[str] = Counter()
    rows = []
    for picture, header in zip(pictures, read_headers(pictures), strict=True):
        mask = root / MASKS / f"{picture.stem}_mask.png"
        rows.append(
            annotate(
                relative(picture, root),
                header,
                [Object(box, 0) for box in people(mask, header, picture)],
                place=str(mask),
                notes=notes,
            )
        )
    return make_index(
        rows,
        name=f"{root.resolve().name}/{split}",
        root=str(root),
        class_names=CLASS_NAMES,
        notes=sentences(notes),
    )


def split_of(pictures: list[Path], split: Split, *, seed: int) -> list[Path]:
    """The pictures of a split: a pure function of their number and the seed, in their order."""
    order = np.random.default_rng([seed, len(pictures)]).permutation(len(pictures))
    held_out = set(order[: round(len(pictures) * VAL_SHARE)].tolist())
    return [p for number, p in enumerate(pictures) if (number in held_out) == (split == "val")]


def people(mask: Path, header: Header, picture: Path) -> list[tuple[float, float, float, float]]:
    """Boxes xyxy, far edges exclusive, of the people in a mask, by their number.

    Raises:
        DataError: the mask is absent, unreadable, empty, no mask, or of another size.
    """
    try:
        with PillowImage.open(mask) as image:
            owner = np.asarray(image)
    except FileNotFoundError as error:
        raise DataError(f"{picture} has no mask {mask}.") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{mask} is not a readable picture; unpack the archive anew.") from error
    if owner.ndim != 2 or owner.dtype == np.bool_:
        raise DataError(f"{mask} is no mask: it must have one number a pixel.")
    height, width = owner.shape
    if (width, height) != (header.width, header.height):
        raise DataError(
            f"{mask} has {width}x{height} pixels, but {picture} has {header.width}x{header.height}; "
            "both must be of the original size."
        )
    numbers = np.unique(owner[owner > 0])
    if not 0 < len(numbers) <= MANY_PEOPLE:
        what = "is empty: nobody is in it" if not len(numbers) else f"has {len(numbers)} people"
        raise DataError(f"{mask} {what}; remove it and its picture, or unpack the archive anew.")
    boxes = []
    for number in numbers:
        inside = owner == number
        xs, ys = np.flatnonzero(inside.any(0)), np.flatnonzero(inside.any(1))
        boxes.append((float(xs[0]), float(ys[0]), float(xs[-1] + 1), float(ys[-1] + 1)))
    return boxes
