"""Every malformed file is answered with one sentence that names it and says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from detector.config import DataConfig
from detector.data import toy
from detector.data.index import DataError, build_index
from detector.data.loader import TrainLoader
from tests.detector.data.writers import write_coco, write_pennfudan, write_voc, write_yolo

COCO = "annotations/instances_train2017.json"
YOLO = "labels/train/00000.txt"
YAML = "data.yaml"
VOC = "Annotations/train_00000.xml"
PICTURE = "images/train/00000.png"
MASK = "PedMasks/FudanPed00001_mask.png"

BOMB = """<?xml version="1.0"?>
<!DOCTYPE annotation [<!ENTITY a "aaaaaaaaaa">
<!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;">]>
<annotation><filename>&c;</filename></annotation>
"""
OUTSIDE = """<?xml version="1.0"?>
<!DOCTYPE annotation [<!ENTITY x SYSTEM "file:///etc/hostname">]>
<annotation><filename>&x;</filename></annotation>
"""


def text(content):
    """Replace the whole file."""
    return lambda path: path.write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def swap(old, new):
    """Replace the first of a text in the file."""

    def change(path):
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new, 1))

    return change


def cut(part):
    """Keep only so much of the file."""

    def change(path):
        content = path.read_bytes()
        path.write_bytes(content[: int(part * len(content))])

    return change


def entry(where, **values):
    """Change the first entry of a list in the JSON document; `...` removes the key."""

    def change(path):
        document = json.loads(path.read_text())
        for key, value in values.items():
            document[where][0][key] = value
            if value is ...:
                del document[where][0][key]
        path.write_text(json.dumps(document))

    return change


def document(**values):
    """Change keys of the JSON document itself; `...` removes one."""

    def change(path):
        content = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return change


def twice(where, **values):
    """Append the first entry of a list once more, with changes."""

    def change(path):
        content = json.loads(path.read_text())
        content[where].append({**content[where][0], **values})
        path.write_text(json.dumps(content))

    return change


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def image(array):
    return lambda path: cv2.imwrite(str(path), array)


# format, what is wrong, the file that is broken, how, what the sentence says; it names that file
MALFORMED = [
    ("coco", "truncated", COCO, cut(0.6), "is not readable JSON"),
    ("coco", "empty", COCO, text(""), "is not readable JSON"),
    ("coco", "utf-16", COCO, text("{}".encode("utf-16")), "is not readable JSON"),
    ("coco", "endlessly nested", COCO, text("[" * 200_000), "is not readable JSON"),
    ("coco", "a list of detections", COCO, text("[]"), "is a list, as detections are written"),
    ("coco", "a number", COCO, text("3"), "must hold images, annotations and categories"),
    ("coco", "no annotations", COCO, document(annotations=...), "annotations must be a list"),
    ("coco", "images is a mapping", COCO, document(images={}), "images must be a list"),
    ("coco", "entries are numbers", COCO, document(annotations=[1]), "must be a list of objects"),
    ("coco", "no images", COCO, document(images=[]), "images is empty"),
    ("coco", "no categories", COCO, document(categories=[], annotations=[]), "categories is empty"),
    ("coco", "three numbers", COCO, entry("annotations", bbox=[1, 2, 3]), r"must be \[left, top"),
    ("coco", "no bbox", COCO, entry("annotations", bbox=...), r"annotations\[0\]: bbox must be"),
    ("coco", "text in bbox", COCO, entry("annotations", bbox=[1, 2, 3, "4"]), "four numbers"),
    ("coco", "NaN", COCO, entry("annotations", bbox=[1, 2, float("nan"), 4]), "is not finite"),
    ("coco", "infinite", COCO, entry("annotations", bbox=[1, 2, 1e400, 4]), "is not finite"),
    ("coco", "a huge integer", COCO, entry("annotations", bbox=[1, 2, 10**400, 4]), "not finite"),
    ("coco", "negative", COCO, entry("annotations", bbox=[9, 9, -3, 4]), "negative width or height"),
    ("coco", "far outside", COCO, entry("annotations", bbox=[900, 9, 3, 4]), "far outside train2017/00000.png"),
    ("coco", "unknown category", COCO, entry("annotations", category_id=4), "category_id 4 is not in"),
    ("coco", "category is text", COCO, entry("annotations", category_id="1"), 'category_id "1" is not'),
    ("coco", "unknown image", COCO, entry("annotations", image_id=7), "image_id 7 is not the id"),
    ("coco", "image is a list", COCO, entry("annotations", image_id=[1]), r"image_id \[1\] is not"),
    ("coco", "iscrowd is 2", COCO, entry("annotations", iscrowd=2), "iscrowd must be 0 or 1"),
    ("coco", "iscrowd is a list", COCO, entry("annotations", iscrowd=[]), "iscrowd must be 0 or 1"),
    ("coco", "duplicate image id", COCO, twice("images", file_name="b.png"), "id 1000 stands twice"),
    ("coco", "duplicate picture", COCO, twice("images", id=5), "00000.png stands twice"),
    ("coco", "duplicate category", COCO, twice("categories", id=9), "the name 'circle' stands twice"),
    ("coco", "no file name", COCO, entry("images", file_name=None), r"images\[0\]: file_name must be"),
    ("coco", "image id is 1.5", COCO, entry("images", id=1.5), "id must be a number, not 1.5"),
    ("coco", "another size", COCO, entry("images", width=50), "are for a picture of 50x192, but"),
    ("coco", "picture absent", "train2017/00001.png", remove, "00001.png does not exist"),
    ("coco", "pictures absent", "train2017", remove, "no such picture is in"),
    ("yolo", "4 columns", YOLO, text("0 .5 .5 .2\n"), "line 1: 4 columns"),
    ("yolo", "class out of range", YOLO, text("7 .5 .5 .2 .2\n"), "line 1: class 7 is outside 0 to 2"),
    ("yolo", "a name as class", YOLO, text("car .5 .5 .2 .2\n"), "is not numbers"),
    ("yolo", "pixels", YOLO, text("0 50 50 20 20\n"), "are these pixels"),
    ("yolo", "negative", YOLO, text("0 .5 .5 -.2 .2\n"), "negative width or height"),
    ("yolo", "NaN", YOLO, text("0 nan .5 .2 .2\n"), "a value is not finite"),
    ("yolo", "utf-16", YOLO, text("0 .5 .5 .2 .2".encode("utf-16")), "not a readable text file"),
    ("yolo", "no names", YAML, text("train: images/train\n"), "names must list the classes"),
    ("yolo", "nc differs", YAML, swap("names:", "nc: 7\nnames:"), "nc is 7 but names has 3"),
    ("yolo", "no train", YAML, swap("train: images/train", ""), "train must be a folder"),
    ("yolo", "path absent", YAML, swap("images/train", "photos"), "there is no .*photos"),
    ("yolo", "no YAML", YAML, text("train: [\n"), "is not readable YAML"),
    ("yolo", "an impossible date", YAML, text("train: 2024-13-45\n"), "is not readable YAML"),
    ("yolo", "labels absent", "labels/train", remove, "none of the 2 pictures"),
    ("yolo", "picture empty", PICTURE, text(""), r"is not a readable picture \(0 bytes\)"),
    ("yolo", "picture is text", PICTURE, text("<html>"), r"is not a readable picture \(6 bytes\)"),
    ("yolo", "picture ends in its header", PICTURE, lambda path: path.write_bytes(path.read_bytes()[:20]), "is not a readable picture"),
    ("voc", "not well-formed", VOC, cut(0.5), "is not readable XML"),
    ("voc", "empty", VOC, text(""), "is not readable XML"),
    ("voc", "unknown encoding", VOC, text('<?xml version="1.0" encoding="x"?><a/>'), "readable XML"),
    ("voc", "entity bomb", VOC, text(BOMB), "declares the entity 'a'"),
    ("voc", "entity from a file", VOC, text(OUTSIDE), "declares the entity 'x'"),
    ("voc", "another root", VOC, text("<html/>"), "no VOC annotation: its root is <html>"),
    ("voc", "no bndbox", VOC, swap("<bndbox>", "<box>"), "readable XML"),
    ("voc", "bndbox absent", VOC, text("<annotation><object><name>a</name></object></annotation>"), r"object 1 \(a\) has no <bndbox>"),
    ("voc", "no name", VOC, text("<annotation><object/></annotation>"), "object 1 has no <name>"),
    ("voc", "no xmin", VOC, swap("xmin", "left"), "readable XML"),
    ("voc", "edge absent", VOC, text("<annotation><object><name>a</name><bndbox/></object></annotation>"), "<bndbox> has no <xmin>"),
    ("voc", "edge is text", VOC, swap("<xmin>", "<xmin>l"), "<xmin> is 'l.*, not a number"),
    ("voc", "edge is NaN", VOC, swap("<xmin>", "<xmin>nan</xmin><xmin>"), "'nan', not a number"),
    ("voc", "min and max swapped", VOC, swap("<xmin>", "<xmin>18"), "xmin 18.* is beyond xmax"),
    ("voc", "beyond the picture", VOC, swap("<xmax>", "<xmax>9"), "is far outside"),
    ("voc", "size is text", VOC, swap("<width>192", "<width>wide"), "width 'wide', not a number"),
    ("voc", "size is negative", VOC, swap("<width>", "<width>-"), "width '-192', not a number"),
    ("voc", "another size", VOC, swap("<width>192", "<width>64"), "are for a picture of 64x192, but"),
    ("voc", "XML absent", VOC, remove, r"lists train_00000, but there is no"),
    ("voc", "picture absent", "JPEGImages/train_00000.png", remove, "lists train_00000, but there is no such picture"),
    ("voc", "list absent", "ImageSets/Main/train.txt", remove, "There is no list of pictures"),
    ("voc", "list is no text", "ImageSets/Main/train.txt", text(b"\xff\xfe\x00"), "not a readable list"),
    ("pennfudan", "mask of another size", MASK, image(np.ones((5, 5), np.uint8)), "has 5x5 pixels, but"),
    ("pennfudan", "mask empty", MASK, image(np.zeros((48, 64), np.uint8)), "is empty: nobody is in it"),
    ("pennfudan", "mask in colour", MASK, image(np.ones((48, 64, 3), np.uint8)), "is no mask"),
    ("pennfudan", "mask absent", MASK, remove, "has no mask"),
    ("pennfudan", "mask is no picture", MASK, text("mask"), "is not a readable picture"),
    ("pennfudan", "mask cut off", MASK, cut(0.5), "is not a readable picture"),
    ("pennfudan", "picture absent", "PNGImages/FudanPed00001.png", remove, "no picture for the mask FudanPed00001_mask"),
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A small sound set of each format."""
    root = tmp_path_factory.mktemp("sound")
    drawn = toy.make("synthetic", "train", count=3)
    splits = {"train": drawn.head(2), "val": drawn.head(1)}
    mask = np.zeros((48, 64), np.uint8)
    mask[5:30, 10:20] = 1
    return {
        "yolo": write_yolo(root / "yolo", splits),
        "coco": write_coco(root / "coco", splits, [1, 2, 3]),
        "voc": write_voc(root / "voc", splits),
        "pennfudan": write_pennfudan(root / "pennfudan", [mask] * 2),
    }


@pytest.mark.parametrize("kind", ["yolo", "coco", "voc", "pennfudan"])
def test_the_sets_are_sound_before_they_are_broken(sound, kind):
    assert len(build_index(DataConfig(format=kind, root=str(sound[kind])), "train")) == 2


@pytest.mark.parametrize(
    ("kind", "file", "breaks", "says"),
    [(kind, file, breaks, says) for kind, _, file, breaks, says in MALFORMED],
    ids=[f"{kind}: {what}" for kind, what, *_ in MALFORMED],
)
def test_a_malformed_file_is_one_sentence_with_its_name(sound, tmp_path, kind, file, breaks, says):
    root = tmp_path / "set"
    shutil.copytree(sound[kind], root)
    breaks(root / file)
    with pytest.raises(DataError, match=says) as caught:
        build_index(DataConfig(format=kind, root=str(root)), "train")
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 900
    assert Path(file).stem in sentence
    assert sentence.endswith((".", "?"))


def test_there_are_at_least_thirty_of_each_kind_of_trouble():
    assert len(MALFORMED) >= 30
    assert len({(kind, what) for kind, what, *_ in MALFORMED}) == len(MALFORMED)


ODD = (None, True, [], {}, [[]], "", "x", -1, 1.5, 10**400, float("nan"), float("-inf"), {"a": 1})


def read_or_refuse(data):
    """Build the index; True where it was refused, which takes one line."""
    sentence = None
    try:
        build_index(data, "train")
    except DataError as error:
        sentence = str(error)
    assert sentence is None or "\n" not in sentence
    return sentence is not None


def places(value, path=()):
    """Every place in a JSON document."""
    yield path
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield from places(value[key], (*path, key))


def changed(value, path, odd):
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], odd)
    return copy


