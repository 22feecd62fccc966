"""A TCP relay in front of a store: it counts what goes up, and may change heads on their way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Change = Callable[[bytes], bytes]


class Relay:
    """Listens on loopback; `up_bytes` counts what clients sent through it.

    Attributes:
        endpoint: its URL.
        change_up: is handed each piece that a client sends; a head arrives as one piece.
        change_down: likewise what the store answers.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lines: set[socket.socket] = set()
        self._closed = False
        self._moved = threading.Condition()
        self.up_bytes = 0
        self.change_up: Change = bytes
        self.change_down: Change = bytes
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_for_bytes(self, count: int, *, or_until: Callable[[], bool], seconds: float) -> None:
        """Return when so much went up, or the other thing has come about."""
        with self._moved:
            for _ in range(round(seconds / 0.01)):
                if self.up_bytes >= count or or_until():
                    return
                self._moved.wait(0.01)
        raise AssertionError(f"{self.up_bytes} of {count} bytes came within {seconds} s")

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the waiting for a client as well
        self._listener.close()
        for line in list(self._lines):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                client, _ = self._listener.accept()
                try:
                    store = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                self._lines |= {client, store}
                for source, sink, up in ((client, store, True), (store, client, False)):
                    threading.Thread(
                        target=self._carry, args=(source, sink, up), daemon=True
                    ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if up:
                    with self._moved:
                        self.up_bytes += len(piece)
                        self._moved.notify_all()
                sink.sendall(self.change_up(piece) if up else self.change_down(piece))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def relay_to(endpoint: str) -> Iterator[Relay]:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    relay = Relay(host, int(port))
    try:
        yield relay
    finally:
        relay.close()
