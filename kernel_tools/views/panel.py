"""The live panel of a run: core ipywidgets, words before colour, a static summary at the end.

Widgets live only as long as their kernel, so a static twin is displayed before them; while they are on
the page it is hidden. It is what a notebook shows that was saved in the middle of a run.

It only looks: closing it, losing it or opening two of them changes nothing for the run. Buttons hand
their work to a thread of its own, because the shell's thread must stay free; the panel's traits are
written by the render clock alone.
"""

from __future__ import annotations

import datetime as dt
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from kernel_tools.errors import KernelToolsError
from kernel_tools.redact import redact
from kernel_tools.state import RunSnapshot, RunState
from kernel_tools.views import curves, markup
from kernel_tools.views.pace import Pace
from kernel_tools.views.render import CLOCK, RenderClock
from kernel_tools.views.summary import KeptView, RunView, body, head, tail

# The log is one trait that is sent whole: this much and no more.
LOG_LINES: Final = 200
LOG_CHARACTERS: Final = 32_000
CURVES_SECONDS: Final = 5.0
KEPT_SECONDS: Final = 30.0  # how old the figures of a notebook saved meanwhile may be


_NOTHING: Final = {"text/plain": "", "text/html": ""}


class Watched(Protocol):
    """What a panel needs of a run."""

    @property
    def id(self) -> str:
        """The run's id."""

    @property
    def snapshot(self) -> RunSnapshot:
        """What is known now."""

    def subscribe(self, callback: Callable[[RunSnapshot], None]) -> Callable[[], None]:
        """Call back on every change."""

    def log_path(self) -> Any:
        """The local log file."""

    def stop(self, *, now: bool = False) -> Any:
        """Ask for an end."""

    def fetch(self, *globs: str) -> Any:
        """Bring files here."""


