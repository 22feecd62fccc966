"""A blocking call with an end: what a library does without a deadline is left behind when it is late.

A half-open socket or a server that sends a byte a second keeps a client waiting for as long as it likes;
the timeouts of `requests` and `websocket-client` are per read. So such a call runs in a daemon thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

# A wait is cut into pieces of this length, so that Ctrl-C is seen on every platform.
PIECE_SECONDS: Final = 0.5


class LateError(TimeoutError):
    """The call had not ended in time; it goes on in its thread, and nobody waits for it."""


class _Call(Generic[T]):
    """One call in its thread: whoever is first, its end or its caller's patience, decides."""

    def __init__(self, action: Callable[[], T], discard: Callable[[T], object]) -> None:
        self._action = action
        self._discard = discard
        self._decided = threading.Lock()
        self._left = False
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            value = self._action()
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            self.error = error
            self.done.set()
            return
        with self._decided:
            self.value = value
            self.done.set()
            left = self._left
        if left:
            self._discard(value)

    def leave(self) -> bool:
        """Stop waiting; false where the call has just ended after all."""
        with self._decided:
            self._left = not self.done.is_set()
            return self._left


def within(
    seconds: float, action: Callable[[], T], *, discard: Callable[[T], object] = lambda _: None
) -> T:
    """Return what `action()` returns, or raise what it raises, if that happens in time.

    Args:
        seconds: how long is waited.
        action: runs in a daemon thread, and so do the threads that it starts.
        discard: given a result that came too late, such as a socket that is to be closed.

    Raises:
        LateError: it took longer.
    """
    call = _Call(action, discard)
    threading.Thread(target=call.run, name="kernel_tools call", daemon=True).start()
    left = seconds
    try:
        while not call.done.wait(min(PIECE_SECONDS, max(0.0, left))):
            left -= PIECE_SECONDS
            if left <= 0:
                break
    except BaseException:
        if not call.leave() and call.error is None:
            discard(call.value)
        raise
    if not call.done.is_set() and call.leave():
        raise LateError(f"no answer within {seconds:g} s")
    if call.error is not None:
        raise call.error
    result: T = call.value
    return result
