"""Scripts, commands and resumes, as far as they are decided before anything travels."""

from __future__ import annotations

import json

import pytest

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.receipt import Receipt, differing, warning
from kernel_tools.session import Session


@pytest.fixture
def session(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/train.py").write_text("print('hello')\n")
    (tmp_path / "tools/helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return Session(tmp_path)


def test_a_script_runs_under_torchrun_and_its_folder_travels(session):
    plan = session.run_script("tools/train.py", ["--epochs", "3"], nproc_per_node=2, dry_run=True)
    assert (plan.job.kind, plan.job.argv) == ("script", ("tools/train.py", "--epochs", "3"))
    assert (plan.job.nproc_per_node, plan.job.name) == (2, "train")
    assert {"tools/train.py", "tools/helper.py"} <= {file.path for file in plan.sync.files}


@pytest.mark.parametrize("script", ["tools/nothing.py", "tools", "/etc/hostname"])
def test_what_is_no_script_of_the_project_is_refused(session, script):
    with pytest.raises(InvalidArgumentError, match="--script"):
        session.run_script(script, dry_run=True)


@pytest.mark.parametrize(
    ("command", "argv", "name"),
    [
        ("libreyolo train data=coco128.yaml", ("libreyolo", "train", "data=coco128.yaml"), "libreyolo"),
        ("python -m 'my tool' --a b", ("python", "-m", "my tool", "--a", "b"), "python"),
        ("cd x && ./run.sh", ("sh", "-c", "cd x && ./run.sh"), "cd"),
        ("A=1 python x.py", ("sh", "-c", "A=1 python x.py"), "A=1"),
        (["python", "a b.py"], ("python", "a b.py"), "python"),
    ],
)  # fmt: skip
def test_a_command_is_split_as_a_shell_would(session, command, argv, name):
    plan = session.run_command(command, dry_run=True)
    assert (plan.job.kind, plan.job.argv, plan.job.name) == ("command", argv, name)


@pytest.mark.parametrize("command", ["", "   ", "python 'x"])
def test_a_command_that_cannot_be_read_is_refused(session, command):
    with pytest.raises(InvalidArgumentError, match="--command"):
        session.run_command(command, dry_run=True)


def test_a_status_folder_is_watched_and_brought_back(session):
    plan = session.run_command("x", status_dir="runs/*/*", artifacts=["a.txt"], dry_run=True)
    assert (plan.job.status_dir, plan.job.artifacts) == ("runs/*/*", ("a.txt", "runs/*/*"))
    with pytest.raises(InvalidArgumentError, match="--status-dir"):
        session.run_command("x", status_dir="/tmp", dry_run=True)


@pytest.mark.parametrize("restarts", [-1, True])
def test_restarts_are_a_count(session, restarts):
    with pytest.raises(InvalidArgumentError, match="max_restarts"):
        session.run_command("x", max_restarts=restarts, dry_run=True)
    assert session.run_command("x", max_restarts=2, dry_run=True).job.max_restarts == 2


def test_a_checkpoint_of_this_machine_travels_with_its_history(session, tmp_path):
    home = tmp_path / "artifacts/remote/old"
    (home / "weights").mkdir(parents=True)
    for name in ("weights/last.pt", "weights/best.pt", "metrics.jsonl", "receipt.json"):
        (home / name).write_text(name)
    for named in ("artifacts/remote/old/weights/last.pt", "artifacts/remote/old"):
        plan = session.train("coins/hgnetv2_n", resume=named, dry_run=True)
        checkpoint = plan.job.resume["checkpoint"]
        assert checkpoint.startswith("checkpoints/")
        assert checkpoint.endswith("/weights/last.pt")
        assert f"would resume from: {checkpoint}" in str(plan)
    from kernel_tools.launching.resuming import of_file

    travels = of_file(home / "weights/last.pt").travels
    assert sorted(path.split("/", 2)[2] for path in travels) == [
        "metrics.jsonl", "weights/best.pt", "weights/last.pt",
    ]  # fmt: skip


def test_a_checkpoint_that_is_not_there_is_refused(session):
    with pytest.raises(InvalidArgumentError, match="no checkpoint"):
        session.train("coins/hgnetv2_n", resume="weights/nothing.pt", dry_run=True)


def test_a_training_without_configuration_or_run_is_refused(session):
    with pytest.raises(InvalidArgumentError, match="configuration"):
        session.train(dry_run=True)


# Receipts -----------------------------------------------------------------------------------------

DOCUMENT = {
    "run_id": "20260101-000000-x-0001", "state": "completed", "code_sha256": "c" * 64,
    "job": {
        "kind": "detector", "name": "x",
        "argv": ["-m", "detector", "train", "--config", "configs/a.yaml", "--set", "solver.epochs=9"],
        "device": "cpu", "nproc_per_node": "auto", "limits": {"max_hours": 3}, "max_restarts": 1,
    },
    "command": {"environment": {"OMP_NUM_THREADS": "1"}},
    "code": {"files": {"detector/gone.py": "0" * 64}, "git_commit": "a" * 40, "git_dirty": True,
             "git_diff_sha256": "d" * 64},
    "config": {"text": "data:\n  format: coins\nsolver:\n  epochs: 3\n", "sha256": "e" * 64},
    "versions": {"python": "3.11.7", "torch": None}, "world_size": 2, "optimizer_steps": 7, "cost": None,
    "artifacts": [{"path": "weights/last.pt", "size_bytes": 1, "sha256": "f" * 64}],
}  # fmt: skip


@pytest.fixture
def receipt_file(tmp_path):
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(DOCUMENT))
    return path


def test_a_receipt_is_run_again_as_it_was(session, receipt_file):
    said = []
    plan = session.run_again(receipt_file, dry_run=True, report=said.append)
    assert plan.job.argv[:4] == ("-m", "detector", "train", "--config")
    assert "--set" not in plan.job.argv
    (config,) = [file for file in plan.sync.files if file.path == plan.job.argv[4]]
    assert config.source.read_text() == DOCUMENT["config"]["text"]
    assert (plan.job.nproc_per_node, plan.job.device, plan.job.env) == (
        2, "cpu", {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (plan.job.limits.max_hours, plan.job.max_restarts, plan.job.name) == (3, 1, "x")
    assert said[0].startswith("code_differs=")
    assert said[0].endswith("; the receipt is of commit aaaaaaaaaaaa")


def test_what_is_given_beside_a_receipt_wins(session, receipt_file):
    plan = session.run_again(receipt_file, dry_run=True, name="other", nproc_per_node=1)
    assert (plan.job.name, plan.job.nproc_per_node) == ("other", 1)


def test_a_command_is_run_again_too(session, receipt_file):
    job = {"kind": "command", "argv": ["python", "x.py"], "name": "python", "status_dir": "runs/*",
           "artifacts": ["a.txt", "runs/*"], "sync": {"paths": ["kernel_tools_agent", "tools"]}}  # fmt: skip
    receipt_file.write_text(json.dumps({**DOCUMENT, "job": job, "config": None}))
    plan = session.run_again(receipt_file, dry_run=True)
    assert (plan.job.argv, plan.job.artifacts) == (("python", "x.py"), ("a.txt", "runs/*"))
    assert "tools/train.py" in {file.path for file in plan.sync.files}


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read"), ("[]", "no receipt"), ("{}", "no receipt"), (None, "there is no receipt")],
)  # fmt: skip
def test_what_is_no_receipt_is_refused(session, receipt_file, text, words):
    if text is None:
        receipt_file.unlink()
    else:
        receipt_file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=words):
        session.run_again(receipt_file, dry_run=True)


def test_a_receipt_of_a_run_that_never_had_a_configuration_says_so(session, receipt_file):
    receipt_file.write_text(json.dumps({**DOCUMENT, "config": None}))
    with pytest.raises(InvalidArgumentError, match="holds no configuration"):
        session.run_again(receipt_file, dry_run=True)


def test_a_receipt_shows_itself_without_a_table_of_braces():
    text = repr(Receipt.from_json(DOCUMENT))
    assert text.startswith("receipt of 20260101-000000-x-0001\n")
    assert "git              aaaaaaaaaaaa, changed (diff dddddddddddd)" in text
    assert "cost             no price known" in text
    assert "{" not in text


def test_code_that_is_the_same_is_no_difference(session):
    plan = session.run_command("x", dry_run=True)
    files = {file.path: file.sha256 for file in plan.sync.files}
    receipt = Receipt.from_json({**DOCUMENT, "code": {"files": files}})
    assert differing(receipt, plan.sync) == ()
    assert warning(receipt, ()) == ""
