"""A run as it stood at one moment: the whole of it, or one line.

What the live panel draws too (head and body) is made here once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kernel_tools.state import RunSnapshot
from kernel_tools.views import curves, facts, markup
from kernel_tools.views.static import View

# Log lines in a saved summary: enough to see how it ended, small enough for a repository.
SUMMARY_LOG_LINES: Final = 12


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

    @property
    def freshness(self) -> str:
        """How old the figures are, in words."""
        return f"contact: {self.snapshot.contact}"

    def plain(self) -> str:
        """State, progress, figures, the last lines of the log."""
        snapshot = self.snapshot
        lines = [f"Run {facts.title(snapshot)}: {snapshot.state.value} ({self.freshness})"]
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
            head(snapshot, "" if snapshot.terminal else self.freshness),
            body(snapshot),
            curves.html(snapshot),
            f'<p class="kt-dim">{markup.text(self.note)}</p>' if self.note else "",
            markup.log(tail(snapshot, self.log_lines)),
            label=f"Run {facts.title(snapshot)}: {snapshot.state.value}",
        )


@dataclass(frozen=True, repr=False)
class KeptView(RunView):
    """A run as it stood when its live panel was last there: seen only where that cannot be.

    Attributes:
        token: of the panel, hexadecimal.
        at: the time that the figures are of.
    """

    token: str = ""
    at: str = ""

    @property
    def freshness(self) -> str:
        """Nothing about contact: nobody looks any more."""
        return f"as it stood at {self.at}"

    def html(self) -> str:
        """The same, hidden by the live panel."""
        return markup.kept(super().html(), token=self.token)


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


def head(snapshot: RunSnapshot, freshness: str) -> str:
    """Name, state in a word and a colour, contact, id. Changes rarely: the part read aloud."""
    contact = snapshot.contact
    marked = markup.badge(contact.kind) if contact.kind != "live" and not snapshot.terminal else ""
    return (
        '<div class="kt-head" role="status" aria-live="polite">'
        f'<span class="kt-name">{markup.text(facts.title(snapshot))}</span>'
        f"{markup.badge(snapshot.state.value)}{marked}"
        f'<span class="kt-dim">{markup.text(freshness)}</span>'
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
