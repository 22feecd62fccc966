"""The live panel: right, calm, and gone in favour of a static summary at the end."""

from __future__ import annotations

import re

import pytest

from kernel_tools.errors import KernelTimeoutError
from kernel_tools.run import StopAnswer
from kernel_tools.views import facts
from kernel_tools.views.pace import Pace
from kernel_tools.views.panel import CURVES_SECONDS, KEPT_SECONDS, LOG_CHARACTERS, Panel
from kernel_tools.views.render import RenderClock
from tests.fakes.runs import RUN_ID, FakeRun, ended, snapshot, training
from tests.fakes.shell import published

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def clock():
    return RenderClock(interval_seconds=0)


@pytest.fixture
def run():
    return FakeRun(snapshot())


@pytest.fixture
def panel(shell, run, clock):
    one = Panel(run, clock=clock).show()
    assert clock.flush()
    yield one
    assert list(clock.errors) == []


def test_it_shows_the_figures(panel):
    for token in (
        "world_size=2",
        "optimizer_steps=97",
        "sync_size_mb=0.24",
        "1 skipped",
        "21.3 images/s",
    ):
        assert token in panel.body.value
    assert "training" in panel.head.value
    assert "epoch=4 step=14/28" in panel.log.value


def test_it_follows_the_run(panel, run, clock):
    run.tell(snapshot(training(optimizer_steps=98, state="validating")))
    assert clock.flush()
    assert "optimizer_steps=98" in panel.body.value
    assert "validating" in panel.head.value


def test_where_no_widget_can_be_a_static_twin_is_readable(panel, shell):
    kept, live = published(shell)
    assert set(live["data"]) == {WIDGET, "text/plain"}
    assert set(kept["data"]) == {"text/plain", "text/html"}
    assert "optimizer_steps=97" in kept["data"]["text/html"]
    assert f"%remote_attach {RUN_ID}" in kept["data"]["text/plain"]
    for told in kept["data"].values():
        assert re.search(r"as it stood at \d{4}-\d\d-\d\d \d\d:\d\d", told)
        assert "contact: live" not in told
    # The page hides it as long as the panel is there.
    (token,) = re.findall(r"body:has\(\.kt-live-(\w+)\)", kept["data"]["text/html"])
    assert f'class="kt-kept-{token}"' in kept["data"]["text/html"]
    assert f"kt-live-{token}" in panel.box._dom_classes


def test_the_static_twin_keeps_up_now_and_again(shell, run, clock):
    now = [100.0]
    panel = Panel(run, clock=clock, now=lambda: now[0]).show()
    assert clock.flush()

    def updates(count):
        run.tell(snapshot(training(optimizer_steps=count)))
        assert clock.flush()
        return [one["data"]["text/plain"] for one in published(shell) if one["update"]]

    assert updates(98) == []
    now[0] += KEPT_SECONDS
    (told,) = updates(99)
    assert "optimizer_steps=99" in told
    assert len(updates(100)) == 1
    assert panel.live


def test_at_the_end_a_static_summary_takes_its_place(panel, run, clock, shell):
    run.tell(ended())
    assert clock.flush()
    kept, live, summary, nothing = published(shell)
    assert (summary["update"], nothing["update"]) == (True, True)
    assert (summary["transient"], nothing["transient"]) == (kept["transient"], live["transient"])
    assert nothing["data"] == {"text/plain": "", "text/html": ""}
    assert set(summary["data"]) == {"text/plain", "text/html"}
    assert "optimizer_steps=280" in summary["data"]["text/html"]
    assert "kt-kept" not in summary["data"]["text/html"]
    assert not panel.live
    assert run.subscribers == []
    (left,) = panel.box.children  # for a page that was opened again, and knows the widgets alone
    assert left.value == summary["data"]["text/html"]
    assert panel.stop_button.comm is None


def test_what_comes_after_the_end_changes_nothing(panel, run, clock, shell):
    run.tell(ended())
    assert clock.flush()
    clock.touch(panel)
    assert clock.flush()
    assert len(published(shell)) == 4


def test_a_panel_without_its_kernel_says_so(panel):
    """The front end gives every widget that class when its kernel is gone."""
    assert ".jupyter-widgets-disconnected .kt-view .kt-head::after" in panel.head.value
    assert "the kernel behind this panel is gone" in panel.head.value.lower()


def test_an_unchanged_state_sends_nothing(panel, run, clock):
    seen = []
    for widget in (panel.head, panel.body, panel.log, panel.note):
        widget.observe(seen.append, "value")
    run.tell(snapshot())
    assert clock.flush()
    assert seen == []


def test_stop_asks_first(panel, run, clock):
    panel.stop_button.click()
    assert clock.flush()
    assert panel.confirm.layout.display == "flex"
    assert run.calls == []
    panel.keep_button.click()
    assert clock.flush()
    assert panel.confirm.layout.display == "none"
    assert run.calls == []


def test_confirmed_stop_stops_once(panel, run, clock):
    panel.stop_button.click()
    panel.confirm_button.click()
    assert run.acted.wait(5)
    assert clock.flush()
    assert run.calls == [("stop", False)]
    assert panel.stop_button.disabled
    assert panel.confirm.layout.display == "none"


def test_fetch_brings_the_best_weights(panel, run):
    panel.fetch_button.click()
    assert run.acted.wait(5)
    assert run.calls == [("fetch", ("weights/best.pt",), None)]


