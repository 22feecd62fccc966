"""One thread paints, at most so often, and never loses the last state."""

from __future__ import annotations

import threading

from kernel_tools.views.render import RenderClock


class Counting:
    def __init__(self):
        self.value = 0
        self.painted = []
        self.threads = set()

    def paint(self):
        self.painted.append(self.value)
        self.threads.add(threading.current_thread().name)


class Broken:
    def paint(self):
        raise RuntimeError("no page")


def test_many_touches_become_few_paints_and_the_last_is_shown():
    gate, waiting = threading.Event(), threading.Event()

    def sleep(_seconds):
        waiting.set()
        gate.wait(5)

    clock, face = RenderClock(sleep=sleep), Counting()
    clock.touch(face)
    assert waiting.wait(5)
    for value in range(1, 1001):
        face.value = value
        clock.touch(face)
    gate.set()
    assert clock.flush()
    assert face.painted == [0, 1000]
    assert face.threads == {"render clock"}


def test_between_two_paints_lies_the_interval():
    slept = []
    clock, face = RenderClock(interval_seconds=0.25, sleep=slept.append), Counting()
    for _ in range(5):
        clock.touch(face)
        assert clock.flush()
    assert len(face.painted) == 5
    assert set(slept) == {0.25}


def test_a_broken_face_does_not_stop_the_others():
    clock, face = RenderClock(interval_seconds=0), Counting()
    clock.touch(Broken())
    clock.touch(face)
    assert clock.flush()
    assert face.painted
    assert [str(error) for error in clock.errors] == ["no page"]
