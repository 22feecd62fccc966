"""One clock for everything that moves on the page: a single thread, at most four paints a second.

Workers only say that something changed (`touch`, from any thread); whatever is written into a widget
is written by this thread. Between two paints any number of changes become one, and the last is never
lost. The thread ends by itself when nothing moves any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

# Faster than this a reader sees no more, and a notebook's server only has more to carry.
PAINT_INTERVAL_SECONDS: Final = 0.3
IDLE_SECONDS: Final = 5.0


class Face(Protocol):
    """Something that can draw its newest state."""

    def paint(self) -> None:
        """Draw it; called by the clock's thread only."""


class RenderClock:
    """Paints faces that were touched.

    Attributes:
        errors: what faces raised, newest last; a thread's traceback would land in some other cell.
    """

    def __init__(
        self,
        *,
        interval_seconds: float = PAINT_INTERVAL_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.errors: deque[Exception] = deque(maxlen=20)
        self._interval = interval_seconds
        self._sleep = sleep
        self._changed = threading.Condition()
        self._dirty: dict[Face, None] = {}
        self._busy = False
        self._thread: threading.Thread | None = None

    def touch(self, face: Face) -> None:
        """Have `face` painted soon; returns at once."""
        with self._changed:
            self._dirty[face] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="render clock")
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until nothing is left to paint; False if `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._dirty and not self._busy, timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._dirty), IDLE_SECONDS)
                if not self._dirty:
                    self._thread = None
                    return
                faces = tuple(self._dirty)
                self._dirty.clear()
                self._busy = True
            for face in faces:
                try:
                    face.paint()
                except Exception as error:  # noqa: BLE001 - one broken panel must not stop the others
                    self.errors.append(error)
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            self._sleep(self._interval)


CLOCK: Final = RenderClock()
