"""Free TCP ports of 127.0.0.1 for local services of ours."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

from kernel_tools.errors import ServiceError

# Below the ports that Linux and macOS give to outgoing connections (32768 and 49152 upwards), also when
# 10,000 is added.
PORT_RANGE: Final = (15_000, 20_000)


def free(count: int, *, also_above: int = 0) -> tuple[int, ...]:
    """Return `count` free TCP ports of 127.0.0.1 below the range that the system hands out itself.

    Args:
        count: how many.
        also_above: where not 0, `port + also_above` is free as well for each.
    """
    first = int.from_bytes(os.urandom(2), "big")
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for offset in range(PORT_RANGE[1] - PORT_RANGE[0]):
            port = PORT_RANGE[0] + (first + offset) % (PORT_RANGE[1] - PORT_RANGE[0])
            with contextlib.ExitStack() as pair:
                try:
                    pair.enter_context(_bound(port))
                    if also_above:
                        pair.enter_context(_bound(port + also_above))
                except OSError:
                    continue
                held.push(pair.pop_all())
            ports.append(port)
            if len(ports) == count:
                return tuple(ports)
    raise ServiceError(f"No free port on 127.0.0.1 between {PORT_RANGE[0]} and {PORT_RANGE[1]}.")


def is_free(port: int) -> bool:
    """True where nothing listens on that port of 127.0.0.1."""
    try:
        with _bound(port):
            return True
    except OSError:
        return False


def _bound(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # As servers do: a port whose last connections are still in TIME_WAIT is free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound
