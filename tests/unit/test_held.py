"""What a held kernel does with a cell that was given up, without a server."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest

from kernel_tools.errors import KernelConnectionError, KernelTimeoutError
from kernel_tools.kernels import held
from kernel_tools.kernels.base import Patience
from kernel_tools.kernels.driver import CellTimeoutError
from kernel_tools.kernels.held import HeldKernel


def kernel_of(state_of, line=None):
    driver = SimpleNamespace(
        patience=Patience(),
        address=SimpleNamespace(shown="a server"),
        state_of=state_of,
        open_line=lambda _: line,
        named=lambda _: contextlib.nullcontext(),
    )
    kernel = HeldKernel(driver, "0123456789", kernel_name="python3")
    kernel._unanswered = True
    return kernel


@pytest.fixture
def over():
    over = threading.Event()
    yield over
    over.set()


def test_nothing_is_sent_while_the_server_is_too_slow_to_say_whether_the_cell_ended(
    over, monkeypatch
):
    monkeypatch.setattr(held, "CHECK_SECONDS", 0.05)
    kernel = kernel_of(lambda _: over.wait(60))
    with pytest.raises(KernelTimeoutError, match="nothing more was sent"):
        kernel._await_the_last_cell(time.monotonic() + 0.01)
    assert kernel._unanswered


def test_a_server_that_is_not_there_is_left_to_the_opening_of_the_line():
    def unreachable(_):
        raise KernelConnectionError("refused")

    line = FakeLine()
    kernel = kernel_of(unreachable, line)
    kernel._await_the_last_cell(time.monotonic() + 1)
    assert line.asked == 1
    assert not kernel._unanswered


def test_the_wait_ends_with_the_cell():
    states = iter(["busy", "busy", "idle"])
    kernel = kernel_of(lambda _: next(states), FakeLine())
    kernel._await_the_last_cell(time.monotonic() + 30)
    assert not kernel._unanswered
    assert next(states, None) is None


def test_a_server_that_calls_a_busy_kernel_idle_is_not_believed():
    line = FakeLine(busy=2)
    kernel = kernel_of(lambda _: "idle", line)
    for _ in range(2):
        with pytest.raises(KernelTimeoutError, match="nothing more was sent"):
            kernel._await_the_last_cell(time.monotonic() + 1)
    assert not line.dropped
    kernel._await_the_last_cell(time.monotonic() + 1)
    assert not kernel._unanswered


def test_a_line_that_stays_silent_for_too_long_is_opened_anew():
    line = FakeLine(busy=1)
    kernel = kernel_of(lambda _: "idle", line)
    kernel._patience = dataclasses.replace(Patience(), answer=0)
    with pytest.raises(KernelTimeoutError, match="nothing more was sent"):
        kernel._await_the_last_cell(time.monotonic() + 1)
    assert line.dropped


class FakeLine:
    """Comes to the question when asked for the time after `busy`."""

    def __init__(self, busy=0):
        self.busy, self.asked, self.dropped = busy, 0, False

    def await_turn(self, timeout_seconds):
        self.asked += 1
        if self.asked <= self.busy:
            raise CellTimeoutError

    def is_alive(self):
        return not self.dropped

    def drop(self):
        self.dropped = True
