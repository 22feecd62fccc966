"""One embedded store for all tests of this folder, each in a bucket of its own, and one hub each."""

from __future__ import annotations

import contextlib
import io
import itertools
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_tools.session import Session
from kernel_tools.settings import Secret
from kernel_tools.stores.base import ObjectStore
from kernel_tools.stores.hub import HubStore
from kernel_tools.stores.local import LocalStore
from tests.fakes import hub_server

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStore]:
    store = LocalStore.ensure(state_dir=tmp_path_factory.mktemp("store"), idle_seconds=120)
    yield store
    store.stop()


@pytest.fixture
def bucket(embedded: LocalStore) -> Iterator[LocalStore]:
    """The store, in a bucket that nothing has made yet; gone again, for a bucket holds volumes on disk."""
    store = LocalStore(embedded.service, bucket=f"bucket-{next(_numbers)}")
    yield store
    client = store._client
    if client.bucket_exists(store.bucket):
        for found in client.list_objects(store.bucket, recursive=True):
            client.remove_object(store.bucket, found.object_name)
        client.remove_bucket(store.bucket)


@pytest.fixture
def store(bucket: LocalStore) -> LocalStore:
    """The embedded store."""
    return bucket


@pytest.fixture
def hub() -> Iterator[hub_server.Hub]:
    with hub_server.running() as hub:
        yield hub


@pytest.fixture
def hub_store(hub: hub_server.Hub) -> HubStore:
    """A repository that nothing has made yet."""
    return HubStore("org/data", token=Secret(hub_server.TOKEN), endpoint=hub.url)


@contextlib.contextmanager
def connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A project's session, connected to a local server."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    session = Session(project)
    session.connect("local", remote_dir=str(tmp_path / "remote"))
    yield session
    session.disconnect()


def put(store: ObjectStore, data: bytes, key: str, **metadata: str) -> None:
    store.put(io.BytesIO(data), key, size_bytes=len(data), metadata=metadata)


def fetch(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as reply:
        return reply.read()
