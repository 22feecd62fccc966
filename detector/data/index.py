"""One in-memory table of pictures and boxes, whatever format they came in.

Everything after this module (loader, evaluator, pictures of predictions) knows only `DataIndex`.
Arrays, not lists of dicts: worker processes share them without copying.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from detector.config import DataConfig

Split: TypeAlias = Literal["train", "val"]
Image: TypeAlias = NDArray[np.uint8]
"""`(H, W, 3)` RGB."""

BUILT_IN: Final = ("coins", "digits", "synthetic")

JPEG_SUFFIXES: Final = (".jpg", ".jpeg")
_JPEG_START, _JPEG_SCAN, _JPEG_END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"

GRID: Final = 1 << 14
"""Steps a pixel of the boxes in an index; a power of two, so that dividing by it is exact."""


class DataError(ValueError):
    """A data set, label file or picture is not fit for use; one sentence that names the file."""


class MissingPackageError(DataError):
    """A built-in set draws on a package that is not installed; the sentence has the pip line."""


@dataclass(frozen=True, slots=True)
class Annotated:
    """One picture's row on its way into an index.

    Attributes:
        file: path relative to the data set's root, with forward slashes.
        width: pixels, as the decoder sees the picture (EXIF rotation applied).
        height: pixels.
        boxes: `(K, 4)` xyxy in pixels; 0 and width are the picture's outer edges.
        labels: `(K,)` class numbers.
        iscrowd: `(K,)` True where a box marks a region to ignore; None for none.
        areas: `(K,)` object areas in square pixels that decide small, medium and large, NaN for the
            box's own; None for all boxes' own.
        image_id: what the picture is called in the source; None: its position.
    """

    file: str
    width: int
    height: int
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    iscrowd: NDArray[np.bool_] | None = None
    areas: NDArray[np.float64] | None = None
    image_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DataIndex:
    """A split of a data set: N pictures, T boxes, in a fixed order.

    Attributes:
        name: what it is and which split, for messages: `coins/val`.
        root: folder that `files` are relative to, relative itself where it was given so; empty for
            pictures that exist in memory only.
        files: `N` picture paths relative to `root`, forward slashes.
        class_names: the names of labels 0 to C-1.
        category_ids: `(C,)` what the source calls labels 0 to C-1 (COCO's are sparse).
        image_ids: `(N,)` int64, unique; COCO's own, else 0 to N-1.
        sizes: `(N, 2)` int64, width and height.
        boxes: `(T, 4)` float32 xyxy in pixels.
        labels: `(T,)` int64.
        iscrowd: `(T,)` bool: not trained on, ignored in evaluation (COCO's crowds, VOC's difficult).
        areas: `(T,)` float64, square pixels.
        offsets: `(N + 1,)` int64: picture i owns boxes `offsets[i]:offsets[i + 1]`.
        images: decoded pictures where they were made here, else None.
        notes: what was repaired while reading, one sentence each.
    """

    name: str
    root: str
    files: tuple[str, ...]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    image_ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    iscrowd: NDArray[np.bool_]
    areas: NDArray[np.float64]
    offsets: NDArray[np.int64]
    images: tuple[Image, ...] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_paths(self) -> tuple[str, ...]:
        """`N` paths that open the pictures; empty where they exist in memory only."""
        if self.images is not None:
            return ()
        return tuple(os.path.join(self.root, file) for file in self.files)

    def where(self, position: int) -> str:
        """The picture's path as a message should name it."""
        return os.path.join(self.root, self.files[position])

    def rows(self, position: int) -> slice:
        """The picture's rows in `boxes`, `labels`, `iscrowd` and `areas`."""
        return slice(int(self.offsets[position]), int(self.offsets[position + 1]))

    def reduction(self, position: int, least: int) -> int:
        """By how much a picture may be decoded smaller and keep `least` pixels a side: 1, 2, 4 or 8.

        Only JPEG can be, which saves most of the time of decoding it.
        """
        if self.images is not None or not self.files[position].lower().endswith(JPEG_SUFFIXES):
            return 1
        side = int(self.sizes[position].min())
        return next((by for by in (8, 4, 2) if side // by >= least), 1)

    def read_image(self, position: int, *, reduction: int = 1) -> Image:
        """Decode picture `position` to `(H, W, 3)` RGB uint8; the caller must not write into it.

        With a `reduction` sides are divided by it and rounded up, where the file is a JPEG.

        Raises:
            DataError: the file is gone, is no whole picture, or changed size since it was indexed.
        """
        if self.images is not None:
            return self.images[position]
        image = decode(self.where(position), reduction=reduction)
        width, height = (int(value) for value in self.sizes[position])
        reduced = (-(-height // reduction), -(-width // reduction))
        if image.shape[:2] not in {(height, width), reduced}:
            raise DataError(
                f"{self.where(position)} decodes to {image.shape[1]}x{image.shape[0]} but its header "
                f"says {width}x{height}; write the file anew."
            )
        return image

    def head(self, count: int | None) -> DataIndex:
        """The first `count` pictures (all for None)."""
        if count is None or count >= len(self):
            return self
        boxes = slice(0, int(self.offsets[count]))
        return replace(
            self,
            files=self.files[:count],
            image_ids=self.image_ids[:count],
            sizes=self.sizes[:count],
            boxes=self.boxes[boxes],
            labels=self.labels[boxes],
            iscrowd=self.iscrowd[boxes],
            areas=self.areas[boxes],
            offsets=self.offsets[: count + 1],
            images=None if self.images is None else self.images[:count],
        )

    def keep_classes(self, names: Sequence[str]) -> DataIndex:
        """Only boxes of the named classes, renumbered in the order given; pictures all stay.

        Raises:
            DataError: a name is not a class of this set, or is given twice.
        """
        if not names:
            return self
        if len(set(names)) != len(names):
            raise DataError(f"data.classes names a class twice: {', '.join(names)}.")
        new_label = np.full(self.num_classes, -1, np.int64)
        for label, name in enumerate(names):
            if name not in self.class_names:
                raise DataError(
                    f"data.classes: {self.name} has no class {name!r}{nearest(name, self.class_names)}"
                    f"; it has {listed(self.class_names)}."
                )
            new_label[self.class_names.index(name)] = label
        labels = new_label[self.labels]
        kept = labels >= 0
        counts = np.concatenate([[0], np.cumsum(kept)])
        return replace(
            self,
            class_names=tuple(names),
            category_ids=tuple(self.category_ids[self.class_names.index(name)] for name in names),
            boxes=self.boxes[kept],
            labels=labels[kept],
            iscrowd=self.iscrowd[kept],
            areas=self.areas[kept],
            offsets=counts[self.offsets].astype(np.int64),
        )

    def fingerprint(self) -> str:
        """16 hex digits that change with any file name, size, box, label or class name."""
        digest = hashlib.sha256("\n".join((*self.class_names, "", *self.files)).encode())
        for array in (self.sizes, self.boxes, self.labels, self.iscrowd, self.offsets):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def make_index(
    rows: Sequence[Annotated],
    *,
    name: str,
    root: str,
    class_names: Sequence[str],
    category_ids: Sequence[int] | None = None,
    images: Sequence[Image] | None = None,
    notes: Iterable[str] = (),
) -> DataIndex:
    """Pack rows into the table: boxes clipped to their pictures, and to the grid that float32 has.

    The grid (2^-14 pixel) makes the same boxes out of fractions, corners and sides, which differ in
    the last digits of float64.
    """

    def column(values: list[NDArray[Any]], shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
        return np.concatenate([np.zeros(shape, kind), *values]).astype(kind)

    counts = [len(row.labels) for row in rows]
    sizes = np.array([(row.width, row.height) for row in rows], np.int64).reshape(-1, 2)
    limits = np.repeat(np.tile(sizes, 2), counts, axis=0)
    boxes = column([row.boxes for row in rows], (0, 4), np.float64)
    boxes = (np.clip(boxes, 0, limits) * GRID).round().astype(np.float32) / np.float32(GRID)
    width, height = (boxes[:, 2:] - boxes[:, :2]).astype(np.float64).T
    areas = column(
        [np.full(len(row.labels), np.nan) if row.areas is None else row.areas for row in rows],
        (0,),
        np.float64,
    )
    ids = [row.image_id for row in rows]
    return DataIndex(
        name=name,
        root=root,
        files=tuple(row.file for row in rows),
        class_names=tuple(class_names),
        category_ids=tuple(range(len(class_names)) if category_ids is None else category_ids),
        image_ids=np.array(range(len(rows)) if None in ids else ids, np.int64),
        sizes=sizes,
        boxes=boxes,
        labels=column([row.labels for row in rows], (0,), np.int64),
        iscrowd=column(
            [
                np.zeros(len(row.labels), bool) if row.iscrowd is None else row.iscrowd
                for row in rows
            ],
            (0,),
            np.bool_,
        ),
        areas=np.where(np.isnan(areas), width * height, areas),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        images=None if images is None else tuple(images),
        notes=tuple(notes),
    )


def build_index(data: DataConfig, split: Split) -> DataIndex:
    """The table for one split of the configured data.

    `data.root` null with a built-in `data.format` makes the pictures in memory. A root is read as
    `data.format` says; `auto` and the built-in names mean what lies there.
    `data.train_samples` and `data.eval_samples` are how many pictures to make, or read of a folder.

    Raises:
        DataError: nothing usable there, in one sentence.
        MissingPackageError: a built-in set needs a package that is not installed.
    """
    from detector.data import formats, toy

    count = data.train_samples if split == "train" else data.eval_samples
    if data.root is None:
        if data.format not in BUILT_IN:
            raise DataError(
                "data.root is not set: give the data set's folder (--set data.root=PATH), or use "
                f"a built-in set (--set data.format={BUILT_IN[0]}, or {', '.join(BUILT_IN[1:])})."
            )
        index = toy.make(data.format, split, count=count, seed=data.seed)
    else:
        hint = ""
        if data.format in BUILT_IN:
            hint = f" (write it with: python -m detector prepare {data.format} --to {data.root})"
        named = data.train_annotations is not None or data.val_annotations is not None
        index = formats.read(
            data.root,
            split,
            data_format="coco" if named and data.format == "auto" else data.format,
            seed=data.seed,
            limit=count,
            annotations=data.train_annotations if split == "train" else data.val_annotations,
            images=data.train_images if split == "train" else data.val_images,
            hint=hint,
        )
    return index.keep_classes(data.classes)


def check_same_classes(train: DataIndex, val: DataIndex) -> None:
    """Raise DataError where the splits, each with names of its own, do not number classes alike."""
    if train.class_names != val.class_names:
        raise DataError(
            f"{train.name} has the classes {listed(train.class_names)}, but {val.name} has "
            f"{listed(val.class_names)}; list the same in both, in the same order, or choose some with "
            "data.classes."
        )


def decode(path: str, *, reduction: int = 1) -> Image:
    """Read a picture as `(H, W, 3)` RGB uint8: EXIF rotation applied, alpha dropped, grey tripled.

    With a `reduction` of 2, 4 or 8 a JPEG is decoded to that part of its sides, rounded up.

    Raises:
        DataError: the file cannot be read, is cut off, or is no picture.
    """
    import cv2

    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if _cut_off(data):
        raise DataError(f"{path} is cut off after {len(data)} bytes; copy it anew, or remove it.")
    rgb = getattr(cv2, "IMREAD_COLOR_RGB", None)  # OpenCV 4.11
    reduced = 8 * reduction if reduction > 1 and data.startswith(_JPEG_START) else 0
    flags = reduced | (cv2.IMREAD_COLOR if rgb is None else rgb)
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flags) if data else None
    if image is None:
        raise DataError(f"{path} is not a picture that OpenCV can decode ({len(data)} bytes).")
    decoded: Image = image if rgb is not None else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return decoded


def _cut_off(data: bytes) -> bool:
    """True for a JPEG or PNG without its end, of which some decoders make a half grey picture."""
    if data.startswith(_JPEG_START):
        # A preview inside has an end too, but before the last scan begins; padding may follow.
        whole = data.endswith(_JPEG_END) or data.rfind(_JPEG_END) > data.rfind(_JPEG_SCAN)
        return not whole
    return data.startswith(b"\x89PNG") and b"IEND" not in data[-4096:]


def encode_png(image: Image) -> bytes:
    """A picture `(H, W, 3)` RGB as the bytes of a PNG file."""
    import cv2

    _, data = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    content: bytes = data.tobytes()
    return content


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'car'?)` where something is close, else nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listed(names: Sequence[str], limit: int = 12) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
