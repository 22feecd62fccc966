"""What a held kernel does with a cell that was given up, without a server."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from kernel_tools.errors import KernelConnectionError, KernelTimeoutError
from kernel_tools.kernels import held
from kernel_tools.kernels.base import Patience
from kernel_tools.kernels.held import HeldKernel


def kernel_of(state_of):
    driver = SimpleNamespace(
        patience=Patience(), address=SimpleNamespace(shown="a server"), state_of=state_of
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

    kernel = kernel_of(unreachable)
    kernel._await_the_last_cell(time.monotonic() + 1)
    assert not kernel._unanswered


def test_the_wait_ends_with_the_cell():
    states = iter(["busy", "busy", "idle"])
    kernel = kernel_of(lambda _: next(states))
    kernel._await_the_last_cell(time.monotonic() + 30)
    assert not kernel._unanswered
    assert next(states, None) is None
