"""An evaluation as tables and figures: what to read first, then by class, curve and confusion matrix.

The page of a figure is white in light and dark themes alike; hues are Okabe and Ito's, each with its own
line and marker, and every number that matters is said in the alternative text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.results.evaluation import Evaluation, JudgedClass
from kernel_tools.views.figures import Figure, blank, png, say_empty
from kernel_tools.views.static import TableView, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTHING: Final = "none to find"
MEANINGS: Final = {
    "mAP@0.50:0.95": "average precision, mean over IoU 0.50 to 0.95",
    "AP50": "at IoU 0.50",
    "AP75": "at IoU 0.75",
    "AP_small": "objects below 32 x 32 pixels",
    "AP_medium": "objects up to 96 x 96 pixels",
    "AP_large": "objects above 96 x 96 pixels",
    "AR_1": "average recall with 1 detection a picture",
    "AR_10": "with 10",
    "AR_100": "with 100",
    "AR_small": "with 100, objects below 32 x 32 pixels",
    "AR_medium": "with 100, objects up to 96 x 96 pixels",
    "AR_large": "with 100, objects above 96 x 96 pixels",
}
# More rows than this are no table to read: the worst are shown.
MOST_ROWS: Final = 30
# Curves that can be told apart; of more classes the best and the worst are named.
MOST_CURVES: Final = 7
ENDS: Final = 3
MOST_CELLS: Final = 14
PERCENT_CELLS: Final = 8
LONGEST_NAME: Final = 24

# Okabe & Ito (2008) without its yellow, which a white page swallows.
HUES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00", "#5c5f66")
LINES: Final = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (3, 3)))
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
INK: Final = "#1b1b1b"


def evaluation_parts(judged: Evaluation) -> tuple[View | Figure, ...]:
    """Return what there is to see, in reading order."""
    return (
        metrics_table(judged),
        class_table(judged),
        pr_curve(judged),
        confusion_matrix(judged),
    )


def metrics_table(judged: Evaluation) -> TableView:
    """COCO's figures, with what each means."""
    when = "" if judged.epoch is None else f", after epoch {judged.epoch}"
    rows = tuple(
        (name, figure(value), MEANINGS.get(name, "")) for name, value in judged.metrics.items()
    )
    caption = f"{judged.run_id}: {judged.images} pictures evaluated{when}"
    return TableView(caption, ("figure", "value", "what it is"), rows, right=(1,))


def class_table(judged: Evaluation) -> TableView:
    """One row a class, in label order; of very many, the worst."""
    classes, caption = list(judged.classes), "By class"
    if len(classes) > MOST_ROWS:
        classes = [one for one in classes if one.ap is not None]
        classes = sorted(classes, key=lambda one: one.ap or 0.0)[:MOST_ROWS]
        caption = f"The {len(classes)} weakest of {len(judged.classes)} classes; evaluation.classes has all"
    rows = tuple(
        (
            one.name,
            str(one.instances),
            figure(one.ap50),
            figure(one.ap),
            figure(one.best_f1),
            figure(one.best_score),
        )
        for one in classes
    )
    header = ("class", "objects", "AP50", "mAP@0.50:0.95", "best F1", "at score")
    return TableView(caption, header, rows, right=(1, 2, 3, 4, 5))


def pr_curve(judged: Evaluation) -> Figure:
    """Precision against recall, a line a class, with the point of the best F1."""
    page = blank(7.6, 4.4)
    axes = page.subplots()
    axes.set_xlabel("recall: share of the objects that are found")
    axes.set_ylabel("precision: share of the detections that are right")
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.02)
    axes.grid(color="#dddddd", linewidth=0.6)
    shown = [one for one in judged.classes if one.precision]
    if not shown:
        say_empty(axes, "there is no object to find")
        return Figure(png(page), "Precision-recall curve: there is no object to find.")
    named = _ends(shown) if len(shown) > MOST_CURVES else shown
    for one in shown:
        if one not in named:
            axes.plot(judged.recall, one.precision, color="#c4c4c4", linewidth=0.6, zorder=1)
    for one, hue, line, marker in zip(named, cycle(HUES), cycle(LINES), cycle(MARKERS)):
        _draw_curve(axes, judged.recall, one, hue, line, marker)
    if len(shown) > 1:
        mean = [
            sum(values) / len(shown)
            for values in zip(*(one.precision for one in shown), strict=True)
        ]
        ap50 = judged.metrics.get("AP50")
        axes.plot(
            judged.recall,
            mean,
            color=INK,
            linewidth=2.6,
            zorder=4,
            label=f"mean, AP50 {figure(ap50)}",
        )
    axes.set_title(
        f"Precision and recall at IoU {judged.iou:.2f}; marks: best F1",
        fontsize=10,
        parse_math=False,
    )
    _legend(axes)
    return Figure(png(page), _curve_told(judged, shown, named))


