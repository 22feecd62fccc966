"""Ports that are free now, and will not be given to someone's outgoing connection."""

from __future__ import annotations

import socket

from kernel_tools.services import ports


def test_ports_differ_are_free_and_lie_below_the_systems_own_range() -> None:
    found = ports.free(5, also_above=10_000)

    assert len(set(found)) == 5
    for port in found:
        assert ports.PORT_RANGE[0] <= port < ports.PORT_RANGE[1]
        assert ports.is_free(port)
        assert ports.is_free(port + 10_000)


def test_a_port_that_someone_listens_on_is_not_free() -> None:
    (port,) = ports.free(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not ports.is_free(port)
    assert ports.is_free(port)