def test_a_button_that_fails_says_so_in_the_panel(panel, run, clock):
    def stop(*, now=False):
        run.acted.set()
        raise KernelTimeoutError("the kernel gave no reply.")

    run.stop = stop
    panel.stop_button.click()
    panel.confirm_button.click()
    assert run.acted.wait(5)
    panel._worker.join(5)
    assert clock.flush()
    assert "Error: the kernel gave no reply." in panel.note.value
    assert not panel.stop_button.disabled


def test_detach_leaves_the_run_alone_and_says_how_to_return(panel, run, clock, shell):
    panel.detach_button.click()
    assert clock.flush()
    assert run.calls == []
    assert not panel.live
    (farewell, _nothing) = [one for one in published(shell) if one["update"]]
    assert f"%remote_attach {RUN_ID}" in farewell["data"]["text/html"]


def test_two_panels_of_one_run_live_side_by_side(panel, run, clock, shell):
    other = Panel(run, clock=clock).show()
    panel.detach_button.click()
    run.tell(snapshot(training(optimizer_steps=123)))
    assert clock.flush()
    assert "optimizer_steps=123" in other.body.value


def test_the_log_is_a_ring(panel, run, clock):
    run.tell(snapshot(log_tail=tuple(f"line {i} " + "x" * 400 for i in range(200))))
    assert clock.flush()
    assert "line 199 " in panel.log.value
    assert "line 0 " not in panel.log.value
    assert len(panel.log.value) < LOG_CHARACTERS + 1000


def test_one_endless_line_is_cut(panel, run, clock):
    run.tell(snapshot(log_tail=("y" * 100_000,)))
    assert clock.flush()
    assert len(panel.log.value) < LOG_CHARACTERS + 1000


def test_the_path_of_the_log_is_escaped_in_its_button(shell, run, clock):
    run.log_path = lambda: '/data/"><img src=x onerror=alert(1)>/train.log'
    assert "<img" not in Panel(run, clock=clock).copy_button.value


def test_it_is_made_of_core_widgets_alone(panel):
    """So that VS Code and Colab need no package from elsewhere to show it."""

    def below(widget):
        return [widget, *(w for child in getattr(widget, "children", ()) for w in below(child))]

    modules = {(w._model_module, w._view_module) for w in below(panel.box)}
    assert modules == {("@jupyter-widgets/controls", "@jupyter-widgets/controls")}
    assert all(w._model_module_version.startswith("2.") for w in below(panel.box))
    for widget in below(panel.box):
        assert "http" not in str(getattr(widget, "value", "")), "nothing is asked of a network"


def test_an_unknown_failure_of_a_button_stays_in_the_panel(panel, run, clock):
    def fetch(*_globs):
        raise OSError(28, "No space left on device")

    run.fetch = fetch
    panel.fetch_button.click()
    panel._worker.join(5)
    assert clock.flush()
    assert "No space left on device" in panel.note.value


def test_a_stop_that_could_not_be_said_is_told_as_such(panel, run, clock):
    run.stop = lambda: StopAnswer(RUN_ID, run.snapshot.state, pending=True)
    panel.stop_button.click()
    panel.confirm_button.click()
    panel._worker.join(5)
    assert clock.flush()
    assert "cannot be reached, so it goes on for now" in panel.note.value


def test_curves_are_drawn_as_soon_as_there_is_a_line_and_then_now_and_again(shell, run, clock):
    now = [100.0]
    panel = Panel(run, clock=clock, now=lambda: now[0]).show()

    def told(count, metrics=()):
        rows = tuple({"optimizer_steps": i, "loss": 9.0 - i} for i in range(count))
        run.tell(snapshot(steps=rows, metrics=metrics))
        assert clock.flush()
        return panel.curves.value

    assert told(1) == ""
    assert "from 9 at step 0 to 7 at step 2" in told(3)
    assert "at step 2" in told(4)
    now[0] += CURVES_SECONDS
    assert "from 9 at step 0 to 4 at step 5" in told(6)
    # What an evaluation found stands in the panel's figures at once: the curve must not say less.
    judged = tuple({"epoch": epoch, "metrics": {"AP50": epoch / 4}} for epoch in (1, 2, 3))
    assert "AP50" not in told(6)
    assert "AP50 is 0.500" in told(6, judged[:2])
    assert "AP50 is 0.750" in told(7, judged)


def test_data_on_its_way_is_told_with_how_fast_it_comes():
    now = iter((0.0, 2.0, 4.0))
    pace = Pace(clock=lambda: next(now))
    told = training(phase="inputs", current_epoch=None)

    def at(count, state="downloading"):
        row = {"name": "coins", "state": state, "bytes": count, "size_bytes": 40_000_000}
        return snapshot(told, agent={"inputs": [row]})

    assert pace.rates(at(0)) == {}
    rates = pace.rates(at(20_000_000))
    assert rates == {"coins": 10e6}
    words = "coins: downloading, 20.00 MB of 40.00 MB, 10.00 MB/s"
    assert facts.bars(at(20_000_000), rates) == ((words, 0.5),)
    assert pace.rates(at(40_000_000, "ready")) == {}
    assert (
        "ready, 40.00 MB, verified by SHA-256" in dict(facts.rows(at(40_000_000, "ready"))).values()
    )
