"""The machine is gone in epoch 3 of 5: its last milestone comes back, and a new machine goes on bit for bit."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_tools.errors import AgentError, RunNotFoundError
from kernel_tools.session import Session
from kernel_tools.stores.local import LocalStore

from .conftest import CONFIG, TINY, processes_of_run, wait_for
from .test_again import tensors

pytestmark = [pytest.mark.campaign, pytest.mark.slow, pytest.mark.timeout(900)]

FIVE = (*TINY[:2], "data.train_samples=8", *TINY[3:-2], "solver.epochs=5", "evaluation.interval=2")
LAUNCH = {"nproc_per_node": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStore]:
    """An object store that is on neither machine."""
    store = LocalStore.ensure(state_dir=tmp_path_factory.mktemp("far-store"), idle_seconds=120)
    yield store
    store.stop()


@pytest.fixture(autouse=True)
def far_store_is_configured(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the machine's user are kept from other tests; here they are these."""
    secrets = store.service.secrets
    monkeypatch.setenv("MINIO_ENDPOINT", store.endpoint)
    monkeypatch.setenv("MINIO_BUCKET", "runs-of-a-user")
    monkeypatch.setenv("MINIO_ACCESS_KEY", secrets["access_key"].reveal())
    monkeypatch.setenv("MINIO_SECRET_KEY", secrets["secret_key"].reveal())


def kill_the_machine(session: Session, run_id: str) -> None:
    """SIGKILL everything of the run, and take its disk away."""
    remote_dir = session.connection().remote_dir
    for _ in range(50):  # a watchdog may be starting
        found = [*processes_of_run(run_id), *agents_of(run_id)]
        if not found:
            break
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(remote_dir)


def agents_of(run_id: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if folder.name.isdigit() and run_id.encode() in words and state not in {"Z", "X"}:
            found.append(int(folder.name))
    return found


def test_a_new_machine_goes_on_from_the_last_milestone_bit_for_bit(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("KERNEL_TOOLS_STATE_DIR", str(tmp_path / "first"))
    first = Session(project)
    first.connect("local")
    run = first.train(CONFIG, overrides=FIVE, name="lost", **LAUNCH)

    def two_pushed() -> bool:
        pushes = (run.snapshot.agent or {}).get("pushes") or ()
        return any(row["reason"].endswith("epoch 2") and not row["error"] for row in pushes)

    wait_for(two_pushed, seconds=200)
    kill_the_machine(first, run.id)
    run.detach()
    first.disconnect()

    stored = first.stored_run(run.id[-4:])
    (last,) = stored.fetch("weights/last.pt", to=tmp_path / "fetched")
    pushed = stored.link.pushed  # type: ignore[attr-defined]
    assert not pushed.ended
    assert (
        hashlib.sha256(last.path.read_bytes()).hexdigest() == pushed.find("weights/last.pt").sha256
    )
    milestone = len(stored.metrics())
    assert milestone in {2, 3, 4}
    assert torch.load(last.path, weights_only=True)["optimizer_steps"] == 2 * milestone
    assert "checkpoint_saved=" in stored.logs(1000)
    with pytest.raises(AgentError, match="only known from the store"):
        stored.stop()

    monkeypatch.setenv("KERNEL_TOOLS_STATE_DIR", str(tmp_path / "second"))
    second = Session(project)
    second.connect("local")
    with pytest.raises(RunNotFoundError):
        second.attach(run.id)
    again = second.train(resume=run.id, **LAUNCH)
    again.wait(300)
    whole = second.train(CONFIG, overrides=FIVE, name="whole", push=False, **LAUNCH)
    whole.wait(300)
    assert again.status()["resumed_from"].endswith("/work/resumed/weights/last.pt")
    assert [row["epoch"] for row in again.metrics()] == [1, 2, 3, 4, 5]
    assert again.status()["optimizer_steps"] == whole.status()["optimizer_steps"] == 10
    weights = []
    for one in (again, whole):
        (file,) = one.fetch("weights/last.pt")
        weights.append(dict(tensors(torch.load(file.path, weights_only=True))))
    assert sorted(weights[0]) == sorted(weights[1])
    assert [k for k, v in weights[0].items() if not torch.equal(v, weights[1][k])] == []
    assert stored_ended(second, again.id)
    with pytest.raises(RunNotFoundError, match="nothing of"):
        second.stored_run(whole.id)
    second.disconnect()


def stored_ended(session: Session, run_id: str) -> bool:
    run = session.stored_run(run_id)
    return run.refresh().state.value == "completed" and bool(run.snapshot.artifacts)
