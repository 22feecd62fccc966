"""How fast bytes come, from what a panel sees of them now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kernel_tools.state import RunSnapshot
from kernel_tools.views.facts import inputs

# Long enough to be calm, short enough to notice that nothing comes any more. Seconds.
WINDOW_SECONDS: Final = 10.0


class Pace:
    """Remembers the last seconds of every data set that is on its way."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def rates(self, snapshot: RunSnapshot) -> dict[str, float]:
        """Note how far each is, and return bytes a second by name, of those seen twice."""
        now = self._clock()
        coming = {one.name: one.done_bytes for one in inputs(snapshot) if one.state != "ready"}
        self._seen = {name: self._seen.get(name, deque()) for name in coming}
        rates = {}
        for name, count in coming.items():
            seen = self._seen[name]
            seen.append((now, count))
            while len(seen) > 2 and now - seen[0][0] > WINDOW_SECONDS:
                seen.popleft()
            since, had = seen[0]
            if now > since:
                rates[name] = max(0.0, (count - had) / (now - since))
        return rates
