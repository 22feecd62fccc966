"""Bytes on their way while a cell works: one display, updated in place, on the cell's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from kernel_tools.views.mode import Mode, current_mode
from kernel_tools.views.static import ProgressView

UPDATE_SECONDS: Final = 0.25


class TransferDisplay:
    """`update(done_bytes, total_bytes)` as often as one likes; the page changes four times a second."""

    def __init__(self, label: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._clock = clock
        self._started = clock()
        self._shown = float("-inf")
        self._handle: Any = None
        self._last: tuple[int, int] | None = None

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Note how far it is."""
        self._last = (done_bytes, total_bytes)
        if self._clock() - self._shown >= UPDATE_SECONDS:
            self._draw()

    def finish(self) -> None:
        """Draw the end."""
        if self._last is not None:
            self._draw()

    def _draw(self) -> None:
        self._shown = self._clock()
        if self._last is None or current_mode() is Mode.PLAIN:
            return
        view = ProgressView(self._label, *self._last, self._clock() - self._started)
        if self._handle is None:
            from IPython.display import display

            self._handle = display(view, display_id=True)
        else:
            self._handle.update(view)
