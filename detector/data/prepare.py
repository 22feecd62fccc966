"""Write a built-in set as a YOLO folder: something to look at, to stage, and to train from.

`formats.read` gives back the very index that `toy.make` gives in memory, pixels included.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import cv2
import yaml

from detector.data import toy
from detector.data.index import DataError, DataIndex, Split

SPLITS: Final[tuple[Split, ...]] = ("train", "val")


def prepare(
    name: str,
    *,
    to: str | os.PathLike[str],
    train: int | None = None,
    val: int | None = None,
    seed: int = 0,
    size: int = toy.SIZE,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write set `name` to the folder `to`, which appears whole or not at all.

    Args:
        name: `coins`, `digits` or `synthetic`.
        to: a folder that does not exist yet or is empty.
        train: pictures in the train split; None for the set's own number. `val` likewise.
        val: see `train`.
        seed: another seed, another set.
        size: side of a picture, pixels.
        on_progress: called with pictures written and pictures in all.

    Returns:
        The folder.

    Raises:
        DataError: no such set, or the folder is taken.
        MissingPackageError: the set needs a package that is not installed.
    """
    target = Path(to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target} exists and is not empty; give another folder, or remove it.")
    sets = [
        toy.make(name, split, count=count, seed=seed, size=size)
        for split, count in zip(SPLITS, (train, val), strict=True)
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        total = sum(len(index) for index in sets)
        done = 0
        for split, index in zip(SPLITS, sets, strict=True):
            for kind in ("images", "labels"):
                (partial / kind / split).mkdir(parents=True)
            for position in range(len(index)):
                _write_picture(partial, index, position)
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
        description: dict[str, object] = {"path": "."}
        description.update({split: f"images/{split}" for split in SPLITS})
        description["names"] = dict(enumerate(sets[0].class_names))
        (partial / "data.yaml").write_text(
            f"# Built-in set {name}, seed {seed}. Made by: python -m detector prepare {name}\n"
            + yaml.safe_dump(description, sort_keys=False),
            encoding="utf-8",
        )
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def label_rows(index: DataIndex, position: int) -> str:
    """The picture's label file: `class cx cy w h`, with digits enough to read the same boxes back."""
    width, height = (float(value) for value in index.sizes[position])
    rows = index.rows(position)
    lines = []
    for (x1, y1, x2, y2), label in zip(
        index.boxes[rows].tolist(), index.labels[rows].tolist(), strict=True
    ):
        fractions = (
            (x1 + x2) / 2 / width,
            (y1 + y2) / 2 / height,
            (x2 - x1) / width,
            (y2 - y1) / height,
        )
        lines.append(f"{label} " + " ".join(f"{value:.12g}" for value in fractions) + "\n")
    return "".join(lines)


def _write_picture(root: Path, index: DataIndex, position: int) -> None:
    picture = root / index.files[position]
    bgr = cv2.cvtColor(index.read_image(position), cv2.COLOR_RGB2BGR)
    if not cv2.imwrite(str(picture), bgr):
        raise DataError(f"{picture} could not be written; is the disk full?")
    labels = root / index.files[position].replace("images/", "labels/", 1)
    labels.with_suffix(".txt").write_text(label_rows(index, position), encoding="ascii")
