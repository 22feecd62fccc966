"""Each magic is a thin adapter: what it calls, what it returns, what it prints."""

from __future__ import annotations

import pytest

from kernel_tools.errors import KernelToolsError, RunFailed, RunNotFoundError, WaitTimeoutError
from tests.fakes.runs import FakeRun, ended, snapshot
from tests.fakes.shell import published


def keywords(session, name):
    (found,) = [kw for called, _, kw in session.calls if called == name]
    return found


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.setenv("KERNEL_TOOLS_MODE", "batch")


@pytest.fixture
def interactive(monkeypatch):
    monkeypatch.setenv("KERNEL_TOOLS_MODE", "interactive")


def test_connect_hands_everything_on(loaded, session):
    loaded.run_line_magic(
        "remote_connect", "https://gpu.example.org/ --token-env GPU_TOKEN --attach k-1 --as gpu"
    )
    assert session.calls == [
        (
            "connect",
            ("https://gpu.example.org/",),
            {
                "token_env": "GPU_TOKEN",
                "kernel_name": "python3",
                "attach": "k-1",
                "client": None,
                "remote_dir": None,
                "name": "gpu",
                "password_env": None,
                "keep_alive_minutes": None,
            },
        )
    ]


def test_train_hands_everything_on(loaded, session, batch):
    loaded.run_line_magic(
        "remote_train",
        "coins/hgnetv2_n --set solver.epochs=2 --set runtime.seed=1 --nproc-per-node 2 --dataset coins"
        " --artifact 'artifacts/*.pt' --sync-path tools --exclude '*.csv' --max-hours 1.5 --name first",
    )
    told = keywords(session, "train")
    assert told["overrides"] == ["solver.epochs=2", "runtime.seed=1"]
    assert (told["nproc_per_node"], told["datasets"], told["artifacts"]) == (
        "2",
        ["coins"],
        ["artifacts/*.pt"],
    )
    assert (told["sync_paths"], told["exclude"], told["allow_large"]) == (
        ["tools"],
        ["*.csv"],
        False,
    )
    assert (told["max_hours"], told["timeout"], told["stall_minutes"]) == (1.5, None, 30.0)
    assert (told["name"], told["device"], told["dry_run"], told["on"]) == (
        "first",
        "auto",
        False,
        None,
    )


def test_train_hands_on_what_is_resumed_and_how_often_it_is_tried(loaded, session, batch):
    loaded.run_line_magic("remote_train", "--resume 3f2a --max-restarts 2")
    told = keywords(session, "train")
    assert (told["resume"], told["max_restarts"]) == ("3f2a", 2)


def test_a_receipt_is_run_again_with_only_what_was_given_beside_it(loaded, session, batch):
    loaded.run_line_magic("remote_train", "--from-receipt a/receipt.json --max-hours 2 --no-wait")
    ((_, positional, told),) = [call for call in session.calls if call[0] == "run_again"]
    assert positional == ("a/receipt.json",)
    assert {key: value for key, value in told.items() if key != "report"} == {"max_hours": 2.0}


@pytest.mark.parametrize(
    ("line", "name", "what", "arguments"),
    [
        ("--script tools/a.py -- --epochs 3", "run_script", "tools/a.py", ("--epochs", "3")),
        ('--command "libreyolo train a=b"', "run_command", "libreyolo train a=b", ()),
    ],
)
def test_a_program_is_launched_with_its_own_arguments(
    loaded, session, batch, line, name, what, arguments
):
    loaded.run_line_magic("remote_run", f"custom --status-dir 'runs/*/*' --max-restarts 1 {line}")
    ((_, positional, told),) = [call for call in session.calls if call[0] == name]
    assert positional == (what, arguments)
    assert (told["status_dir"], told["max_restarts"]) == ("runs/*/*", 1)


def test_train_prints_the_sync_report_in_its_own_cell(loaded, session, batch, capsys):
    loaded.run_line_magic("remote_train", "coins")
    assert capsys.readouterr().out.splitlines()[0] == "sync_files=51"


