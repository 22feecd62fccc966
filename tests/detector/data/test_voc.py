"""Pascal VOC files as they are found: what is read, repaired and noted."""

from __future__ import annotations

import numpy as np
import pytest

from detector.config import DataConfig
from detector.data import formats
from detector.data.formats import voc
from detector.data.index import DataError, build_index
from tests.detector.data.writers import write_picture

PIXELS = np.full((50, 100, 3), 90, np.uint8)


def thing(name="car", box=(11, 21, 30, 40), extra="", difficult=None):
    edges = "".join(
        f"<{tag}>{value}</{tag}>"
        for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    )
    flag = "" if difficult is None else f"<difficult>{difficult}</difficult>"
    return f"<object><name>{name}</name>{flag}{extra}<bndbox>{edges}</bndbox></object>"


def page(*objects, size="<size><width>100</width><height>50</height></size>", filename="a.png"):
    return f"<annotation><filename>{filename}</filename>{size}{''.join(objects)}</annotation>"


def home(root, content, *, lists=("train",), stems=("a",)):
    """VOC's own layout with the same page for each picture."""
    for folder in ("Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for stem in stems:
        write_picture(root / f"JPEGImages/{stem}.png", PIXELS)
        xml = root / f"Annotations/{stem}.xml"
        xml.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in lists:
        (root / f"ImageSets/Main/{name}.txt").write_text("".join(f"{stem}\n" for stem in stems))
    return root


def test_pixels_count_from_one_and_the_last_is_inside(tmp_path):
    index = formats.read(home(tmp_path, page(thing(box=(1, 1, 100, 50)), thing())), "train")
    assert index.boxes.tolist() == [[0, 0, 100, 50], [10, 20, 30, 40]]


def test_fractions_and_zeros_are_taken_as_they_are_meant(tmp_path):
    index = formats.read(
        home(tmp_path, page(thing(box=(45.5, 0, 60.25, 20)), thing(box=(0, 5, 9, 9)))), "train"
    )
    assert index.boxes.tolist() == [[44.5, 0, 60.25, 20], [0, 4, 9, 9]]
    assert index.notes == (
        "2 boxes start at pixel 0 although VOC counts from 1; taken as the edge",
    )


def test_difficult_objects_are_marked_to_be_ignored(tmp_path):
    index = formats.read(
        home(tmp_path, page(thing(difficult=1), thing(box=(1, 1, 5, 5), difficult=0))), "train"
    )
    assert index.iscrowd.tolist() == [True, False]
    assert index.notes == ("1 difficult objects: not trained on, ignored in evaluation",)


def test_parts_of_an_object_are_no_objects(tmp_path):
    part = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
    index = formats.read(home(tmp_path, page(thing("person", extra=part))), "train")
    assert index.class_names == ("person",)
    assert index.boxes.tolist() == [[10, 20, 30, 40]]


@pytest.mark.parametrize(
    "size",
    ["", "<size/>", "<size><width>0</width><height>0</height></size>", "<size><width/></size>"],
)
def test_a_size_that_is_not_stated_is_the_picture_s(tmp_path, size):
    index = formats.read(home(tmp_path, page(thing(), size=size)), "train")
    assert index.sizes.tolist() == [[100, 50]]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + page(thing()).encode(),
        b'<?xml version="1.0" encoding="UTF-16"?>'.decode().encode("utf-16")
        + page(thing()).encode("utf-16")[2:],
        b'<?xml version="1.0" encoding="iso-8859-1"?>' + page(thing("caf\xe9")).encode("latin-1"),
        b"<!DOCTYPE annotation>" + page(thing()).encode(),
        page(thing(" car\n ")).encode(),
    ],
    ids=["bom", "utf-16", "latin-1", "doctype", "spaces"],
)
def test_other_spellings_of_the_same_page(tmp_path, content):
    index = formats.read(home(tmp_path, content), "train")
    assert index.boxes.tolist() == [[10, 20, 30, 40]]
    assert index.class_names[0] in {"car", "café"}


def test_class_names_are_those_of_all_splits(tmp_path):
    home(tmp_path, page(thing("dog")), stems=("a",))
    home(tmp_path, page(thing("cat"), thing("a car")), lists=("val",), stems=("b",))
    train, val = (formats.read(tmp_path, split) for split in ("train", "val"))
    assert train.class_names == val.class_names == ("a car", "cat", "dog")
    assert train.labels.tolist() == [2]


