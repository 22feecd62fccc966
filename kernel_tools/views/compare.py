"""Several runs beside each other: what differs between them, what came of it, and their curves.

Pure: it draws snapshots that somebody else has brought. Nothing is told apart by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.state import RunSnapshot
from kernel_tools.views import curves, facts
from kernel_tools.views.figures import Figure, blank, png, say_empty
from kernel_tools.views.readable import readable
from kernel_tools.views.static import Stack, TableView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito (2008) without its yellow, which a white page swallows; each with its line and marker.
LOOKS: Final = (
    ("#0072b2", "-", "o"),
    ("#d55e00", "--", "s"),
    ("#009e73", "-.", "^"),
    ("#cc79a7", ":", "D"),
    ("#56b4e9", (0, (5, 1, 1, 1)), "v"),
    ("#8a6d00", (0, (8, 2)), "P"),
    ("#5c5f66", (0, (3, 3)), "X"),
)
NOTHING: Final = "-"
# So many of the settings that differ stand beside a run's name in the figure; the table has all.
MOST_LABELLED: Final = 2


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the runs: what was asked of it and what is known of it.

    Attributes:
        snapshot: as last seen.
        settings: `section.key` -> value that its command line set, its configuration as `config`.
    """

    snapshot: RunSnapshot
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """What `%remote_compare` returns; it shows itself as a table above a figure."""

    runs: tuple[Compared, ...]

    @property
    def table(self) -> TableView:
        """One row a run: what only some of them were told, then what came of it."""
        keys = differing([one.settings for one in self.runs])
        header = ("run", "state", *keys, "epochs", "world size", "optimizer steps", "loss",
                  facts.HEADLINE_METRIC, "best metric", "images/s", "elapsed")  # fmt: skip
        rows = tuple((*_named(one, keys), *_figures(one.snapshot)) for one in self.runs)
        figures = range(2 + len(keys), len(header))
        return TableView(_caption(self.runs, keys), header, rows, right=tuple(figures))

    @property
    def figure(self) -> Figure:
        """Their training loss over optimizer steps, and their average precision over epochs."""
        page = blank(9.0, 3.6 + 0.2 * len(self.runs))
        loss_axes, metric_axes = page.subplots(1, 2)
        name = _common_metric(self.runs)
        labels = _labels(self.runs)
        _draw(loss_axes, self.runs, labels, "optimizer steps", "training loss", _loss)
        _draw(metric_axes, self.runs, labels, "epoch", name, lambda one: _metric(one, name))
        metric_axes.set_ylim(0.0, 1.0)
        # A run may have only one of the two curves; each is named once.
        drawn = [axes.get_legend_handles_labels() for axes in (metric_axes, loss_axes)]
        known = {label: handle for pair in drawn for handle, label in zip(*pair, strict=True)}
        if known:
            legend = page.legend(
                [known[label] for label in labels if label in known],
                [label for label in labels if label in known],
                loc="outside lower center", fontsize=8, frameon=False,
            )  # fmt: skip
            for text in legend.get_texts():
                text.set_parse_math(False)
        told = " ".join(
            f"{label}: {curves.told(one.snapshot)}"
            for label, one in zip(labels, self.runs, strict=True)
        )
        return Figure(png(page), f"Curves of {len(self.runs)} runs. {told}")

    def __repr__(self) -> str:
        return self.table.plain()

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, Any]:
        return Stack((self.table, self.figure))._repr_mimebundle_(include, exclude)


def settings_of(argv: Sequence[str]) -> dict[str, str]:
    """Return what a command line of the detector sets: its `--config`, and each `--set key=value`."""
    found = {}
    for option, value in pairwise(argv):
        if option == "--config":
            found["config"] = value.removeprefix("configs/").rpartition(".")[0] or value
        elif option == "--set":
            key, _, told = value.partition("=")
            found[key] = told
    return found


def differing(settings: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the keys that are not the same in all of them, in the order of their first naming."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return tuple(key for key in keys if len({one.get(key) for one in settings}) > 1)


def _caption(runs: Sequence[Compared], keys: Sequence[str]) -> str:
    if not any(one.settings for one in runs):
        return f"{len(runs)} runs"
    if not keys:
        return f"{len(runs)} runs that were told the same"
    return f"{len(runs)} runs; they differ in {', '.join(keys)}"


def _named(one: Compared, keys: Sequence[str]) -> tuple[str, ...]:
    return (
        one.snapshot.run_id,
        one.snapshot.state.value.replace("_", " "),
        *(one.settings.get(key, "(default)") for key in keys),
    )


def _figures(snapshot: RunSnapshot) -> tuple[str, ...]:
    status = readable(snapshot.status)
    losses = curves.loss_series(snapshot.steps).y
    loss = losses[-1] if losses else status.get("train_loss")
    done, whole = status.get("completed_epochs"), status.get("total_epochs")
    best, epoch = status.get("best_metric"), status.get("best_epoch")
    rate, elapsed = status.get("images_per_second"), status.get("elapsed_seconds")
    headline = facts.headline(status)
    return (
        NOTHING if whole is None else f"{done or 0} of {whole}",
        NOTHING if status.get("world_size") is None else str(status["world_size"]),
        NOTHING if status.get("optimizer_steps") is None else str(status["optimizer_steps"]),
        NOTHING if loss is None else facts.number(loss),
        NOTHING if headline is None else f"{headline:.4f}",
        NOTHING if best is None else f"{best:.4f}" + ("" if epoch is None else f", epoch {epoch}"),
        NOTHING if rate is None else f"{rate:.1f}",
        NOTHING if elapsed is None else facts.duration(elapsed),
    )


def _labels(runs: Sequence[Compared]) -> list[str]:
    """Each run's name, the four digits that tell it from others of that name, and what it was told."""
    keys = differing([one.settings for one in runs])[:MOST_LABELLED]
    labels = []
    for one in runs:
        told = [
            f"{key.rpartition('.')[2]}={one.settings[key]}" for key in keys if key in one.settings
        ]
        digits = one.snapshot.run_id.rpartition("-")[2]
        labels.append(", ".join([f"{facts.title(one.snapshot)} ({digits})", *told]))
    return labels


def _common_metric(runs: Sequence[Compared]) -> str:
    """The metric that most of the runs have; AP50 where it is one of those."""
    counted = {name: sum(bool(_metric(one, name)) for one in runs) for name, *_ in curves.METRICS}
    return max(counted, key=counted.__getitem__)


def _loss(one: Compared) -> curves.Series:
    return curves.loss_series(one.snapshot.steps)


def _metric(one: Compared, name: str) -> curves.Series | None:
    found = [series for series in curves.metric_series(one.snapshot.metrics) if series.name == name]
    return found[0] if found else None


def _draw(
    axes: Axes,
    runs: Sequence[Compared],
    labels: Sequence[str],
    xlabel: str,
    ylabel: str,
    series: Callable[[Compared], curves.Series | None],
) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    drawn = False
    for position, one in enumerate(runs):
        line = series(one)
        if not line:
            continue
        drawn = True
        hue, style, marker = LOOKS[position % len(LOOKS)]
        axes.plot(
            line.x, line.y, color=hue, linestyle=style, linewidth=1.5, marker=marker, markersize=4,
            markevery=max(1, len(line.x) // 12), label=labels[position],
        )  # fmt: skip
    if not drawn:
        say_empty(axes, f"no {ylabel} yet")
