"""What is made of a remote's answers: every check that fails is one row with what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kernel_tools.datasets.reference import DatasetReference
from kernel_tools.preflight import RemoteInfo, judge

GB = 10**9
ROOM = {
    "folder": "/w", "place": "/w", "free_bytes": 20 * GB, "quota_bytes": None, "writable": True,
}  # fmt: skip
CARD = {
    "place": "cuda:0", "name": "Tesla T4", "problem": "", "seconds": 0.31, "memory_total": 15 * GB,
    "memory_free": 14 * GB, "capability": "sm_75", "built_for": ["sm_70", "sm_75"],
}  # fmt: skip
GPU = {"name": "Tesla T4", "memory_total": 15 * GB, "memory_used": 0, "util": 0, "temperature": 40}
COINS = DatasetReference(
    "coins", "datasets/coins/a.tar", 4 * GB, "a" * 64, "data/coins", "tar", 10, 4 * GB, "s3", "b", None
)  # fmt: skip
T0 = 1_800_000_000.0


def answer(**changes: Any) -> dict[str, Any]:
    """What a Kaggle session with two cards says."""
    return {
        "asked_at": T0 + 1, "answered_at": T0 + 9, "python": "3.11.13", "executable": "/usr/bin/python3",
        "platform": "Linux", "kaggle": True, "cpu_count": 4, "memory_bytes": 31 * GB,
        "memory_available_bytes": 29 * GB, "shared_memory_bytes": 15 * GB, "gpus": [GPU, GPU],
        "driver": "550.54", "driver_cuda": "12.4",
        "disk": {
            "runs": {**ROOM, "quota_bytes": 20 * GB},
            "datasets": {**ROOM, "folder": "/tmp/d", "place": "/t", "free_bytes": 53 * GB},
        },
        "staged": [], "missing": ["faster_coco_eval"],
        "torch": {"torch": "2.6.0+cu124", "cuda": "12.4", "cards": 2, "problem": ""},
        "places": [CARD, {**CARD, "place": "cuda:1"}], "proof_problem": "",
        "stores": [{"name": "s3/b", "object": None, "problem": "", "read": False, "ahead_seconds": 0.2}],
        **changes,
    }  # fmt: skip


def info(*, asked: float = T0, answered: float = T0 + 10, **changes: Any) -> RemoteInfo:
    references = changes.pop("references", (COINS,))
    return judge(
        answer(**changes), where="kaggle", references=references, asked=asked, answered=answered
    )


def row(found: RemoteInfo, name: str) -> tuple[str, str, str]:
    check = found.find(name)
    assert check is not None
    return check.standing, check.found, check.advice


def test_a_session_that_is_well_says_so_row_by_row() -> None:
    found = info()
    assert found.problems == ()
    assert {check.standing for check in found.checks} == {"ok"}
    assert row(found, "machine")[1] == "a Kaggle session, 4 CPUs"
    assert row(found, "torch")[1] == (
        "2.6.0+cu124, built for CUDA 12.4, driver 550.54 (CUDA up to 12.4)"
    )
    assert row(found, "cuda:1")[1] == (
        "Tesla T4, 14.00 GB of 15.00 GB free; a product of matrices is right, 0.31 s"
    )
    assert row(found, "memory")[1] == "29.00 GB of 31.00 GB free"
    assert row(found, "disk for runs")[1] == "20.00 GB of the quota of 20.00 GB free in /w"
    assert row(found, "disk for data")[1] == "53.00 GB free in /tmp/d"
    assert row(found, "clock")[1] == "0.0 s ahead of this machine's, give or take 1.0 s"
    assert row(found, "store from there")[1] == "s3/b answers"


def test_the_disk_to_rent_is_printed_for_what_is_staged() -> None:
    found = info()
    assert found.disk_need == COINS.disk
    assert row(found, "disk to rent")[1] == (
        "10.72 GB for a run on coins: archives 4.00 GB, unpacked 4.00 GB, checkpoints 243.20 MB, and 30 %"
    )
    assert row(info(references=()), "disk to rent")[0] == "note"


def small(**free: int) -> dict[str, Any]:
    rooms = answer()["disk"]
    return {name: {**room, "free_bytes": free[name]} for name, room in rooms.items()}


def test_a_disk_that_is_too_small_is_told_with_what_to_rent() -> None:
    standing, found, advice = row(info(disk=small(runs=20 * GB, datasets=8 * GB)), "disk to rent")
    assert standing == "problem"
    assert found.endswith("; 10.40 GB of it belong into /tmp/d, where 8.00 GB are free")
    assert advice == "rent a disk of 10.72 GB or more, or free some"
    runs = row(info(disk=small(runs=GB // 5, datasets=20 * GB)), "disk to rent")
    assert "316.16 MB of it belong into /w, where 200.00 MB are free" in runs[1]
    shared = {"runs": {**ROOM, "free_bytes": 10 * GB}, "datasets": {**ROOM, "free_bytes": 10 * GB}}
    assert "10.72 GB of it" in row(info(disk=shared), "disk to rent")[1]


def test_what_is_there_already_needs_no_room() -> None:
    found = info(disk=small(runs=GB, datasets=0), staged=[COINS.sha256])
    assert row(found, "disk to rent")[0] == "ok"
    assert row(found, "disk to rent")[1].endswith("; there already: coins")
    more = dataclasses.replace(COINS, name="cars", sha256="b" * 64)
    both = info(
        disk=small(runs=GB, datasets=11 * GB), staged=[COINS.sha256], references=(COINS, more)
    )
    assert row(both, "disk to rent")[0] == "ok"
    assert row(both, "disk to rent")[1].startswith("21.12 GB for a run on coins, cars")


@pytest.mark.parametrize(
    ("changes", "name", "found", "advice"),
    [
        ({"python": "3.8.18"}, "Python", "3.8.18 at /usr/bin/python3; the detector needs 3.10", "--kernel-name"),
        ({"torch": {"torch": None, "problem": ""}, "places": []}, "torch",
         "not installed for /usr/bin/python3", "%pip install torch"),
        ({"torch": {"torch": None, "problem": "libcudart"}, "places": []}, "torch",
         "it cannot be imported: libcudart", "%pip install torch"),
        ({"torch": None, "places": [], "proof_problem": "ended with SIGSEGV"}, "torch",
         "importing it failed: ended with SIGSEGV", "%pip install torch"),
        ({"torch": {"torch": "2.6.0+cpu", "cuda": None, "cards": 0, "problem": ""},
          "places": [{"place": "cpu", "problem": "", "seconds": 0.1}]}, "torch",
         "the driver lists 2 cards, torch sees 0", "built for the driver's CUDA"),
        ({"missing": ["cv2", "faster_coco_eval", "pycocotools"]}, "packages",
         "the detector lacks cv2, faster_coco_eval", "%pip install opencv-python-headless faster-coco-eval"),
        ({"places": [CARD, {**CARD, "place": "cuda:1", "problem": "no kernel image", "capability": "sm_60"}]},
         "cuda:1", "fails: no kernel image", "built for sm_60; this one is for sm_70, sm_75"),
        ({"places": [CARD], "proof_problem": "no answer within 60 s"}, "cuda:1",
         "was not computed: no answer within 60 s", "restart the session"),
        ({"shared_memory_bytes": 64 << 20}, "shared memory", "67.11 MB in /dev/shm", "--shm-size"),
        ({"disk": {"runs": {**ROOM, "writable": False}, "datasets": ROOM}}, "disk",
         "which may not be written to", "--remote-dir"),
        ({"stores": [{"name": "s3/b", "problem": "Connection refused", "ahead_seconds": None}]},
         "store from there", "s3/b: Connection refused", "MINIO_PUBLIC_ENDPOINT"),
        ({"stores": [{"name": "the hub", "problem": "Name or service not known", "ahead_seconds": None}]},
         "store from there", "the hub: Name", "internet on"),
    ],
)  # fmt: skip
def test_what_fails_is_one_row_with_what_to_do(
    changes: dict[str, Any], name: str, found: str, advice: str
) -> None:
    answered = info(**changes)
    standing, told, to_do = row(answered, name)
    assert standing == "problem"
    assert found in told
    assert advice in to_do
    assert [check.name for check in answered.problems] == [name]


def test_cards_without_a_torch_are_listed_and_one_that_hangs_spares_the_rest_no_wait() -> None:
    without = info(torch={"torch": None, "problem": ""}, places=[])
    assert row(without, "cuda:1")[:2] == (
        "note", "Tesla T4, 15.00 GB; not tried, for want of torch",
    )  # fmt: skip
    hanging = info(places=[], proof_problem="no answer within 60 s")
    assert row(hanging, "cuda:0")[1].endswith("no answer within 60 s")
    assert row(hanging, "cuda:1")[1].endswith("not tried: the one before it hangs")


def test_a_card_that_another_process_holds_is_a_note() -> None:
    found = info(places=[{**CARD, "memory_free": GB}, {**CARD, "place": "cuda:1"}])
    assert row(found, "cuda:0")[0] == "note"
    assert "nvidia-smi" in row(found, "cuda:0")[2]


@pytest.mark.parametrize(
    ("remote_ahead", "store_ahead", "problems"),
    [
        (0, 0.2, []),
        (-312, -312, ["clock", "clock and store"]),  # the remote's is wrong
        (312, 0.2, ["clock", "clock here"]),  # this machine's is
        (0, 312, ["clock and store", "clock here"]),  # both differ from the store's
    ],
)
def test_the_clock_that_is_wrong_is_named(
    remote_ahead: float, store_ahead: float, problems: list[str]
) -> None:
    stores = [{"name": "s3/b", "problem": "", "read": False, "ahead_seconds": store_ahead}]
    found = info(
        asked_at=T0 + 1 + remote_ahead, answered_at=T0 + 9 + remote_ahead, stores=stores
    )  # fmt: skip
    assert [check.name for check in found.problems] == problems
    if "clock here" in problems and remote_ahead:
        assert row(found, "clock here")[1].startswith("311.8 s behind the store's")


def test_a_long_way_to_the_answer_is_no_clock_that_is_wrong() -> None:
    found = info(asked=T0 - 200, asked_at=T0, answered_at=T0 + 9, answered=T0 + 10)
    assert row(found, "clock")[0] == "ok"


def test_it_shows_itself_as_text_and_as_a_table() -> None:
    bundle = info(shared_memory_bytes=1)._repr_mimebundle_()
    assert bundle["text/plain"].splitlines()[0] == "kaggle: 1 to be put right"
    assert "PROBLEM" in bundle["text/plain"]
    assert '<th scope="col">to do</th>' in bundle["text/html"]
    well = info()._repr_mimebundle_()
    assert well["text/plain"].splitlines()[0] == "kaggle: nothing stands in the way"
    assert "to do" not in well["text/plain"]
