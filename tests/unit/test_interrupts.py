"""Ctrl-C in the midst of a call: `%xmode Verbose` must find no URL and no key to show."""

from __future__ import annotations

import contextlib
import traceback

import pytest

from kernel_tools.kernels.base import PATIENCE, ServerAddress
from kernel_tools.kernels.driver import ServerDriver
from kernel_tools.stores.failures import translated

CANARY = "canary-in-a-frame"


class Driver(ServerDriver):
    def open_line(self, kernel_id):
        raise NotImplementedError


def in_a_library(url):
    """Stands for a client library: its frame holds the secret when the interrupt arrives."""
    assert url
    raise KeyboardInterrupt


@pytest.mark.parametrize("library", ["kernel", "store"])
def test_an_interrupt_leaves_the_librarys_frames_behind(library):
    guard: contextlib.AbstractContextManager[None]
    if library == "kernel":
        address = ServerAddress.parse("http://127.0.0.1:1", None)
        guard = Driver(address, PATIENCE).named("a cell")
    else:
        guard = translated(endpoint="e", bucket="b", key="k", ask_again=lambda: None)
    with pytest.raises(KeyboardInterrupt) as caught, guard:
        in_a_library(CANARY)
    told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert "in_a_library" not in "".join(told.format())
