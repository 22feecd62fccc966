"""A run's loss and metrics as series, in words, and as small drawings that a live panel can afford.

The drawings are SVG without a library: they take the page's own text colour, so light and dark are
alike to them, and cost a millisecond. `figures` draws the same series with matplotlib. Hues are Okabe
and Ito's, each with its own line and marker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kernel_tools.state import RunSnapshot
from kernel_tools.views import markup
from kernel_tools.views.readable import is_finite

# Okabe & Ito (2008), "Color universal design".
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
# Metric, hue, matplotlib's line and marker, SVG's dashes.
METRICS: Final = (
    ("AP50", BLUE, "-", "o", ""),
    ("mAP@0.50:0.95", ORANGE, "--", "s", "6 4"),
    ("AP75", GREEN, ":", "^", "2 3"),
)
# More points than this no small drawing can show.
MOST_POINTS: Final = 160
WIDTH, HEIGHT = 400, 132
LEFT, RIGHT, TOP, BOTTOM = 44, 390, 26, 112


@dataclass(frozen=True, slots=True)
class Series:
    """One line: finite values `y` over `x`, in order."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.x)


def loss_series(rows: Sequence[Mapping[str, Any]]) -> Series:
    """Return the training loss over optimizer steps, from the rows of `steps.jsonl`."""
    points = ((row.get("optimizer_steps"), row.get("loss")) for row in rows)
    return _series("training loss", points)


def metric_series(rows: Sequence[Mapping[str, Any]]) -> tuple[Series, ...]:
    """Return the evaluated ones of `METRICS` over epochs, from the rows of `metrics.jsonl`."""
    found = (
        _series(name, ((row.get("epoch"), _metric(row, name)) for row in rows))
        for name, *_ in METRICS
    )
    return tuple(series for series in found if series)


def told(snapshot: RunSnapshot) -> str:
    """Say both in sentences: where each curve began, is, and was best."""
    loss = loss_series(snapshot.steps)
    sentences = [
        f"Training loss went from {loss.y[0]:.3g} at step {loss.x[0]:g}"
        f" to {loss.y[-1]:.3g} at step {loss.x[-1]:g}."
        if loss
        else "No loss has been logged yet."
    ]
    sentences += [
        f"{one.name} is {one.y[-1]:.3f} at epoch {one.x[-1]:g}, at best {max(one.y):.3f}."
        for one in metric_series(snapshot.metrics)
    ] or ["Nothing has been evaluated yet."]
    return " ".join(sentences)


def html(snapshot: RunSnapshot) -> str:
    """Return the curves side by side where there is room; "" before there is a line to draw."""
    loss, metrics = loss_series(snapshot.steps), metric_series(snapshot.metrics)
    drawn = []
    if len(loss.x) > 1:
        drawn.append(_chart("training loss", (loss,), xlabel="step", bottom=min(0.0, *loss.y)))
    if any(len(one.x) > 1 for one in metrics):
        drawn.append(
            _chart("average precision", metrics, xlabel="epoch", bottom=0.0, top=1.0, keyed=True)
        )
    if not drawn:
        return ""
    return (
        f'<div class="kt-curves" role="img" aria-label="{markup.text(told(snapshot))}">'
        f"{''.join(drawn)}</div>"
    )


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """Return at most about `most` of its points, evenly taken, the first and the last among them."""
    stride = -(-len(series.x) // most)
    if stride <= 1:
        return series
    kept = sorted({*range(0, len(series.x), stride), len(series.x) - 1})
    return Series(series.name, tuple(series.x[i] for i in kept), tuple(series.y[i] for i in kept))


def _metric(row: Mapping[str, Any], name: str) -> Any:
    metrics = row.get("metrics")
    return metrics.get(name) if isinstance(metrics, Mapping) else None


def _series(name: str, points: Any) -> Series:
    kept = [(float(x), float(y)) for x, y in points if is_finite(x) and is_finite(y)]
    return Series(name, tuple(x for x, _ in kept), tuple(y for _, y in kept))


def _chart(
    title: str,
    lines: Sequence[Series],
    *,
    xlabel: str,
    bottom: float,
    top: float | None = None,
    keyed: bool = False,
) -> str:
    """One drawing with its two axes' ends named, and each line's newest value."""
    low, high = min(one.x[0] for one in lines), max(one.x[-1] for one in lines)
    top = max(max(one.y) for one in lines) if top is None else top
    if top <= bottom:
        top = bottom + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / (high - low) if high > low else 0.5
        up = (min(max(y, bottom), top) - bottom) / (top - bottom)
        return round(LEFT + across * (RIGHT - LEFT), 1), round(BOTTOM - up * (BOTTOM - TOP), 1)

    looks = {name: (hue, dashes) for name, hue, _, _, dashes in METRICS}
    parts, key = [], []
    for one in lines:
        hue, dashes = looks.get(one.name, (BLUE, ""))
        few = thinned(one)
        points = [place(x, y) for x, y in zip(few.x, few.y, strict=True)]
        parts.append(_line(points, hue, dashes))
        key.append(f"{one.name} {one.y[-1]:.3f}" if keyed else f"now {one.y[-1]:.4g}")
    frame = f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="currentColor" opacity=".45"/>'
    words = [
        _text(LEFT, 13, title, "start", weight=600) if not keyed else "",
        *_key(key, lines, looks, keyed=keyed),
        _text(LEFT - 5, TOP + 8, f"{top:.3g}", "end"),
        _text(LEFT - 5, BOTTOM, f"{bottom:.3g}", "end"),
        _text(LEFT, HEIGHT - 4, f"{xlabel} {low:g}", "start"),
        _text(RIGHT, HEIGHT - 4, f"{xlabel} {high:g}", "end"),
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{frame}'
        f"{''.join(parts)}{''.join(words)}</svg>"
    )


def _key(
    said: Sequence[str], lines: Sequence[Series], looks: Mapping[str, Any], *, keyed: bool
) -> list[str]:
    """The newest values: at the right for one line, behind a piece of each line for several."""
    if not keyed:
        return [_text(RIGHT, 13, said[0], "end")]
    parts, x = [], LEFT
    for text, one in zip(said, lines, strict=True):
        hue, dashes = looks[one.name]
        parts += [_line([(x, 9), (x + 22, 9)], hue, dashes), _text(x + 27, 13, text, "start")]
        x += 40 + round(6.4 * len(text))
    return parts


def _line(points: Sequence[tuple[float, float]], hue: str, dashes: str) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    x, y = points[-1]
    return (
        f'<polyline points="{path}" fill="none" stroke="{hue}" stroke-width="2"{dashed}/>'
        f'<circle cx="{x:g}" cy="{y:g}" r="2.6" fill="{hue}"/>'
    )


def _text(x: float, y: float, words: str, anchor: str, *, weight: int = 400) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}"'
        f' fill="currentColor" font-size="11">{markup.text(words)}</text>'
    )
