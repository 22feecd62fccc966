"""What stands in a saved notebook: complete, escaped, redacted, readable without style."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from kernel_tools.redact import register_secret
from kernel_tools.session import Session
from kernel_tools.state import Contact
from kernel_tools.sync import SyncReport
from kernel_tools.views import facts
from kernel_tools.views.answers import files_table, runs_table, sync_view
from kernel_tools.views.static import ProgressView, TableView
from kernel_tools.views.summary import RunLine, RunView, summary_mimebundle
from tests.fakes.runs import RUN_ID, FakeRun, ended, snapshot, status, training

EVIL = "<img src=x onerror=alert(1)>"
VOID = {"img", "br", "hr", "input", "meta", "link"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(markup)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


VIEWS = {
    "training": RunView(snapshot()),
    "blank": RunView(snapshot(status(), sync=None, log_tail=())),
    "completed": RunView(ended(), note="%remote_fetch brings its files here"),
    "failed": RunView(ended("failed", error={"type": "E", "message": "m", "rank": 1})),
    "line": RunLine(ended()),
    "table": TableView("2 runs", ("run", "steps"), (("a", "1"), ("b", "20")), right=(1,)),
    "empty": runs_table(()),
    "files": files_table(FakeRun().fetch()),
    "progress": ProgressView("staging coins", 12_000_000, 30_000_000, 3.0),
}


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_every_view_is_text_and_html(name):
    bundle = VIEWS[name]._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert Page(bundle["text/html"]).text
    assert bundle["text/plain"].strip()
    assert set(VIEWS[name]._repr_mimebundle_(include={"text/plain"})) == {"text/plain"}
    assert set(VIEWS[name]._repr_mimebundle_(exclude={"text/plain"})) == {"text/html"}


@pytest.mark.parametrize("kind", ["text/plain", "text/html"])
def test_the_figures_that_people_look_for_stand_as_tokens(kind):
    body = RunView(ended())._repr_mimebundle_()[kind]
    text = Page(body).text if kind == "text/html" else body
    for token in (
        "sync_files=51",
        "sync_size_mb=0.24",
        "world_size=2",
        "optimizer_steps=280",
        "AP50=0.9321",
    ):
        assert token in text.split()


def test_progress_has_a_role_and_values():
    page = Page(RunView(snapshot()).html())
    bars = [attrs for tag, attrs in page.tags if attrs.get("role") == "progressbar"]
    assert [bar["aria-valuenow"] for bar in bars] == ["35", "50"]
    assert all(bar["aria-valuemin"] == "0" and bar["aria-valuemax"] == "100" for bar in bars)
    assert "epoch 4 of 10, 35 %" in page.text
    assert "step 14 of 28, 50 %" in page.text


def test_state_is_a_word_and_not_only_a_colour():
    assert "training" in Page(RunView(snapshot()).html()).text
    assert "timed out" in Page(RunView(ended("timed_out")).html()).text


def test_lost_contact_is_shown_beside_the_state():
    page = Page(RunView(snapshot(contact=Contact("stale", 34.2))).html())
    assert "training stale contact: stale, 34 s" in page.text


def test_text_from_the_remote_is_escaped():
    told = training(gpu_names=[EVIL], best_metric_name=EVIL)
    view = RunView(snapshot(told, name=EVIL, where=EVIL, log_tail=(EVIL,), message=EVIL), note=EVIL)
    assert "<img" not in view.html()
    assert Page(view.html()).text.count(EVIL) >= 5
    failed = RunView(ended("failed", error={"type": EVIL, "message": EVIL, "rank": 0}))
    assert "<img" not in failed.html()


def test_secrets_are_masked_in_text_and_html():
    register_secret("canary-secret-value")
    bundle = RunView(snapshot(log_tail=("key=canary-secret-value",)))._repr_mimebundle_()
    assert all("canary" not in body for body in bundle.values())
    url = "https://s3.example.org/b/k?X-Amz-Signature=abcdef0123"
    bundle = TableView("t", ("u",), ((url,),))._repr_mimebundle_()
    assert all("abcdef0123" not in body for body in bundle.values())


def test_no_colour_of_text_is_fixed():
    markup = RunView(snapshot()).html()
    assert "color:var(--jp-ui-font-color1,var(--vscode-foreground,inherit))" in markup


def test_an_error_says_which_rank_and_what():
    error = {"type": "ValueError", "message": "no boxes", "traceback": None, "rank": 1}
    text = Page(RunView(ended("failed", error=error)).html()).text
    assert "Error: ValueError: no boxes (rank 1)" in text


def test_a_run_as_a_value_is_one_line():
    bundle = summary_mimebundle(ended())
    assert bundle["text/plain"].count("\n") == 0
    assert RUN_ID in bundle["text/plain"]


def test_a_wide_table_aligns_its_columns():
    assert VIEWS["table"].plain().splitlines() == [
        "2 runs",
        "  run  steps",
        "  a        1",
        "  b       20",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "not yet"), (0.2, "0 s"), (65, "1 min 05 s"), (3725, "1 h 02 min"), (-1, "0 s")],
)
def test_durations_read_well(seconds, words):
    assert facts.duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (None, "not yet"),
        (12, "12 B"),
        (2048, "2.0 kB"),
        (240_000, "0.24 MB"),
        (15.1e6, "15.10 MB"),
        (2.5e9, "2.50 GB"),
    ],
)
def test_sizes_are_decimal(count, words):
    assert facts.size(count) == words


def test_the_line_of_a_run_holds_what_a_batch_log_needs():
    assert facts.line(snapshot()) == (
        f"{RUN_ID} state=training epoch=3/10 optimizer_steps=97 loss=17.43 AP50=0.8123 eta=1min05s"
    )


def test_a_dry_run_is_told_as_text_and_html(tmp_path):
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "pyproject.toml").write_text("")
    plan = Session(tmp_path).run_script("train.py", ["--name", EVIL], dry_run=True)
    bundle = plan._repr_mimebundle_()
    assert bundle["text/plain"] == str(plan)
    text = Page(bundle["text/html"]).text
    assert "nothing was sent" in text
    assert f"train.py --name {EVIL}" in text
    assert f"{len(plan.sync.files)} files" in text


def test_a_sync_tells_what_travelled_that_it_was_verified_and_how_long_it_took():
    report = SyncReport(("detector",), 51, 240_000, 3, {}, sent_bytes=200_000)
    pairs = dict(sync_view(report, seconds=0.25).pairs)
    assert pairs["sent"] == "3 files, 0.20 MB, each verified by SHA-256"
    assert (pairs["size"], pairs["took"]) == ("0.24 MB", "0.25 s, 0.80 MB/s")


def test_a_sync_that_had_nothing_to_send_says_so():
    report = SyncReport(("detector",), 51, 240_000, 0, {})
    pairs = dict(sync_view(report, seconds=0.25).pairs)
    assert (pairs["sent"], pairs["took"]) == ("nothing, all of it was there", "0.25 s")


@pytest.mark.parametrize(
    "value", [EVIL, "", {}, [], {EVIL: EVIL}, True, -1, 10**400, float("nan"), float("inf"), None]
)
def test_whatever_another_trainer_writes_is_drawn_or_left_out(value):
    for key in training():
        if key == "state":
            continue
        for state in ("preparing", "training", "completed", "failed"):
            told = snapshot(training(**{key: value, "state": state}))
            assert "<img" not in RunView(told).html()
            assert facts.line(told).startswith(RUN_ID)
    for key in ("loss", "optimizer_steps", "data_seconds", "step_seconds"):
        rows = tuple({"optimizer_steps": i, "loss": 9 - i, key: value} for i in range(3))
        assert "<img" not in RunView(snapshot(steps=rows)).html()
    rows = ({"epoch": 1, "metrics": value}, {"epoch": value, "metrics": {"AP50": value}})
    assert "<img" not in RunView(snapshot(metrics=rows)).html()


def test_a_program_that_tells_nothing_has_no_epochs_and_no_bar():
    for state in ("training", "stopping", "completed", "failed"):
        one = snapshot(status(state=state, elapsed_seconds=12.0))
        assert facts.bars(one) == ()
        assert "epoch" not in facts.line(one)
        assert dict(facts.sections(one)[0].pairs) == {"elapsed": "12 s"}
