"""Display objects that need nothing but the page: text/plain and text/html, alive after saving.

Each is a frozen value with `_repr_mimebundle_`; none does IO, holds a widget or changes later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from kernel_tools.redact import redact
from kernel_tools.state import RunSnapshot
from kernel_tools.views import curves, facts, markup
from kernel_tools.views.bundles import wanted

if TYPE_CHECKING:
    from kernel_tools.connection import Connection
    from kernel_tools.datasets.reference import DatasetReference
    from kernel_tools.datasets.sizing import DiskNeed
    from kernel_tools.fetch import Fetched
    from kernel_tools.launch import LaunchPlan
    from kernel_tools.session import RunRow
    from kernel_tools.sync import SyncPlan, SyncReport

# Log lines in a saved summary: enough to see how it ended, small enough for a repository.
SUMMARY_LOG_LINES: Final = 12


class View:
    """Base of display objects: `plain()` and `html()` become a MIME bundle."""

    def plain(self) -> str:
        """Return the text; one string, lines separated by newlines."""
        raise NotImplementedError

    def html(self) -> str:
        """Return self-contained markup."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.plain()

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        bundle = {"text/plain": redact(self.plain()), "text/html": self.html()}
        return wanted(bundle, include, exclude)


@dataclass(frozen=True, repr=False)
class RunView(View):
    """A run as it stood at one moment.

    Attributes:
        snapshot: what was known.
        log_lines: how many of the last log lines are shown.
        note: a sentence below, such as how to come back to the run.
    """

    snapshot: RunSnapshot
    log_lines: int = SUMMARY_LOG_LINES
    note: str = ""

    def plain(self) -> str:
        """State, progress, figures, the last lines of the log."""
        snapshot = self.snapshot
        lines = [
            f"Run {facts.title(snapshot)}: {snapshot.state.value} (contact: {snapshot.contact})"
        ]
        lines += facts.plain_table(
            (
                ("run", snapshot.run_id),
                *((label, f"{fraction:.0%}") for label, fraction in facts.bars(snapshot)),
                *facts.rows(snapshot),
            )
        )
        lines.append(f"  {facts.tokens(snapshot)}")
        if snapshot.steps or snapshot.metrics:
            lines.append(f"  {curves.told(snapshot)}")
        failure = facts.failure(snapshot)
        if failure:
            lines.append(f"  Error: {failure}")
        elif said(snapshot):
            lines.append(f"  {said(snapshot)}")
        if self.note:
            lines.append(f"  {self.note}")
        lines += [f"  | {line}" for line in tail(snapshot, self.log_lines)]
        return "\n".join(lines)

    def html(self) -> str:
        """The same, as one labelled region."""
        snapshot = self.snapshot
        return markup.view(
            head(snapshot),
            body(snapshot),
            curves.html(snapshot),
            f'<p class="kt-dim">{markup.text(self.note)}</p>' if self.note else "",
            markup.log(tail(snapshot, self.log_lines)),
            label=f"Run {facts.title(snapshot)}: {snapshot.state.value}",
        )


@dataclass(frozen=True, repr=False)
class RunLine(View):
    """A run in one line, for the place where a cell's value is shown."""

    snapshot: RunSnapshot

    def plain(self) -> str:
        """`Run <id>: <state>` and its headline figures."""
        snapshot = self.snapshot
        return f"Run {snapshot.run_id}: {snapshot.state.value}. {facts.tokens(snapshot)}".rstrip(
            " ."
        )

    def html(self) -> str:
        """The same with the state as a badge."""
        snapshot = self.snapshot
        return markup.view(
            f"Run <code>{markup.text(snapshot.run_id)}</code> {markup.badge(snapshot.state.value)}"
            f' <span class="kt-dim">{markup.text(facts.tokens(snapshot))}</span>',
            label=f"Run {facts.title(snapshot)}: {snapshot.state.value}",
        )


def summary_mimebundle(
    snapshot: RunSnapshot,
    *,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
) -> dict[str, str]:
    """Return how a `Run` shows as a cell's value: one line, because its panel has the rest."""
    return RunLine(snapshot)._repr_mimebundle_(include, exclude)


@dataclass(frozen=True, repr=False)
class TableView(View):
    """Rows of text under headings.

    Attributes:
        caption: what the table holds; stands alone where there are no rows.
        header: one heading a column.
        rows: cells as strings.
        right: indices of columns that hold figures.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()

    def plain(self) -> str:
        """Aligned columns."""
        grid = [self.header, *self.rows] if self.rows else []
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.header))] if grid else []
        lines = [self.caption]
        for row in grid:
            cells = [
                cell.rjust(width) if i in self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join(lines)

    def html(self) -> str:
        """A table with scoped headings."""
        if not self.rows:
            return markup.view(f"<p>{markup.text(self.caption)}</p>", label=self.caption)
        grid = markup.table(self.caption, self.header, self.rows, right=self.right)
        return markup.view(grid, label=self.caption)


@dataclass(frozen=True, repr=False)
class FactsView(View):
    """A heading with labelled figures below it."""

    heading: str
    pairs: tuple[tuple[str, str], ...]
    tokens: str = ""

    def plain(self) -> str:
        """The heading, then one figure a line."""
        tail_line = [f"  {self.tokens}"] if self.tokens else []
        return "\n".join([self.heading, *facts.plain_table(self.pairs), *tail_line])

    def html(self) -> str:
        """The same as a list of terms."""
        return markup.view(
            f'<div class="kt-head"><span class="kt-name">{markup.text(self.heading)}</span></div>',
            markup.facts(self.pairs),
            f"<code>{markup.text(self.tokens)}</code>" if self.tokens else "",
            label=self.heading,
        )


class Shows(Protocol):
    """Whatever shows itself: a `View`, a `Figure`, a `Picture`."""

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> Mapping[str, Any]: ...


@dataclass(frozen=True, repr=False)
class Stack(View):
    """Several things below each other as one value, pictures included."""

    parts: tuple[Shows, ...]

    def plain(self) -> str:
        """Each part's text, an empty line between them."""
        return "\n\n".join(str(part._repr_mimebundle_()["text/plain"]) for part in self.parts)

    def html(self) -> str:
        """Each part's markup."""
        return "\n".join(str(part._repr_mimebundle_()["text/html"]) for part in self.parts)