def confusion_matrix(judged: Evaluation) -> Figure:
    """What is there (rows) and what was found (columns), as counts and shares of the row."""
    names, matrix = _reduced(judged.names, judged.confusion)
    names = [shorten(name) for name in names]
    side = len(names)
    page = blank(max(4.6, 1.9 + 0.5 * side), max(3.8, 1.5 + 0.4 * side))
    axes = page.subplots()
    shares = [[cell / max(1, sum(row)) for cell in row] for row in matrix[:-1]]
    shares.append([0.0] * side)  # what is found where nothing is has no whole to be a share of
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    for row in range(side):
        for column in range(side):
            _draw_cell(axes, row, column, matrix[row][column], shares[row][column], side)
    axes.set_xticks(range(side), [*names[:-1], "missed"], rotation=40, ha="right", parse_math=False)
    axes.set_yticks(range(side), [*names[:-1], "nothing"], parse_math=False)
    axes.tick_params(length=0)
    axes.set_xlabel("found as")
    axes.set_ylabel("what is there")
    page.suptitle(  # as wide as the page: long names leave the axes little
        f"Confusion at IoU {judged.iou:.2f}, score {judged.confusion_score:g} and above",
        fontsize=10,
        parse_math=False,
    )
    return Figure(png(page), _confusion_told(judged))


def shorten(name: str) -> str:
    """A name that leaves room for the figure; the table above has it whole."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def figure(value: float | None) -> str:
    """Four digits behind the point; in words where there is nothing of the kind."""
    return NOTHING if value is None else f"{value:.4f}"


def _draw_curve(
    axes: Axes, recall: Sequence[float], one: JudgedClass, hue: str, line: Any, marker: str
) -> None:
    f1 = [2 * p * r / max(p + r, 1e-12) for p, r in zip(one.precision, recall, strict=True)]
    best = max(range(len(f1)), key=f1.__getitem__)
    end = 1 + max(
        (k for k, p in enumerate(one.precision) if p > 0), default=0
    )  # reached no further
    axes.plot(
        recall[:end],
        one.precision[:end],
        color=hue,
        linestyle=line,
        linewidth=1.7,
        marker=marker,
        markevery=[best],
        markersize=8,
        markeredgecolor="white",
        clip_on=False,
        label=f"{shorten(one.name)}, AP50 {figure(one.ap50)}",
        zorder=3,
    )


def _ends(classes: Sequence[JudgedClass]) -> list[JudgedClass]:
    """The best and the worst."""
    ranked = sorted(classes, key=lambda one: -(one.ap50 or 0.0))
    return ranked[:ENDS] + ranked[-ENDS:]


def _legend(axes: Axes) -> None:
    """Beside the curves, where it covers none; names are text, never formulas."""
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_cell(axes: Axes, row: int, column: int, count: int, share: float, side: int) -> None:
    from matplotlib.patches import Rectangle

    corner = (column - 0.5, row - 0.5)
    if row == column == side - 1:  # nothing there and nothing found is not counted
        axes.add_patch(
            Rectangle(corner, 1, 1, facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="//")
        )
        return
    if row == column:
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=INK, linewidth=1.8))
    if not count:
        return
    said = f"{count}\n{share:.0%}" if side <= PERCENT_CELLS + 1 and row < side - 1 else f"{count}"
    axes.text(
        column,
        row,
        said,
        ha="center",
        va="center",
        fontsize=9,
        color="white" if share > 0.68 else INK,  # each at least 4 to 1 on its blue
    )


def _reduced(
    names: Sequence[str], matrix: Sequence[Sequence[int]]
) -> tuple[list[str], list[list[int]]]:
    """At most `MOST_CELLS` classes, those with most errors; the others are summed up as one."""
    classes = len(names) - 1
    if classes <= MOST_CELLS:
        return list(names), [list(row) for row in matrix]
    errors = [
        sum(matrix[k]) + sum(row[k] for row in matrix) - 2 * matrix[k][k] for k in range(classes)
    ]
    worst = sorted(sorted(range(classes), key=lambda k: -errors[k])[: MOST_CELLS - 1])
    groups = [*([k] for k in worst), [k for k in range(classes) if k not in worst], [classes]]
    kept = [*(names[k] for k in worst), f"{classes - len(worst)} others", names[-1]]
    summed = [
        [sum(matrix[i][j] for i in rows for j in columns) for columns in groups] for rows in groups
    ]
    return kept, summed


def _curve_told(
    judged: Evaluation, shown: Sequence[JudgedClass], named: Sequence[JudgedClass]
) -> str:
    each = "; ".join(
        f"{one.name} AP50 {figure(one.ap50)}, best F1 {figure(one.best_f1)} at score"
        f" {figure(one.best_score)}"
        for one in named
    )
    whole = f" Mean AP50 {figure(judged.metrics.get('AP50'))}." if len(shown) > 1 else ""
    some = f", the best and the worst {ENDS} named" if len(named) < len(shown) else ""
    return (
        f"Precision-recall curves at IoU {judged.iou:.2f} of {len(shown)}"
        f" class{'es' if len(shown) > 1 else ''}{some}: {each}.{whole}"
    )


def _confusion_told(judged: Evaluation) -> str:
    matrix, names = judged.confusion, judged.names
    last = len(names) - 1
    right = sum(matrix[k][k] for k in range(last))
    missed, invented = sum(row[last] for row in matrix), sum(matrix[last])
    mixed = sorted(
        ((matrix[i][j], names[i], names[j]) for i in range(last) for j in range(last) if i != j),
        key=lambda entry: -entry[0],
    )
    swaps = [f"{there} taken for {found}: {count}" for count, there, found in mixed[:3] if count]
    return (
        f"Confusion matrix at IoU {judged.iou:.2f}, score {judged.confusion_score:g} and above: of"
        f" {sum(map(sum, matrix[:last]))} objects {right} are found as what they are, {missed} are missed;"
        f" {invented} detections are of nothing." + (f" {'; '.join(swaps)}." if swaps else "")
    )
