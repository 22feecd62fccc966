"""`%remote_runs`: what the remote has, joined with what this project remembers."""

from __future__ import annotations

import time

import pytest

from kernel_tools.errors import KernelAuthError, KernelConnectionError
from kernel_tools.runs.registry import RunRecord, write_json
from kernel_tools.session import Session

ROW = {"run_id": "20260102-b", "name": "b", "state": "training", "created_at": "t", "world_size": 2}


class Remote:
    name, remote_dir = "gpu", "/remote"

    def __init__(self):
        self.rows, self.failure = [ROW], None

    def call(self, function, **_):
        assert function == "list_runs"
        if self.failure is not None:
            raise self.failure
        return {"runs": self.rows}


@pytest.fixture
def remote():
    return Remote()


@pytest.fixture
def session(tmp_path, remote):
    session = Session(tmp_path)
    for run_id, where in (("20260101-a", "gpu"), ("20260102-b", "gpu"), ("20260103-c", "other")):
        session.registry.save(RunRecord(run_id, run_id[-1], "t", where, "/remote", "a"))
    write_json(session.registry.folder("20260101-a") / "status.json", {"state": "completed"})
    session._connections.add(remote)
    return session


def test_both_sides_are_joined_newest_first(session):
    assert [(row.run_id, row.state, row.where) for row in session.runs()] == [
        ("20260103-c", "not seen", "other"),
        ("20260102-b", "training", "gpu"),
        ("20260101-a", "completed", "gpu"),  # gone there, and remembered here
    ]


def test_a_remote_that_does_not_answer_leaves_what_is_known_here(session, remote):
    remote.failure = KernelConnectionError("no answer")
    assert [(row.state, row.where) for row in session.runs()] == [
        ("not seen", "other"),
        ("not seen", "gpu, no answer"),
        ("completed", "gpu, no answer"),
    ]
    remote.failure = KernelAuthError("expired")
    with pytest.raises(KernelAuthError):
        session.runs()


def test_a_thousand_runs_are_listed_within_a_second(tmp_path):
    session = Session(tmp_path)
    for number in range(1000):
        record = RunRecord(f"20260101-{number:06d}", "many", "t", "gpu", "/remote", "a")
        session.registry.save(record)
    began = time.process_time()
    assert len(session.runs()) == 1000
    assert time.process_time() - began < 1.0
