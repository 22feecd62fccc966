"""COCO JSON: one file a split with `images`, `annotations` and `categories`.

    annotations/instances_train2017.json + train2017/     COCO's own
    train/_annotations.coco.json beside its pictures      Roboflow's (valid/ for val)
    data.train_annotations, data.train_images             anything else, named

Written after https://cocodataset.org/#format-data. Category ids are sparse there and become labels 0 to
C-1 in their order, the originals kept. Crowds stay, for evaluation; training leaves them out.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from detector.data.formats.pictures import (
    Header,
    Object,
    annotate,
    find_pictures,
    read_headers,
    relative,
    sentences,
)
from detector.data.index import DataError, DataIndex, Split, listed, make_index

# Where a split's file is looked for, best first; the first pattern that matches decides.
PLACES: Final[Mapping[Split, tuple[str, ...]]] = {
    "train": (
        "annotations/instances_train*.json",
        "train/_annotations.coco.json",
        "annotations/train.json",
        "train/annotations.json",
        "train/labels.json",
        "train.json",
        "annotations/*train*.json",
    ),
    "val": (
        "annotations/instances_val*.json",
        "valid/_annotations.coco.json",
        "val/_annotations.coco.json",
        "annotations/val.json",
        "val/annotations.json",
        "val/labels.json",
        "val.json",
        "annotations/*val*.json",
    ),
}
SPLIT_FOLDERS: Final[Mapping[Split, tuple[str, ...]]] = {
    "train": ("train",),
    "val": ("val", "valid"),
}
_LARGEST_ID: Final = 2**63 - 1  # of int64, which image ids become


def find_annotations(root: Path, split: Split) -> list[Path]:
    """The files that may hold the split; more than one where that cannot be told."""
    for pattern in PLACES[split]:
        found = sorted(path for path in root.glob(pattern) if path.is_file())
        if found:
            return found
    return []


def read(
    root: Path,
    split: Split,
    *,
    annotations: str | None = None,
    images: str | None = None,
    limit: int | None = None,
) -> DataIndex:
    """Read one split of the folder `root`, at most its first `limit` pictures by name.

    Args:
        root: of the data set.
        split: `train` or `val`.
        annotations: the split's JSON file, from `root`; None to look at the usual places.
        images: the folder that the file's picture names start from, from `root`; None likewise.
        limit: see above.

    Raises:
        DataError: in one sentence, naming the file and the entry.
    """
    path = _annotation_file(root, split, annotations)
    content = _load(path)
    pictures = _images(content, path)
    objects, class_names, category_ids, notes = _objects(content, path, pictures)
    folder = _picture_folder(root, split, path, images, [name for name, _ in pictures.values()])
    chosen = sorted(pictures, key=lambda id_: pictures[id_][0])[:limit]
    files = [folder / pictures[id_][0] for id_ in chosen]
    numbered = all(type(id_) is int and 0 <= id_ <= _LARGEST_ID for id_ in chosen)
    rows = []
    for id_, file, header in zip(chosen, files, _headers(files, path), strict=True):
        rows.append(
            annotate(
                relative(file, root),
                header,
                objects.get(id_, ()),
                place=str(path),
                notes=notes,
                stated=pictures[id_][1],
                image_id=int(id_) if numbered else None,
            )
        )
    return make_index(
        rows,
        name=f"{root.resolve().name}/{split}",
        root=str(root),
        class_names=class_names,
        category_ids=category_ids,
        notes=sentences(notes),
    )


def _annotation_file(root: Path, split: Split, given: str | None) -> Path:
    key = f"data.{split}_annotations"
    if given is not None:
        path = root / Path(given).expanduser()
        if not path.is_file():
            raise DataError(f"{key} is {given}, but there is no file {path}.")
        return path
    found = find_annotations(root, split)
    if len(found) == 1:
        return found[0]
    if found:
        names = listed([relative(path, root) for path in found])
        raise DataError(f"{root} has several files for {split!r}: {names}; choose one with {key}.")
    raise DataError(
        f"{root} has no COCO file for {split!r}: looked for {', '.join(PLACES[split])}; "
        f"name it with {key}."
    )


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        content = json.loads(text, object_hook=_without_outlines)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not readable JSON: {' '.join(str(error).split())}; copy or export it anew."
        ) from error
    if isinstance(content, list):
        raise DataError(
            f"{path} is a list, as detections are written; a data set has images, annotations and "
            "categories."
        )
    if not isinstance(content, Mapping):
        raise DataError(f"{path} must hold images, annotations and categories.")
    for key in ("images", "annotations", "categories"):
        entries = content.get(key)
        if not isinstance(entries, list) or not all(isinstance(item, dict) for item in entries):
            raise DataError(f"{path}: {key} must be a list of objects; is this a COCO data set?")
    return content


def _without_outlines(entry: dict[str, Any]) -> dict[str, Any]:
    """Drop what is not used while it is parsed: COCO's outlines are nine tenths of its memory."""
    entry.pop("segmentation", None)
    return entry


