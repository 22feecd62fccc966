"""What a remote can do, shown: one row a check, with what to do where something is not well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kernel_tools.views.static import TableView

if TYPE_CHECKING:
    from kernel_tools.preflight import RemoteInfo

# Words, not colours: they stay in text, in a saved page and for a screen reader.
WORDS: Final = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def info_view(info: RemoteInfo) -> TableView:
    """Show all checks; the caption says how many problems there are."""
    problems = len(info.problems)
    told = "nothing stands in the way" if not problems else f"{problems} to be put right"
    advised = any(check.advice for check in info.checks)
    header = ("check", "", "found", "to do")[: 4 if advised else 3]
    rows = tuple(
        (check.name, WORDS[check.standing], check.found, check.advice)[: len(header)]
        for check in info.checks
    )
    return TableView(f"{info.where}: {told}", header, rows)