def test_batch_blocks_until_the_run_has_ended_and_shows_one_display(loaded, session, batch):
    result = loaded.run_cell("run = %remote_train coins")
    result.raise_error()
    assert loaded.user_ns["run"].snapshot.state.value == "completed"
    shown = published(loaded)
    assert len({message["transient"]["display_id"] for message in shown}) == 1
    assert [message.get("update", False) for message in shown] == [False, True]
    assert set(shown[-1]["data"]) == {"text/plain", "text/html"}
    assert "optimizer_steps=280" in shown[-1]["data"]["text/html"]


def test_batch_raises_for_a_failed_run(loaded, session, batch):
    error = {"type": "ValueError", "message": "no boxes", "traceback": "", "rank": 0}
    session.the_run = FakeRun(snapshot(), ended("failed", error=error))
    result = loaded.run_cell("%remote_train coins")
    assert isinstance(result.error_in_exec, RunFailed)
    assert "no boxes" in str(result.error_in_exec)
    assert "no boxes" in published(loaded)[-1]["data"]["text/html"]


def test_no_wait_returns_at_once_in_batch(loaded, session, batch):
    loaded.run_cell("run = %remote_train coins --no-wait").raise_error()
    assert loaded.user_ns["run"].snapshot.state.value == "training"
    assert session.the_run.waits == 0


def test_interactive_returns_at_once_with_a_live_panel(loaded, session, interactive):
    loaded.run_cell("run = %remote_train coins").raise_error()
    assert session.the_run.waits == 0
    twin, shown = published(loaded)
    assert "application/vnd.jupyter.widget-view+json" in shown["data"]
    assert "world_size=2" in twin["data"]["text/plain"]


def test_interrupting_an_interactive_wait_gives_the_run_back(loaded, session, interactive):
    session.the_run = FakeRun(snapshot(), interrupt_at=1)
    loaded.run_cell("run = %remote_wait").raise_error()
    assert loaded.user_ns["run"] is session.the_run


def test_interrupting_a_batch_notebook_fails_the_cell(loaded, session, batch):
    session.the_run = FakeRun(snapshot(), interrupt_at=1)
    result = loaded.run_cell("%remote_wait")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)


def test_dry_run_shows_the_plan_and_watches_nothing(loaded, session, interactive):
    session.the_run = FakeRun(snapshot())
    loaded.run_line_magic("remote_train", "coins --dry-run")
    assert keywords(session, "train")["dry_run"] is True
    assert published(loaded) == []


def test_status_asks_anew_and_shows_the_run(loaded, session):
    view = loaded.run_line_magic("remote_status", "")
    assert session.the_run.calls == [("status",)]
    assert "optimizer_steps=97" in view.plain()


def test_a_run_may_be_named_in_part(loaded, session):
    loaded.run_line_magic("remote_status", "3f2a --on gpu")
    assert session.calls == [("run", ("3f2a",), {"on": "gpu"})]


def test_logs_prints_the_last_lines(loaded, session, capsys):
    loaded.run_line_magic("remote_logs", "-n 2")
    assert capsys.readouterr().out.splitlines() == list(session.the_run.snapshot.log_tail[-2:])


def test_wait_raises_what_the_run_raises(loaded, session, batch):
    session.the_run = FakeRun(snapshot(), ended("timed_out"))
    with pytest.raises(RunFailed):
        loaded.run_line_magic("remote_wait", "")


def test_wait_without_check_returns_the_failed_run(loaded, session, batch):
    session.the_run = FakeRun(snapshot(), ended("failed"))
    assert loaded.run_line_magic("remote_wait", "--no-check") is session.the_run


def test_wait_gives_up_after_its_timeout(loaded, session, batch):
    session.the_run = FakeRun(snapshot())
    with pytest.raises(WaitTimeoutError):
        loaded.run_line_magic("remote_wait", "--timeout 0.001")