def _images(
    content: Mapping[str, Any], path: Path
) -> dict[int | str, tuple[str, tuple[int, int] | None]]:
    """File name and stated size of each picture, by id."""
    pictures: dict[int | str, tuple[str, tuple[int, int] | None]] = {}
    by_name: dict[str, int | str] = {}
    for number, entry in enumerate(content["images"]):
        place = f"{path}, images[{number}]"
        id_, name = entry.get("id"), entry.get("file_name")
        if type(id_) not in {int, str}:
            raise DataError(f"{place}: id must be a number, not {_shown(id_)}.")
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{place}: file_name must be a picture's name, not {_shown(name)}.")
        name = name.strip().replace("\\", "/")
        if id_ in pictures:
            raise DataError(
                f"{place}: image id {id_} stands twice, for {pictures[id_][0]} and {name}; give each "
                "picture an id of its own."
            )
        if name in by_name:
            raise DataError(
                f"{place}: {name} stands twice, with ids {by_name[name]} and {id_}; remove one."
            )
        by_name[name] = id_
        size = (entry.get("width"), entry.get("height"))
        known = all(type(side) in {int, float} and 1 <= side < _LARGEST_ID for side in size)
        pictures[id_] = (name, (int(size[0]), int(size[1])) if known else None)
    if not pictures:
        raise DataError(f"{path}: images is empty.")
    return pictures


def _objects(
    content: Mapping[str, Any], path: Path, pictures: Mapping[int | str, Any]
) -> tuple[dict[int | str, list[Object]], tuple[str, ...], tuple[int, ...], Counter[str]]:
    """Objects by picture id; names and ids of the categories that became labels; what was repaired."""
    categories = _categories(content, path)
    used = {str(entry.get("category_id")) for entry in content["annotations"]}
    parents = {
        str(entry.get("supercategory"))
        for entry in content["categories"]
        if entry.get("supercategory") != entry.get("name")
    }
    notes: Counter[str] = Counter()
    for id_, name in list(categories.items()):
        if name in parents and str(id_) not in used and len(categories) > 1:  # Roboflow's
            del categories[id_]
            notes[f"category {name!r} left out: it only groups the others and has no box"] += 1
    ids = tuple(sorted(categories))
    label = {id_: number for number, id_ in enumerate(ids)}

    objects: dict[int | str, list[Object]] = {}
    seen: dict[Any, tuple[Any, ...]] = {}
    for number, entry in enumerate(content["annotations"]):
        place = f"{path}, annotations[{number}]"
        image_id, category = entry.get("image_id"), entry.get("category_id")
        if type(image_id) not in {int, str} or image_id not in pictures:
            raise DataError(f"{place}: image_id {_shown(image_id)} is not the id of a picture.")
        if type(category) is not int or category not in label:
            raise DataError(
                f"{place}: category_id {_shown(category)} is not in categories, which has "
                f"{listed([str(id_) for id_ in ids])}."
            )
        box = _box(entry, place)
        crowd = entry.get("iscrowd", 0)
        if crowd not in (0, 1):
            raise DataError(f"{place}: iscrowd must be 0 or 1, not {_shown(crowd)}.")
        own, content_of = entry.get("id"), (image_id, category, box)
        if type(own) in {int, str}:
            if own in seen and seen[own] != content_of:
                notes["annotations share their id with another; all are kept"] += 1
            seen[own] = content_of
        area = entry.get("area")
        sound = type(area) in {int, float} and 0 < area < _LARGEST_ID
        objects.setdefault(image_id, []).append(
            Object(box, label[category], bool(crowd), float(area) if sound else math.nan)
        )
    return objects, tuple(categories[id_] for id_ in ids), ids, notes


