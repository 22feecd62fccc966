"""The two files for people and scripts that come after: `results.csv` and `summary.json`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV: one line an epoch, metrics as columns of their own."""
    flat = [{**row, **(row["metrics"] or {})} for row in rows]
    columns: list[str] = []
    for row in flat:
        columns += [key for key in row if key not in columns and key != "metrics"]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def final_figures(
    rows: Sequence[Mapping[str, Any]], *, state: str, **figures: Any
) -> dict[str, Any]:
    """Return what `summary.json` holds: how it ended, the last evaluation, and `figures`."""
    judged = [row for row in rows if row["metrics"]]
    return {
        "state": state,
        "epochs": len(rows),
        "metrics": judged[-1]["metrics"] if judged else {},
        **figures,
    }
