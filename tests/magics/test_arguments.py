"""A line is read as it was meant, or refused in one line that says what to type."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.magics.arguments import split


def call(shell, name, line):
    return shell.run_line_magic(name, line)


def launched(session):
    (keywords,) = [kw for name, _, kw in session.calls if name == "train"]
    return keywords


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a.yaml;", ["a.yaml"]),
        ("a.yaml ; ", ["a.yaml"]),
        ("--set 'data.classes=[car, bus]'", ["--set", "data.classes=[car, bus]"]),
        ('--set data.root="a b"', ["--set", "data.root=a b"]),
        ('"C:\\data\\my coins" --name x', ["C:\\data\\my coins", "--name", "x"]),
        ("--exclude '*.csv'", ["--exclude", "*.csv"]),
        ("", []),
    ],
)
def test_quotes_and_a_final_semicolon_are_stripped(line, words):
    assert split(line) == words


@pytest.mark.parametrize(
    ("magic", "line", "names"),
    [
        ("remote_train", "", "CONFIG"),
        ("remote_train", "coins --bogus 3", "--bogus"),
        ("remote_train", "coins --nproc-per-node two", "--nproc-per-node"),
        ("remote_train", "coins --nproc-per-node 0", "--nproc-per-node"),
        ("remote_train", "coins --max-hours -1", "--max-hours"),
        ("remote_train", "coins --max-hours nan", "--max-hours"),
        ("remote_connect", "local --client telnet", "--client"),
        ("remote_logs", "-n many", "-n"),
        ("remote_attach", "", "RUN"),
        ("remote_train", "coins --set", "--set"),
        ("remote_train", "coins --max-restarts -1", "--max-restarts"),
        ("remote_train", "coins --max-restarts two", "--max-restarts"),
        ("remote_train", "coins --from-receipt x.json", "--from-receipt"),
        ("remote_train", "--from-receipt x.json --set a.b=1", "--set"),
        ("remote_run", "", "custom"),
        ("remote_run", "train-everything", "train-everything"),
        ("remote_run", "custom", "--script"),
        ("remote_run", "custom --script a.py --command b", "--script"),
        ("remote_run", "custom --bogus 1 -- --fine", "--bogus"),
        ("remote_eval", "--checkpoint", "--checkpoint"),
        ("remote_eval", "coins bus", "bus"),
        ("remote_visualize", "--count 0", "--count"),
        ("remote_visualize", "--min-score 1.5", "--min-score"),
        ("remote_visualize", "--min-score nan", "--min-score"),
    ],
)
def test_wrong_arguments_are_one_line_and_no_usage_error(loaded, session, magic, line, names):
    with pytest.raises(InvalidArgumentError) as raised:
        call(loaded, magic, line)
    assert not isinstance(raised.value, UsageError)
    assert names in str(raised.value)
    assert f"%{magic}?" in str(raised.value)
    assert len(raised.value._render_traceback_()) == 1
    assert "\n" not in raised.value._render_traceback_()[0]
    assert session.calls == []


def test_an_unknown_option_names_the_nearest(loaded, session):
    with pytest.raises(InvalidArgumentError, match="--nproc-per-node"):
        call(loaded, "remote_train", "coins --nproc-per-nod 2")


@pytest.mark.parametrize(
    "line", ["coins --minio-secret-key hunter2", "coins --minio-secret-key=hunter2"]
)
def test_a_secret_is_refused_with_the_right_way_and_not_repeated(loaded, session, line):
    with pytest.raises(InvalidArgumentError) as raised:
        call(loaded, "stage_dataset", line)
    assert "into the environment or .env as MINIO_SECRET_KEY" in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert session.calls == []


def test_a_name_left_in_braces_is_an_error(loaded, session):
    result = loaded.run_cell("%remote_train coins --set solver.epochs={epochs}")
    assert isinstance(result.error_in_exec, InvalidArgumentError)
    assert "{epochs}" in str(result.error_in_exec)
    assert session.calls == []


def test_defined_names_are_expanded(loaded, session):
    loaded.run_cell("epochs = 3").raise_error()
    loaded.run_cell("%remote_train coins --set solver.epochs={epochs} --no-wait").raise_error()
    assert launched(session)["overrides"] == ["solver.epochs=3"]


def test_an_environment_variable_of_the_configuration_passes(loaded, session):
    loaded.run_cell("%remote_train coins --set data.root=${{COINS_DIR}} --no-wait").raise_error()
    assert launched(session)["overrides"] == ["data.root=${COINS_DIR}"]


def test_options_are_not_abbreviated(loaded, session):
    with pytest.raises(InvalidArgumentError):
        call(loaded, "remote_train", "coins --max 3")


def test_help_reads_well(loaded, capsys):
    loaded.run_cell("%remote_train?")
    page = capsys.readouterr().out
    assert "Train on the remote and return the `Run`." in page
    assert "run = %remote_train coins/hgnetv2_n --nproc-per-node 2" in page
    assert "--stall-minutes" in page
    assert "%%" not in page


LAUNCH = (
    " --set --nproc-per-node --device --dataset --artifact --artifact-dir --sync-path --exclude"
    " --allow-large --timeout --max-hours --stall-minutes --max-restarts --push --no-push --push-epochs --push-minutes --push-to --name --wait --no-wait --dry-run"
)
OPTIONS = {
    "remote_eval": "--run --checkpoint --calibrate" + LAUNCH,
    "remote_visualize": "--run --checkpoint --count --min-score --calibration" + LAUNCH,
    "remote_connect": "--token-env --kernel-name --attach --client --remote-dir --as"
    " --password-env --keep-alive",
    "remote_info": "--dataset",
    "remote_disconnect": "",
    "remote_sync": "--dry-run --sync-path --exclude --allow-large",
    "stage_dataset": "--name --object-name --expected-root --sha256 --config --to --force --dry-run",
    "store_ls": "--to --price",
    "store_rm": "--yes --to --price",
    "remote_train": "--resume --from-receipt" + LAUNCH,
    "remote_run": "--script --command --status-dir" + LAUNCH.replace(" --set", ""),
    "remote_status": "",
    "remote_logs": "-n --lines",
    "remote_wait": "--timeout --no-check",
    "remote_attach": "",
    "remote_runs": "",
    "remote_compare": "",
    "remote_fetch": "--to --from --push-to",
    "remote_stop": "--now",
}


@pytest.mark.parametrize("magic", sorted(OPTIONS))
def test_the_options_are_these(loaded, magic):
    parser = loaded.magics_manager.magics["line"][magic].parser
    on = [] if magic == "remote_connect" else ["--on"]
    assert set(parser._option_string_actions) == {*OPTIONS[magic].split(), *on}
