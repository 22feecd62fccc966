"""YOLO folders.

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
from typing import Any, Final

import numpy as np
import yaml
from numpy.typing import NDArray

from detector.data.formats.pictures import (
    OVERHANG,
    Object,
    annotate,
    find_pictures,
    read_headers,
    relative,
    sentences,
)
from detector.data.index import DataError, DataIndex, Split, listed, make_index

DESCRIPTIONS: Final = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
SPLIT_KEYS: Final[Mapping[Split, tuple[str, ...]]] = {"train": ("train",), "val": ("val", "valid")}


def find_description(path: Path) -> Path | None:
    """The data.yaml of a folder, or the file itself where it is one; None where there is none."""
    if path.suffix in {".yaml", ".yml"} and path.is_file():
        return path
    return next((path / name for name in DESCRIPTIONS if (path / name).is_file()), None)


def read(path: Path, split: Split, *, limit: int | None = None) -> DataIndex:
    """Read one split of the folder (or data.yaml) `path`, at most its first `limit` pictures.

    Raises:
        DataError: in one sentence, naming the file and, for a label, its line.
    """
    description = find_description(path)
    if description is None:
        raise DataError(
            f"{path} is not a YOLO folder: it has no {DESCRIPTIONS[0]} with train, val and names."
        )
    content = _load_yaml(description)
    names = _class_names(content, description)
    base, places = _split_places(content, description, split)
    pictures = sorted({picture for place in places for picture in _pictures(place, base)})[:limit]
    if not pictures:
        raise DataError(
            f"{description}: no pictures for {split!r} in {listed([str(p) for p in places])}."
        )

    notes: Counter[str] = Counter()
    rows, unlabelled = [], 0
    for picture, header in zip(pictures, read_headers(pictures), strict=True):
        labels = label_path(picture)
        if labels.is_file():
            boxes, classes = read_labels(labels, num_classes=len(names), notes=notes)
        else:
            boxes, classes = np.zeros((0, 4)), np.zeros(0, np.int64)
            unlabelled += 1
        boxes = boxes * (header.width, header.height, header.width, header.height)
        objects = [
            Object(tuple(box), label)
            for box, label in zip(boxes.tolist(), classes.tolist(), strict=True)
        ]
        rows.append(
            annotate(relative(picture, base), header, objects, place=str(labels), notes=notes)
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
        notes=sentences(notes),
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
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
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


def _load_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
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
        try:
            text = place.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{place} is not a readable list of pictures: {error}.") from error
        for line in text.splitlines():
            if not line.strip():
                continue
            start = place.parent if line.startswith("./") else base
            picture = Path(os.path.normpath(start / line.strip()))
            if not picture.is_file():
                raise DataError(f"{place} lists {line.strip()}, but there is no {picture}.")
            yield picture
        return
    yield from find_pictures(place)