@dataclass(frozen=True, repr=False)
class NoteView(View):
    """One sentence."""

    text: str

    def plain(self) -> str:
        """The sentence."""
        return self.text

    def html(self) -> str:
        """The same as a quiet paragraph."""
        return markup.view(
            f'<p class="kt-dim" role="status">{markup.text(self.text)}</p>', label="note"
        )


@dataclass(frozen=True, repr=False)
class ProgressView(View):
    """Bytes on their way, updated in place while a cell works."""

    label: str
    done_bytes: int
    total_bytes: int
    elapsed_seconds: float

    def plain(self) -> str:
        """`label: 12.00 MB of 30.00 MB, 4.00 MB/s`."""
        rate = self.done_bytes / self.elapsed_seconds if self.elapsed_seconds > 0 else None
        speed = "" if rate is None else f", {facts.size(rate)}/s"
        whole = facts.size(self.total_bytes) if self.total_bytes else "?"
        return f"{self.label}: {facts.size(self.done_bytes)} of {whole}{speed}"

    def html(self) -> str:
        """A bar with the same figures."""
        fraction = self.done_bytes / self.total_bytes if self.total_bytes else 0.0
        bar = markup.progress_bar(self.label, fraction=fraction)
        return markup.view(
            bar, f'<div class="kt-dim">{markup.text(self.plain())}</div>', label=self.label
        )


def head(snapshot: RunSnapshot) -> str:
    """Name, state in a word and a colour, contact, id. Changes rarely: the part read aloud."""
    contact = snapshot.contact
    seen = "" if snapshot.terminal else f" contact: {contact}"
    marked = markup.badge(contact.kind) if contact.kind != "live" and not snapshot.terminal else ""
    return (
        '<div class="kt-head" role="status" aria-live="polite">'
        f'<span class="kt-name">{markup.text(facts.title(snapshot))}</span>'
        f"{markup.badge(snapshot.state.value)}{marked}"
        f'<span class="kt-dim">{markup.text(seen.strip())}</span>'
        f'<code class="kt-dim">{markup.text(snapshot.run_id)}</code></div>'
    )


def body(snapshot: RunSnapshot, rates: Mapping[str, float] | None = None) -> str:
    """Progress, figures, tokens, and the error where there is one. `rates` as in `facts.bars`."""
    failure = facts.failure(snapshot)
    message = f'<p class="kt-dim">{markup.text(said(snapshot))}</p>' if said(snapshot) else ""
    return "".join(
        [
            *(
                markup.progress_bar(label, fraction=part)
                for label, part in facts.bars(snapshot, rates)
            ),
            *(markup.section(one.heading, one.pairs) for one in facts.sections(snapshot)),
            f"<code>{markup.text(facts.tokens(snapshot))}</code>",
            markup.error(failure) if failure else message,
        ]
    )


def said(snapshot: RunSnapshot) -> str:
    """The message, unless it only repeats the state."""
    return "" if snapshot.message == snapshot.state.value else snapshot.message


def tail(snapshot: RunSnapshot, count: int) -> tuple[str, ...]:
    """The last `count` lines of the log that are not empty at the very end."""
    lines = snapshot.log_tail
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines[len(lines) - min(count, len(lines)) :]


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
        ("sent", f"{result.uploaded} files, each verified by SHA-256"),
        *(() if seconds is None else (("took", f"{seconds:.2f} s"),)),
        *(("note", warning) for warning in result.warnings),
    )
    return FactsView("Code is on the remote", pairs, " ".join(result.lines()))


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


def dataset_view(reference: DatasetReference, *, standing: str = "is staged") -> FactsView:
    """Show a data set, where it stands in words, and the disk that a run on it needs."""
    pairs = (
        (
            "object",
            reference.object
            if not reference.bucket
            else f"{reference.store}/{reference.bucket}/{reference.object}",
        ),
        ("archive", facts.size(reference.size_bytes)),
        ("files", "not counted" if reference.file_count is None else str(reference.file_count)),
        ("unpacks to", reference.expected_root),
        ("disk needed", _disk(reference.disk)),
        ("SHA-256", reference.sha256),
    )
    heading = f"Data set {reference.name} {standing}"
    return FactsView(heading, pairs, f"--dataset {reference.name}")


def _disk(need: DiskNeed) -> str:
    parts = (
        ("archive", need.staged_bytes),
        ("unpacked", need.extracted_bytes),
        ("checkpoints", need.checkpoints_bytes),
    )
    told = ", ".join(f"{name} {facts.size(size)}" for name, size in parts)
    return f"{facts.size(need.total_bytes)} ({told}, and 30 %)"


def connection_view(connection: Connection) -> FactsView:
    """Show a connection in words, without its URL's secrets."""
    pairs = [("kernel", connection.where), ("folder there", connection.remote_dir)]
    if connection.notice:
        pairs.append(("note", connection.notice))
    return FactsView(f"Connected: {connection.name}", tuple(pairs))
