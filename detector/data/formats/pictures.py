"""Picture files as every format needs them: found, measured by their headers, and their boxes made sound.

Owns what the formats share. Nothing here knows how any of them writes a label.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from detector.data.index import Annotated, DataError

SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
EXIF_ORIENTATION: Final = 0x0112
EXIF_QUARTER_TURNS: Final = frozenset({5, 6, 7, 8})

OVERHANG: Final = 0.5
"""A box may leave the picture by rounding or by an annotator's hand, and is cut at the edge; beyond
this part of the picture's side the numbers mean something else."""

HEADER_THREADS: Final = 8  # opening a file waits for the disk more than for the CPU


class Header(NamedTuple):
    """What a picture's first bytes say.

    Attributes:
        width: pixels, as the decoder sees the picture (EXIF rotation applied).
        height: pixels.
        orientation: EXIF's, 1 to 8; 1 is as it is stored.
    """

    width: int
    height: int
    orientation: int = 1


class Object(NamedTuple):
    """One object on its way to a row of the index; `box` is xyxy in pixels."""

    box: tuple[float, float, float, float]
    label: int
    crowd: bool = False
    area: float = math.nan


def find_pictures(folder: Path) -> Iterator[Path]:
    """Every picture below a folder, hidden files and folders left out, in no order."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield Path(parent, name)


def relative(picture: Path, base: Path) -> str:
    """The path from `base` with forward slashes; as it is where it lies elsewhere."""
    try:
        return picture.relative_to(base).as_posix()
    except ValueError:
        return picture.as_posix()


def read_headers(pictures: Sequence[Path]) -> list[Header]:
    """Measure all pictures.

    Raises:
        DataError: some cannot be read; names the first and says how many more.
    """
    PillowImage.init()  # not from several threads at once
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        headers = list(pool.map(_try_header, pictures))
    sound = [header for header in headers if isinstance(header, Header)]
    if len(sound) < len(headers):
        first, *more = (header for header in headers if isinstance(header, DataError))
        others = f" There are {len(more)} more like it." if more else ""
        raise DataError(f"{first}{others}")
    return sound


def read_header(picture: Path) -> Header:
    """Measure one picture by its header alone.

    Raises:
        DataError: it is absent, empty or no picture.
    """
    try:
        with PillowImage.open(picture) as image:
            width, height = image.size
            # Pillow decodes a whole PNG in search of EXIF that did not stand before the pixels
            has_exif = image.format != "PNG" or "exif" in image.info
            orientation = image.getexif().get(EXIF_ORIENTATION, 1) if has_exif else 1
    except FileNotFoundError as error:
        raise DataError(f"{picture} does not exist.") from error
    except (
        OSError,
        SyntaxError,
        ValueError,
        PillowImage.DecompressionBombError,
        PillowImage.DecompressionBombWarning,
    ) as error:
        size = picture.stat().st_size if picture.is_file() else 0
        raise DataError(
            f"{picture} is not a readable picture ({size} bytes); replace it, or remove it with its "
            "labels."
        ) from error
    if not isinstance(orientation, int) or not 1 <= orientation <= 8:
        orientation = 1
    if orientation in EXIF_QUARTER_TURNS:
        width, height = height, width
    return Header(width, height, orientation)


def _try_header(picture: Path) -> Header | DataError:
    try:
        return read_header(picture)
    except DataError as error:
        return error


def annotate(
    file: str,
    header: Header,
    objects: Iterable[Object],
    *,
    place: str,
    notes: Counter[str],
    stated: tuple[int, int] | None = None,
    image_id: int | None = None,
) -> Annotated:
    """A picture's row: boxes in the frame that is decoded, cut at its edges, each once.

    Boxes without area and duplicates are dropped, and what was repaired is counted in `notes`.

    Args:
        file: path relative to the data set's root.
        header: of the picture.
        objects: boxes in the frame that the labels were written for.
        place: the file of the labels, for messages.
        notes: counts of repairs, by sentence.
        stated: width and height that the labels give for the picture; None where they give none.
        image_id: what the source calls the picture.

    Raises:
        DataError: the stated size is of another picture, or a box lies far outside.
    """
    given = list(objects)
    boxes = np.array([item.box for item in given], np.float64).reshape(-1, 4)
    boxes = _to_decoded_frame(boxes, header, stated, file=file, place=place, notes=notes)
    limits = np.array([header.width, header.height] * 2, np.float64)
    if len(boxes):
        far = ((boxes < -OVERHANG * limits) | (boxes > (1 + OVERHANG) * limits)).any(1)
        if far.any():
            box = ", ".join(f"{edge:g}" for edge in boxes[int(far.argmax())])
            raise DataError(
                f"{place}: box ({box}) is far outside {file}, which has {header.width}x"
                f"{header.height} pixels; correct it, or remove it."
            )
    cut = np.clip(boxes, 0, limits)
    over: NDArray[np.bool_] = np.any(np.abs(cut - boxes) > 1.0, axis=1)  # less is rounding
    kept: dict[tuple[float, ...], Object] = {}
    for box, reached, item in zip(cut.tolist(), over.tolist(), given, strict=True):
        x1, y1, x2, y2 = box
        key = (*box, item.label, item.crowd)
        if x2 <= x1 or y2 <= y1:
            notes["boxes without area dropped"] += 1
        elif key in kept:
            notes["duplicate boxes dropped"] += 1
        else:
            notes["boxes cut at the picture's edge"] += reached
            kept[key] = item._replace(box=(x1, y1, x2, y2))
    rows = list(kept.values())
    return Annotated(
        file=file,
        width=header.width,
        height=header.height,
        boxes=np.array([row.box for row in rows], np.float64).reshape(-1, 4),
        labels=np.array([row.label for row in rows], np.int64),
        iscrowd=np.array([row.crowd for row in rows], np.bool_),
        areas=np.array([row.area for row in rows], np.float64),
        image_id=image_id,
    )


def _to_decoded_frame(
    boxes: NDArray[np.float64],
    header: Header,
    stated: tuple[int, int] | None,
    *,
    file: str,
    place: str,
    notes: Counter[str],
) -> NDArray[np.float64]:
    """Boxes drawn on the stored pixels of a photograph that EXIF turns are turned with it."""
    size = (header.width, header.height)
    if stated is None or stated == size:
        return boxes
    if stated == (header.height, header.width):
        if header.orientation in EXIF_QUARTER_TURNS:
            notes["pictures turned by EXIF, their boxes turned along"] += 1
            return turn(boxes, header)
        if not len(boxes) or (boxes <= np.array([*size, *size]) + 1).all():
            notes["pictures whose labels give width and height the wrong way round"] += 1
            return boxes
    raise DataError(
        f"{place}: the labels are for a picture of {stated[0]}x{stated[1]}, but {file} has "
        f"{size[0]}x{size[1]} pixels; put the original picture back, or export the labels anew."
    )


def turn(boxes: NDArray[np.float64], header: Header) -> NDArray[np.float64]:
    """Boxes `(K, 4)` of the stored pixels, as they lie once EXIF's orientation is applied."""
    swapped = header.orientation in EXIF_QUARTER_TURNS
    width, height = (header.height, header.width) if swapped else header[:2]
    x1, y1, x2, y2 = boxes.T
    edges = {
        1: (x1, y1, x2, y2),
        2: (width - x2, y1, width - x1, y2),
        3: (width - x2, height - y2, width - x1, height - y1),
        4: (x1, height - y2, x2, height - y1),
        5: (y1, x1, y2, x2),
        6: (height - y2, x1, height - y1, x2),
        7: (height - y2, width - x2, height - y1, width - x1),
        8: (y1, width - x2, y2, width - x1),
    }[header.orientation]
    return np.stack(edges, axis=1)


def sentences(notes: Counter[str]) -> list[str]:
    """`3 duplicate boxes dropped`, sorted by what."""
    return [f"{count} {what}" for what, count in sorted(notes.items()) if count]
