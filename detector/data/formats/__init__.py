"""Data sets as they lie on disk, each read into the one table.

pictures     what all share: files, headers, sound boxes
yolo  coco  voc  pennfudan     a module a format
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from detector.data.formats import coco, pennfudan, voc, yolo
from detector.data.formats.pictures import SUFFIXES
from detector.data.formats.yolo import label_path, read_labels
from detector.data.index import DataError, DataIndex, Split

__all__ = ["SUFFIXES", "label_path", "read", "read_labels", "recognise"]

LAYOUTS: Final = (
    "data.yaml (YOLO), annotations/instances_train*.json or train/_annotations.coco.json (COCO), "
    "Annotations/*.xml or train/*.xml (Pascal VOC), PNGImages and PedMasks (Penn-Fudan)"
)


def recognise(root: Path) -> str | None:
    """`yolo`, `coco`, `voc` or `pennfudan`, by what lies in the folder; None for none of them."""
    if yolo.find_description(root) is not None:
        return "yolo"
    if any(coco.find_annotations(root, split) for split in ("train", "val")):
        return "coco"
    if pennfudan.is_pennfudan(root):
        return "pennfudan"
    return "voc" if voc.is_voc(root) else None


def read(
    root: str | os.PathLike[str],
    split: Split,
    *,
    data_format: str = "auto",
    seed: int = 0,
    limit: int | None = None,
    annotations: str | None = None,
    images: str | None = None,
    hint: str = "",
) -> DataIndex:
    """Read one split of the data set at `root`: its folder, or its data.yaml.

    Args:
        root: relative paths start at the working directory.
        split: `train` or `val`.
        data_format: `yolo`, `coco`, `voc` or `pennfudan`; anything else: what the folder holds.
        seed: of a split that is drawn.
        limit: read only the first so many pictures.
        annotations: COCO: the split's JSON file, from `root`.
        images: COCO: the folder of its pictures, from `root`.
        hint: appended to the sentence that says that the folder is absent.

    Raises:
        DataError: in one sentence, naming the file and the place in it.
    """
    path = Path(root).expanduser()
    if not path.exists():
        raise DataError(f"The data set {path} does not exist{hint}.")
    kind: str | None = data_format
    if kind not in {"yolo", "coco", "voc", "pennfudan"}:
        kind = "coco" if annotations is not None else recognise(path)
    if path.is_file() and kind != "yolo":
        raise DataError(
            f"data.root is the file {path}; give the folder of the data set, and for a COCO file of "
            f"another name data.{split}_annotations={path.name}."
        )
    if kind == "yolo":
        return yolo.read(path, split, limit=limit)
    if kind == "coco":
        return coco.read(path, split, annotations=annotations, images=images, limit=limit)
    if kind == "voc":
        return voc.read(path, split, limit=limit)
    if kind == "pennfudan":
        return pennfudan.read(path, split, seed=seed, limit=limit)
    inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and recognise(folder)]
    if inside:
        raise DataError(f"{path} holds the data set one folder deeper: use data.root={inside[0]}.")
    raise DataError(f"{path} is no data set that is known here: it has none of {LAYOUTS}.")
