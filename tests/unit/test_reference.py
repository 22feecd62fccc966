"""References and their list: names that are safe, roots that stay inside, nothing lost between writers."""

from __future__ import annotations

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernel_tools.datasets import (
    DatasetReference,
    DatasetRegistry,
    DiskNeed,
    disk_need,
    disk_to_rent,
)
from kernel_tools.datasets.reference import check_name, check_root, name_from
from kernel_tools.errors import InvalidArgumentError, StagingError

REFERENCE = DatasetReference(
    name="coins",
    object="datasets/coins/ab.tar",
    size_bytes=100,
    sha256="ab",
    expected_root="data/coins",
    format="tar",
    file_count=3,
    content_bytes=80,
    store="local",
    bucket="dataset",
    source_path=None,
)


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    registry = DatasetRegistry(tmp_path)
    assert registry.names() == ()

    registry.save(REFERENCE)
    registry.save(dataclasses.replace(REFERENCE, name="a"))
    registry.save(dataclasses.replace(REFERENCE, size_bytes=101))

    assert registry.names() == ("a", "coins")
    assert registry.resolve("coins") == dataclasses.replace(REFERENCE, size_bytes=101)


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    registry = DatasetRegistry(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda n: registry.save(dataclasses.replace(REFERENCE, name=f"n{n}")), range(24)
            )
        )

    assert len(registry.names()) == 24
    assert os.listdir(registry.path.parent) == ["datasets.json"]


def test_the_lock_of_a_writer_that_died_is_broken(tmp_path: Path) -> None:
    registry = DatasetRegistry(tmp_path)
    registry.save(REFERENCE)
    lock = registry.path.with_name("datasets.json.lock")
    lock.touch()
    os.utime(lock, (time.time() - 60, time.time() - 60))

    registry.save(dataclasses.replace(REFERENCE, name="b"))

    assert registry.names() == ("b", "coins")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    DatasetRegistry(tmp_path).save(REFERENCE)

    with pytest.raises(InvalidArgumentError, match="'coin'.*staged here: coins.*%stage_dataset"):
        DatasetRegistry(tmp_path).resolve("coin")
    with pytest.raises(InvalidArgumentError, match="--object-name a/b.tar --sha256"):
        DatasetRegistry(tmp_path).resolve("s3://dataset/a/b.tar")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"datasets": {"a": {"nope": 1}}}'])
def test_a_damaged_list_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = DatasetRegistry(tmp_path).path
    path.parent.mkdir()
    path.write_text(text)

    with pytest.raises(StagingError, match=r"datasets\.json is damaged.*stage the data sets again"):
        DatasetRegistry(tmp_path).load()


@pytest.mark.parametrize(
    ("root", "normal"), [("data/x", "data/x"), ("data//x/", "data/x"), ("./x", "x")]
)
def test_a_root_is_brought_to_its_normal_form(root: str, normal: str) -> None:
    assert check_root(root) == normal


@pytest.mark.parametrize(
    "root", ["", ".", "/data/x", "../x", "data/../../x", "C:/x", "a\\b", "a\nb"]
)
def test_a_root_outside_the_work_folder_is_refused(root: str) -> None:
    with pytest.raises(InvalidArgumentError, match="inside the run's work folder"):
        check_root(root)


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", ".x", "a/b", "ä", "x" * 101])
def test_a_name_that_is_unsafe_in_a_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="no usable name"):
        check_name(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [("My set (v2)", "My-set-v2"), ("żółw", "w"), ("日本", "dataset"), ("..", "dataset")],
)
def test_a_name_is_made_from_any_file_name(text: str, name: str) -> None:
    assert name_from(text) == name


def test_the_disk_to_rent_is_archive_content_and_checkpoints_and_thirty_percent() -> None:
    need = disk_need(
        staged_bytes=1_000_000, extracted_bytes=2_000_000, parameters=1_000, checkpoints=2
    )

    assert need.checkpoints_bytes == 32_000
    assert need.total_bytes == round(3_032_000 * 1.3)
    assert disk_need(staged_bytes=5, parameters=0).total_bytes == 13  # unpacked size not known
    assert REFERENCE.disk.staged_bytes == 100


def test_several_data_sets_need_the_sum_and_one_runs_checkpoints() -> None:
    one = disk_need(staged_bytes=1_000, extracted_bytes=2_000, parameters=10, checkpoints=2)
    other = disk_need(staged_bytes=100, parameters=20, checkpoints=2)

    both = disk_to_rent([one, other])

    assert both == DiskNeed(1_100, 2_100, 20 * 16 * 2)
    assert both.total_bytes == round(1.3 * (1_100 + 2_100 + 640))
