"""Waiting: what is shown meanwhile, and how it ends."""

from __future__ import annotations

import pytest

from kernel_tools.errors import RunFailed, WaitTimeoutError
from kernel_tools.views import Mode, follow
from kernel_tools.views.render import CLOCK
from tests.fakes.runs import RUN_ID, FakeRun, ended, snapshot, training
from tests.fakes.shell import published


@pytest.fixture(autouse=True)
def no_panels_of_other_tests():
    assert CLOCK.flush()  # what an earlier test's panel still has to paint is not this one's
    follow._panels.clear()
    yield
    follow._panels.clear()


def test_plain_prints_a_line_an_epoch_and_no_more(capsys):
    run = FakeRun(
        snapshot(training(completed_epochs=1)),
        snapshot(training(completed_epochs=1, optimizer_steps=98)),
        snapshot(training(completed_epochs=2)),
        ended(),
    )
    follow.follow(run, mode=Mode.PLAIN)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines] == [
        ["state=training", "epoch=1/10"],
        ["state=training", "epoch=2/10"],
        ["state=completed", "epoch=10/10"],
    ]


def test_a_failed_run_raises_after_its_end_was_shown(capsys):
    run = FakeRun(snapshot(), ended("failed"))
    with pytest.raises(RunFailed):
        follow.follow(run, mode=Mode.PLAIN)
    assert "state=failed" in capsys.readouterr().out


def test_an_interrupt_between_two_looks_says_how_to_come_back(capsys, monkeypatch):
    run = FakeRun(snapshot(), ended())

    def interrupted(self, _snapshot):
        raise KeyboardInterrupt

    monkeypatch.setattr(follow._LineWatcher, "see", interrupted)
    with pytest.raises(KeyboardInterrupt):
        follow.follow(run, mode=Mode.PLAIN)
    assert f"%remote_attach {RUN_ID}" in capsys.readouterr().err


def test_a_run_that_has_ended_is_not_shown_twice(shell):
    follow.follow(FakeRun(ended()), mode=Mode.BATCH)
    assert published(shell) == []


def test_waiting_opens_no_second_panel(shell):
    run = FakeRun(snapshot(), snapshot(), ended())
    follow.show(run, mode=Mode.INTERACTIVE)
    follow.follow(run, mode=Mode.INTERACTIVE)
    panels = [
        m for m in published(shell) if "application/vnd.jupyter.widget-view+json" in m["data"]
    ]
    assert len(panels) == 1


def test_taking_a_run_up_again_retires_its_older_panel(shell):
    first, again = FakeRun(snapshot()), FakeRun(snapshot())
    follow.show(first, mode=Mode.INTERACTIVE)
    follow.show(again, mode=Mode.INTERACTIVE)
    assert CLOCK.flush()
    old = published(shell)[0]
    # Before or after the new one; the second takes its widgets away.
    farewell, _nothing = [one for one in published(shell) if one["update"]]
    assert farewell["transient"] == old["transient"]
    assert "a newer panel shows it" in farewell["data"]["text/html"]


def test_disconnecting_makes_panels_static_that_nobody_updates_any_more(shell):
    gone, kept = FakeRun(snapshot()), FakeRun(snapshot(run_id="other"))
    gone.link, kept.link = object(), object()
    follow.show(gone, mode=Mode.INTERACTIVE)
    follow.show(kept, mode=Mode.INTERACTIVE)
    follow.let_go([kept.link])
    assert CLOCK.flush()
    first, *_others, farewell, _nothing = published(shell)
    assert farewell["transient"] == first["transient"]
    assert "%remote_connect" in farewell["data"]["text/plain"]


def test_a_wait_that_gives_up_names_the_whole_time():
    run, now = FakeRun(snapshot()), iter(range(100))
    with pytest.raises(WaitTimeoutError, match=r"after 5 s\."):
        follow.follow(run, mode=Mode.PLAIN, timeout_seconds=5, clock=lambda: float(next(now)))
