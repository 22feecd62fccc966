"""Connections: those that are open, by name, and those let go of, which come back as themselves.

A run is watched through its connection, so connecting again under a name hands the new line to the
object that the runs already hold. What a connection does is in `connection.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernel_tools.connecting.connection import Connection
from kernel_tools.errors import NotConnectedError
from kernel_tools.run import Run


class Connections:
    """The connections of one session; the last one made is the default."""

    def __init__(self) -> None:
        self._open: dict[str, Connection] = {}
        self._let_go: dict[str, Connection] = {}  # runs go on being watched through these

    @property
    def open(self) -> tuple[Connection, ...]:
        """Those that are open, the default one last."""
        return tuple(self._open.values())

    def named(self, on: str | None = None) -> Connection:
        """Return an open connection by name, or the default one.

        Raises:
            NotConnectedError: there is none.
        """
        if on is None and self._open:
            return next(reversed(self._open.values()))
        if on is not None and on in self._open:
            return self._open[on]
        wanted = "there is no connection yet" if on is None else f"there is no connection {on!r}"
        known = f" (there are: {', '.join(self._open)})" if self._open else ""
        raise NotConnectedError(
            f"{wanted}{known}.", hint="%remote_connect local, or %remote_connect URL."
        )

    def of(self, run: Run | None, on: str | None = None) -> Connection | None:
        """Return the run's own connection, so that its weights are at hand; None without a run."""
        if run is None:
            return None
        held = [connection for connection in self.open if connection is run.link]
        return held[0] if held else self.named(on)

    def add(self, made: Connection) -> Connection:
        """Make a connection the default; return the one to hold, which an earlier one of its name is."""
        previous = self._open.pop(made.name, None) or self._let_go.pop(made.name, None)
        if previous is not None:
            previous.take_over(made)
            made = previous
        self._open[made.name] = made
        return made

    def let_go(self, connection: Connection, *, running: Sequence[str]) -> str:
        """Close a connection; return a sentence that says so.

        Args:
            connection: an open one.
            running: ids of the runs that go on there.
        """
        del self._open[connection.name]
        ended = " The local server and store were ended." if connection.close() else ""
        self._let_go[connection.name] = connection
        if not running:
            return f"Disconnected from {connection.name}; none of its runs is going on.{ended}"
        return (
            f"Disconnected from {connection.name}; still running there: {', '.join(running)}. "
            f"%remote_connect{' local' if connection.local else ''} and "
            f"%remote_attach {running[0]} come back."
        )
