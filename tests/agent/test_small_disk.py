"""A remote whose disk is five megabytes, a file system of its own: what does not fit is said before the download."""

import contextlib
import gzip
import os
import subprocess

import pytest

from .archives import tar_of
from .test_stage import dataset, datasets, run

MEGABYTE = 1_000_000
DISK_BYTES = 5 << 20


@pytest.fixture
def small_disk(tmp_path):
    """The remote folder, on a disk of its own."""
    path = tmp_path / "remote dir"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    done = subprocess.run(mount, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {done.stdout.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def folder_of(megabytes):
    """A tar of so much that does not shrink, in files of a megabyte at most."""
    files = {}
    for number in range(int(megabytes * 10)):
        files[f"coins/{number:03}.bin"] = os.urandom(MEGABYTE // 10)
    return tar_of(files)


def stage(remote, store, run_id, data, checkpoint_bytes=0, **fields):
    store.objects["datasets/coins.tar"] = data
    known = {"content_bytes": len(data), **fields}
    inputs = [dataset(data, **known)]
    return run(remote, store, run_id, inputs, checkpoint_bytes=checkpoint_bytes)


def test_archive_content_and_thirty_percent_are_held_against_the_disk_before_any_byte_comes(
    small_disk, remote, store
):
    end = stage(remote, store, "large", folder_of(2.5))
    assert end["state"] == "failed"
    assert end["message"].startswith(
        "the disk is too small for coins: it needs 6.6 MB with 30 % of headroom, 5."
    )
    assert end["message"].endswith(f" MB are free in {small_disk}/datasets")
    assert store.requests == []
    assert datasets(remote) == []


def test_the_checkpoints_count_and_without_them_the_same_data_set_fits(small_disk, remote, store):
    data = folder_of(1.5)
    end = stage(remote, store, "weights", data, checkpoint_bytes=2 * MEGABYTE)
    assert "the disk is too small for coins, the checkpoints: it needs 6.5 MB" in end["message"]
    assert store.requests == []
    assert stage(remote, store, "fits", data)["state"] == "completed"
    assert "data/coins/000.bin" in remote.text("fits", "train.log")
    # And once it is here, only what a new run adds is asked for: nothing of it comes again.
    asked = len(store.requests)
    assert (
        stage(remote, store, "again", data, checkpoint_bytes=9 * MEGABYTE)["state"] == "completed"
    )
    assert len(store.requests) == asked


def nothing_is_left_and_the_next_fits(remote, store, end):
    assert end["state"] == "failed"
    assert end["message"].startswith("the disk is full: coins could not be ")
    assert datasets(remote) == []
    assert stage(remote, store, "next", folder_of(0.5))["state"] == "completed"


def test_content_that_nobody_knew_the_size_of_fills_the_disk_and_leaves_nothing(
    small_disk, remote, store
):
    zeros = tar_of({f"coins/{number}.bin": bytes(MEGABYTE) for number in range(8)})
    packed = gzip.compress(zeros)  # small on its way, large on the disk
    assert len(packed) < DISK_BYTES // 100
    end = stage(remote, store, "fills", packed, format="tar.gz", content_bytes=None)
    nothing_is_left_and_the_next_fits(remote, store, end)


def test_a_disk_that_somebody_else_fills_meanwhile_leaves_nothing(small_disk, remote, store):
    data = folder_of(1.5)
    store.gate_at = MEGABYTE // 2
    store.objects["datasets/coins.tar"] = data
    run(remote, store, "fills", [dataset(data, content_bytes=len(data))], wait=False)
    assert store.reached.wait(30)
    filler = small_disk / "of somebody else"
    with contextlib.suppress(OSError), filler.open("wb") as stream:
        while True:
            stream.write(bytes(65536))
            stream.flush()
    store.open_gate()
    end = remote.wait_end("fills")  # told although the disk is as full as before
    filler.unlink()
    nothing_is_left_and_the_next_fits(remote, store, end)
