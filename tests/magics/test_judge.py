"""`%remote_eval` and `%remote_visualize`: what they ask for, and where what came out is shown."""

from __future__ import annotations

import pytest

from kernel_tools.errors import FetchError, RunFailed
from tests.fakes.runs import FakeRun, ended, snapshot
from tests.fakes.shell import published
from tests.magics.test_completion import tab


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.setenv("KERNEL_TOOLS_MODE", "batch")


@pytest.fixture
def interactive(monkeypatch):
    monkeypatch.setenv("KERNEL_TOOLS_MODE", "interactive")


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setenv("KERNEL_TOOLS_MODE", "plain")


def asked(session, name):
    ((positional, keywords),) = [(a, kw) for called, a, kw in session.calls if called == name]
    return positional, keywords


def kinds(shell):
    """What was displayed after the run itself: the MIME types of each."""
    return [set(message["data"]) for message in published(shell) if not message.get("update")]


def words(text):
    return " ".join(text.split())


def eventually(condition, *, seconds=20.0):
    import time

    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_eval_hands_everything_on(loaded, session, batch):
    loaded.run_line_magic(
        "remote_eval",
        "--run 3f2a --checkpoint last --calibrate --set data.eval_samples=8 --nproc-per-node 2 --device cpu"
        " --dataset coins --max-hours 1 --name check",
    )
    positional, told = asked(session, "evaluate")
    assert positional == (None,)
    assert (told["run"], told["checkpoint"], told["calibrate"]) == ("3f2a", "last", True)
    assert (told["overrides"], told["datasets"]) == (["data.eval_samples=8"], ["coins"])
    assert (told["nproc_per_node"], told["device"]) == ("2", "cpu")
    assert (told["max_hours"], told["name"], told["on"]) == (1.0, "check", None)


def test_visualize_hands_everything_on(loaded, session, batch):
    loaded.run_line_magic(
        "remote_visualize", "coins/hgnetv2_n --count 3 --min-score 0.2 --calibration c.json"
    )
    positional, told = asked(session, "visualize")
    assert positional == ("coins/hgnetv2_n",)
    assert (told["count"], told["min_score"], told["calibration"]) == (3, 0.2, "c.json")
    assert (told["run"], told["checkpoint"]) == (None, None)


def test_batch_blocks_and_shows_tables_then_figures(loaded, session, batch, capsys):
    result = loaded.run_cell("run = %remote_eval")
    result.raise_error()
    assert loaded.user_ns["run"].snapshot.state.value == "completed"
    html, figure = {"text/plain", "text/html"}, {"text/plain", "text/html", "image/png"}
    assert kinds(loaded) == [html, html, html, figure, figure]
    texts = [words(message["data"]["text/plain"]) for message in published(loaded)]
    assert "mAP@0.50:0.95 0.3100 average precision" in texts[-4]
    assert "car" in texts[-3]
    assert "Precision-recall curves at IoU 0.50 of 2 classes: car AP50 0.9000" in texts[-2]
    assert "Confusion matrix" in texts[-1]
    assert capsys.readouterr().out.splitlines()[0] == "sync_files=51"


def test_batch_shows_each_picture_with_its_words(loaded, session, batch):
    loaded.run_cell("%remote_visualize --count 2").raise_error()
    assert kinds(loaded)[1:] == [{"text/plain", "text/html", "image/jpeg"}] * 2
    assert 'alt="a.jpg: left and right"' in published(loaded)[-2]["data"]["text/html"]


@pytest.mark.parametrize("magic", ["remote_eval", "remote_visualize"])
def test_a_failed_evaluation_fails_the_cell_and_shows_no_figures(loaded, session, batch, magic):
    error = {"type": "DataError", "message": "no pictures", "traceback": "", "rank": 0}
    session.the_run = FakeRun(snapshot(), ended("failed", error=error))
    result = loaded.run_cell(f"%{magic}")
    assert isinstance(result.error_in_exec, RunFailed)
    assert "no pictures" in str(result.error_in_exec)
    assert session.the_run.calls == []


