"""Data sets as they lie on disk, read into the one table. Today: YOLO folders.

    data.yaml            path, train, val, names
    images/<split>/...   pictures
    labels/<split>/...   a text file a picture: class cx cy w h, fractions of the picture

Written after https://docs.ultralytics.com/datasets/detect/ and what exporters make of it. Whatever
cannot be understood is refused with the file and line; whatever is harmless is repaired and noted.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image as PillowImage
from PIL import UnidentifiedImageError

from detector.data.index import Annotated, DataError, DataIndex, Split, listed, make_index

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
DESCRIPTIONS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
SPLIT_KEYS: Mapping[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "valid")}
EXIF_ORIENTATION, EXIF_QUARTER_TURNS = 0x0112, frozenset({5, 6, 7, 8})

# A box may leave the picture by rounding (six digits of a fraction) or by an annotator's hand;
# beyond this it is a file in pixels, not fractions.
OVERHANG = 0.5


def read(root: str | os.PathLike[str], split: Split, *, hint: str = "") -> DataIndex:
    """Read one split of the data set at `root`: its folder, or its data.yaml.

    Args:
        root: relative paths start at the working directory.
        split: `train` or `val`.
        hint: appended to the sentence that says that the folder is absent.

    Raises:
        DataError: in one sentence, naming the file and, for a label, its line.
    """
    path = Path(root).expanduser()
    if not path.exists():
        raise DataError(f"The data set {path} does not exist{hint}.")
    description = path if path.is_file() else _find_description(path)
    if description is None:
        raise DataError(
            f"{path} is not a YOLO folder: it has no {DESCRIPTIONS[0]} with train, val and names."
        )
    content = _load_yaml(description)
    names = _class_names(content, description)
    base, places = _split_places(content, description, split)
    pictures = sorted({picture for place in places for picture in _pictures(place, base)})
    if not pictures:
        raise DataError(
            f"{description}: no pictures for {split!r} in {listed([str(p) for p in places])}."
        )

    notes: Counter[str] = Counter()
    rows, unlabelled = [], 0
    for picture in pictures:
        width, height = _size(picture)
        labels = label_path(picture)
        if labels.is_file():
            boxes, classes = read_labels(labels, num_classes=len(names), notes=notes)
        else:
            boxes, classes = np.zeros((0, 4)), np.zeros(0, np.int64)
            unlabelled += 1
        rows.append(
            Annotated(
                file=_relative(picture, base),
                width=width,
                height=height,
                boxes=boxes * (width, height, width, height),
                labels=classes,
            )
        )
    if unlabelled == len(pictures):
        raise DataError(
            f"{description}: none of the {unlabelled} pictures for {split!r} has a label file; "
            f"looked for {label_path(pictures[0])} and so on."
        )
    if unlabelled:
        notes["pictures without a label file, taken as background"] = unlabelled
    return make_index(
        rows,
        name=f"{base.resolve().name}/{split}",
        root=str(base),
        class_names=names,
        notes=[f"{count} {what}" for what, count in sorted(notes.items())],
    )


def label_path(picture: Path) -> Path:
    """Where a picture's labels are: the last `images` folder becomes `labels`, else beside it."""
    parts = list(picture.parts)
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def read_labels(
    path: Path, *, num_classes: int, notes: Counter[str] | None = None
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Read one label file: boxes `(K, 4)` xyxy as fractions of the picture, classes `(K,)`.

    A row is `class cx cy w h`, or `class x1 y1 x2 y2 x3 y3 ...`, a polygon, taken by its bounds.
    Duplicate rows and boxes without area are dropped and counted in `notes`.

    Raises:
        DataError: a row cannot be understood.
    """
    notes = Counter() if notes is None else notes
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable text file: {error}.") from error
    rows: dict[tuple[float, ...], None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        row = _parse_row(line.split(), f"{path}, line {number}", num_classes)
        if row[3] <= row[1] or row[4] <= row[2]:
            notes["boxes without area dropped"] += 1
        elif row in rows:
            notes["duplicate rows dropped"] += 1
        else:
            rows[row] = None
    table = np.array(list(rows), np.float64).reshape(-1, 5)
    return table[:, 1:], table[:, 0].astype(np.int64)


def _parse_row(words: Sequence[str], place: str, num_classes: int) -> tuple[float, ...]:
    """`(class, x1, y1, x2, y2)` in fractions, clipped to the picture."""
    try:
        values = [float(word) for word in words]
    except ValueError as error:
        raise DataError(f"{place}: {' '.join(words)[:60]!r} is not numbers.") from error
    if not all(math.isfinite(value) for value in values):
        raise DataError(f"{place}: a value is not finite.")
    label = values[0]
    if label != int(label) or not 0 <= label < num_classes:
        raise DataError(
            f"{place}: class {words[0]} is outside 0 to {num_classes - 1} (data.yaml names "
            f"{num_classes})."
        )
    if len(values) == 5:
        cx, cy, w, h = values[1:]
        if w < 0 or h < 0:
            raise DataError(f"{place}: negative width or height.")
        edges = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
    elif len(values) >= 7 and len(values) % 2 == 1:
        xs, ys = values[1::2], values[2::2]
        edges = (min(xs), min(ys), max(xs), max(ys))
    else:
        raise DataError(
            f"{place}: {len(values)} columns; a box has 5, a polygon an odd number from 7."
        )
    if min(edges) < -OVERHANG or max(edges) > 1 + OVERHANG:
        raise DataError(f"{place}: a coordinate is far outside 0 to 1; are these pixels?")
    return (label, *(min(max(edge, 0.0), 1.0) for edge in edges))


def _find_description(folder: Path) -> Path | None:
    return next((folder / name for name in DESCRIPTIONS if (folder / name).is_file()), None)


def _load_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path} is not readable YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, Mapping):
        raise DataError(f"{path} must be a mapping with train, val and names.")
    return content


def _class_names(content: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    names = content.get("names")
    if isinstance(names, Mapping):
        try:
            numbered = {int(key): str(value) for key, value in names.items()}
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}: the keys of names must be class numbers.") from error
        if sorted(numbered) != list(range(len(numbered))) or len(numbered) != len(names):
            raise DataError(f"{path}: the keys of names must be 0 to {len(names) - 1}, each once.")
        found = tuple(numbered[key] for key in range(len(numbered)))
    elif isinstance(names, Sequence) and not isinstance(names, str):
        found = tuple(str(name) for name in names)
    else:
        raise DataError(f"{path}: names must list the classes.")
    if not found:
        raise DataError(f"{path}: names is empty.")
    if len(set(found)) != len(found):
        twice = next(name for name, count in Counter(found).items() if count > 1)
        raise DataError(f"{path}: the class name {twice!r} stands twice in names.")
    if content.get("nc", len(found)) != len(found):
        raise DataError(f"{path}: nc is {content['nc']} but names has {len(found)}.")
    return found


def _split_places(
    content: Mapping[str, Any], description: Path, split: Split
) -> tuple[Path, list[Path]]:
    """The root that the split's paths start from, and the folders or lists of pictures."""
    value = next((content[key] for key in SPLIT_KEYS[split] if content.get(key)), None)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise DataError(
            f"{description}: {split} must be a folder, a list of folders or a .txt file."
        )
    folder = description.parent
    tried: list[Path] = []
    for base, trim in _bases(content, folder):
        if not base.is_dir():
            continue
        places = [
            Path(os.path.normpath(base / (_climb(item) if trim else item))) for item in values
        ]
        if all(place.exists() for place in places):
            return base, places
        tried += [place for place in places if place not in tried]
    raise DataError(
        f"{description}: {split} is {', '.join(values)}, but there is no "
        f"{' or '.join(str(place) for place in tried)}."
    )


def _bases(content: Mapping[str, Any], folder: Path) -> Iterator[tuple[Path, bool]]:
    """Roots to try, best first, each with whether a leading `../` of a split's path is dropped.

    `path` counts from the yaml's folder; exporters also write it from the working directory or as an
    absolute path of the machine they ran on, and `../train/images` for `train/images`.
    """
    stated = content.get("path")
    if isinstance(stated, str) and stated.strip():
        yield Path(os.path.normpath(folder / Path(stated).expanduser())), False
        yield Path(os.path.normpath(stated)), False
    yield folder, False
    yield folder, True


def _climb(item: str) -> str:
    while item.startswith("../"):
        item = item[3:]
    return item


def _pictures(place: Path, base: Path) -> Iterator[Path]:
    if place.is_file():
        for line in place.read_text(encoding="utf-8-sig").splitlines():
            if not line.strip():
                continue
            start = place.parent if line.startswith("./") else base
            picture = Path(os.path.normpath(start / line.strip()))
            if not picture.is_file():
                raise DataError(f"{place} lists {line.strip()}, but there is no {picture}.")
            yield picture
        return
    for folder, folders, files in os.walk(place, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield Path(folder, name)


def _size(picture: Path) -> tuple[int, int]:
    """Width and height as the decoder sees them, from the header alone."""
    try:
        with PillowImage.open(picture) as image:
            width, height = image.size
            # Pillow decodes a whole PNG in search of EXIF that did not stand before the pixels
            has_exif = image.format != "PNG" or "exif" in image.info
            turned = has_exif and image.getexif().get(EXIF_ORIENTATION) in EXIF_QUARTER_TURNS
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise DataError(f"{picture} is not a readable picture.") from error
    return (height, width) if turned else (width, height)


def _relative(picture: Path, base: Path) -> str:
    try:
        return picture.relative_to(base).as_posix()
    except ValueError:
        return picture.as_posix()
