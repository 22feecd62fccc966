"""Whatever a user calls a picture (a path, an array, a PIL image, a tensor) as `(H, W, 3)` RGB uint8.

Files are decoded as in training, and a PIL image that is the same file gives the same pixels. Nothing
here imports torch or PIL: who hands over an object of theirs has imported them.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from detector.data.formats.pictures import SUFFIXES
from detector.data.formats.pictures import find_pictures as pictures_below
from detector.data.index import DataError, Image, decode

if TYPE_CHECKING:
    from PIL import Image as Pillow
    from torch import Tensor

Picture: TypeAlias = "str | os.PathLike[str] | NDArray[Any] | Tensor | Pillow.Image"


def load_picture(picture: Picture) -> Image:
    """A picture as `(H, W, 3)` RGB uint8: EXIF rotation applied, alpha dropped, grey tripled.

    Args:
        picture: a path; an array (H, W), (H, W, 1|3|4); a tensor (H, W), (1|3|4, H, W), on any device;
            or a PIL image. Arrays and tensors are RGB, uint8 or floating point in 0..1.

    Raises:
        DataError: it is none of these, or cannot be read; in one sentence.
    """
    if isinstance(picture, str | os.PathLike):
        return decode(os.fspath(picture))
    if _is_tensor(picture):
        tensor: Any = picture
        values = tensor.detach().cpu()
        values = values.float() if values.is_floating_point() else values  # bfloat16 has no array
        if values.dim() == 3:
            if len(values) not in {1, 3, 4}:
                raise DataError(
                    f"A tensor of shape {tuple(values.shape)} is no picture: channels come first, (3, H, W)."
                )
            values = values.permute(1, 2, 0)
        return _from_array(values.numpy(), "A tensor")
    if _is_pillow(picture):
        return _from_pillow(picture)
    if isinstance(picture, np.ndarray):
        return _from_array(picture, "An array")
    raise DataError(
        f"An object of type {type(picture).__name__} is no picture: give a path, an array (H, W, 3), a "
        "tensor (3, H, W) or a PIL image."
    )


def listed_pictures(pictures: Picture | Iterable[Picture]) -> Iterator[Picture]:
    """One picture, or each of many: what is iterable and no picture itself, or an array of four axes."""
    if isinstance(pictures, str | os.PathLike) or _is_pillow(pictures):
        yield cast("Picture", pictures)
    elif isinstance(pictures, np.ndarray) or _is_tensor(pictures):
        array: Any = pictures
        if array.ndim == 4:
            yield from array
        else:
            yield array
    else:
        many: Any = pictures
        if not isinstance(many, Iterable):
            load_picture(many)  # says what it is not
        yield from many


def find_pictures(places: Sequence[str]) -> list[str]:
    """Paths, folders (all pictures below, sorted) and patterns (`**` for any depth) as paths.

    Raises:
        DataError: there is nothing there.
    """
    found: list[str] = []
    for place in places:
        if os.path.isdir(place):
            files = sorted(map(str, pictures_below(Path(place))))
            if not files:
                raise DataError(f"There are no pictures in {place} ({' '.join(sorted(SUFFIXES))}).")
        elif not os.path.exists(place) and glob.has_magic(place):
            files = sorted(
                path for path in glob.glob(place, recursive=True) if os.path.isfile(path)
            )
            if not files:
                raise DataError(f"No file fits {place}.")
        else:
            files = [place]
        found.extend(files)
    return list(dict.fromkeys(found))


def _from_array(values: NDArray[Any], what: str) -> Image:
    """Rows first, channels last."""
    if values.ndim == 2:
        values = values[:, :, None]
    if values.ndim != 3 or values.shape[2] not in {1, 3, 4}:
        raise DataError(
            f"{what} of shape {values.shape} is no picture: it must be (H, W), or (H, W, 3) with the "
            "channels last."
        )
    if 0 in values.shape:
        raise DataError(f"{what} of shape {values.shape} has no pixels.")
    if np.issubdtype(values.dtype, np.floating):
        low, high = float(values.min()), float(values.max())
        if not (low >= 0.0 and high <= 1.0):  # also where one is not a number
            raise DataError(
                f"{what} of {values.dtype} must lie in 0..1, not {low:g}..{high:g}: divide by 255, or "
                "give uint8; the network does its own normalisation."
            )
        values = (values * 255).round().astype(np.uint8)
    if values.dtype != np.uint8:
        raise DataError(f"{what} must be of uint8, or floating point in 0..1, not {values.dtype}.")
    colours = values[:, :, :3]
    return np.ascontiguousarray(np.broadcast_to(colours, (*colours.shape[:2], 3)))


def _from_pillow(picture: Any) -> Image:
    from PIL import ImageOps

    if picture.mode.startswith("I;16"):  # OpenCV keeps the upper byte, PIL would clip
        upper = (np.asarray(picture) >> 8).astype(np.uint8)
        return _from_array(upper, "An image")
    if picture.mode in {"I", "F"}:
        raise DataError(
            f"A PIL image of mode {picture.mode} has no range known here: convert it to RGB."
        )
    try:
        upright = ImageOps.exif_transpose(picture)
        return _from_array(np.asarray(upright.convert("RGB")), "An image")
    except OSError as error:
        raise DataError(f"The PIL image cannot be decoded: {error}.") from error


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_pillow(value: object) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