def test_a_stopped_evaluation_shows_no_figures(loaded, session, batch):
    session.the_run = FakeRun(snapshot(), ended("stopped"))
    loaded.run_cell("%remote_eval").raise_error()
    assert session.the_run.calls == []


def test_without_waiting_a_program_is_shown_no_figures(loaded, session, batch):
    loaded.run_cell("%remote_eval --no-wait").raise_error()
    assert session.the_run.waits == 0
    assert session.the_run.calls == []


def test_a_terminal_gets_text(loaded, session, plain, capsys):
    loaded.run_cell("run = %remote_eval").raise_error()
    said = capsys.readouterr().out
    assert "mAP@0.50:0.95 0.3100" in words(said)
    assert "<Figure: Precision-recall curves" in said


def test_interactive_returns_at_once_and_fills_its_place_when_the_run_has_ended(
    loaded, session, interactive
):
    loaded.run_cell("run = %remote_eval").raise_error()
    assert session.the_run.waits == 0
    _twin, panel, place = published(loaded)
    assert "application/vnd.jupyter.widget-view+json" in panel["data"]
    assert "The figures appear here" in place["data"]["text/plain"]
    session.the_run.tell(ended())
    eventually(lambda: len(published(loaded)) >= 6)  # the panel becomes a summary, the place fills
    (filled,) = [
        message
        for message in published(loaded)
        if message.get("update") and message["transient"] == place["transient"]
    ]
    assert set(filled["data"]) == {"text/plain", "text/html"}
    assert "AP50 0.7000" in words(filled["data"]["text/plain"])
    assert filled["data"]["text/html"].count("<img alt=") == 2
    assert session.the_run.calls == [("evaluation",)]


@pytest.mark.parametrize(
    ("state", "says"), [("failed", "the run failed"), ("stopped", "the run stopped")]
)
def test_interactive_says_why_there_is_nothing_to_show(loaded, session, interactive, state, says):
    loaded.run_cell("run = %remote_visualize").raise_error()
    session.the_run.tell(ended(state))
    eventually(
        lambda: any(says in m["data"]["text/plain"] and m.get("update") for m in published(loaded))
    )
    assert session.the_run.calls == []


def test_interactive_says_why_the_files_did_not_come(loaded, session, interactive, monkeypatch):
    def lost():
        raise FetchError("confusion.json keeps changing.")

    monkeypatch.setattr(session.the_run, "evaluation", lost)
    loaded.run_cell("run = %remote_eval").raise_error()
    session.the_run.tell(ended())
    eventually(
        lambda: any("Error: confusion.json" in m["data"]["text/plain"] for m in published(loaded))
    )


def test_interactive_may_wait(loaded, session, interactive):
    loaded.run_cell("run = %remote_eval --wait").raise_error()
    assert session.the_run.waits > 0
    assert "Confusion matrix" in published(loaded)[-1]["data"]["text/plain"]


def test_a_dry_run_shows_the_plan_and_nothing_else(loaded, session, interactive):
    loaded.run_line_magic("remote_eval", "--dry-run")
    assert asked(session, "evaluate")[1]["dry_run"] is True
    assert published(loaded) == []


def test_disconnecting_closes_the_place(loaded, session, interactive):
    from kernel_tools.views import follow
    from kernel_tools.views.render import CLOCK

    loaded.run_cell("run = %remote_eval").raise_error()
    follow.let_go(())
    assert CLOCK.flush()  # the panel's farewell
    texts = [one["data"]["text/plain"] for one in published(loaded) if one.get("update")]
    assert sum("Disconnected." in text for text in texts) == 2  # of the panel and of the place
    session.the_run.tell(ended())
    assert session.the_run.calls == []


def test_options_and_values_complete(loaded):
    assert tab(loaded, "%remote_visualize --min") == {"%remote_visualize --min-score"}
    assert tab(loaded, "%remote_eval --checkpoint b") == {"%remote_eval --checkpoint best"}
    assert "%remote_eval coins/hgnetv2_n" in tab(loaded, "%remote_eval coins/")
