"""Penn-Fudan: boxes out of masks, and a split that is drawn."""

from __future__ import annotations

import numpy as np
import pytest

from detector.config import DataConfig
from detector.data import formats
from detector.data.index import DataError, build_index
from tests.detector.data.writers import write_pennfudan


def mask(*people, height=48, width=64):
    """Rectangles xyxy, numbered from 1."""
    owner = np.zeros((height, width), np.uint8)
    for number, (x1, y1, x2, y2) in enumerate(people, start=1):
        owner[y1:y2, x1:x2] = number
    return owner


@pytest.fixture
def root(tmp_path):
    return write_pennfudan(
        tmp_path / "set", [mask((k, 2, k + 7, 40), (30, 5, 50, 48)) for k in range(20)]
    )


def test_boxes_are_the_extents_of_the_masks_in_the_original_resolution(root):
    index = formats.read(root, "train")
    assert formats.recognise(root) == "pennfudan"
    assert index.class_names == ("person",)
    for position, file in enumerate(index.files):
        k = int(file[-9:-4]) - 1
        rows = index.rows(position)
        assert index.boxes[rows].tolist() == [[k, 2, k + 7, 40], [30, 5, 50, 48]]
        assert index.sizes[position].tolist() == [64, 48]


def test_the_splits_share_no_picture_and_follow_the_seed(root):
    def files(split, seed):
        return build_index(DataConfig(root=str(root), seed=seed), split).files

    assert len(files("train", 0)) == 16
    assert len(files("val", 0)) == 4
    assert not set(files("train", 0)) & set(files("val", 0))
    assert files("val", 0) == files("val", 0)
    assert len({files("val", seed) for seed in range(5)}) == 5
    assert list(files("train", 0)) == sorted(files("train", 0))


def test_people_that_others_cover_in_part_keep_their_whole_extent(tmp_path):
    owner = mask((10, 10, 30, 40))
    owner[20:30, 15:25] = 2
    root = write_pennfudan(tmp_path, [owner] * 5)
    index = formats.read(root, "val")
    assert index.boxes.tolist() == [[10, 10, 30, 40], [15, 20, 25, 30]]


def test_one_picture_is_too_few_for_two_splits(tmp_path):
    root = write_pennfudan(tmp_path, [mask((1, 1, 9, 9))])
    with pytest.raises(DataError, match="has 1 pictures, too few for two splits"):
        formats.read(root, "val")
