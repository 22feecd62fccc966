from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from detector.stopping import StopRequest, StopWatch


def ask(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "control" / "stop.json"


@pytest.fixture
def restored_signals() -> object:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def watching(control: Path, **options: object) -> StopWatch:
    watch = StopWatch()
    watch.watch(control, **{"max_hours": None, "started": time.monotonic(), **options})
    return watch


def test_nothing_asked_is_no_request(control: Path) -> None:
    assert watching(control).requested() is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps({"reason": "stopped", "message": "enough"}), StopRequest("stopped", "enough")),
        (
            json.dumps({"reason": "timed_out", "message": "budget"}),
            StopRequest("timed_out", "budget"),
        ),
        ("", StopRequest("stopped", "stopped on request")),
        ("[]", StopRequest("stopped", "stopped on request")),
    ],
)
def test_the_file_asks_whatever_stands_in_it(
    control: Path, text: str, expected: StopRequest
) -> None:
    ask(control, text)
    assert watching(control).requested() == expected


def test_used_up_hours_are_a_limit(control: Path) -> None:
    watch = watching(control, max_hours=1.0, started=time.monotonic() - 3601)
    assert watch.requested() == StopRequest("timed_out", "runtime.max_hours=1 is used up")
    assert watching(control, max_hours=1.0).requested() is None


@pytest.mark.usefixtures("restored_signals")
def test_sigterm_asks_and_the_file_says_more(control: Path) -> None:
    watch = StopWatch()
    watch.catch_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert watch.requested() == StopRequest("stopped", "stopped by SIGTERM")
    watch.watch(control, max_hours=None, started=0.0)
    ask(control, json.dumps({"reason": "timed_out", "message": "budget"}))
    assert watch.requested() == StopRequest("timed_out", "budget")


@pytest.mark.usefixtures("restored_signals")
def test_the_second_interrupt_interrupts(control: Path) -> None:
    watch = StopWatch()
    watch.catch_signals()
    os.kill(os.getpid(), signal.SIGINT)
    assert watch.requested() == StopRequest("stopped", "stopped by SIGINT")
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
