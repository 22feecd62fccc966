"""How a run is shown where it was launched: a live panel and on, or one display until the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kernel_tools.errors import KernelToolsError, WaitTimeoutError
from kernel_tools.redact import redact
from kernel_tools.state import RunSnapshot, RunState
from kernel_tools.views import facts
from kernel_tools.views.mode import Mode
from kernel_tools.views.static import NoteView, Shows, Stack
from kernel_tools.views.summary import RunView

if TYPE_CHECKING:
    from kernel_tools.run import Run
    from kernel_tools.views.panel import Panel

LOOK_SECONDS: Final = 0.5

_panels: list[Panel] = []
_results: list[_Results] = []


def show(run: Run, *, mode: Mode) -> None:
    """Show a run without waiting for it: a live panel where a person looks on, else one view."""
    if mode is Mode.INTERACTIVE and not run.snapshot.terminal:
        _open_panel(run)
    else:
        _display(RunView(run.snapshot), mode)


def follow(
    run: Run,
    *,
    mode: Mode,
    timeout_seconds: float | None = None,
    check: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show a run and block until it has ended. Ctrl-C ends the waiting, never the run.

    Raises:
        RunFailed: it ended as failed or timed out (unless `check` is False).
        WaitTimeoutError: it goes on after `timeout_seconds`.
    """
    watcher: _Watcher
    if run.snapshot.terminal:
        watcher = _Watcher()  # whoever asks for it again sees the run itself
    elif mode is Mode.INTERACTIVE:
        watcher = _PanelWatcher(run)
    elif mode is Mode.BATCH:
        watcher = _PageWatcher()
    else:
        watcher = _LineWatcher()
    _look_on(run, watcher, timeout_seconds, clock)
    watcher.see(run.snapshot)
    if check:
        run.raise_for_state()


def present(run: Run, parts: Callable[[Run], Sequence[Shows]], *, mode: Mode, waiting: str) -> None:
    """Show what a run found: at once where it has ended, else below its panel as soon as it has.

    Args:
        run: the run.
        parts: brings what is to be shown; called when the run has completed, never else.
        mode: a program that does not wait is shown nothing.
        waiting: the sentence that stands there until then.
    """
    if run.snapshot.terminal:
        if run.snapshot.state is RunState.COMPLETED:
            for part in parts(run):
                _display(part, mode)
    elif mode is Mode.INTERACTIVE:
        _results[:] = [one for one in _results if one.open]
        _results.append(_Results(run, parts, waiting))


def let_go(connections: Sequence[object]) -> None:
    """Make panels static whose run is on none of `connections` any more."""
    for one in _results:
        if one.open and all(getattr(one.run, "link", None) is not link for link in connections):
            one.close(f"Disconnected. %remote_connect and %remote_attach {one.run.id} come back.")
    for panel in _panels:
        if panel.live and all(getattr(panel.run, "link", None) is not one for one in connections):
            panel.retire(
                f"Disconnected. %remote_connect and %remote_attach {panel.run.id} show it again."
            )


class _Results:
    """A place on the page that fills when its run has ended."""

    def __init__(self, run: Run, parts: Callable[[Run], Sequence[Shows]], waiting: str) -> None:
        from IPython.display import display

        self.run = run
        self.open = True
        self._parts = parts
        self._handle: Any = display(NoteView(waiting), display_id=True)
        self._fetching = threading.Lock()
        self._unsubscribe = run.subscribe(self._seen)
        self._seen(run.snapshot)

    def close(self, said: str) -> None:
        """Leave a sentence and wait no more."""
        self._put(NoteView(said))

    def _seen(self, snapshot: RunSnapshot) -> None:
        """Runs on the watcher's thread, which must not wait for files."""
        if snapshot.terminal and self._fetching.acquire(blocking=False):
            threading.Thread(target=self._fill, args=(snapshot,), daemon=True).start()

    def _fill(self, snapshot: RunSnapshot) -> None:
        if snapshot.state is not RunState.COMPLETED:
            self._put(NoteView(f"There is nothing to show: the run {snapshot.state.value}."))
            return
        try:
            shown: Shows = Stack(tuple(self._parts(self.run)))
        except KernelToolsError as error:
            shown = NoteView(f"Error: {error}")
        self._put(shown)

    def _put(self, shown: Shows) -> None:
        if not self.open:
            return
        self.open = False
        self._unsubscribe()
        if self._handle is not None:
            self._handle.update(shown)


class _Watcher:
    """Is shown every new snapshot, on the thread of the cell."""

    def see(self, snapshot: RunSnapshot) -> None:
        """Draw it if anything changed."""


class _PanelWatcher(_Watcher):
    """A panel draws itself; one is opened unless the run has one on the page."""

    def __init__(self, run: Run) -> None:
        _panels[:] = [panel for panel in _panels if panel.live]
        if all(panel.run is not run for panel in _panels):
            _open_panel(run)


class _LineWatcher(_Watcher):
    """A line of text whenever the state changes or an epoch is done."""

    def __init__(self) -> None:
        self._said: tuple[Any, ...] | None = None

    def see(self, snapshot: RunSnapshot) -> None:
        key = (snapshot.state, snapshot.status.get("completed_epochs"))
        if key != self._said:
            self._said = key
            print(redact(facts.line(snapshot)), flush=True)


class _PageWatcher(_LineWatcher):
    """One display that is updated in place, and the lines for whoever reads the batch log."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._shown: RunSnapshot | None = None

    def see(self, snapshot: RunSnapshot) -> None:
        super().see(snapshot)
        if snapshot is self._shown:
            return
        self._shown = snapshot
        if self._handle is None:
            from IPython.display import display

            self._handle = display(RunView(snapshot), display_id=True)
        else:
            self._handle.update(RunView(snapshot))


def _look_on(
    run: Run, watcher: _Watcher, timeout_seconds: float | None, clock: Callable[[], float]
) -> None:
    deadline = None if timeout_seconds is None else clock() + timeout_seconds
    said = False
    try:
        while True:
            watcher.see(run.snapshot)
            left = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, deadline - clock())
            try:
                run.wait(max(left, 0.0), check=False)
            except KeyboardInterrupt:
                said = True  # `wait` has told how to come back
                raise
            except WaitTimeoutError as error:
                if deadline is not None and clock() >= deadline:
                    # Its own text names the last slice of the waiting.
                    raise WaitTimeoutError(
                        f"{run.id} goes on ({run.snapshot.state.value}) after {timeout_seconds:g} s.",
                        hint=error.hint,
                    ) from None
            else:
                return
    except KeyboardInterrupt:
        if not said:
            print(
                f"Detached: {run.id} goes on. %remote_attach {run.id} comes back to it,"
                f" %remote_stop {run.id} ends it.",
                file=sys.stderr,
            )
        raise


def _open_panel(run: Run) -> None:
    from kernel_tools.views.panel import Panel

    _panels[:] = [panel for panel in _panels if panel.live]
    for panel in _panels:
        if panel.run.id == run.id and panel.run is not run:
            panel.retire("The run was taken up again; a newer panel shows it.")
    _panels.append(Panel(run).show())


def _display(view: Shows, mode: Mode) -> None:
    if mode is Mode.PLAIN:
        print(redact(str(view._repr_mimebundle_()["text/plain"])), flush=True)
        return
    from IPython.display import display

    display(view)
