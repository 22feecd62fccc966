"""Runs beside each other: what differs is named, figures are right, unknown ones are dashes."""

from __future__ import annotations

import dataclasses

import pytest

from kernel_tools.errors import InvalidArgumentError, KernelConnectionError
from kernel_tools.results.comparing import kept
from kernel_tools.run import Run
from kernel_tools.runs.mirror import STEPS, RunMirror
from kernel_tools.runs.registry import Registry, RunRecord, write_json
from kernel_tools.session import Session
from kernel_tools.views.compare import Compared, Comparison, differing, settings_of
from tests.fakes.runs import ended, snapshot, status

EVIL = "<img src=x onerror=alert(1)>"


def command(lr, epochs=10):
    return (
        "-m", "detector", "train", "--config", "configs/coins/hgnetv2_n.yaml",
        "--set", f"solver.lr={lr}", "--set", f"solver.epochs={epochs}",
    )  # fmt: skip


def compared(run_id, lr, loss, **changes):
    told = dataclasses.replace(
        ended(**changes),
        run_id=run_id,
        steps=({"optimizer_steps": 10, "loss": 25.0}, {"optimizer_steps": 280, "loss": loss}),
        metrics=({"epoch": 1, "metrics": {"AP50": 0.5}}, {"epoch": 2, "metrics": {"AP50": 0.9}}),
    )
    return Compared(told, settings_of(command(lr)))


class Unasked:
    """A line that is down: what is known here must do."""

    where = "there"

    def call(self, *_words, **_told):
        raise KernelConnectionError("no answer")

    def get_file(self, *_words):
        raise KernelConnectionError("no answer")


@pytest.fixture
def two():
    return Comparison((compared("coins-aaaa", 0.1, 4.5), compared("coins-bbbb", 0.01, 3.25)))


def test_settings_are_read_from_the_command_line():
    assert settings_of(command(0.1)) == {
        "config": "coins/hgnetv2_n",
        "solver.lr": "0.1",
        "solver.epochs": "10",
    }
    assert settings_of(("script.py", "--set")) == {}


def test_only_what_differs_is_a_column():
    assert differing([settings_of(command(1)), settings_of(command(2))]) == ("solver.lr",)
    assert differing([{"a": "1"}, {}]) == ("a",)


def test_the_table_holds_what_was_told_and_what_came_of_it(two):
    table = two.table
    assert table.caption == "2 runs; they differ in solver.lr"
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [(row["run"], row["solver.lr"], row["loss"]) for row in rows] == [
        ("coins-aaaa", "0.1", "4.5"),
        ("coins-bbbb", "0.01", "3.25"),
    ]
    assert rows[0]["epochs"] == "10 of 10"
    assert rows[0]["AP50"] == "0.9321"


def test_a_run_of_which_nothing_is_known_is_a_row_of_dashes(two):
    blank = Compared(snapshot(status(), run_id="new"), {})
    row = Comparison((two.runs[0], blank)).table.rows[1]
    assert row[:4] == ("new", "queued", "(default)", "(default)")
    assert set(row[-8:]) == {"-"}


def test_the_figure_says_each_curve_in_words(two):
    told = two.figure.alt
    assert "(aaaa), lr=0.1: Training loss went from 25 at step 10 to 4.5 at step 280." in told
    assert "AP50 is 0.900 at epoch 2" in told


def test_it_shows_itself_as_text_and_html_with_names_escaped(two):
    evil = dataclasses.replace(two.runs[0].snapshot, name=EVIL, run_id=f"$x_{EVIL}$")
    bundle = Comparison((Compared(evil, {"a": EVIL}), two.runs[1]))._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/html"].count("<img") == 1  # the figure itself
    assert EVIL in bundle["text/plain"]


def test_a_run_that_ended_is_compared_without_a_connection(tmp_path):
    registry = Registry(tmp_path)
    for run_id, lr in (("20260102-030405-a-1111", 0.1), ("20260102-030406-b-2222", 0.2)):
        registry.save(RunRecord(run_id, "coins", "2026", "local", "r", "a", argv=command(lr)))
        write_json(registry.folder(run_id) / "status.json", dict(ended().status))
        (registry.folder(run_id) / STEPS).write_text('{"optimizer_steps": 3, "loss": 2.0}\n')
    found = Session(tmp_path).compare("1111", "2222")
    assert [row[2] for row in found.table.rows] == ["0.1", "0.2"]
    assert [one.snapshot.steps[0]["loss"] for one in found.runs] == [2.0, 2.0]


def test_without_names_evaluations_are_left_out(tmp_path):
    session = Session(tmp_path)
    judged = ("-m", "detector", "eval", "--config", "a.yaml")
    told = {
        "20260102-030405-a-1111": command(0.1),
        "20260102-030406-eval-2222": judged,
        "20260102-030407-b-3333": command(0.2),
        "20260102-030408-tool-4444": ("sh", "-c", "make"),
    }
    for run_id, argv in told.items():
        record = RunRecord(run_id, "coins", "2026", "local", "r", "a", argv=argv)
        session.registry.save(record)
        write_json(session.registry.folder(run_id) / "status.json", dict(ended().status))
        mirror = RunMirror(session.registry.folder(run_id))
        session._runs.hold(Run(record, link=Unasked(), mirror=mirror))
    found = session.compare()
    assert [one.snapshot.run_id[-4:] for one in found.runs] == ["1111", "3333", "4444"]
    named = session.compare("1111", "2222")
    assert [one.snapshot.run_id[-4:] for one in named.runs] == ["1111", "2222"]


def test_one_run_is_too_few_and_a_run_never_seen_to_end_is_not_read_from_here(tmp_path):
    Registry(tmp_path).save(RunRecord("x-1111", "coins", "2026", "local", "r", "a"))
    with pytest.raises(InvalidArgumentError, match="two runs"):
        Session(tmp_path).compare("1111")
    assert kept(Registry(tmp_path), "x-1111") is None
    assert kept(Registry(tmp_path), "y") is None
