from __future__ import annotations

import base64
import json
import threading
import zlib

import pytest

from kernel_tools.errors import (
    AgentError,
    FetchError,
    KernelAuthError,
    KernelConnectionError,
    RunFailed,
    WaitTimeoutError,
)
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import Registry, RunRecord

RECORD = RunRecord("20260101-000000-x-0001", "x", "t", "local", "/remote", "artifacts/remote")


class Remote:
    """A remote made of plain bytes that answers polls as the agent does."""

    where = "a made-up kernel"

    def __init__(self):
        self.state, self.message, self.error = "training", None, None
        self.log, self.metrics, self.steps = b"", "", ""
        self.failure = None
        self.calls = []
        self.files = {}
        self.lock = threading.Lock()

    def call(self, function, *, timeout_seconds=60.0, **arguments):
        self.calls.append((function, arguments))
        if self.failure is not None:
            raise self.failure
        return getattr(self, f"answer_{function}")(**arguments)

    def answer_poll(self, *, log_offset, metrics_offset, steps_offset, max_bytes, **_):
        with self.lock:
            data = self.log[log_offset : log_offset + max_bytes]
            return {
                "status": {"state": self.state, "message": self.message, "error": self.error, "boot_id": "b"},
                "agent": {"boot_id": "b"}, "agent_alive": True, "boot_id": "b", "run_dir": "/remote/runs/x",
                "agent_heartbeat_age_seconds": 1.0, "artifacts": None,
                "log": {"offset": log_offset, "data": base64.b64encode(zlib.compress(data)).decode(), "size": len(self.log)},
                "metrics": {"offset": metrics_offset, "data": self.metrics[metrics_offset:], "size": len(self.metrics)},
                "steps": {"offset": steps_offset, "data": self.steps[steps_offset:], "size": len(self.steps)},
            }  # fmt: skip

    def answer_files(self, **_):
        import hashlib

        return {"files": [
            {"path": p, "size_bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for p, d in self.files.items()
        ]}  # fmt: skip

    def answer_stop(self, **_):
        self.state = "stopped"
        return {"state": "stopping", "asked": True}

    def get_file(self, remote_path, destination):
        destination.write_bytes(self.files[remote_path.partition("runs/")[2].partition("/")[2]])


@pytest.fixture
def remote():
    return Remote()


@pytest.fixture
def run(remote, tmp_path):
    return Run(RECORD, link=remote, mirror=RunMirror(tmp_path / "mirror"))


def test_a_burst_of_log_is_caught_up_whole(run, remote):
    remote.log = b"".join(b"line %d\n" % i for i in range(100_000))
    run.refresh()
    assert run.log_path().read_bytes() == remote.log
    assert run.logs(2) == "line 99998\nline 99999"


def test_two_notebooks_that_watch_one_run_into_one_folder_both_see_all_of_it(run, remote, tmp_path):
    other = Run(RECORD, link=remote, mirror=RunMirror(tmp_path / "mirror"))
    for epoch in range(1, 7):
        remote.log += b"line %d\n" % epoch
        remote.metrics += json.dumps({"epoch": epoch}) + "\n"
        remote.steps += json.dumps({"optimizer_steps": epoch}) + "\n"
        (run if epoch % 2 else other).refresh()
    for one in (run, other):
        snapshot = one.refresh()
        assert [row["epoch"] for row in snapshot.metrics] == [1, 2, 3, 4, 5, 6]
        assert [row["optimizer_steps"] for row in snapshot.steps] == [1, 2, 3, 4, 5, 6]
        assert snapshot.log_tail == (*(f"line {k}" for k in range(1, 7)), "")
    assert run.log_path().read_bytes() == remote.log
    remote.metrics = remote.metrics[: len('{"epoch": 1}\n') * 2]  # a resume cut the rest
    for one in (run, other, run):
        assert [row["epoch"] for row in one.refresh().metrics] == [1, 2]


def test_wait_returns_once_the_run_has_ended_and_its_log_is_here(run, remote):
    remote.log, remote.state = b"last words\n", "completed"
    assert run.wait(timeout=20) is run
    assert run.state.value == "completed"
    assert run.log_path().read_bytes() == b"last words\n"


def test_a_failed_run_raises_with_its_cause_unless_told_not_to(run, remote):
    remote.state, remote.message = "failed", "rank 1 raised ValueError: banana"
    remote.error = {"type": "ValueError", "message": "banana", "traceback": "", "rank": 1}
    with pytest.raises(RunFailed, match="rank 1 raised ValueError: banana"):
        run.wait(timeout=20)
    assert run.wait(timeout=20, check=False).state.value == "failed"


def test_wait_gives_up_after_its_timeout_and_leaves_the_run_alone(run, remote):
    with pytest.raises(WaitTimeoutError, match="goes on"):
        run.wait(timeout=0.2)
    assert [c for c, _ in remote.calls if c == "stop"] == []


def test_a_broken_line_is_an_observation(run, remote):
    run.refresh()
    remote.failure = KernelConnectionError("no answer")
    status = run.status()
    assert status["state"] == "training"
    remote.failure = None
    assert run.status()["contact"] == "live"


@pytest.mark.parametrize("error", [KernelAuthError("expired"), AgentError("unknown run")])
def test_waiting_ends_when_the_remote_will_never_tell(run, remote, error):
    remote.failure = error
    with pytest.raises(type(error)):
        run.wait(timeout=20)


def test_subscribers_get_snapshots_until_they_leave(run, remote):
    seen = []
    leave = run.subscribe(seen.append)
    run.refresh()
    leave()
    run.refresh()
    assert [snapshot.state.value for snapshot in seen] == ["training"]


def test_fetch_verifies_and_does_not_move_what_is_here(run, remote, tmp_path):
    remote.files = {"weights/last.pt": b"weights"}
    first = run.fetch("weights/*.pt", to=tmp_path / "out")
    again = run.fetch("weights/*.pt", to=tmp_path / "out")
    assert (tmp_path / "out/weights/last.pt").read_bytes() == b"weights"
    assert [f.travelled for f in (*first, *again)] == [True, False]


def test_fetch_of_a_pattern_that_fits_nothing_says_so(run, remote, tmp_path):
    with pytest.raises(FetchError, match="no file that fits"):
        run.fetch("weights/nothing.pt", to=tmp_path)


def test_fetch_refuses_to_leave_its_folder(run, remote, tmp_path):
    remote.files = {"../../evil": b"x"}
    with pytest.raises(FetchError, match="would leave"):
        run.fetch(to=tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_a_file_that_changes_under_way_is_listed_and_read_again(run, remote, tmp_path):
    remote.files = {"weights/last.pt": b"new"}
    honest = remote.answer_files
    lies = iter([b"old"])

    def listing(**arguments):
        stale = next(lies, None)
        if stale is None:
            return honest(**arguments)
        import hashlib

        return {
            "files": [
                {
                    "path": "weights/last.pt",
                    "size_bytes": 3,
                    "sha256": hashlib.sha256(stale).hexdigest(),
                }
            ]
        }

    remote.answer_files = listing
    (fetched,) = run.fetch("weights/last.pt", to=tmp_path)
    assert fetched.path.read_bytes() == b"new"


def test_a_record_comes_back_as_it_was_saved(tmp_path):
    registry = Registry(tmp_path)
    registry.save(RECORD)
    assert registry.load(RECORD.run_id) == RECORD
    assert registry.find("x-0001") == RECORD.run_id
    assert "http" not in json.dumps((registry.folder(RECORD.run_id) / "record.json").read_text())


def test_status_does_not_wait_behind_a_poll_that_is_never_answered(run, remote, monkeypatch):
    monkeypatch.setattr("kernel_tools.runs.watch.ASK_SECONDS", 0.1)
    run.refresh()
    asked, release = threading.Event(), threading.Event()

    def never(**_):
        asked.set()
        release.wait(20)
        raise KernelConnectionError("no answer")

    monkeypatch.setattr(remote, "answer_poll", never)
    stuck = threading.Thread(target=run._watcher._poll_for_thread)
    stuck.start()
    try:
        assert asked.wait(10)
        assert run.status()["state"] == "training"
        assert stuck.is_alive()
    finally:
        release.set()
        stuck.join()


def test_status_asks_with_a_deadline_of_its_own(run, remote, monkeypatch):
    given = []
    monkeypatch.setattr(
        remote,
        "call",
        lambda function, *, timeout_seconds, **_: (
            given.append(timeout_seconds),
            remote.answer_poll(**_),
        )[1],
    )
    run.status()
    assert given
    assert max(given) <= 10


def test_stopping_a_run_that_has_ended_asks_nobody(run, remote):
    remote.state = "completed"
    run.refresh()
    remote.failure = KernelConnectionError("no answer")
    assert run.stop().state.value == "completed"


def test_an_expired_line_says_nothing_about_the_next_one(run, remote):
    remote.failure = KernelAuthError("expired")
    with pytest.raises(KernelAuthError):
        run.wait(timeout=20)
    remote.failure, remote.state = None, "completed"
    run.reconnected()
    assert run.wait(timeout=20).state.value == "completed"
