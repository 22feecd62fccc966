"""One embedded store for all tests of this folder, each in a bucket of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kernel_tools.stores.local import LocalStore

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStore]:
    store = LocalStore.ensure(state_dir=tmp_path_factory.mktemp("store"), idle_seconds=120)
    yield store
    store.stop()


@pytest.fixture
def store(embedded: LocalStore) -> Iterator[LocalStore]:
    """The store, in a bucket that nothing has made yet; gone again, for a bucket holds volumes on disk."""
    store = LocalStore(embedded.service, bucket=f"bucket-{next(_numbers)}")
    yield store
    client = store._client
    if client.bucket_exists(store.bucket):
        for found in client.list_objects(store.bucket, recursive=True):
            client.remove_object(store.bucket, found.object_name)
        client.remove_bucket(store.bucket)
