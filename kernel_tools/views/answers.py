"""What the magics answer with: runs and files as tables; a connection, a sync and a plan as figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_tools.views import facts
from kernel_tools.views.static import FactsView, TableView, View

if TYPE_CHECKING:
    from kernel_tools.connecting.connection import Connection
    from kernel_tools.launching.launch import LaunchPlan
    from kernel_tools.results.fetch import Fetched
    from kernel_tools.runs.known_runs import RunRow
    from kernel_tools.sync import SyncPlan, SyncReport


def connection_view(connection: Connection) -> FactsView:
    """Show a connection in words, without its URL's secrets."""
    pairs = [("kernel", connection.where), ("folder there", connection.remote_dir)]
    if connection.notice:
        pairs.append(("note", connection.notice))
    return FactsView(f"Connected: {connection.name}", tuple(pairs))


def sync_view(result: SyncPlan | SyncReport, *, seconds: float | None = None) -> View:
    """Show what a sync sent (every file was verified on arrival) and how long it took, or would send."""
    from kernel_tools.sync import SyncPlan

    if isinstance(result, SyncPlan):
        files = result.largest(len(result.files))
        rows = tuple((file.path, facts.size(file.size)) for file in files)
        caption = f"{len(rows)} files, {facts.size(result.bytes)} would travel; nothing was sent"
        caption = " ".join((f"{caption}.", *result.warnings)) if result.warnings else caption
        return TableView(caption, ("file", "size"), rows, right=(1,))
    pairs = (
        ("paths", ", ".join(result.paths)),
        ("files", str(result.files)),
        ("size", facts.size(result.bytes)),
        ("sent", _sent(result)),
        *(() if seconds is None else (("took", _took(result, seconds)),)),
        *(("note", warning) for warning in result.warnings),
    )
    return FactsView("Code is on the remote", pairs, " ".join(result.lines()))


def _sent(report: SyncReport) -> str:
    if not report.uploaded:
        return "nothing, all of it was there"
    noun = "1 file" if report.uploaded == 1 else f"{report.uploaded} files"
    return f"{noun}, {facts.size(report.sent_bytes)}, each verified by SHA-256"


def _took(report: SyncReport, seconds: float) -> str:
    """`0.50 s, 4.00 MB/s`; without a speed where nothing travelled."""
    if not report.sent_bytes or seconds <= 0:
        return f"{seconds:.2f} s"
    return f"{seconds:.2f} s, {facts.size(report.sent_bytes / seconds)}/s"


@dataclass(frozen=True, repr=False)
class PlanView(FactsView):
    """What a launch would send; the text is the plan's own lines."""

    text: str = ""

    def plain(self) -> str:
        """The lines that scripts and logs know."""
        return self.text


def plan_view(plan: LaunchPlan) -> PlanView:
    """Show what a dry run found: what would run, what would travel, what would be used."""
    files, job = plan.sync.files, plan.job
    largest = ", ".join(f"{one.path} {facts.size(one.size)}" for one in plan.sync.largest(3))
    pairs = [
        ("command", " ".join(job.argv)),
        ("code that would travel", f"{len(files)} files, {facts.size(plan.sync.bytes)}"),
        ("the largest of it", largest),
        *(("note", warning) for warning in plan.sync.warnings),
        *((("resumes from", str(job.resume["checkpoint"])),) if job.resume else ()),
        *(("data set", f"{one['object']} as {one['dest']}") for one in job.inputs),
    ]
    return PlanView("Would be launched; nothing was sent", tuple(pairs), text=str(plan))


def runs_table(rows: Sequence[RunRow]) -> TableView:
    """Show the runs of a project, newest first."""
    header = ("run", "state", "where", "created", "world size", "optimizer steps")
    cells = tuple(
        (
            row.run_id,
            row.state,
            row.where,
            row.created_at,
            "" if row.world_size is None else str(row.world_size),
            "" if row.optimizer_steps is None else str(row.optimizer_steps),
        )
        for row in rows
    )
    noun = "run" if len(cells) == 1 else "runs"
    caption = f"{len(cells)} {noun}" if cells else "No runs here yet."
    return TableView(caption, header, cells, right=(4, 5))


def files_table(files: Sequence[Fetched], *, relative_to: Path | None = None) -> TableView:
    """Show what was fetched; every file in it has been verified. Paths are shortened where they can be."""
    rows = []
    for one in files:
        inside = relative_to is not None and one.path.is_relative_to(relative_to)
        path = one.path.relative_to(relative_to) if inside and relative_to else one.path
        rows.append((str(path), facts.size(one.size_bytes), one.sha256[:12]))
    noun = "file" if len(rows) == 1 else "files"
    caption = (
        f"{len(rows)} {noun} fetched, each verified by SHA-256" if rows else "Nothing to fetch."
    )
    return TableView(caption, ("file", "size", "sha256"), tuple(rows), right=(1,))
