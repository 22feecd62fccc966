"""`--push-to hf://ORG/REPO`: the real client puts a run's weights there from its machine, or leaves them to this one.

While it trains as well: what was there at the last push outlives the machine, and is resumed from.

The hub is a local server that speaks its endpoints; agent, kernel and client are real.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel_tools import receipt as receipts
from kernel_tools.agent.hub import HubPusher
from kernel_tools.agent.job import Job
from kernel_tools.errors import InvalidArgumentError, ObjectNotFoundError, StoreAuthError
from kernel_tools.launching import resuming
from kernel_tools.launching.launch import LaunchOptions
from kernel_tools.receipt import Receipt
from kernel_tools.session import Session
from kernel_tools.settings import Settings
from tests.fakes import hub_server
from tests.services.conftest import wait_for
from tests.store.conftest import connected

WEIGHTS = os.urandom(50_000)
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()


class Ended:
    """A run directory whose processes are gone, and what its end says of the hub."""

    def __init__(self, folder: Path, hub: hub_server.Hub, **environment: str) -> None:
        self.dir = folder / "remote/runs/run-1"
        for name in ("weights", "control"):
            (self.dir / name).mkdir(parents=True)
        (self.dir / "weights/last.pt").write_bytes(b"the last ones")
        self.environment = {**os.environ, "HF_ENDPOINT": hub.url, **environment}
        self.environment.pop("HF_HUB_OFFLINE", None)

    @property
    def log(self) -> list[str]:
        path = self.dir / "train.log"
        return path.read_text().splitlines() if path.exists() else []

    def pusher(self, *, path: str | None = None, minutes: float = 30.0) -> HubPusher:
        hub = {"repository": "org/coins", "path": path, "minutes": minutes}
        job = Job.from_json({"run_id": "run-1", "argv": ["x"], "hub": hub})
        return HubPusher(str(self.dir), job, self.environment)

    def deliver(self, *, path: str | None = None) -> str:
        return self.pusher(path=path).deliver()

    def write(self, name: str, data: bytes) -> None:
        """As a trainer does: whole or not at all."""
        part = self.dir / "weights" / f"{name}.part"
        part.write_bytes(data)
        part.rename(self.dir / "weights" / name)


@pytest.fixture
def ended(hub: hub_server.Hub, tmp_path: Path) -> Ended:
    return Ended(tmp_path, hub, HF_TOKEN=hub_server.TOKEN)


def content(hub: hub_server.Hub, name: str) -> bytes | None:
    repository = hub.repositories.get("org/coins")
    file = repository.files.get(name) if repository else None
    return file.data if file else None


def kept(folder: Path, *secrets: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(p) for p in files if any(one.encode() in p.read_bytes() for one in secrets)]


def test_the_best_weights_are_in_a_private_repository_when_the_run_has_ended(
    hub: hub_server.Hub, ended: Ended, tmp_path: Path
) -> None:
    (ended.dir / "weights/best.pt").write_bytes(WEIGHTS)
    seen: list[str] = []
    hub.on_upload = lambda: seen.extend(
        " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])
    )
    assert ended.deliver() == ""
    repository = hub.repositories["org/coins"]
    assert repository.private
    assert repository.files["best.pt"].data == WEIGHTS
    assert DIGEST.encode() in repository.files[".kernel_tools/best.pt.json"].data
    assert ended.log == ["weights_pushed=hf://org/coins/best.pt"]
    assert any("hub_upload.py org/coins best.pt" in words for words in seen)
    assert not any(hub_server.TOKEN in words for words in seen)
    assert kept(tmp_path, hub_server.TOKEN, "X-Amz-Signature") == []

    assert ended.deliver(path="v2/coins.pt") == ""  # it is there by then: nothing is sent
    assert repository.files["v2/coins.pt"].data == WEIGHTS
    assert sum("PUT /lfs/" in asked for asked in hub.asked) == 1


def test_without_best_weights_the_last_ones_go(hub: hub_server.Hub, ended: Ended) -> None:
    assert ended.deliver() == ""
    assert hub.repositories["org/coins"].files["last.pt"].data == b"the last ones"


def test_a_run_without_weights_says_so(hub: hub_server.Hub, ended: Ended) -> None:
    (ended.dir / "weights/last.pt").unlink()
    assert ended.deliver() == "nothing went to hf://org/coins: the run has left no weights"
    assert hub.asked == []


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ({"HF_TOKEN": ""}, "HF_TOKEN is not set there"),
        ({"HF_TOKEN": "_".join(["hf", "somebodyelses"])}, "the hub refused HF_TOKEN (401)"),
        ({"fail_uploads": "1"}, "the hub refused HF_TOKEN (403)"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub does not answer (Connect"),
        ({"module": "raise ImportError('no', name='huggingface_hub')"}, "huggingface_hub is not installed"),
        ({"module": "raise RuntimeError('broken')"}, "huggingface_hub cannot be imported"),
        ({"module": "import os; os._exit(3)"}, "its process ended with exit code 3"),
    ],
)  # fmt: skip
def test_what_keeps_them_from_the_hub_is_said_and_shows_no_token(
    hub: hub_server.Hub, ended: Ended, tmp_path: Path, trouble: dict[str, str], why: str
) -> None:
    hub.fail_uploads = bool(trouble.pop("fail_uploads", ""))
    if "module" in trouble:
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules/huggingface_hub.py").write_text(trouble.pop("module"))
        trouble["PYTHONPATH"] = str(tmp_path / "modules")
    ended.environment.update(trouble)
    told = ended.deliver(path="coins.pt")
    assert told.startswith(f"the weights are not in hf://org/coins/coins.pt: {why}")
    assert told.endswith("; %remote_fetch puts them there from here")
    (line,) = ended.log
    assert line.startswith(f"weights_not_pushed=hf://org/coins/coins.pt {why}")
    token = ended.environment["HF_TOKEN"] or hub_server.TOKEN
    assert kept(tmp_path, token, "X-Amz-Signature") == []
    assert token not in told + line
    assert "X-Amz" not in told + line


def test_weights_go_on_the_way_as_often_as_the_job_says_and_only_what_changed(
    hub: hub_server.Hub, ended: Ended
) -> None:
    pusher = ended.pusher(minutes=0.001)
    pusher.start()
    try:
        assert wait_for(lambda: content(hub, "last.pt") == b"the last ones", seconds=30)
        assert content(hub, "best.pt") is None
        ended.write("best.pt", WEIGHTS)
        assert wait_for(lambda: content(hub, "best.pt") == WEIGHTS, seconds=30)
        ended.write("last.pt", b"newer ones")
        assert wait_for(lambda: content(hub, "last.pt") == b"newer ones", seconds=30)
        assert wait_for(lambda: len(ended.log) == 3)
    finally:
        pusher.stop()
    assert [line for line in ended.log if "not_pushed" in line] == []
    assert ended.log == [
        "weights_pushed=hf://org/coins/last.pt",
        "weights_pushed=hf://org/coins/best.pt",
        "weights_pushed=hf://org/coins/last.pt",
    ]
    assert pusher.pids == frozenset()
    assert list((ended.dir / "control").iterdir()) == []

    ended.write("best.pt", b"the best of all")
    ended.write("last.pt", b"the last of all")
    assert pusher.deliver() == ""  # nothing old stands beside the best
    assert content(hub, "best.pt") == b"the best of all"
    assert content(hub, "last.pt") == b"the last of all"


def test_a_file_that_the_launch_named_is_the_only_one(hub: hub_server.Hub, ended: Ended) -> None:
    pusher = ended.pusher(path="v2/coins.pt", minutes=0.001)
    pusher.start()
    try:
        assert wait_for(lambda: content(hub, "v2/coins.pt") == b"the last ones", seconds=30)
        ended.write("best.pt", WEIGHTS)
        assert wait_for(lambda: content(hub, "v2/coins.pt") == WEIGHTS, seconds=30)
    finally:
        pusher.stop()
    ended.write("last.pt", b"worse ones")
    assert pusher.deliver() == ""
    assert content(hub, "v2/coins.pt") == WEIGHTS
    assert set(hub.repositories["org/coins"].files) == {
        "v2/coins.pt",
        ".kernel_tools/v2/coins.pt.json",
    }


def test_what_a_trainer_replaces_during_an_upload_arrives_as_it_was(
    hub: hub_server.Hub, ended: Ended
) -> None:
    ended.write("last.pt", WEIGHTS)
    hub.on_upload = lambda: ended.write("last.pt", b"others meanwhile" * 9999)
    pusher = ended.pusher(minutes=0.001)
    pusher.start()
    try:
        assert wait_for(lambda: content(hub, "last.pt") == WEIGHTS, seconds=30)
        hub.on_upload = lambda: None
        assert wait_for(lambda: content(hub, "last.pt") == b"others meanwhile" * 9999, seconds=30)
    finally:
        pusher.stop()
    assert [line for line in ended.log if "not_pushed" in line] == []


def test_the_end_gives_up_what_is_on_its_way_and_sends_the_final_ones(
    hub: hub_server.Hub, ended: Ended
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(60)

    hub.on_upload = hold
    ended.write("last.pt", WEIGHTS)
    pusher = ended.pusher(minutes=0.001)
    pusher.start()
    assert held.wait(30)
    (pid,) = pusher.pids
    began = time.monotonic()
    pusher.stop()
    assert time.monotonic() - began < 10
    assert not psutil.pid_exists(pid)
    go_on.set()
    hub.on_upload = lambda: None

    assert pusher.deliver() == ""
    assert content(hub, "last.pt") == WEIGHTS
    assert ended.log == ["weights_pushed=hf://org/coins/last.pt"]
    assert list((ended.dir / "control").iterdir()) == []


def test_a_hub_that_is_away_is_told_once_and_tried_again(hub: hub_server.Hub, ended: Ended) -> None:
    hub.fail_uploads = True
    ended.write("last.pt", WEIGHTS)
    pusher = ended.pusher(minutes=0.001)
    pusher.start()
    try:
        assert wait_for(lambda: sum("PUT /lfs/" in asked for asked in hub.asked) >= 3, seconds=60)
        hub.fail_uploads = False
        assert wait_for(lambda: len(ended.log) == 2, seconds=60)
        assert content(hub, "last.pt") == WEIGHTS
    finally:
        pusher.stop()
    assert ended.log[0].startswith("weights_not_pushed=hf://org/coins/last.pt the hub refused")
    assert ended.log[1] == "weights_pushed=hf://org/coins/last.pt"


@pytest.mark.parametrize("place", ["org/coins", "s3://b/k", "hf://org", "hf://org/../x", "hf://"])
def test_a_place_that_is_none_is_refused_before_the_launch(place: str) -> None:
    with pytest.raises(InvalidArgumentError, match="no place on the hub"):
        LaunchOptions(push_to=place)


@pytest.fixture
def session(
    hub: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with connected(tmp_path, monkeypatch) as session:
        yield session


@pytest.mark.timeout(180)
def test_a_machine_that_is_lost_has_left_its_checkpoint_on_the_hub_and_a_resume_takes_it(
    hub: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)  # of the kernel's environment
    monkeypatch.setattr("kernel_tools.launching.launch.HUB_MINUTES", 0.01)
    script = (
        "import os, time; path = os.environ['RUN_DIR'] + '/weights/last.pt'; "
        "open(path, 'wb').write(b'w' * 99999); time.sleep(600)"
    )
    with connected(tmp_path, monkeypatch) as session:
        run: Any = session.run_command(
            [sys.executable, "-c", script], push_to="hf://org/coins", push=False, push_minutes=0.01
        )
        assert wait_for(lambda: content(hub, "last.pt") == b"w" * 99_999, seconds=60)
        assert not run.refresh().terminal
        agent = json.loads((tmp_path / f"remote/runs/{run.id}/agent.json").read_text())
        for pid in (agent["watchdog"]["pid"], agent["pid"], agent["trainer"]["pid"]):
            os.kill(pid, signal.SIGKILL)

        source, point = resuming.find("hf://org/coins", session._runs, on=None)
        assert source is None
        assert point is not None
        ((remote, here),) = point.travels.items()
        assert remote == point.checkpoint
        assert here.read_bytes() == b"w" * 99_999
        assert here.is_relative_to(session.project_dir / ".kernel_tools")
        with pytest.raises(ObjectNotFoundError, match=r"nothing\.pt"):
            resuming.find("hf://org/coins/nothing.pt", session._runs, on=None)
    assert kept(tmp_path / "remote", hub_server.TOKEN) == []


def test_a_receipt_sends_where_the_first_run_sent() -> None:
    job = {
        "argv": ["x"], "kind": "command", "hub": {"repository": "org/coins", "path": "a/b.pt"},
        "push": {"epochs": 3, "minutes": 60.0},
    }  # fmt: skip
    told = Receipt.from_json({"run_id": "r", "job": job})
    again = receipts.again(
        told, references=(), options={}, project_dir=Path(), settings=Settings({}, {}, Path())
    ).options

    assert (again.push_to, again.push_epochs, again.push_minutes) == (
        "hf://org/coins/a/b.pt",
        3,
        60.0,
    )


@pytest.mark.timeout(180)
def test_what_the_machine_could_not_do_is_done_from_here_by_the_next_fetch(
    session: Session, hub: hub_server.Hub, tmp_path: Path
) -> None:
    script = "import os; open(os.environ['RUN_DIR'] + '/weights/best.pt', 'wb').write(b'w' * 9999)"
    options: dict[str, Any] = {"push_to": "hf://org/coins", "push": False}
    plan = session.run_command([sys.executable, "-c", script], dry_run=True, **options)
    assert "would push the weights to: hf://org/coins" in str(plan)
    run: Any = session.run_command([sys.executable, "-c", script], **options)
    run.wait(60)
    assert run.snapshot.message == (
        "completed; the weights are not in hf://org/coins: HF_TOKEN is not set there; "
        "%remote_fetch puts them there from here"
    )
    assert hub.asked == []
    with pytest.raises(StoreAuthError, match="HF_TOKEN"):
        session.push_weights()
    (session.project_dir / ".env").write_text(f"HF_TOKEN={hub_server.TOKEN}\n")
    assert session.push_weights() == "hf://org/coins/best.pt"
    assert hub.repositories["org/coins"].files["best.pt"].data == b"w" * 9999
    uploads = [asked for asked in hub.asked if asked.startswith("PUT /lfs/")]
    assert session.push_weights() == "hf://org/coins/best.pt"
    assert [asked for asked in hub.asked if asked.startswith("PUT /lfs/")] == uploads

    other: Any = session.run_command([sys.executable, "-c", script], push=False)
    other.wait(60)
    assert session.push_weights() is None
    assert kept(tmp_path / "remote", hub_server.TOKEN) == []
    with pytest.raises(InvalidArgumentError, match="no place on the hub"):
        session.push_weights(to="org/coins")
