"""What every object store promises, asked of real ones: SeaweedFS, and the hub's own client."""

from __future__ import annotations

import hashlib
import io
import os
import unicodedata
from datetime import datetime, timezone
from pathlib import Path

import pytest

from kernel_tools.errors import InvalidArgumentError, ObjectNotFoundError, StoreError
from kernel_tools.stores.base import ObjectStore
from kernel_tools.stores.multipart import PART_BYTES
from tests.store.conftest import fetch, put

ODD_NAMES = [
    "a b/c d.tar", "plus+and#and%.tar", "żółw/日本.tar", "tilde~and&=?.tar", " lead and trail .tar", "100%25.tar",
    "a%20b+c d.tar", "%2F.tar", "'quoted\".tar", "<&amp;]]>.tar", "..a/...tar", "*[x]{y}|`^@$!().tar", "😀.tar",
    unicodedata.normalize("NFD", "żółw.tar"), "-x:y;z=1,.tar", "n" * 251 + ".tar",
]  # fmt: skip


@pytest.fixture(params=["s3", "hub"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """Each kind, in a bucket that nothing has made yet."""
    found: ObjectStore = request.getfixturevalue(
        {"s3": "bucket", "hub": "hub_store"}[request.param]
    )
    return found


def test_it_is_an_object_store(store: ObjectStore) -> None:
    assert isinstance(store, ObjectStore)


def test_an_object_comes_back_as_it_went_with_its_facts(store: ObjectStore, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    digest = hashlib.sha256(data).hexdigest()

    info = store.put(
        io.BytesIO(data), "x/y.bin", size_bytes=len(data), metadata={"sha256": digest, "top": "y"}
    )

    assert (info.key, info.size_bytes, info.sha256) == ("x/y.bin", len(data), digest)
    assert info.metadata == {"sha256": digest, "top": "y"}
    assert info.modified is not None
    assert abs((datetime.now(timezone.utc) - info.modified).total_seconds()) < 60
    assert store.get("x/y.bin", tmp_path / "out" / "y.bin") == info
    assert (tmp_path / "out" / "y.bin").read_bytes() == data


def test_a_file_of_several_parts_comes_back_and_is_counted(
    store: ObjectStore, tmp_path: Path
) -> None:
    data = os.urandom(2 * PART_BYTES + 12_345)
    (tmp_path / "big").write_bytes(data)
    seen: list[tuple[int, int]] = []

    store.put(
        tmp_path / "big", "big.tar", on_progress=lambda done, total: seen.append((done, total))
    )

    assert hashlib.sha256(fetch(store.presign_get("big.tar", expires_seconds=60))).digest() == (
        hashlib.sha256(data).digest()
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(data), len(data))
    assert len({done for done, _ in seen}) >= 3


def test_an_empty_object_is_an_object(store: ObjectStore, tmp_path: Path) -> None:
    put(store, b"", "empty")

    assert store.get("empty", tmp_path / "empty").size_bytes == 0
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.parametrize("key", ODD_NAMES)
def test_odd_names_work_everywhere(store: ObjectStore, tmp_path: Path, key: str) -> None:
    put(store, key.encode(), key)

    assert [info.key for info in store.list()] == [key]
    assert fetch(store.presign_get(key, expires_seconds=60)) == key.encode()
    store.remove(key)
    assert store.stat(key) is None


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b", "a\nb", "x" * 1025, "y" * 256, "é" * 128, "%2e%2e/a",
     "a/%2E", "a\0", "a\x7fb", "a\x85b", "a\u2028b", "\u202ea", "a\u200bb", "a\uffffb", "\udc80", "/".join("x" * 600)],
)  # fmt: skip
def test_names_that_something_on_the_way_would_rewrite_are_refused_up_front(
    store: ObjectStore, key: str
) -> None:
    for call in (
        lambda: put(store, b"x", key),
        lambda: store.stat(key),
        lambda: store.presign_get(key, expires_seconds=60),
    ):
        with pytest.raises(InvalidArgumentError, match="object name"):
            call()


def test_list_goes_below_a_prefix_in_order(store: ObjectStore) -> None:
    for key in ("b/2", "a/1", "b/1", "bc"):
        put(store, b"x", key)

    assert [info.key for info in store.list("b/")] == ["b/1", "b/2"]
    assert [info.key for info in store.list()] == ["a/1", "b/1", "b/2", "bc"]


def test_remove_is_silent_where_there_is_nothing(store: ObjectStore) -> None:
    put(store, b"x", "a")
    store.remove("a")
    store.remove("a")

    assert store.stat("a") is None


def test_a_range_is_what_was_asked_for(store: ObjectStore) -> None:
    put(store, bytes(range(256)), "r")

    assert store.read_range("r", offset=10, length=5) == bytes(range(10, 15))
    assert store.read_range("r", offset=250, length=100) == bytes(range(250, 256))


def test_a_presigned_get_honours_ranges(store: ObjectStore) -> None:
    put(store, bytes(range(256)), "r.tar")
    url = store.presign_get("r.tar", expires_seconds=60)

    assert fetch(url, Range="bytes=200-209") == bytes(range(200, 210))


@pytest.mark.parametrize("seconds", [0, -5, 7 * 24 * 3600 + 1])
def test_a_life_that_no_store_accepts_is_refused(store: ObjectStore, seconds: int) -> None:
    with pytest.raises(InvalidArgumentError, match="7 days"):
        store.presign_get("p", expires_seconds=seconds)


def test_a_missing_object_is_none_to_stat_and_an_error_to_read(
    store: ObjectStore, tmp_path: Path
) -> None:
    assert store.stat("nowhere") is None  # nor is the bucket there
    put(store, b"x", "somewhere")
    assert store.stat("nowhere") is None
    with pytest.raises(ObjectNotFoundError, match="no object nowhere in"):
        store.get("nowhere", tmp_path / "out")
    with pytest.raises(ObjectNotFoundError):
        store.read_range("nowhere", offset=0, length=1)
    assert list(tmp_path.iterdir()) == []


class Failing(io.RawIOBase):
    """Fails once `good` bytes have been read."""

    def __init__(self, good: int) -> None:
        self.left = good

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        if self.left <= 0:
            raise OSError("the cable is out")
        self.left -= len(buffer)
        return len(buffer)


@pytest.mark.parametrize("good", [0, PART_BYTES, 2 * PART_BYTES])
def test_an_upload_whose_source_fails_leaves_no_object(store: ObjectStore, good: int) -> None:
    with pytest.raises(OSError, match="the cable is out"):
        store.put(Failing(good), "half", size_bytes=3 * PART_BYTES)

    assert store.stat("half") is None
    assert list(store.list()) == []


def test_an_upload_whose_source_fails_leaves_the_object_of_before(store: ObjectStore) -> None:
    put(store, b"before", "kept")
    with pytest.raises(OSError, match="the cable is out"):
        store.put(Failing(PART_BYTES), "kept", size_bytes=3 * PART_BYTES)

    assert store.read_range("kept", offset=0, length=10) == b"before"


def test_what_does_not_match_its_own_hash_is_not_handed_out(
    store: ObjectStore, tmp_path: Path
) -> None:
    put(store, b"tampered", "t", sha256=hashlib.sha256(b"original").hexdigest())

    with pytest.raises(StoreError, match="damaged"):
        store.get("t", tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
