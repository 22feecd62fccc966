"""Polling: offsets, bounds, whole rows; what a watcher may rely on."""

import base64
import json
import os
import zlib

import pytest
from kernel_tools_agent import files, launch, monitor, status
from kernel_tools_agent.errors import RunNotFoundError


@pytest.fixture
def quiet(remote, monkeypatch):
    """A run directory whose agent is never started."""
    monkeypatch.setattr(launch, "_start", lambda run_dir: False)
    remote.launch("quiet")
    remote.runs.clear()
    return remote


def put(remote, name, data):
    with open(os.path.join(remote.dir("quiet"), name), "wb") as stream:
        stream.write(data)


def log_bytes(document):
    return zlib.decompress(base64.b64decode(document["log"]["data"]))


def test_an_unknown_run_is_an_error_of_its_own(remote):
    with pytest.raises(RunNotFoundError, match="there is no run nobody"):
        remote.poll("nobody")


def test_a_queued_run_has_every_key_and_no_agent(quiet):
    document = quiet.poll("quiet")
    assert tuple(document["status"]) == status.STATUS_KEYS
    assert (document["status"]["state"], document["agent"], document["agent_alive"]) == (
        "queued", None, False,
    )  # fmt: skip
    assert document["log"] == {"offset": 0, "data": "", "size": 0}
    assert json.loads(json.dumps(document)) == document


def test_the_log_is_given_from_the_offset(quiet):
    put(quiet, "train.log", b"first\nsecond\n")
    document = quiet.poll("quiet", log_offset=6)
    assert (document["log"]["offset"], document["log"]["size"]) == (6, 13)
    assert log_bytes(document) == b"second\n"


def test_a_negative_offset_counts_from_the_end(quiet):
    put(quiet, "train.log", b"x" * 1000 + b"tail")
    assert log_bytes(quiet.poll("quiet", log_offset=-4)) == b"tail"
    document = quiet.poll("quiet", log_offset=-5000)
    assert (document["log"]["offset"], len(log_bytes(document))) == (0, 1004)


def test_a_log_that_shrank_is_given_from_the_start(quiet):
    put(quiet, "train.log", b"new")
    document = quiet.poll("quiet", log_offset=100)
    assert (document["log"]["offset"], log_bytes(document)) == (0, b"new")


@pytest.mark.parametrize("kind", ["text", "random"])
def test_a_burst_is_caught_up_gaplessly_in_bounded_documents(quiet, kind):
    line = b"epoch=1 step=12/345 loss=1.2345 lr=0.0004\n"
    whole = os.urandom(1 << 20) if kind == "random" else line * 60000
    put(quiet, "train.log", whole)
    put(quiet, "steps.jsonl", b'{"step": 1, "loss": 0.5, "note": "a \\"quoted\\" word"}\n' * 20000)
    got, offset, calls = b"", 0, 0
    while offset < len(whole):
        document = quiet.poll("quiet", log_offset=offset)
        assert len(json.dumps(document)) <= 262144
        assert document["log"]["offset"] == offset
        got += log_bytes(document)
        offset = len(got)
        calls += 1
    assert got == whole
    assert calls <= (12 if kind == "random" else 2)


def test_the_first_look_at_a_long_log_ends_at_its_newest_byte(quiet):
    put(quiet, "train.log", os.urandom(2 << 20) + b"the end")
    document = quiet.poll("quiet", log_offset=-(1 << 20))
    data = log_bytes(document)
    assert data.endswith(b"the end")
    assert document["log"]["offset"] + len(data) == document["log"]["size"]


def test_rows_come_whole(quiet):
    put(quiet, "metrics.jsonl", b'{"epoch": 1}\n{"epoch": 2}\n{"epo')
    part = quiet.poll("quiet")["metrics"]
    assert part == {"offset": 0, "data": '{"epoch": 1}\n{"epoch": 2}\n', "size": 31}
    assert quiet.poll("quiet", metrics_offset=26)["metrics"]["data"] == ""
    put(quiet, "metrics.jsonl", b'{"epoch": 1}\n')  # a resumed run dropped the second row
    part = quiet.poll("quiet", metrics_offset=26)["metrics"]
    assert (part["offset"], part["data"]) == (0, '{"epoch": 1}\n')


def test_a_row_longer_than_the_budget_still_comes(quiet):
    row = b'{"x": "' + b"y" * 100000 + b'"}\n'
    put(quiet, "steps.jsonl", row * 2)
    assert quiet.poll("quiet")["steps"]["data"].encode().startswith(row)


def test_another_trainers_status_is_read_with_every_key(quiet):
    put(quiet, "status.json", b'{"state": "running", "current_epoch": 3}')
    found = quiet.status("quiet")
    assert (found["state"], found["current_epoch"], found["error"]) == ("training", 3, None)
    put(quiet, "status.json", b'{"state": "comp')
    assert quiet.status("quiet")["state"] == "queued"


def test_another_trainers_completed_is_not_the_runs(quiet):
    put(quiet, "status.json", b'{"state": "completed", "phase": "train"}')
    assert quiet.status("quiet")["state"] == "training"
    put(quiet, "artifacts.json", b'{"files": []}')
    assert quiet.status("quiet")["state"] == "completed"


def test_a_heartbeat_of_another_boot_is_no_life(quiet):
    agent = {"pid": os.getpid(), "start_time": "1", "boot_id": "other", "heartbeat_monotonic": 1.0}
    put(quiet, "agent.json", json.dumps(agent).encode())
    document = quiet.poll("quiet")
    assert (document["agent_alive"], document["agent_heartbeat_age_seconds"]) == (False, None)


def test_runs_are_listed_newest_first(remote):
    remote.launch("20260101-a", "--steps", "2", "--ranks", "2", name="alpha")
    remote.launch("20260102-b", "--steps", "1", name="beta")
    remote.wait_end("20260101-a")
    remote.wait_end("20260102-b")
    rows = monitor.list_runs(remote.root)["runs"]
    assert [(r["run_id"], r["name"], r["state"]) for r in rows] == [
        ("20260102-b", "beta", "completed"),
        ("20260101-a", "alpha", "completed"),
    ]
    assert [(r["world_size"], r["optimizer_steps"], r["agent_alive"]) for r in rows] == [
        (1, 1, False),
        (2, 2, False),
    ]


def test_no_folder_is_no_runs(tmp_path):
    assert monitor.list_runs(str(tmp_path / "none")) == {"runs": []}


def test_files_are_found_in_the_run_and_its_work_folder(quiet):
    put(quiet, "weights/last.pt", b"w")
    put(quiet, "work/artifacts/x.pt", b"x")
    found = monitor_files(quiet, ["weights/*", "artifacts/*", "../../secrets/*", "/etc/passwd"])
    assert [entry["path"] for entry in found] == ["weights/last.pt", "work/artifacts/x.pt"]
    assert (
        found[0]["sha256"]
        == files.sha256_file(os.path.join(quiet.dir("quiet"), "weights/last.pt"))[0]
    )


def test_a_link_out_of_the_run_is_no_file_of_it(quiet, tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    os.symlink(str(tmp_path / "private"), os.path.join(quiet.dir("quiet"), "work", "data", "ds"))
    assert monitor_files(quiet, ["data/ds/*", "work/data/**"]) == []


def monitor_files(remote, patterns):
    from kernel_tools_agent import api

    return api.files(remote_dir=remote.root, run_id="quiet", patterns=patterns)["files"]
