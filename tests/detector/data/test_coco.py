"""COCO files as tools write them: what is read, repaired and noted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detector.config import DataConfig
from detector.data import formats
from detector.data.index import DataError, build_index, check_same_classes
from tests.detector.data.writers import write_picture

PIXELS = np.full((50, 100, 3), 90, np.uint8)
CATEGORIES = [{"id": 17, "name": "cat"}, {"id": 3, "name": "car"}]


def note(id_, box, *, image=1, category=3, **more):
    return {"id": id_, "image_id": image, "category_id": category, "bbox": box, **more}


def data_set(root, annotations, *, place="train.json", folder="train", **document):
    """Two pictures of 100 by 50, `b.png` without any annotation unless given one."""
    for name in ("a.png", "b.png"):
        write_picture(root / folder / name, PIXELS)
    content = {
        "images": [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "b.png"}],
        "annotations": annotations,
        "categories": CATEGORIES,
        **document,
    }
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return root


def test_categories_become_labels_in_the_order_of_their_ids(tmp_path):
    root = data_set(tmp_path, [note(1, [1, 2, 10, 20], category=17), note(2, [5, 5, 5, 5])])
    index = formats.read(root, "train")
    assert index.class_names == ("car", "cat")
    assert index.category_ids == (3, 17)
    assert index.labels.tolist() == [1, 0]
    assert index.boxes.tolist() == [[1, 2, 11, 22], [5, 5, 10, 10]]


def test_pictures_without_annotations_stay(tmp_path):
    index = formats.read(data_set(tmp_path, [note(1, [1, 2, 3, 4])]), "train")
    assert index.files == ("train/a.png", "train/b.png")
    assert index.offsets.tolist() == [0, 1, 1]
    assert index.image_ids.tolist() == [1, 2]


def test_crowds_are_kept_and_marked(tmp_path):
    index = formats.read(
        data_set(tmp_path, [note(1, [1, 2, 3, 4], iscrowd=1), note(2, [1, 2, 3, 4])]), "train"
    )
    assert index.iscrowd.tolist() == [True, False]


def test_an_area_is_the_outline_s_or_else_the_box_s(tmp_path):
    root = data_set(
        tmp_path,
        [
            note(1, [1, 2, 10, 20], area=77.5),
            note(2, [1, 2, 10, 21]),
            note(3, [1, 2, 10, 22], area=0),
            note(4, [1, 2, 10, 23], area=float("nan")),
        ],
    )
    assert formats.read(root, "train").areas.tolist() == [77.5, 210, 220, 230]


def test_what_was_repaired_is_noted(tmp_path):
    root = data_set(
        tmp_path,
        [
            note(1, [1, 2, 10, 20]),
            note(1, [1, 2, 10, 20]),
            note(1, [1, 2, 10, 21]),
            note(4, [1, 2, 0, 20]),
            note(5, [90, 2, 20, 20]),
        ],
    )
    index = formats.read(root, "train")
    assert index.boxes.tolist() == [[1, 2, 11, 22], [1, 2, 11, 23], [90, 2, 100, 22]]
    assert index.notes == (
        "1 annotations share their id with another; all are kept",
        "1 boxes cut at the picture's edge",
        "1 boxes without area dropped",
        "1 duplicate boxes dropped",
    )


def test_the_group_that_roboflow_lists_first_is_no_class(tmp_path):
    categories = [
        {"id": 0, "name": "vehicles", "supercategory": "none"},
        {"id": 1, "name": "bus", "supercategory": "vehicles"},
        {"id": 2, "name": "car", "supercategory": "vehicles"},
    ]
    root = data_set(
        tmp_path,
        [note(0, [1, 2, 3, 4], category=2)],
        place="train/_annotations.coco.json",
        categories=categories,
    )
    index = formats.read(root, "train")
    assert index.class_names == ("bus", "car")
    assert index.category_ids == (1, 2)
    assert index.labels.tolist() == [1]
    assert index.notes[0].startswith("1 category 'vehicles' left out")


def test_a_group_with_boxes_of_its_own_is_a_class(tmp_path):
    categories = [
        {"id": 0, "name": "vehicle", "supercategory": "none"},
        {"id": 1, "name": "car", "supercategory": "vehicle"},
    ]
    root = data_set(tmp_path, [note(0, [1, 2, 3, 4], category=0)], categories=categories)
    assert formats.read(root, "train").class_names == ("vehicle", "car")


@pytest.mark.parametrize(
    ("place", "folder"),
    [
        ("annotations/instances_train2017.json", "train2017"),
        ("annotations/instances_train2017.json", "images/train2017"),
        ("annotations/instances_train.json", "images"),
        ("annotations/train.json", "train/images"),
        ("train/_annotations.coco.json", "train"),
        ("train/labels.json", "train/data"),
        ("train.json", "."),
        ("annotations/my_train_set.json", "images/train"),
    ],
)
def test_the_places_that_a_split_may_have(tmp_path, place, folder):
    more = {}
    if folder == "train/data":  # not guessed, but may be named
        more = {"images": folder}
    root = data_set(tmp_path / "set", [note(1, [1, 2, 3, 4])], place=place, folder=folder)
    assert formats.recognise(root) == "coco"
    index = formats.read(root, "train", **more)
    assert [file.rsplit("/")[-1] for file in index.files] == ["a.png", "b.png"]
    assert index.read_image(0).shape == (50, 100, 3)


def test_valid_is_another_word_for_val(tmp_path):
    root = data_set(
        tmp_path, [note(1, [1, 2, 3, 4])], place="valid/_annotations.coco.json", folder="valid"
    )
    assert len(formats.read(root, "val")) == 2


def test_files_of_any_name_are_named_in_the_configuration(tmp_path):
    root = data_set(tmp_path, [note(1, [1, 2, 3, 4])], place="x/labels-v3.json", folder="pics/one")
    data = DataConfig(root=str(root), train_annotations="x/labels-v3.json", train_images="pics/one")
    assert len(build_index(data, "train")) == 2
    with pytest.raises(DataError, match=r"name it with data\.val_annotations"):
        build_index(data, "val")
    with pytest.raises(DataError, match=r"there is no file \S*nothing\.json"):
        formats.read(root, "train", annotations="nothing.json")
    with pytest.raises(DataError, match="there is no folder"):
        formats.read(root, "train", annotations="x/labels-v3.json", images="nothing")


def test_two_files_that_may_be_meant_are_not_guessed_between(tmp_path):
    for year in (2014, 2017):
        data_set(tmp_path, [], place=f"annotations/instances_train{year}.json")
    with pytest.raises(
        DataError, match=r"instances_train2014.json, annotations/instances_train2017.json; choose"
    ):
        formats.read(tmp_path, "train")


def test_a_file_instead_of_a_folder_is_answered_with_the_keys(tmp_path):
    root = data_set(tmp_path, [note(1, [1, 2, 3, 4])])
    with pytest.raises(
        DataError, match=r"is the file .*give the folder .*train_annotations=train.json"
    ):
        formats.read(root / "train.json", "train")


def test_names_with_folders_and_of_windows(tmp_path):
    write_picture(tmp_path / "train/deep/a.png", PIXELS)
    write_picture(tmp_path / "train/deep/b.png", PIXELS)
    images = [{"id": 1, "file_name": "deep/a.png"}, {"id": 2, "file_name": "deep\\b.png"}]
    root = data_set(tmp_path, [note(1, [1, 2, 3, 4])], images=images)
    assert formats.read(root, "train").files == ("train/deep/a.png", "train/deep/b.png")


def test_ids_that_are_text_are_numbered(tmp_path):
    images = [{"id": "x", "file_name": "a.png"}, {"id": "y", "file_name": "b.png"}]
    root = data_set(tmp_path, [note(1, [1, 2, 3, 4], image="y")], images=images)
    index = formats.read(root, "train")
    assert index.image_ids.tolist() == [0, 1]
    assert index.offsets.tolist() == [0, 0, 1]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_of_a_photograph_that_exif_turns_are_turned_along(tmp_path, orientation):
    from PIL import Image

    stored = np.zeros((40, 80, 3), np.uint8)
    stored[5:15, 50:70] = 255  # the box (50, 5, 70, 15) of the stored pixels
    image = Image.fromarray(stored)
    exif = image.getexif()
    exif[0x0112] = orientation
    (tmp_path / "train").mkdir()
    image.save(tmp_path / "train/a.jpg", exif=exif, quality=100, subsampling=0)
    quarter = orientation >= 5
    images = [{"id": 1, "file_name": "a.jpg", "width": 80, "height": 40}]
    root = data_set(tmp_path, [note(1, [50, 5, 20, 10])], images=images)
    index = formats.read(root, "train")
    seen = index.read_image(0)[..., 0] > 128
    xs, ys = np.flatnonzero(seen.any(0)), np.flatnonzero(seen.any(1))
    shown = [xs[0], ys[0], xs[-1] + 1, ys[-1] + 1]
    assert index.sizes[0].tolist() == ([40, 80] if quarter else [80, 40])
    if quarter:  # the stated size tells that the labels are of the stored pixels
        assert index.boxes[0].tolist() == shown
        assert index.notes == ("1 pictures turned by EXIF, their boxes turned along",)
    else:  # it cannot tell: as in most tools, the labels are of what is shown
        assert index.boxes[0].tolist() == [50, 5, 70, 15]


def test_width_and_height_the_wrong_way_round_are_noted(tmp_path):
    images = [{"id": 1, "file_name": "a.png", "width": 50, "height": 100}]
    root = data_set(tmp_path, [note(1, [60, 5, 20, 10])], images=images)
    index = formats.read(root, "train")
    assert index.boxes.tolist() == [[60, 5, 80, 15]]
    assert index.notes == ("1 pictures whose labels give width and height the wrong way round",)


def test_outlines_are_not_kept_in_memory_and_change_nothing(tmp_path):
    plain = data_set(tmp_path / "a", [note(1, [1, 2, 3, 4])])
    outlined = data_set(
        tmp_path / "b", [note(1, [1, 2, 3, 4], segmentation=[[1, 2, 3, 4, 5, 6]] * 50)]
    )
    assert (
        formats.read(plain, "train").fingerprint() == formats.read(outlined, "train").fingerprint()
    )


def test_splits_that_number_their_classes_differently_are_refused(tmp_path):
    data_set(tmp_path, [note(1, [1, 2, 3, 4])])
    fewer = [{"id": 3, "name": "car"}]
    data_set(tmp_path, [note(1, [1, 2, 3, 4])], place="val.json", folder="val", categories=fewer)
    train, val = (formats.read(tmp_path, split) for split in ("train", "val"))
    with pytest.raises(
        DataError, match=r"/train has the classes car, cat, but .*/val has car; list"
    ):
        check_same_classes(train, val)
    check_same_classes(train.keep_classes(["car"]), val.keep_classes(["car"]))
