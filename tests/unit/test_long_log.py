"""A log that is far ahead: its newest lines at once, the whole of it from behind, always a gapless prefix."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import psutil
import pytest

from kernel_tools.agent import api
from kernel_tools.errors import KernelConnectionError
from kernel_tools.run import Run
from kernel_tools.runs import watch
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord

RUN_ID = "20260101-000000-long-0001"
LINE = b"epoch=%04d step=%06d/999999 loss=12.3456 lr=1.00e-04 images_per_second=123.45\n"


class Machine:
    """A remote folder on this disk, and the agent's own functions to reach it."""

    where = "this machine"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "runs" / RUN_ID / "train.log"
        (self.log.parent / "control").mkdir(parents=True)
        self.calls: list[str] = []
        self.failures = 0

    def call(self, function, *, timeout_seconds=60.0, **arguments):
        self.calls.append(function)
        if function == "pack_log" and self.failures:
            self.failures -= 1
            raise KernelConnectionError("no answer")
        return getattr(api, function)(**arguments)

    def get_file(self, remote_path, destination):
        shutil.copyfile(remote_path, destination)

    def write(self, megabytes):
        block = b"".join(LINE % (i // 100, i) for i in range((1 << 20) // len(LINE % (0, 0)) + 1))
        with self.log.open("ab") as stream:
            for _ in range(megabytes):
                stream.write(block)

    def say(self, text):
        with self.log.open("ab") as stream:
            stream.write(text)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "remote")


@pytest.fixture
def run(machine, tmp_path):
    record = RunRecord(RUN_ID, "long", "t", "local", str(machine.root), "artifacts/remote")
    run = Run(record, link=machine, mirror=RunMirror(tmp_path / "mirror"))
    yield run
    run.detach()


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def filled(run, machine):
    return run.log_path().is_file() and run.log_path().stat().st_size == machine.log.stat().st_size


def same(first: Path, second: Path) -> bool:
    with first.open("rb") as one, second.open("rb") as other:
        while True:
            left, right = one.read(1 << 22), other.read(1 << 22)
            if left != right:
                return False
            if not left:
                return True


def test_the_first_look_shows_the_newest_lines_in_two_round_trips(run, machine, monkeypatch):
    monkeypatch.setattr(watch.RunWatcher, "_fill", lambda self: None)
    machine.write(8)
    machine.say(b"the newest line\n")
    run.refresh()
    assert machine.calls == ["poll", "poll"]
    assert run.snapshot.log_tail[-2:] == ("the newest line", "")
    assert run.logs(1) == "the newest line"


def test_what_lies_before_comes_from_behind_and_new_lines_go_on(run, machine, monkeypatch):
    monkeypatch.setattr(watch, "PIECE_BYTES", 1 << 20)
    machine.write(12)
    run.refresh()
    for number in range(20):
        machine.say(b"new %d\n" % number)
        run.refresh()
        assert run.snapshot.log_tail[-2] == f"new {number}"
        prefix = run.log_path().read_bytes()
        assert machine.log.read_bytes().startswith(prefix)
    wait_for(lambda: (run.refresh(), filled(run, machine))[1])
    assert same(run.log_path(), machine.log)
    assert [name for name in os.listdir(machine.log.parent / "control") if "log-" in name] == []


def test_a_line_that_breaks_meanwhile_leaves_no_gap(run, machine, monkeypatch):
    monkeypatch.setattr(watch, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)
    machine.write(8)
    machine.failures = 3
    run.refresh()
    wait_for(lambda: (run.refresh(), filled(run, machine))[1])
    assert same(run.log_path(), machine.log)


def test_a_run_is_finished_only_when_its_whole_log_is_here(run, machine):
    machine.write(8)
    run.refresh()
    assert not run._watcher.finished
    wait_for(lambda: filled(run, machine))
    run.refresh()
    assert run._watcher._caught_up


@pytest.mark.slow
def test_a_gibibyte_is_shown_within_two_seconds_and_fits_in_memory(run, machine):
    machine.write(1024)
    machine.say(b"the newest line\n")
    before, most = psutil.Process().memory_info().rss, [0]
    over = threading.Event()

    def measure():
        while not over.wait(0.05):
            most[0] = max(most[0], psutil.Process().memory_info().rss - before)

    watcher = threading.Thread(target=measure)
    watcher.start()
    try:
        began = time.monotonic()
        run.refresh()
        shown = time.monotonic() - began
        assert run.snapshot.log_tail[-2] == "the newest line"
        assert shown < 2.0
        wait_for(lambda: filled(run, machine), 240)
        run.refresh()
    finally:
        over.set()
        watcher.join()
    assert same(run.log_path(), machine.log)
    assert most[0] < 200e6  # both ends are in this process
