"""`%remote_info` on a real kernel and a real store: what it says, and what it leaves behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_tools.session import Session
from kernel_tools.stores.local import LocalStore
from tests.fakes.relay import Relay, relay_to
from tests.store.conftest import connected
from tests.store.test_errors import with_date


@pytest.fixture
def relay(store: LocalStore) -> Iterator[Relay]:
    with relay_to(store.endpoint) as relay:
        yield relay


@pytest.fixture
def session(
    store: LocalStore, relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    """A project whose store is reached from here directly, and from the remote through a relay."""
    keys = store.service.secrets
    monkeypatch.setenv("MINIO_ENDPOINT", store.endpoint)
    monkeypatch.setenv("MINIO_PUBLIC_ENDPOINT", relay.endpoint)
    monkeypatch.setenv("MINIO_BUCKET", store.bucket)
    monkeypatch.setenv("MINIO_ACCESS_KEY", keys["access_key"].reveal())
    monkeypatch.setenv("MINIO_SECRET_KEY", keys["secret_key"].reveal())
    with connected(tmp_path, monkeypatch) as session:
        yield session


@pytest.mark.timeout(180)
def test_cards_disk_clock_and_store_are_told_and_no_link_stays(
    session: Session,
    store: LocalStore,
    relay: Relay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "coins"
    folder.mkdir()
    (folder / "a.txt").write_text("x" * 5000)
    reference = session.stage_dataset(folder)
    relay.change_down = with_date(-312)
    found = session.info()
    rows = {check.name: (check.standing, check.found) for check in found.checks}
    assert rows["cpu"][0] == "ok"
    assert "a product of matrices is right" in rows["cpu"][1]
    assert rows["store from there"][1] == (
        f"s3/{store.bucket} answers, {reference.object} can be read"
    )
    assert re.match(r"31\d\.\d s ahead of the store's", rows["clock and store"][1])
    assert "316.18 MB for a run on coins: archives 6.7 kB" in rows["disk to rent"][1]
    assert {check.name for check in found.problems} == {"clock and store", "clock here"}

    store.remove(reference.object)
    relay.close()
    lost = session.info(datasets=["coins"])
    rows = {check.name: (check.standing, check.found) for check in lost.checks}
    assert rows["store from here"][1] == (
        f"s3/{store.bucket} answers, but has no {reference.object} any more"
    )
    assert rows["store from there"] == ("problem", f"s3/{store.bucket}: Connection refused")

    monkeypatch.setenv("MINIO_SECRET_KEY", "not-the-right-one-at-all")
    monkeypatch.delenv("MINIO_PUBLIC_ENDPOINT")
    session.connection()._store = None  # settings are read when a store is opened
    refused = session.info()
    checks = {check.name: check for check in refused.checks}
    assert "refused the signature" in checks["store from here"].found
    assert "MINIO_SECRET_KEY" in checks["store from here"].advice
    assert "SignatureDoesNotMatch" in checks["store from there"].found

    shown = repr(refused) + repr(found) + repr(lost) + str(found._repr_mimebundle_())
    secret = [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]
    key = store.service.secrets["access_key"].reveal().encode()
    assert [path for path in secret if key in path.read_bytes()] == []
    assert list((tmp_path / "remote" / "secrets").iterdir()) == []
    assert "X-Amz-" not in shown
    assert store.service.secrets["secret_key"].reveal() not in shown
