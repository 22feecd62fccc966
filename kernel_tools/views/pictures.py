"""Photographs that came back from a run, small enough for a notebook, with words for who cannot see them."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kernel_tools.errors import FetchError
from kernel_tools.redact import redact
from kernel_tools.views.bundles import picture_bundle, wanted

# As wide as a page shows it; a notebook that holds eight of them stays below 3 MB.
WIDEST: Final = 1320
QUALITY: Final = 85


@dataclass(frozen=True, repr=False)
class Picture:
    """One picture; the file itself is at `path`, whole.

    Attributes:
        path: the fetched file.
        jpeg: what the notebook holds, scaled down.
        alt: what it shows.
    """

    path: Path
    jpeg: bytes
    alt: str

    def __repr__(self) -> str:
        return redact(f"<Picture {self.path}: {self.alt}>")

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, Any]:
        bundle = picture_bundle(self.jpeg, "image/jpeg", alt=self.alt, plain=repr(self))
        return wanted(bundle, include, exclude)


def read_picture(path: Path) -> Picture:
    """Read a picture; its own `Description`, where it has one, says what it shows.

    Raises:
        FetchError: it is no picture.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            alt = str(image.info.get("Description") or path.name)
            shown = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise FetchError(f"{path} is no picture: {error}.") from error
    if shown.width > WIDEST:
        shown = shown.resize(
            (WIDEST, max(1, round(shown.height * WIDEST / shown.width))), Image.Resampling.LANCZOS
        )
    file = io.BytesIO()
    shown.save(file, format="JPEG", quality=QUALITY)
    return Picture(path, file.getvalue(), alt)
