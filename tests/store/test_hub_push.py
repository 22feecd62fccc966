"""`--push-to hf://ORG/REPO`: the real client puts a run's weights there from its machine, or leaves them to this one.

The hub is a local server that speaks its endpoints; agent, kernel and client are real.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel_tools.agent.hub import deliver
from kernel_tools.agent.job import Job
from kernel_tools.errors import InvalidArgumentError, StoreAuthError
from kernel_tools.launch import LaunchOptions
from kernel_tools.session import Session
from tests.fakes import hub_server
from tests.store.conftest import connected

WEIGHTS = os.urandom(50_000)
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()


class Ended:
    """A run directory whose processes are gone, and what its end says of the hub."""

    def __init__(self, folder: Path, hub: hub_server.Hub, **environment: str) -> None:
        self.dir, self.log = folder / "remote/runs/run-1", list[str]()
        (self.dir / "weights").mkdir(parents=True)
        (self.dir / "weights/last.pt").write_bytes(b"the last ones")
        self.environment = {**os.environ, "HF_ENDPOINT": hub.url, **environment}
        self.environment.pop("HF_HUB_OFFLINE", None)

    def deliver(self, repository: str = "org/coins", path: str | None = None) -> str:
        hub = {"repository": repository, "path": path}
        job = Job.from_json({"run_id": "run-1", "argv": ["x"], "hub": hub})
        return deliver(str(self.dir), job, log=self.log.append, environment=self.environment)


@pytest.fixture
def ended(hub: hub_server.Hub, tmp_path: Path) -> Ended:
    return Ended(tmp_path, hub, HF_TOKEN=hub_server.TOKEN)


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
        ({"module": "import os; os._exit(3)"}, "the upload ended with exit code 3"),
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
