"""The same pictures give the same index, whatever format they are written in."""

from __future__ import annotations

import numpy as np
import pytest

from detector.config import DataConfig
from detector.data import formats, toy
from detector.data.index import Annotated, build_index, make_index
from tests.detector.data.writers import write_coco, write_voc, write_voc_folders, write_yolo

PICTURES = 20
IDS = [3, 18, 90]  # sparse, as COCO's


def source(count, seed):
    """Pictures of different sizes with boxes on fractions of a pixel, some without any."""
    drawn = toy.make("synthetic", "train", count=count, seed=seed)
    rng = np.random.default_rng(seed)
    rows, images = [], []
    for position in range(count):
        width, height = rng.integers(90, 192, 2).tolist()
        low = rng.uniform(0, 0.7, (int(rng.integers(0, 5)), 2))
        high = low + rng.uniform(0.02, 0.3, low.shape)
        boxes = np.concatenate([low, high], 1) * [width, height, width, height]
        if position % 2:
            boxes = boxes.round()
        labels = rng.integers(0, 3, len(boxes))
        rows.append(Annotated(f"{position:05}.png", width, height, boxes=boxes, labels=labels))
        images.append(np.ascontiguousarray(drawn.images[position][:height, :width]))
    return make_index(rows, name="x", root="", class_names=("car", "dog", "van"), images=images)


@pytest.fixture(scope="module")
def splits():
    return {"train": source(PICTURES, 1), "val": source(5, 2)}


@pytest.fixture(scope="module")
def written(splits, tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    return {
        "yolo": write_yolo(root / "yolo", splits),
        "coco": write_coco(root / "coco", splits, IDS),
        "voc": write_voc(root / "voc", splits),
        "voc folders": write_voc_folders(root / "folders", splits),
    }


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ["yolo", "coco", "voc", "voc folders"])
def test_every_format_gives_the_very_same_boxes(written, splits, kind, split):
    index, expected = formats.read(written[kind], split), splits[split]
    assert index.class_names == expected.class_names
    for field in ("sizes", "boxes", "labels", "iscrowd", "areas", "offsets"):
        got, wanted = getattr(index, field), getattr(expected, field)
        assert got.dtype == wanted.dtype
        assert np.array_equal(got, wanted), field
    for position in range(len(expected)):
        assert np.array_equal(index.read_image(position), expected.images[position])
    assert index.notes == ()


@pytest.mark.parametrize("kind", ["yolo", "coco", "voc", "voc folders"])
def test_what_lies_there_is_recognised_and_may_be_named(written, kind):
    name = kind.split()[0]
    assert formats.recognise(written[kind]) == name
    auto = build_index(DataConfig(root=str(written[kind])), "train")
    named = build_index(DataConfig(format=name, root=str(written[kind])), "train")
    assert auto.fingerprint() == named.fingerprint()
    assert auto.name == f"{written[kind].name}/train"


def test_original_ids_are_kept_and_others_are_counted(written):
    coco = formats.read(written["coco"], "train")
    assert coco.category_ids == (3, 18, 90)
    assert coco.image_ids.tolist() == list(range(1000, 1000 + PICTURES))
    assert coco.keep_classes(["van", "car"]).category_ids == (90, 3)
    yolo = formats.read(written["yolo"], "train")
    assert yolo.category_ids == (0, 1, 2)
    assert yolo.image_ids.tolist() == list(range(PICTURES))


@pytest.mark.parametrize("kind", ["yolo", "coco", "voc", "voc folders"])
def test_a_class_may_be_picked_and_pictures_limited(written, splits, kind):
    data = DataConfig(root=str(written[kind]), classes=("dog",), train_samples=7)
    index = build_index(data, "train")
    wanted = splits["train"].head(7).keep_classes(["dog"])
    assert len(index) == 7
    assert np.array_equal(index.boxes, wanted.boxes)
    assert index.class_names == ("dog",)


def test_a_folder_too_high_is_answered_with_the_one_below(written, tmp_path):
    (tmp_path / "top").mkdir()
    (tmp_path / "top/set").symlink_to(written["voc"])
    with pytest.raises(formats.DataError, match=r"one folder deeper: use data.root=\S+/top/set\."):
        formats.read(tmp_path / "top", "train")


def test_a_folder_of_no_known_layout_is_answered_with_the_layouts(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(formats.DataError, match=r"has none of data\.yaml \(YOLO\), .*PedMasks"):
        formats.read(tmp_path, "train")
