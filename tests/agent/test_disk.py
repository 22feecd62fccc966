"""Room is asked for before the download: 30 % on top, all of one place together, quotas beside `df`."""

import os

import pytest
from kernel_tools_agent import disk
from kernel_tools_agent.disk import Claim, check_room, room_of, used_bytes
from kernel_tools_agent.errors import InputError
from kernel_tools_agent.job import Job
from kernel_tools_agent.stage import room_claims


def test_what_fits_passes_and_what_does_not_is_named_with_its_place(tmp_path):
    free = room_of(str(tmp_path), quotas={}).free_bytes
    check_room([Claim(str(tmp_path), ("coins",), free // 2)], quotas={})
    with pytest.raises(InputError) as caught:
        check_room([Claim(str(tmp_path / "new"), ("coins",), 10 * free)], quotas={})
    said = str(caught.value)
    assert said.startswith("the disk is too small for coins: it needs ")
    assert said.endswith(f"are free in {tmp_path / 'new'}")
    assert "quota" not in said


def test_thirty_percent_are_kept_free(tmp_path):
    (tmp_path / "working").mkdir()
    quotas = {str(tmp_path / "working"): 1_000_000}
    check_room([Claim(str(tmp_path / "working"), ("a",), 769_000)], quotas=quotas)
    with pytest.raises(InputError, match=r"it needs 1\.0 MB with 30 % of headroom"):
        check_room([Claim(str(tmp_path / "working"), ("a",), 770_000)], quotas=quotas)


def test_claims_on_one_place_are_added(tmp_path):
    (tmp_path / "working").mkdir()
    quotas = {str(tmp_path / "working"): 1_000_000}
    claims = [
        Claim(str(tmp_path / "working" / "data"), ("coins",), 400_000),
        Claim(str(tmp_path / "working" / "runs"), ("the checkpoints",), 400_000),
    ]
    check_room(claims[:1], quotas=quotas)
    with pytest.raises(InputError, match="too small for coins, the checkpoints"):
        check_room(claims, quotas=quotas)


def test_a_quota_counts_what_is_used_and_not_what_df_shows(tmp_path):
    working = tmp_path / "working"
    working.mkdir()
    quotas = {str(working): 20 * 10**9}
    assert room_of(str(working / "runs"), quotas=quotas).free_bytes <= 20 * 10**9
    (working / "big").write_bytes(os.urandom(1_000_000))
    os.link(str(working / "big"), str(working / "again"))
    assert 1_000_000 <= used_bytes(str(working)) < 1_100_000
    quotas = {str(working): 1_500_000}
    assert room_of(str(working), quotas=quotas).free_bytes == 1_500_000 - used_bytes(str(working))
    with pytest.raises(InputError, match=r"0\.. MB of its quota of 1\.5 MB are free"):
        check_room([Claim(str(working), ("coins",), 900_000)], quotas=quotas)


def test_kaggle_keeps_twenty_gigabytes_of_its_working_folder():
    assert disk.KAGGLE_QUOTAS["/kaggle/working"] == 20 * 10**9


class Task:
    def __init__(self, one, ready=False, arrived=0):
        self.input, self.ready, self.arrived_bytes = one, ready, arrived


def test_archive_and_content_and_checkpoints_are_claimed_of_what_is_not_here():
    rows = [
        {"name": "tar", "object": "a", "dest": "data/a", "format": "tar", "size_bytes": 100, "content_bytes": 90},
        {"name": "peeked", "object": "b", "dest": "data/b", "format": "zip", "size_bytes": 50},
        {"name": "file", "object": "c", "dest": "data/c", "size_bytes": 10},
    ]  # fmt: skip
    job = Job.from_json({"run_id": "r", "argv": ["x"], "inputs": rows, "checkpoint_bytes": 1000})
    tar, peeked, file = job.inputs
    tasks = [Task(tar, arrived=40), Task(peeked), Task(file)]
    claims = room_claims(tasks, "/d", "/r", job.checkpoint_bytes)
    assert [(c.folder, c.bytes) for c in claims] == [
        ("/d", 150),
        ("/d", 100),
        ("/d", 10),
        ("/r", 1000),
    ]
    assert room_claims([Task(tar, ready=True)], "/d", "/r", 1000) == []
