"""Display objects that need nothing but the page: text/plain and text/html, alive after saving.

Each is a frozen value with `_repr_mimebundle_`; none does IO, holds a widget or changes later. They know
tables, figures and sentences; what a run looks like is in `summary`, other answers are in `answers`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kernel_tools.redact import redact
from kernel_tools.views import facts, markup
from kernel_tools.views.bundles import wanted


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
        tail = [f"  {self.tokens}"] if self.tokens else []
        return "\n".join([self.heading, *facts.plain_table(self.pairs), *tail])

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
