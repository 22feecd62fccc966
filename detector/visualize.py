"""Pictures of what was found next to what is there, as PNG files; OpenCV only.

Left the ground truth, right the predictions with `raw=<score>` and, where a calibration is given, with
`p=<precision>`; below, the classes with their colours and how many of each are there and were found.
Each file says in words what it shows, as the PNG text `Description`.
"""

from __future__ import annotations

import colorsys
import os
import struct
import unicodedata
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np

from detector.data.index import DataIndex, Image, encode_png
from detector.files import replacing

if TYPE_CHECKING:
    from detector.calibrate import Calibration

PANEL_WIDTH: Final = (480, 900)
"""A panel is at least and at most this wide, pixels; the picture is scaled to it, shape kept."""

PANEL_HEIGHT: Final = 4000
"""And at most this high: a strip of one by 4,000 pixels would become a drawing of a gigabyte."""

GAP: Final = 12
LINE: Final = 22
FONT: Final = cv2.FONT_HERSHEY_SIMPLEX
TITLE_SCALE, TEXT_SCALE = 0.55, 0.45
INK, PAPER = (30, 30, 30), (255, 255, 255)
LEGEND_CLASSES: Final = 12


class DrawnBox(NamedTuple):
    """A box `(x1, y1, x2, y2)` in the picture's pixels, its class, and what is written at it."""

    box: tuple[float, float, float, float]
    label: int
    text: str


def draw_predictions(
    index: DataIndex,
    document: Mapping[str, Any],
    *,
    to: str | os.PathLike[str],
    count: int = 8,
    min_score: float = 0.5,
    calibration: Calibration | None = None,
) -> list[Path]:
    """Draw the first `count` pictures of a `predictions.json` document of this index.

    Args:
        index: the pictures; found by file name.
        document: as `EvalResult.predictions`, or read back from the file.
        to: folder for the PNG files, made where absent.
        count: at most so many.
        min_score: predictions below are not drawn.
        calibration: says the precision of each score, which is drawn too.

    Returns:
        The files written, in order.

    Raises:
        DataError: a picture cannot be read.
        ValueError: the document is about pictures that the index does not have.
    """
    place = {file: position for position, file in enumerate(index.files)}
    names = [str(name) for name in document["classes"]]
    paths = []
    for entry in document["images"][:count]:
        file = str(entry["file"])
        if file not in place:
            raise ValueError(f"{file} is not a picture of {index.name}")
        truth = [DrawnBox((a, b, c, d), k, names[k]) for a, b, c, d, k in entry["ground_truth"]]
        shown = [found for found in entry["predictions"] if found[5] >= min_score]
        precision = None
        if calibration is not None:
            precision = calibration.apply([f[5] for f in shown], [f[4] for f in shown])
        found = [
            DrawnBox(
                (a, b, c, d),
                k,
                score_text(names, k, score, None if precision is None else float(precision[row])),
            )
            for row, (a, b, c, d, k, score) in enumerate(shown)
        ]
        canvas = side_by_side(
            index.read_image(place[file]),
            truth,
            found,
            class_names=names,
            title=file,
            found_title=f"predictions, score {min_score:.2f} and above: {len(found)}",
        )
        path = Path(to) / png_name(file)
        told = (
            f"{file}: left the ground truth ({_counted(truth, names)}), right the predictions with "
            f"a score of {min_score:g} and above ({_counted(found, names)})."
        )
        with replacing(path) as stream:
            stream.write(described(encode_png(canvas), told))
        paths.append(path)
    return paths


def png_name(file: str) -> str:
    """The name of a drawing: the picture's path in one piece, so that two folders may have an `a.jpg`."""
    path = Path(file).with_suffix("")
    return "_".join(part for part in path.parts if part not in {path.anchor, ".."}) + ".png"


def side_by_side(
    image: Image,
    truth: Sequence[DrawnBox],
    found: Sequence[DrawnBox],
    *,
    class_names: Sequence[str],
    title: str = "",
    found_title: str | None = None,
) -> Image:
    """One picture `(H, W, 3)` RGB: truth, predictions, legend."""
    panels = [
        _panel(draw_boxes(image, boxes), heading)
        for boxes, heading in (
            (truth, f"ground truth: {len(truth)}"),
            (found, found_title or f"predictions: {len(found)}"),
        )
    ]
    height = panels[0].shape[0]
    gap = np.full((height, GAP, 3), PAPER, np.uint8)
    body = np.hstack([gap, panels[0], gap, panels[1], gap])
    legend = _legend(body.shape[1], truth, found, class_names)
    canvas = np.vstack([_line(body.shape[1], title), body, legend])
    return np.ascontiguousarray(canvas)