class Panel:
    """Widgets that follow one run until it ends, or until the user detaches.

    `show()` displays it. When the run has ended the display becomes a static summary, so that the
    saved notebook says how it went.
    """

    def __init__(
        self,
        run: Watched,
        *,
        clock: RenderClock = CLOCK,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        import ipywidgets as widgets

        self._run = run
        self._clock = clock
        self._note = ""
        self._asking = self._stopping = self._closed = False
        self._farewell: str | None = None  # set where it lets go before the run has ended
        self._token = secrets.token_hex(4)
        self._kept_id: str | None = None  # of the display that stays
        self._live_id: str | None = None  # of the widgets' display
        self._kept_at = 0.0
        self._worker: threading.Thread | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._pace = Pace()
        self._now = now
        # The newest rows of steps and of metrics that the curves show.
        self._drawn: tuple[object, object] = ((), ())
        self._drawn_at = 0.0
        self.head = widgets.HTML()
        self.body = widgets.HTML()
        self.curves = widgets.HTML()
        self.note = widgets.HTML()
        self.log = widgets.HTML(layout=widgets.Layout(flex="0 0 auto"))
        self.stop_button = self._button(
            "Stop", "Stop the run at its next step; asks first", self._ask
        )
        self.fetch_button = self._button(
            "Fetch best", "Bring weights/best.pt here, verified", self._fetch
        )
        self.detach_button = self._button(
            "Detach", "Close this panel; the run goes on", self._detach
        )
        self.copy_button = widgets.HTML(_copy_button(str(run.log_path())))
        self.confirm_button = self._button(
            "Yes, stop it", "Stop the run", self._stop, style="danger"
        )
        self.keep_button = self._button("Keep it running", "Do nothing", self._keep)
        self.question = widgets.HTML("Stop this run? It saves a checkpoint at its next step.")
        self.confirm = widgets.HBox(
            [self.question, self.confirm_button, self.keep_button],
            layout=widgets.Layout(display="none", flex_flow="row wrap", align_items="center"),
        )
        buttons = widgets.HBox(
            [self.stop_button, self.fetch_button, self.detach_button, self.copy_button],
            layout=widgets.Layout(flex_flow="row wrap", align_items="center"),
        )
        # Reversed columns keep the newest line in sight, and a reader's place when he scrolls up.
        scroll = widgets.VBox(
            [self.log],
            layout=widgets.Layout(flex_flow="column-reverse", max_height="17em", overflow="auto"),
        )
        self.box = widgets.VBox(
            [self.head, self.body, self.curves, buttons, self.confirm, self.note, scroll],
            layout=widgets.Layout(max_width="75em", overflow="hidden"),
        )
        self.box.add_class(markup.live(self._token))

    @property
    def live(self) -> bool:
        """True while it follows the run on the page."""
        return not self._closed

    @property
    def run(self) -> Watched:
        """What it shows."""
        return self._run

    def show(self) -> Panel:
        """Display the panel below the current cell and begin to follow."""
        from IPython.display import display

        self._write()
        self._kept_at = self._now()
        handle = display(self._kept(), display_id=True)
        self._kept_id = None if handle is None else handle.display_id
        words = f"The live panel of {self._run.id}."
        bundle = {"text/plain": words, **_widget_view(self.box)}
        handle = display(bundle, raw=True, display_id=True)
        self._live_id = None if handle is None else handle.display_id
        self._unsubscribe = self._run.subscribe(lambda _snapshot: self._clock.touch(self))
        self._clock.touch(self)
        return self

    def retire(self, farewell: str) -> None:
        """Become static before the run has ended, with a sentence on where it goes on."""
        self._farewell = farewell
        self._clock.touch(self)

    def paint(self) -> None:
        """Write the newest state into the widgets; the clock calls it."""
        if self._closed:
            return
        if self._farewell is not None or self._run.snapshot.terminal:
            self._finish()
        else:
            self._write()
            self._keep_up()

    def _kept(self) -> KeptView:
        return KeptView(
            self._run.snapshot,
            note=self._how_to_return(),
            token=self._token,
            at=dt.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        )

    def _keep_up(self) -> None:
        """Put the newest figures now and again where a notebook that is saved has them."""
        from IPython.display import update_display

        if self._kept_id is not None and self._now() - self._kept_at >= KEPT_SECONDS:
            self._kept_at = self._now()
            update_display(self._kept(), display_id=self._kept_id)

    def _write(self) -> None:
        snapshot = self._run.snapshot
        figures = body(snapshot, self._pace.rates(snapshot))
        contact = f"contact: {snapshot.contact}"
        _set(self.head, markup.view(head(snapshot, contact), label="run"))
        _set(self.body, markup.view(figures, label="figures", style=False))
        self._draw_curves(snapshot)
        _set(self.log, markup.view(markup.log(_newest(snapshot)), label="log", style=False))
        note = f'<div class="kt-dim" role="status">{markup.text(self._note)}</div>'
        _set(self.note, markup.view(note if self._note else "", label="note", style=False))
        self.confirm.layout.display = "flex" if self._asking else "none"
        self.stop_button.disabled = self._stopping or snapshot.state is RunState.STOPPING

    def _draw_curves(self, snapshot: RunSnapshot) -> None:
        """Draw them anew for new rows, steps not at every poll: a curve of hours has time."""
        rows = snapshot.steps[-1:], snapshot.metrics[-1:]
        judged = rows[1] != self._drawn[1]
        waits = self.curves.value and self._now() - self._drawn_at < CURVES_SECONDS
        if rows == self._drawn or (waits and not judged):
            return
        self._drawn, self._drawn_at = rows, self._now()
        drawn = curves.html(snapshot)
        _set(self.curves, markup.view(drawn, label="curves", style=False) if drawn else "")

    def _finish(self) -> None:
        """Put a static summary in the place of all, and one into the widgets.

        A page that was opened again while the run went on does not know the displays any more, only
        the widgets.
        """
        import ipywidgets as widgets
        from IPython.display import update_display

        self._closed = True
        if self._unsubscribe is not None:
            self._unsubscribe()
        note = self._farewell or _whats_next(self._run.snapshot)
        summary = RunView(self._run.snapshot, note=note)
        gone = tuple(_below(self.box))
        self.box.children = (widgets.HTML(summary.html()),)
        for widget in gone:
            widget.close()
        if self._kept_id is not None:
            update_display(summary, display_id=self._kept_id)
        if self._live_id is not None:
            update_display(_NOTHING, raw=True, display_id=self._live_id)

    def _how_to_return(self) -> str:
        run_id = self._run.id
        return f"%remote_attach {run_id} shows it live again, %remote_stop {run_id} ends it."

    # Buttons: called on the shell's thread, which must not wait ----------------------------------

    def _ask(self, _button: object) -> None:
        self._asking = True
        self._clock.touch(self)

    def _keep(self, _button: object) -> None:
        self._asking = False
        self._clock.touch(self)

    def _stop(self, _button: object) -> None:
        self._asking, self._stopping = False, True
        self._do("asking it to stop", self._run.stop, then=str)

    def _fetch(self, _button: object) -> None:
        self._do(
            "fetching weights/best.pt",
            lambda: self._run.fetch("weights/best.pt"),
            then=lambda files: "fetched " + ", ".join(str(one.path) for one in files),
        )

    def _detach(self, _button: object) -> None:
        self.retire(self._how_to_return())

    def _do(
        self, note: str, action: Callable[[], Any], then: Callable[[Any], str] | None = None
    ) -> None:
        self._note = note
        self._clock.touch(self)
        self._worker = threading.Thread(target=self._work, args=(action, then), daemon=True)
        self._worker.start()

    def _work(self, action: Callable[[], Any], then: Callable[[Any], str] | None) -> None:
        try:
            result = action()
            if then is not None:
                self._note = then(result)
        except KernelToolsError as error:
            self._note = f"Error: {error}"
            self._stopping = False
        except Exception as error:  # noqa: BLE001 - its traceback would land in some other cell
            self._note = f"Error: {type(error).__name__}: {error}"
            self._stopping = False
        self._clock.touch(self)

    @staticmethod
    def _button(
        text: str, tooltip: str, clicked: Callable[[object], None], *, style: str = ""
    ) -> Any:
        import ipywidgets as widgets

        button = widgets.Button(description=text, tooltip=tooltip, button_style=style)
        button.layout.width = "auto"
        button.on_click(clicked)
        return button


def _set(widget: Any, value: str) -> None:
    if widget.value != value:
        widget.value = value


def _below(box: Any) -> Iterator[Any]:
    """All widgets in a box; what is not closed is kept for ever."""
    for widget in box.children:
        yield widget
        if hasattr(widget, "children"):
            yield from _below(widget)


def _widget_view(box: Any) -> dict[str, Any]:
    kind = "application/vnd.jupyter.widget-view+json"
    bundle: dict[str, Any] = box._repr_mimebundle_()
    return {kind: bundle[kind]}


def _newest(snapshot: RunSnapshot) -> tuple[str, ...]:
    lines = tail(snapshot, LOG_LINES)
    room = LOG_CHARACTERS
    for count, line in enumerate(reversed(lines)):
        room -= len(line) + 1
        if room < 0:
            return lines[len(lines) - count :] or (line[-LOG_CHARACTERS:],)
    return lines


def _copy_button(path: str) -> str:
    """A native button: the clipboard belongs to the browser, and no widget reaches it."""
    shown = markup.text(redact(path))
    return (
        '<button type="button" class="jupyter-button widget-button" style="width:auto;padding:0 10px"'
        f' data-path="{shown}" title="{shown}" onclick="(navigator.clipboard?'
        "navigator.clipboard.writeText(this.dataset.path):Promise.reject())"
        ".then(()=>{this.textContent='Copied'},()=>{this.textContent=this.dataset.path})\">"
        "Copy log path</button>"
    )


def _whats_next(snapshot: RunSnapshot) -> str:
    return f"%remote_fetch {snapshot.run_id} brings its files here; its log is in {snapshot.local_dir}."
