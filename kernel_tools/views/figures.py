"""Pictures of a run, drawn with matplotlib but without pyplot: no global state, no display needed.

Each function returns a `Figure`, which shows itself with alternative text. The page is white in light
and dark themes alike; colours are Okabe and Ito's, and nothing is told apart by colour alone.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.errors import FetchError
from kernel_tools.state import RunSnapshot
from kernel_tools.views import curves
from kernel_tools.views.bundles import picture_bundle, wanted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MplFigure

DPI: Final = 100
BLUE, ORANGE = curves.BLUE, curves.ORANGE
PICTURE_INCHES: Final = 3.1
MATCH_IOU: Final = 0.5
# What a box's label takes of a photograph's longer side: a letter in width, all of it in height.
LETTER_WIDTH: Final = 0.025
LABEL_HEIGHT: Final = 0.08
Box = Sequence[float]


@dataclass(frozen=True, repr=False)
class Figure:
    """A drawn picture.

    Attributes:
        png: the file's bytes.
        alt: what it shows, in a sentence or two.
    """

    png: bytes
    alt: str

    def save(self, path: str | Path) -> Path:
        """Write the PNG and return its path."""
        path = Path(path)
        path.write_bytes(self.png)
        return path

    def __repr__(self) -> str:
        return f"<Figure: {self.alt}>"

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, Any]:
        bundle = picture_bundle(self.png, "image/png", alt=self.alt, plain=repr(self))
        return wanted(bundle, include, exclude)


def plot_metrics(snapshot: RunSnapshot) -> Figure:
    """Draw the training loss against optimizer steps and the evaluation's AP against epochs."""
    figure = blank(9.0, 3.4)
    loss_axes, metric_axes = figure.subplots(1, 2)
    _draw_loss(loss_axes, snapshot.steps)
    _draw_metrics(metric_axes, snapshot.metrics)
    figure.suptitle(
        f"{snapshot.name or snapshot.run_id} ({snapshot.state.value})",
        fontsize=10,
        parse_math=False,
    )
    return Figure(png(figure), f"Curves of run {snapshot.run_id}. {curves.told(snapshot)}")