def draw_boxes(image: Image, boxes: Sequence[DrawnBox]) -> Image:
    """The picture scaled to a legible width, with boxes and their texts; best last, so on top."""
    height, width = image.shape[:2]
    wide = min(max(width, PANEL_WIDTH[0]), PANEL_WIDTH[1])
    scale = min(wide / width, PANEL_HEIGHT / height)
    wide, high = max(1, round(width * scale)), max(1, round(height * scale))
    shrinks = scale < 1
    canvas: Image = cv2.resize(
        image, (wide, high), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
    )
    canvas = np.ascontiguousarray(canvas)
    for drawn in reversed(boxes):
        x1, y1, x2, y2 = (round(edge * scale) for edge in drawn.box)
        cv2.rectangle(canvas, (x1, y1), (x2 - 1, y2 - 1), colour(drawn.label), 2)
    for drawn in reversed(boxes):
        x1, y1, _, _ = (round(edge * scale) for edge in drawn.box)
        _tag(canvas, drawn.text, x1, y1, colour(drawn.label))
    return canvas


def colour(label: int) -> tuple[int, int, int]:
    """RGB of a class: hues a golden section apart, so that neighbours differ."""
    hue = (0.33 + label * 0.618034) % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, (0.85, 0.6)[label // 8 % 2], 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def score_text(
    names: Sequence[str], label: int, score: float, precision: float | None = None
) -> str:
    """What is written at a prediction: `raw=<score>`, `p=<precision>` where known, the class if of many."""
    said = f"raw={score:.2f}" + ("" if precision is None else f" p={precision:.2f}")
    return said if len(names) == 1 else f"{names[label]} {said}"


def described(png: bytes, text: str) -> bytes:
    """Return the PNG file with `text` as its `Description` (PNG specification, 11.3.3.4, iTXt)."""
    body = b"iTXt" + b"Description\0\0\0\0\0" + text.encode("utf-8")
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    after_header = 8 + 25  # signature, then IHDR: length, name, 13 bytes, checksum
    return png[:after_header] + chunk + png[after_header:]


def _counted(boxes: Sequence[DrawnBox], names: Sequence[str]) -> str:
    counts = Counter(names[drawn.label] for drawn in boxes)
    return ", ".join(f"{many} {name}" for name, many in counts.most_common()) or "none"


def _tag(canvas: Image, text: str, x: int, y: int, background: tuple[int, int, int]) -> None:
    """A text on a patch of its class's colour, above (x, y) where there is room, else below."""
    text = _ascii(text)
    (wide, high), base = cv2.getTextSize(text, FONT, TEXT_SCALE, 1)
    x = max(0, min(x, canvas.shape[1] - wide - 4))
    tall = high + base + 5
    top = y - tall
    if top < 0:
        top = max(0, min(y, canvas.shape[0] - tall))
    cv2.rectangle(canvas, (x, top), (x + wide + 4, top + tall), background, -1)
    bright = 0.3 * background[0] + 0.59 * background[1] + 0.11 * background[2] > 130
    ink = INK if bright else PAPER
    cv2.putText(canvas, text, (x + 2, top + high + 2), FONT, TEXT_SCALE, ink, 1, cv2.LINE_AA)


def _panel(image: Image, heading: str) -> Image:
    return np.vstack([_line(image.shape[1], heading, indent=0), image])


def _line(width: int, text: str, *, indent: int = GAP) -> Image:
    line = np.full((LINE + 6, width, 3), PAPER, np.uint8)
    cv2.putText(line, _ascii(text), (indent, LINE - 2), FONT, TITLE_SCALE, INK, 1, cv2.LINE_AA)
    return line


def _legend(
    width: int, truth: Sequence[DrawnBox], found: Sequence[DrawnBox], class_names: Sequence[str]
) -> Image:
    there = Counter(drawn.label for drawn in truth)
    seen = Counter(drawn.label for drawn in found)
    labels = sorted(there | seen, key=lambda label: (-there[label] - seen[label], label))
    rows: list[list[tuple[int, str]]] = [[]]
    used = GAP
    for label in labels[:LEGEND_CLASSES]:
        text = _ascii(f"{class_names[label]}: {there[label]} there, {seen[label]} found")
        (wide, _), _ = cv2.getTextSize(text, FONT, TEXT_SCALE, 1)
        if used + wide + 40 > width and rows[-1]:
            rows.append([])
            used = GAP
        rows[-1].append((label, text))
        used += wide + 40
    canvas = np.full((LINE * len(rows) + 8, width, 3), PAPER, np.uint8)
    for number, row in enumerate(rows):
        x, y = GAP, number * LINE + 18
        for label, text in row:
            cv2.rectangle(canvas, (x, y - 11), (x + 12, y + 1), colour(label), -1)
            cv2.putText(canvas, text, (x + 18, y), FONT, TEXT_SCALE, INK, 1, cv2.LINE_AA)
            (wide, _), _ = cv2.getTextSize(text, FONT, TEXT_SCALE, 1)
            x += wide + 40
    return canvas


def _ascii(text: str) -> str:
    """What OpenCV's own letters can show: accents dropped, the rest as a question mark."""
    plain = unicodedata.normalize("NFKD", text)
    letters = (letter for letter in plain if not unicodedata.combining(letter))
    return "".join(letters).encode("ascii", "replace").decode("ascii")
