"""A run's files in a real store: signed at launch, in parts where large, read back whole, renewed at contact."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_tools.agent.complete_set import CompleteSet
from kernel_tools.agent.errors import PushError
from kernel_tools.agent.targets import _targets
from kernel_tools.errors import FetchError, InvalidArgumentError, RunNotFoundError
from kernel_tools.launching import pushing
from kernel_tools.launching.pushing import Renewal, life_seconds, sign_targets
from kernel_tools.results.fetch import fetch_files
from kernel_tools.results.pushed import StoreLink, find_pushed, fits, read_pushed
from kernel_tools.stores.local import LocalStore

RUN = "20260102-030405-coins-3f2a"
LAST = "weights/last.pt"


class Machine:
    """A run directory, and pushes of it by signed URLs alone."""

    def __init__(self, folder: Path, signed: dict[str, Any]) -> None:
        self.folder, self.used = folder, set[str]()
        self.targets = _targets(signed)
        for name in ("control", "weights"):
            (folder / name).mkdir(parents=True)

    def push(self, **files: bytes) -> None:
        paths = [name.replace("__", "/").replace("_", ".") for name in files]
        for path, data in zip(paths, files.values(), strict=True):
            (self.folder / path).write_bytes(data)
        CompleteSet(str(self.folder), RUN, reason="epoch 1", ended=False).send(
            self.targets, paths, documents={"status.json": b'{"state": "training"}'},
            used=self.used, check=lambda: None, on_file=lambda _path: None,
        )  # fmt: skip


def signed(store: LocalStore, **options: Any) -> dict[str, Any]:
    return sign_targets(store, RUN, **{"expires_seconds": 600, "largest_bytes": 0, **options})


def test_what_was_pushed_is_read_back_by_the_run_or_a_part_of_its_id(
    store: LocalStore, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "run", signed(store))
    machine.push(weights__last_pt=b"one", train_log=b"line\n")
    machine.push(weights__last_pt=b"two", train_log=b"line\nline\n")
    pushed = read_pushed(store, RUN)
    assert [(file.path, file.size_bytes) for file in pushed.files] == [
        (LAST, 3), ("train.log", 10), ("status.json", 21),
    ]  # fmt: skip
    link = find_pushed(store, "3f2a")
    files = fetch_files(
        link, remote_dir="", run_id=RUN, globs=["weights/*.pt", "train.log"], folder=tmp_path / "to"
    )
    assert [file.path.read_bytes() for file in files] == [b"line\nline\n", b"two"]
    with pytest.raises(FetchError, match="no file that fits"):
        fetch_files(link, remote_dir="", run_id=RUN, globs=["x/*"], folder=tmp_path / "to")
    with pytest.raises(RunNotFoundError, match="nothing of other is in the store"):
        find_pushed(store, "other")


def test_a_large_checkpoint_goes_in_parts_through_a_real_store(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "PART_BYTES", 5 << 20)
    targets = signed(store, largest_bytes=11 << 20)
    assert len(targets["slots"][LAST][0]["uploads"]) == pushing.UPLOADS_A_SLOT
    assert "uploads" not in targets["slots"]["train.log"][0]
    machine = Machine(tmp_path / "run", targets)
    data = os.urandom((11 << 20) + 7)
    machine.push(weights__last_pt=data)
    assert len(machine.used) == 1
    (file,) = fetch_files(
        StoreLink(store, RUN), remote_dir="", run_id=RUN, globs=[LAST], folder=tmp_path / "to"
    )
    assert file.sha256 == hashlib.sha256(data).hexdigest()
    machine.used.clear()  # another process of the agent's: that upload has served, one PUT does it
    machine.push(weights__last_pt=data[:-1])
    machine.push(weights__last_pt=data[:-2])
    assert read_pushed(store, RUN).files[0].size_bytes == len(data) - 2


def test_a_fetch_that_was_cut_off_moves_only_the_rest(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_tools.results.pushed.RANGE_BYTES", 1000)
    data = os.urandom(10_000)
    Machine(tmp_path / "run", signed(store)).push(weights__last_pt=data)
    link = StoreLink(store, RUN)
    reads: list[int] = []
    read = LocalStore.read_range

    def counting(self: LocalStore, key: str, *, offset: int, length: int) -> bytes:
        if len(reads) == 6:
            reads.append(-1)
            raise ConnectionError
        reads.append(offset)
        return read(self, key, offset=offset, length=length)

    arguments: dict[str, Any] = {
        "remote_dir": "",
        "run_id": RUN,
        "globs": [LAST],
        "folder": tmp_path,
    }
    monkeypatch.setattr(LocalStore, "read_range", counting)
    with pytest.raises(ConnectionError):
        fetch_files(link, **arguments)
    assert not (tmp_path / LAST).exists()
    (file,) = fetch_files(link, **arguments)
    assert file.path.read_bytes() == data
    assert [offset for offset in reads[reads.index(-1) :] if offset > 0][0] == 5000
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["last.pt"]


def test_figures_that_the_run_replaced_meanwhile_are_not_taken_for_those_of_the_manifest(
    store: LocalStore, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "run", signed(store))
    machine.push(metrics_jsonl=b"{}\n")
    link = StoreLink(store, RUN)
    assert link.call("poll")["metrics"]["size"] == 3
    machine.push(metrics_jsonl=b"{}\n{}\n")
    machine.push(metrics_jsonl=b"[]\n{}\n{}\n")  # in the first one's object
    with pytest.raises(FetchError, match="metrics.jsonl .* is not what its manifest says"):
        link.call("poll")


def test_an_expired_link_is_named(store: LocalStore, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "run", signed(store, expires_seconds=1))
    deadline = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=20)

    def push_until_it_is_over() -> None:
        number = 0
        while dt.datetime.now(dt.timezone.utc) < deadline:
            number += 1
            machine.push(train_log=b"%d" % number)

    with pytest.raises(PushError, match="has expired: %remote_attach renews the links"):
        push_until_it_is_over()


def test_a_store_that_signs_nothing_is_refused_in_one_sentence() -> None:
    hub: Any = SimpleNamespace(name="hub", bucket="org/repo")
    with pytest.raises(InvalidArgumentError, match="the store hub hands out no uploads"):
        sign_targets(hub, RUN, expires_seconds=600, largest_bytes=0)


@pytest.mark.parametrize(("hours", "days"), [(None, 7), (8, 1 + 8 / 24), (24, 2), (24 * 30, 7)])
def test_links_live_for_the_runs_longest_time_and_a_day_and_seven_days_at_most(
    hours: float | None, days: float
) -> None:
    assert life_seconds(hours) == round(days * 86400)


def snapshot(**told: Any) -> Any:
    return SimpleNamespace(
        terminal=False, contact=SimpleNamespace(kind="live"), agent={"push": told} if told else {}
    )


@pytest.mark.parametrize(
    ("left_days", "uploads_left", "largest", "due"),
    [(6, 0, 1, False), (3.6, 0, 1, False), (3.4, 0, 1, True), (-1, 0, 1, True),
     # A launch for two hours signs for 26, with uploads for a checkpoint that is still to come.
     (26 / 24, 8, 0, False), (0.4, 8, 0, True), (6, 0, 65 << 20, True), (6, 3, 65 << 20, False)],
)  # fmt: skip
def test_links_are_renewed_when_half_their_life_is_over_or_uploads_run_out(
    left_days: float, uploads_left: int, largest: int, due: bool
) -> None:
    now = 1_800_000_000.0
    renewal = Renewal(lambda: None, None, RUN, clock=lambda: now)  # type: ignore[arg-type, return-value]
    expires = dt.datetime.fromtimestamp(now + left_days * 86400, dt.timezone.utc).isoformat()
    told = snapshot(expires_at=expires, uploads_left=uploads_left, largest_bytes=largest)
    assert renewal.due(told) is due
    assert not renewal.due(snapshot())


def test_a_renewal_lays_new_links_where_the_agent_looks(store: LocalStore) -> None:
    laid: dict[str, Any] = {}
    told: list[tuple[str, str]] = []
    connection: Any = SimpleNamespace(
        put_secrets=lambda name, payload: laid.update({name: payload}),
        call=lambda function, run_id: told.append((function, run_id)),
    )
    Renewal(lambda: store, connection, RUN).renew(0, 3600)
    targets = _targets(laid[f"{RUN}.push"])
    assert not targets.expired
    assert targets.life_seconds == 3600
    assert told == [("renewed", RUN)]
    assert targets.manifest.object == f"runs/{RUN}/manifest.json"


def test_a_renewal_signs_for_as_long_as_the_launch_did() -> None:
    now = 1_800_000_000.0
    renewal = Renewal(lambda: None, None, RUN, clock=lambda: now)  # type: ignore[arg-type, return-value]

    def due(left_hours: float) -> bool:
        end = dt.datetime.fromtimestamp(now + left_hours * 3600, dt.timezone.utc).isoformat()
        return renewal.due(snapshot(expires_at=end, life_seconds=32 * 3600, largest_bytes=1))

    assert (due(17), due(15)) == (False, True)


def ended(store: LocalStore, **changes: Any) -> Any:
    """A run whose agent has said its last word."""
    told = {"uploads_left": 16, "largest_bytes": 1, "expires_at": "2099-01-01T00:00:00+00:00"}
    told |= changes.pop("told", {})
    facts = {"terminal": True, "status": {"phase": "done"}, "agent": {"push": told}} | changes
    return SimpleNamespace(contact=SimpleNamespace(kind="live"), **facts)


def until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def test_what_was_begun_in_parts_and_not_used_goes_when_the_run_has_ended(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "PART_BYTES", 5 << 20)
    first, second = signed(store, largest_bytes=6 << 20), signed(store, largest_bytes=6 << 20)
    Machine(tmp_path / "run", second).push(weights__last_pt=os.urandom(6 << 20))
    other = store.begin_upload("runs/another/a/weights/last.pt")
    begun = 2 * len(pushing.LARGE_FILES) * len(pushing.SLOTS) * pushing.UPLOADS_A_SLOT
    assert len(store.unfinished(f"runs/{RUN}/")) == begun - 1
    assert first != second

    renewal = Renewal(lambda: store, None, RUN)  # type: ignore[arg-type, return-value]
    renewal(ended(store, terminal=False))
    renewal(ended(store, status={"phase": "train"}))  # concluded from silence: it may push yet
    renewal(ended(store, told={"uploads_left": 0}))
    assert len(store.unfinished(f"runs/{RUN}/")) == begun - 1
    renewal(ended(store))
    until(lambda: not store.unfinished(f"runs/{RUN}/"))
    assert store.unfinished() == (("runs/another/a/weights/last.pt", other, 0),)
    store.abort_upload("runs/another/a/weights/last.pt", other)
    assert read_pushed(store, RUN).find(LAST) is not None


@pytest.mark.parametrize(
    ("path", "pattern", "fitting"),
    [
        (LAST, "weights/*.pt", True), (LAST, "weights", True), (LAST, "*.pt", False),
        (LAST, "**/*.pt", True), ("a/b/c.pt", "a/**/c.pt", True), ("a/c.pt", "a/**/c.pt", True),
        ("train.log", "train.log", True), ("train.log", "train", False), ("a/b", "a/b/c", False),
    ],
)  # fmt: skip
def test_patterns_mean_what_they_mean_on_the_runs_machine(
    path: str, pattern: str, fitting: bool
) -> None:
    assert fits(path, pattern) is fitting