def test_a_list_of_classes_fixes_their_order_and_answers_a_typo(tmp_path):
    home(tmp_path, page(thing("dog")))
    (tmp_path / "classes.txt").write_text("zebra\ndog\n")
    assert formats.read(tmp_path, "train").class_names == ("zebra", "dog")
    (tmp_path / "classes.txt").write_text("zebra\ndogs\n")
    with pytest.raises(
        DataError, match=r"class 'dog' is not in .*classes.txt \(did you mean 'dogs'"
    ):
        formats.read(tmp_path, "train")


def test_one_class_of_many_is_kept_with_all_pictures(tmp_path):
    home(tmp_path, page(thing("person")), stems=("a",))
    home(tmp_path, page(thing("car"), thing("person")), stems=("b",))
    (tmp_path / "ImageSets/Main/train.txt").write_text("a\nb\n")
    index = build_index(DataConfig(root=str(tmp_path), classes=("car",)), "train")
    assert index.class_names == ("car",)
    assert index.offsets.tolist() == [0, 0, 1]
    with pytest.raises(DataError, match=r"has no class 'cars' \(did you mean 'car'\?\)"):
        build_index(DataConfig(root=str(tmp_path), classes=("cars",)), "train")


@pytest.mark.parametrize(
    ("lists", "split", "used"),
    [
        (("train", "trainval", "val"), "train", "train"),
        (("trainval", "test"), "train", "trainval"),
        (("trainval", "test"), "val", "test"),
        (("train", "val", "test"), "val", "val"),
        (("trainval", "val"), "train", None),  # trainval holds what is judged on
    ],
)
def test_the_list_that_a_split_uses(tmp_path, lists, split, used):
    for name in lists:
        home(tmp_path, page(thing()), lists=(name,), stems=(f"of_{name}",))
    if used is None:
        with pytest.raises(DataError, match="There is no list of pictures for 'train'"):
            formats.read(tmp_path, split)
    else:
        assert formats.read(tmp_path, split).files == (f"JPEGImages/of_{used}.png",)


def test_columns_behind_a_name_and_suffixes_in_a_list_are_ignored(tmp_path):
    home(tmp_path, page(thing()), stems=("a", "b.c"))
    (tmp_path / "ImageSets/Main/train.txt").write_text("a.png -1\n\nb.c 1\n")
    assert len(formats.read(tmp_path, "train")) == 2


def test_the_years_of_a_devkit_are_read_together(tmp_path):
    for year in (2007, 2012):
        home(tmp_path / f"VOCdevkit/VOC{year}", page(thing()), stems=(f"of{year}",))
    index = formats.read(tmp_path, "train")
    assert index.files == (
        "VOCdevkit/VOC2007/JPEGImages/of2007.png",
        "VOCdevkit/VOC2012/JPEGImages/of2012.png",
    )


def test_folders_named_after_the_splits(tmp_path):
    for split, stem in (("train", "a"), ("val", "b")):
        write_picture(tmp_path / f"images/{split}/{stem}.png", PIXELS)
        (tmp_path / f"annotations/{split}").mkdir(parents=True)
        (tmp_path / f"annotations/{split}/{stem}.xml").write_text(page(thing()))
    assert formats.read(tmp_path, "train").files == ("images/train/a.png",)
    assert formats.read(tmp_path, "val").files == ("images/val/b.png",)


def test_a_picture_without_a_page_is_background_and_a_page_without_picture_refused(tmp_path):
    write_picture(tmp_path / "train/a.png", PIXELS)
    write_picture(tmp_path / "train/b.png", PIXELS)
    (tmp_path / "train/a.xml").write_text(page(thing()))
    index = formats.read(tmp_path, "train")
    assert index.offsets.tolist() == [0, 1, 1]
    assert index.notes == ("1 pictures without an XML file, taken as background",)
    (tmp_path / "train/c.xml").write_text(page(thing(), filename="gone.png"))
    with pytest.raises(DataError, match=r"c\.xml has 0 pictures of its name"):
        formats.read(tmp_path, "train")


def test_without_splits_the_way_to_make_them_is_said(tmp_path):
    home(tmp_path, page(thing()), lists=())
    (tmp_path / "ImageSets/Main").rmdir()
    with pytest.raises(DataError, match=r"write ImageSets/Main/train\.txt"):
        formats.read(tmp_path, "train")


def test_a_page_of_absurd_size_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(voc, "LARGEST_FILE", 40)
    with pytest.raises(DataError, match=r"a\.xml is larger than 0 MB"):
        formats.read(home(tmp_path, page(thing())), "train")
