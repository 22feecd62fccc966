"""Small pieces of HTML that stay legible in light and dark themes and without any style at all.

All text goes through `text`, which redacts and escapes: names, logs and errors come from elsewhere.
Nothing here knows what a run is.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from kernel_tools.redact import redact

# White on each of these has a contrast of at least 4.5, whatever the page's own background is.
BADGE_COLOURS: Final = {
    "queued": "#5c5f66",
    "preparing": "#5c5f66",
    "training": "#0b62a8",
    "validating": "#6f42c1",
    "stopping": "#8a5300",
    "completed": "#1a7f37",
    "failed": "#b3261e",
    "stopped": "#8a5300",
    "timed_out": "#b3261e",
    "stale": "#8a5300",
    "lost": "#b3261e",
}

STYLE: Final = """<style>
.kt-view{color:var(--jp-ui-font-color1,var(--vscode-foreground,inherit));font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);max-width:75em;text-align:left}
.kt-view .kt-head{display:flex;flex-wrap:wrap;gap:.3em .8em;align-items:baseline;margin:.2em 0 .5em}
.jupyter-widgets-disconnected .kt-view .kt-head::after{content:"The kernel behind this panel is gone: its figures stand still and its buttons do nothing. The run does not need it; %remote_connect, then %remote_attach show it live again.";flex:1 0 100%;font-weight:600;border-left:3px solid #d1453b;padding:.2em .6em}
.kt-view .kt-name{font-size:15px;font-weight:600;overflow-wrap:anywhere}
.kt-view .kt-badge{color:#fff;border-radius:.7em;padding:.05em .7em;font-weight:600;white-space:nowrap}
.kt-view .kt-dim{opacity:.75;overflow-wrap:anywhere}
.kt-view.kt-view.kt-view code,.kt-view.kt-view.kt-view pre{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px;color:inherit;background:transparent;padding:0;border:0}
.kt-view.kt-view code{overflow-wrap:anywhere}
.kt-view .kt-bar{display:flex;align-items:center;gap:.7em;margin:.2em 0}
.kt-view .kt-bar>span{flex:0 0 17em}
.kt-view .kt-track{flex:1 1 auto;height:.55em;border-radius:.3em;background:rgba(127,127,127,.28);overflow:hidden}
.kt-view .kt-fill{height:100%;border-radius:.3em;background:#2a7fd4}
.kt-view .kt-curves{display:flex;flex-wrap:wrap;gap:.2em 1.6em;margin:.5em 0}
.kt-view .kt-curves svg{flex:1 1 25em;min-width:0;max-width:34em;height:auto;font-family:inherit}
.kt-view .kt-section{font-size:11px;font-weight:600;margin:.7em 0 0;border-bottom:1px solid rgba(127,127,127,.3)}
.kt-view dl.kt-facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(12em,100%),1fr));gap:.35em 1.2em;margin:.35em 0 .6em}
.kt-view dl.kt-facts>div{min-width:0}
.kt-view dl.kt-facts dt{float:none;clear:none;width:auto;margin:0;padding:0;font-weight:400;font-size:11px;opacity:.75;text-align:left}
.kt-view dl.kt-facts dd{display:block;margin:0;padding:0;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.kt-view.kt-view.kt-view pre.kt-log{line-height:1.35;overflow:visible;margin:.5em 0 0;padding:.4em .6em;border-left:3px solid rgba(127,127,127,.45);white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere}
.kt-view .kt-error{border-left:3px solid #d1453b;padding:.2em .6em;margin:.4em 0;overflow-wrap:anywhere}
.kt-view table.kt-table{border-collapse:collapse;margin:.4em 0;color:inherit;font-size:13px;table-layout:auto}
.kt-view table.kt-table caption{text-align:left;font-weight:600;caption-side:top;color:inherit;padding:.2em 0}
.kt-view table.kt-table th,.kt-view table.kt-table td{text-align:left;padding:.2em 1em .2em 0;border-bottom:1px solid rgba(127,127,127,.35);background:transparent;color:inherit;overflow-wrap:break-word;max-width:40em;white-space:normal}
.kt-view .kt-wide{overflow-x:auto}
.kt-view table.kt-table td:not(.kt-right){overflow-wrap:anywhere;min-width:7em}
.kt-view table.kt-table .kt-right{text-align:right;font-variant-numeric:tabular-nums}
.kt-view table.kt-table td.kt-right{white-space:nowrap}
</style>"""


def text(value: object) -> str:
    """Return `value` redacted and escaped, fit for an element or a quoted attribute."""
    return html.escape(redact(str(value)), quote=True)


def view(*parts: str, label: str, style: bool = True) -> str:
    """Wrap `parts` (markup) as one labelled region."""
    body = "".join(part for part in parts if part)
    sheet = STYLE if style else ""
    return f'{sheet}<div class="kt-view" role="group" aria-label="{text(label)}">{body}</div>'


def kept(body: str, *, token: str) -> str:
    """Wrap what stands in for a live panel: it shows as long as the page has no element of class `live(token)`.

    A notebook that is opened without the panel's kernel has only this; the words that JupyterLab puts
    in place of a widget that it cannot find are hidden then.
    """
    return (
        f'<div class="kt-kept-{token}">{body}</div><style>'
        f"body:has(.{live(token)}) .kt-kept-{token}{{display:none}}"
        f".jp-OutputArea:has(.kt-kept-{token}) .jp-OutputArea-output.jupyter-widgets:not(:has(*)){{display:none}}</style>"
    )


def live(token: str) -> str:
    """Return the class by which a live panel hides what is kept for it."""
    return f"kt-live-{token}"


def badge(word: str) -> str:
    """A word on its colour; the word alone says it all."""
    colour = BADGE_COLOURS.get(word, "#5c5f66")
    return (
        f'<span class="kt-badge" style="background:{colour}">{text(word.replace("_", " "))}</span>'
    )


def progress_bar(label: str, *, fraction: float) -> str:
    """A bar with its figures beside it and its values for a screen reader. `fraction` in 0..1."""
    per_cent = round(100 * min(max(fraction, 0.0), 1.0))
    return (
        f'<div class="kt-bar"><span>{text(label)}, {per_cent} %</span>'
        f'<div class="kt-track" role="progressbar" aria-label="{text(label)}"'
        f' aria-valuemin="0" aria-valuemax="100" aria-valuenow="{per_cent}">'
        f'<div class="kt-fill" style="width:{per_cent}%"></div></div></div>'
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of labelled figures that flows into as many columns as fit."""
    rows = "".join(
        f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd></div>" for label, value in pairs
    )
    return f'<dl class="kt-facts">{rows}</dl>'


def section(heading: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Labelled figures under a quiet heading, as one group for a screen reader."""
    return (
        f'<div role="group" aria-label="{text(heading)}">'
        f'<div class="kt-section" aria-hidden="true">{text(heading)}</div>{facts(pairs)}</div>'
    )


def log(lines: Sequence[str]) -> str:
    """Preformatted lines; nothing where there are none."""
    if not lines:
        return ""
    return f'<pre class="kt-log" tabindex="0" aria-label="last log lines">{text(chr(10).join(lines))}</pre>'


def error(message: str) -> str:
    """A paragraph that says what went wrong, marked by more than its colour."""
    return f'<div class="kt-error" role="alert"><strong>Error:</strong> {text(message)}</div>'


def table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[int] = (),
) -> str:
    """A table with a caption and scoped headings; columns in `right` hold figures."""

    def cells(tag: str, values: Sequence[object], scope: str) -> str:
        return "".join(
            f"<{tag}{scope}{' class=kt-right' if i in right else ''}>{text(v)}</{tag}>"
            for i, v in enumerate(values)
        )

    head = cells("th", header, ' scope="col"')
    body = "".join(f"<tr>{cells('td', row, '')}</tr>" for row in rows)
    # Wider than the page, it scrolls, and the keyboard reaches it to do so.
    return (
        f'<div class="kt-wide" role="region" tabindex="0" aria-label="{text(caption)}">'
        f'<table class="kt-table"><caption>{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