def test_no_odd_value_anywhere_in_a_coco_file_is_a_traceback(sound, tmp_path):
    root = tmp_path / "set"
    shutil.copytree(sound["coco"], root)
    whole = json.loads((root / COCO).read_text())
    whole["annotations"] = whole["annotations"][:1]
    whole["images"] = whole["images"][:1]
    refused = [
        read_or_refuse(DataConfig(root=str(root), eval_samples=1))
        for path in places(whole)
        for odd in ODD
        if (root / COCO).write_text(json.dumps(changed(whole, path, odd)))
    ]
    assert len(refused) > 300
    assert sum(refused) > 150


def test_no_odd_value_anywhere_in_a_yolo_description_is_a_traceback(sound, tmp_path):
    root = tmp_path / "set"
    shutil.copytree(sound["yolo"], root)
    whole = {
        "path": ".", "train": ["images/train"], "val": "images/val", "nc": 3, "names": ["a", "b", "c"],
    }  # fmt: skip
    refused = [
        read_or_refuse(DataConfig(root=str(root)))
        for path in places(whole)
        for odd in ODD
        if (root / YAML).write_text(json.dumps(changed(whole, path, odd)))
    ]
    assert len(refused) > 100
    assert sum(refused) > 40


def test_no_cut_of_a_voc_file_is_a_traceback(sound, tmp_path):
    root = tmp_path / "set"
    shutil.copytree(sound["voc"], root)
    page = (root / VOC).read_bytes()
    for end in range(0, len(page), 7):
        (root / VOC).write_bytes(page[:end])
        assert read_or_refuse(DataConfig(root=str(root)))
    rng = np.random.default_rng(0)
    for _ in range(60):  # a few bytes of anything in the middle
        start = int(rng.integers(len(page) - 4))
        (root / VOC).write_bytes(page[:start] + rng.bytes(3) + page[start + 3 :])
        read_or_refuse(DataConfig(root=str(root)))


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.99])
def test_a_picture_cut_off_behind_its_header_is_named_when_it_is_read(tmp_path, suffix, part):
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    path = tmp_path / f"images/a.{suffix}"
    cv2.imwrite(str(path), rng.integers(0, 256, (200, 300, 3), dtype=np.uint8))
    (tmp_path / "labels/a.txt").write_text("0 .5 .5 .5 .5\n")
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [thing]\n")
    cut(part)(path)
    data = DataConfig(root=str(tmp_path), image_size=64, max_unreadable=0)
    index = build_index(data, "train")
    with pytest.raises(DataError, match=rf"a\.{suffix} is cut off after \d+ bytes; copy it anew"):
        index.read_image(0)
    with pytest.raises(DataError, match=r"a\.\w+ is cut off") as caught:
        next(TrainLoader(index, config=data, global_batch=1).epoch(0))
    assert "\n" not in str(caught.value)


def test_a_preview_inside_a_jpeg_does_not_hide_that_it_is_cut_off(tmp_path):
    from PIL import Image

    from detector.data.index import decode

    rng = np.random.default_rng(1)
    small, large = (
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for side in (32, 200)
    )
    small.save(tmp_path / "small.jpg")
    preview = (tmp_path / "small.jpg").read_bytes()
    large.save(tmp_path / "a.jpg", comment=preview)
    assert decode(str(tmp_path / "a.jpg")).shape == (200, 200, 3)
    cut(0.8)(tmp_path / "a.jpg")
    with pytest.raises(DataError, match="is cut off"):
        decode(str(tmp_path / "a.jpg"))