def _categories(content: Mapping[str, Any], path: Path) -> dict[int, str]:
    categories: dict[int, str] = {}
    for number, entry in enumerate(content["categories"]):
        place = f"{path}, categories[{number}]"
        id_, name = entry.get("id"), entry.get("name")
        if type(id_) is not int or not isinstance(name, str) or not name:
            raise DataError(
                f"{place}: needs a number as id and a name, not {_shown(id_)} and {_shown(name)}."
            )
        if id_ in categories or name in categories.values():
            twice = f"id {id_}" if id_ in categories else f"the name {name!r}"
            raise DataError(f"{place}: {twice} stands twice; each category is listed once.")
        categories[id_] = name
    if not categories:
        raise DataError(f"{path}: categories is empty.")
    return categories


def _box(entry: Mapping[str, Any], place: str) -> tuple[float, float, float, float]:
    """`bbox`, left, top, width and height, as xyxy."""
    given = entry.get("bbox")
    if not isinstance(given, list) or len(given) != 4:
        raise DataError(f"{place}: bbox must be [left, top, width, height], not {_shown(given)}.")
    if not all(type(value) in {int, float} for value in given):
        raise DataError(f"{place}: bbox must be four numbers, not {_shown(given)}.")
    try:
        x, y, width, height = (float(value) for value in given)
    except OverflowError:
        x = y = width = height = math.inf
    if not all(map(math.isfinite, (x, y, width, height))):
        raise DataError(f"{place}: a number of bbox {_shown(given)} is not finite.")
    if width < 0 or height < 0:
        raise DataError(f"{place}: bbox {_shown(given)} has a negative width or height.")
    return x, y, x + width, y + height


def _picture_folder(
    root: Path, split: Split, path: Path, given: str | None, names: Sequence[str]
) -> Path:
    """The folder that file names start from: the one given, or where the first of them are."""
    key = f"data.{split}_images"
    if given is not None:
        folder = root / Path(given).expanduser()
        if not folder.is_dir():
            raise DataError(f"{key} is {given}, but there is no folder {folder}.")
        return folder
    # instances_train2017 -> train2017
    stems = (path.stem.removeprefix("instances_"), *SPLIT_FOLDERS[split])
    inside = [stem for stem in dict.fromkeys(stems) if stem not in {"", "_annotations.coco"}]
    folders = [root / "images" / stem for stem in inside] + [root / stem for stem in inside]
    folders += [root / stem / "images" for stem in inside]
    folders += [path.parent, path.parent / "images", root / "images", root]
    looked = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    for folder in looked:
        # not the very first alone: that one may be the one that is missing
        if any((folder / name).is_file() for name in names[:20]):
            return folder
    places = listed(
        [str(folder) for folder in looked if next(find_pictures(folder), None)] or [str(root)]
    )
    raise DataError(
        f"{path} names {names[0]}, but no such picture is in {places}; name the folder with {key}."
    )


def _headers(files: Sequence[Path], path: Path) -> list[Header]:
    try:
        return read_headers(files)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _shown(value: Any) -> str:
    """A value as a message should show it: short, on one line."""
    text = " ".join(json.dumps(value, default=str).split())
    return text if len(text) <= 60 else text[:57] + "..."