def show_predictions(
    predictions: Path,
    images_root: Path,
    n: int = 4,
    *,
    worst_first: bool = False,
    min_score: float = 0.5,
) -> Figure:
    """Draw photographs with ground truth (solid) and predictions (dashed, with score).

    Args:
        predictions: a run's `evaluation/predictions.json`.
        images_root: folder that the file names in it are relative to.
        n: how many pictures, at least 1.
        worst_first: begin with the pictures of the lowest F1 at IoU 0.5, instead of the file's order.
        min_score: predictions below it are left out.

    Raises:
        FetchError: a photograph is not in `images_root`.
    """
    told = json.loads(predictions.read_text("utf-8"))
    classes, images = told["classes"], list(told["images"])
    if worst_first:
        images.sort(key=lambda image: f1(image, min_score=min_score))
    images = images[: max(n, 1)]
    columns = min(len(images), 4) or 1
    rows = -(-len(images) // columns) or 1
    figure = blank(PICTURE_INCHES * columns, PICTURE_INCHES * rows + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False)
    captions = []
    for axes, image in zip(grid.flat, images, strict=False):
        captions.append(_draw_picture(axes, image, classes, images_root, min_score))
    for axes in list(grid.flat)[len(images) :]:
        axes.set_axis_off()
    _legend(figure, min_score)
    alt = (
        f"{len(images)} validation pictures with ground truth (solid blue boxes) and predictions"
        f" above {min_score:g} (dashed orange boxes with scores). " + " ".join(captions)
    )
    return Figure(png(figure), alt)


def f1(image: Mapping[str, Any], *, min_score: float) -> float:
    """Return F1 of one picture at IoU 0.5 and `min_score`, matched greedily by score; 1 if both are empty."""
    truth = image["ground_truth"]
    guesses = [p for p in image["predictions"] if p[5] >= min_score]
    if not truth and not guesses:
        return 1.0
    return 2 * _found(truth, guesses) / (len(truth) + len(guesses))


def iou(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes (x1, y1, x2, y2)."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return both / (areas - both)


def _found(truth: Sequence[Box], guesses: Sequence[Box]) -> int:
    left = list(truth)
    for guess in sorted(guesses, key=lambda g: -g[5]):
        same = [t for t in left if t[4] == guess[4]]
        best = max(same, key=lambda t: iou(t, guess), default=None)
        if best is not None and iou(best, guess) >= MATCH_IOU:
            left.remove(best)
    return len(truth) - len(left)


def _draw_loss(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("training loss")
    loss = curves.loss_series(rows)
    if not loss:
        say_empty(axes, "no steps yet")
        return
    axes.plot(loss.x, loss.y, color=BLUE, marker="." if len(loss.x) < 40 else "", linewidth=1.4)
    axes.set_ylim(bottom=min(0.0, *loss.y))


def _draw_metrics(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.set_ylabel("average precision")
    axes.set_ylim(0.0, 1.0)
    looks = {name: look for name, *look in curves.METRICS}
    found = curves.metric_series(rows)
    if not found:
        say_empty(axes, "no evaluation yet")
        return
    for one in found:
        colour, line, marker, _ = looks[one.name]
        every = max(1, len(one.x) // 40)
        axes.plot(
            one.x, one.y, color=colour, linestyle=line, marker=marker, markevery=every,
            markersize=4, label=one.name,
        )  # fmt: skip
    axes.legend(fontsize=8, loc="lower right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_picture(
    axes: Axes, image: Mapping[str, Any], classes: Sequence[str], root: Path, min_score: float
) -> str:
    axes.imshow(_read(root, image["file"]), cmap="gray", interpolation="nearest")
    guesses = [p for p in image["predictions"] if p[5] >= min_score]
    many = len(classes) > 1
    for box in image["ground_truth"]:
        _draw_box(axes, box, BLUE, "-", classes[int(box[4])] if many else "", below=True)
    for box in guesses:
        name = f"{classes[int(box[4])]} " if many else ""
        _draw_box(axes, box, ORANGE, "--", f"{name}{box[5]:.2f}", below=False)
    found, truth = _found(image["ground_truth"], guesses), len(image["ground_truth"])
    extra = len(guesses) - found
    file = Path(image["file"]).name
    axes.set_title(f"{file}: {found} of {truth} found, {extra} extra", fontsize=8, parse_math=False)
    axes.set_xticks([])
    axes.set_yticks([])
    return f"{file}: {found} of {truth} found, {extra} extra."


def _draw_box(axes: Axes, box: Box, colour: str, line: str, label: str, *, below: bool) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    x1, y1, x2, y2 = box[:4]
    # A white rim keeps either line in sight on any photograph.
    rim = [withStroke(linewidth=3.4, foreground="white", alpha=0.85)]
    axes.add_patch(
        Rectangle(
            (x1, y1),
            x2 - x1,
            y2 - y1,
            fill=False,
            edgecolor=colour,
            linestyle=line,
            linewidth=1.8,
            path_effects=rim,
        )
    )
    if label:
        left, right = axes.get_xlim()
        bottom, top = axes.get_ylim()  # a photograph's rows count downwards: bottom is the larger
        side = max(right - left, bottom - top)  # of which all photographs have the same size
        room_x, room_y = LETTER_WIDTH * len(label) * side, LABEL_HEIGHT * side
        at_right = x1 + room_x > right
        # Outside of its box where the photograph goes on, else just inside.
        outside = y2 + room_y <= bottom if below else y1 - room_y >= top
        axes.text(
            min(x2, right) if at_right else max(x1, left),
            min(y2, bottom) if below else max(y1, top),
            label,
            fontsize=7,
            color="white",
            clip_on=True,
            parse_math=False,
            horizontalalignment="right" if at_right else "left",
            verticalalignment="top" if below == outside else "bottom",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0},
        )


def _legend(figure: MplFigure, min_score: float) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[
            Line2D([], [], color=BLUE, linestyle="-", label="ground truth (solid)"),
            Line2D(
                [],
                [],
                color=ORANGE,
                linestyle="--",
                label=f"prediction with score, from {min_score:g} (dashed)",
            ),
        ],
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )


def _read(root: Path, name: str) -> Any:
    """Read a photograph that lies inside `root`: the name comes from the remote."""
    from PIL import Image

    path = root / name
    if not path.resolve().is_relative_to(root.resolve()) or not path.is_file():
        raise FetchError(
            f"{name} is not in {root}.", hint="Name the data set's folder: images_root='data/...'."
        )
    with Image.open(path) as picture:
        return picture.convert("RGB")


def say_empty(axes: Axes, text: str) -> None:
    """Write why there is nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#555555")


def blank(width: float, height: float) -> MplFigure:
    """Return an empty white page, inches."""
    from matplotlib.figure import Figure as MplFigure

    return MplFigure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")


def png(figure: MplFigure) -> bytes:
    """Return the page as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