def test_compare_takes_any_number_of_runs(loaded, session):
    loaded.run_line_magic("remote_compare", "3f2a 90c1 --on gpu")
    assert session.calls == [("compare", ("3f2a", "90c1"), {"on": "gpu"})]


def test_attach_in_a_batch_notebook_shows_and_does_not_block(loaded, session, batch):
    loaded.run_line_magic("remote_attach", "3f2a")
    assert session.the_run.waits == 0
    assert "world_size=2" in published(loaded)[0]["data"]["text/plain"]


@pytest.mark.parametrize(
    ("line", "run_id", "globs", "to"),
    [
        ("", None, (), None),
        ("weights/best.pt", None, ("weights/best.pt",), None),
        ("3f2a", "3f2a", (), None),
        (
            "3f2a 'weights/*.pt' summary.json --to out",
            "3f2a",
            ("weights/*.pt", "summary.json"),
            "out",
        ),
    ],
)
def test_fetch_tells_a_run_from_patterns(loaded, session, line, run_id, globs, to):
    view = loaded.run_line_magic("remote_fetch", line)
    assert session.calls[0] == ("run", (run_id,), {"on": None})
    assert keywords(session, "push_weights") == {"to": None, "source": "kernel", "on": None}
    assert session.the_run.calls == [("fetch", globs, to)]
    assert "15.10 MB" in view.plain()


def test_fetch_brings_files_though_the_hub_refuses_what_the_launch_asked_for(
    loaded, session, monkeypatch, capsys
):
    def refused(*_args, **_keywords):
        raise KernelToolsError("The hub asks for a token.", hint="Set HF_TOKEN.")

    monkeypatch.setattr(session, "push_weights", refused, raising=False)
    view = loaded.run_line_magic("remote_fetch", "")
    assert "15.10 MB" in view.plain()
    assert capsys.readouterr().out == "weights_not_pushed=The hub asks for a token. Set HF_TOKEN.\n"
    with pytest.raises(KernelToolsError, match="asks for a token"):
        loaded.run_line_magic("remote_fetch", "--push-to hf://org/coins")


def test_info_hands_the_data_sets_on(loaded, session):
    loaded.run_line_magic("remote_info", "--dataset coins --dataset cars --on gpu")
    assert session.calls == [("info", (), {"datasets": ["coins", "cars"], "on": "gpu"})]


@pytest.mark.parametrize(("line", "now"), [("", False), ("--now", True)])
def test_stop_asks_and_says_how_to_wait(loaded, session, capsys, line, now):
    loaded.run_line_magic("remote_stop", line)
    assert session.the_run.calls == [("stop", now)]
    assert "was asked to stop" in capsys.readouterr().out


def test_disconnect_says_what_the_session_says(loaded, session, capsys):
    loaded.run_line_magic("remote_disconnect", "--on gpu")
    assert session.calls == [("disconnect", ("gpu",), {})]
    assert capsys.readouterr().out == "Disconnected from local.\n"


def test_errors_of_the_session_are_one_line_in_the_cell(loaded, session, capsys):
    session.the_run = None
    result = loaded.run_cell("%remote_status")
    assert isinstance(result.error_in_exec, RunNotFoundError)
    assert capsys.readouterr().out.splitlines() == [
        "RunNotFoundError: no run was launched. %remote_train launches one."
    ]


def test_a_final_semicolon_silences_the_value(loaded, session, batch, capsys):
    loaded.run_cell("%remote_wait 3f2a;").raise_error()
    assert "Out[" not in capsys.readouterr().out


def test_what_the_file_system_refuses_is_one_line(loaded, session, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "/ro/.kernel_tools")

    monkeypatch.setattr(session, "runs", refused, raising=False)
    with pytest.raises(
        KernelToolsError, match="%remote_runs: Permission denied: /ro/.kernel_tools"
    ):
        loaded.run_line_magic("remote_runs", "")
