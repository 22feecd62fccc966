"""A stop whatever the moment: twice, after the end, while nobody answers; and how it shows itself."""

from __future__ import annotations

import weakref

import pytest

from kernel_tools.errors import AgentError, KernelAuthError, KernelConnectionError
from kernel_tools.run import Run, StopAnswer
from kernel_tools.runs import watch
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.watch import STOPPING_POLL_SECONDS
from kernel_tools.state import RunState

from .test_watch import RECORD, Remote


@pytest.fixture
def remote():
    return Remote()


@pytest.fixture
def run(remote, tmp_path, monkeypatch):
    monkeypatch.setattr("kernel_tools.runs.watch.POLL_SECONDS", 0.01)
    run = Run(RECORD, link=remote, mirror=RunMirror(tmp_path / "mirror"))
    yield run
    run.detach()


def stops(remote):
    return [arguments for name, arguments in remote.calls if name == "stop"]


def test_a_stop_is_one_sentence_as_a_cells_last_line(run, remote):
    remote.answer_stop = lambda **_: {"state": "training", "asked": True}
    answer = run.stop()
    assert (answer.asked, answer.pending, answer.state) == (True, False, RunState.TRAINING)
    assert repr(answer) == (
        f"{run.id} was asked to stop (training); %remote_wait {run.id} --no-check waits for it."
    )


def test_a_second_stop_asks_again_and_does_no_harm(run, remote):
    remote.answer_stop = lambda **_: {"state": "training", "asked": True}
    run.stop()
    run.stop(now=True)
    assert [asked["now"] for asked in stops(remote)] == [False, True]


def test_a_stop_after_the_end_asks_nobody(run, remote):
    remote.state = "completed"
    run.refresh()
    answer = run.stop()
    assert (answer.asked, answer.pending, repr(answer)) == (
        False, False, f"{run.id} has ended: completed.",
    )  # fmt: skip
    assert stops(remote) == []


def test_a_stop_while_contact_is_lost_is_said_when_it_is_back(run, remote):
    run.refresh()
    remote.failure = KernelConnectionError("no answer")
    answer = run.stop(now=True, message="enough")
    assert (answer.asked, answer.pending, answer.state) == (False, True, RunState.TRAINING)
    assert "cannot be reached, so it goes on for now" in repr(answer)
    remote.calls.clear()
    remote.failure = None
    assert run.wait(20).state is RunState.STOPPED
    assert [(asked["now"], asked["message"]) for asked in stops(remote)] == [(True, "enough")]


@pytest.mark.parametrize(
    ("state", "pause"), [("stopping", STOPPING_POLL_SECONDS), ("training", watch.POLL_SECONDS)]
)
def test_somebody_who_waits_for_the_end_hears_of_it_sooner(remote, tmp_path, state, pause):
    pauses = []

    class Wake:
        def wait(self, seconds):
            pauses.append(seconds)
            remote.state = "stopped"

        def clear(self):
            pass

    remote.state = state
    watcher = watch.RunWatcher(RECORD, link=remote, mirror=RunMirror(tmp_path / "mirror"))
    watch._watch(weakref.ref(watcher), Wake())
    assert pauses == [pause]
    assert watcher.snapshot.state is RunState.STOPPED


@pytest.mark.parametrize("error", [KernelAuthError("expired"), AgentError("no such run")])
def test_a_stop_that_is_refused_is_an_error(run, remote, error):
    remote.failure = error
    with pytest.raises(type(error)):
        run.stop()


def test_an_answer_is_a_value():
    assert StopAnswer("r", RunState.STOPPED) == StopAnswer("r", RunState.STOPPED)
