"""YOLO folders as they come out of tools: read where the meaning is clear, refused in one sentence."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from detector.config import DataConfig
from detector.data import formats
from detector.data.index import DataError, build_index

YAML = "path: .\ntrain: images/train\nval: images/val\nnames: [car, bus, truck]\n"


def picture(path, width=100, height=50, value=128):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((height, width, 3), value, np.uint8))
    return path


def folder(root, labels="0 0.5 0.5 0.2 0.4\n", yaml=YAML, split="train"):
    """A data set of one picture, 100 by 50, whose label file holds `labels` (None: no file)."""
    root.mkdir(parents=True, exist_ok=True)
    if yaml is not None:
        (root / "data.yaml").write_bytes(yaml.encode() if isinstance(yaml, str) else yaml)
    picture(root / f"images/{split}/a.png")
    if labels is not None:
        file = root / f"labels/{split}/a.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(labels.encode() if isinstance(labels, str) else labels)
    return root


def test_a_box_comes_out_in_pixels_of_its_picture(tmp_path):
    index = formats.read(folder(tmp_path), "train")
    assert index.boxes.tolist() == [[40, 15, 60, 35]]
    assert index.boxes.dtype == np.float32
    assert index.labels.tolist() == [0]
    assert index.sizes.tolist() == [[100, 50]]
    assert index.areas.tolist() == [400]
    assert index.files == ("images/train/a.png",)
    assert index.class_names == ("car", "bus", "truck")
    assert index.image_paths == (str(tmp_path / "images/train/a.png"),)


@pytest.mark.parametrize(
    "labels",
    [
        b"1 0.5 0.5 0.2 0.4\r\n\r\n",
        b"\xef\xbb\xbf1 0.5 0.5 0.2 0.4",
        b"  1\t0.5  0.5 0.2 0.4   \n",
        b"1.0 5e-1 .5 0.2 0.4\n",
        b"1 0.4 0.3 0.6 0.3 0.6 0.7 0.4 0.7\n",
        b"1 0.5 0.3 0.6 0.5 0.5 0.7 0.4 0.5\n",
        b"1 0.5 0.5 0.2 0.4\n1 0.5 0.5 0.2 0.4\n",
        b"1 0.5 0.5 0.2 0.4\n2 0.5 0.5 0 0.4\n",
    ],
    ids=["crlf", "bom", "spaces", "floats", "polygon", "diamond", "duplicate", "no area"],
)
def test_other_spellings_of_the_same_box(tmp_path, labels):
    index = formats.read(folder(tmp_path, labels), "train")
    np.testing.assert_allclose(index.boxes, [[40, 15, 60, 35]], atol=1e-5)
    assert index.labels.tolist() == [1]


def test_what_was_repaired_is_noted(tmp_path):
    root = folder(tmp_path, "0 .5 .5 .2 .2\n0 .5 .5 .2 .2\n0 .5 .5 .2 0\n")
    picture(root / "images/train/b.png")
    assert formats.read(root, "train").notes == (
        "1 boxes without area dropped",
        "1 duplicate rows dropped",
        "1 pictures without a label file, taken as background",
    )


def test_a_box_over_the_edge_is_clipped_to_the_picture(tmp_path):
    index = formats.read(folder(tmp_path, "0 0.05 0.95 0.2 0.2\n"), "train")
    np.testing.assert_allclose(index.boxes, [[0, 42.5, 15, 50]], atol=1e-5)


def test_missing_and_empty_label_files_are_background(tmp_path):
    root = folder(tmp_path)
    picture(root / "images/train/b.png")
    picture(root / "images/train/c.png")
    (root / "labels/train/c.txt").write_text("")
    index = formats.read(root, "train")
    assert index.offsets.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ("0 0.5 0.5 0.2 0.4\n3 0.5 0.5 0.2 0.4\n", r"a\.txt, line 2: class 3 is outside 0 to 2"),
        ("-1 0.5 0.5 0.2 0.4\n", r"line 1: class -1 is outside"),
        ("0.5 0.5 0.5 0.2 0.4\n", r"line 1: class 0\.5 is outside"),
        ("car 0.5 0.5 0.2 0.4\n", r"line 1: 'car 0\.5 0\.5 0\.2 0\.4' is not numbers"),
        ("0 0.5 0.5 0.2\n", r"line 1: 4 columns"),
        ("0 0.5 0.5 0.2 0.4 0.9\n", r"line 1: 6 columns"),
        ("0 50 25 20 20\n", r"line 1: a coordinate is far outside 0 to 1; are these pixels\?"),
        ("0 0.5 0.5 -0.2 0.4\n", r"line 1: negative width"),
        ("0 nan 0.5 0.2 0.4\n", r"line 1: a value is not finite"),
        (b"\xff\xfe0\x00", r"a\.txt is not a readable text file"),
        (
            None,
            r"none of the 1 pictures for 'train' has a label file; looked for .*labels/train/a\.txt",
        ),
    ],
)
def test_labels_that_make_no_sense_are_refused_with_file_and_line(tmp_path, labels, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        formats.read(folder(tmp_path, labels), "train")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        ("train: [", "is not readable YAML"),
        ("- a\n", "must be a mapping"),
        ("train: images/train\n", "names must list the classes"),
        ("train: images/train\nnames: []\n", "names is empty"),
        ("train: images/train\nnames: [a, a]\n", "'a' stands twice"),
        ("train: images/train\nnames: {0: a, 2: b}\n", "must be 0 to 1, each once"),
        ("train: images/train\nnames: {x: a}\n", "must be class numbers"),
        ("train: images/train\nnames: [a]\nnc: 4\n", "nc is 4 but names has 1"),
        ("names: [a]\n", "train must be a folder, a list of folders or a .txt file"),
        ("train: 3\nnames: [a]\n", "train must be a folder"),
        ("train: pictures\nnames: [a]\n", "there is no .*pictures"),
        ("train: labels/train\nnames: [a]\n", "no pictures for 'train'"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(tmp_path, yaml, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        formats.read(folder(tmp_path, yaml=yaml), "train")
    assert "\n" not in str(caught.value)
    assert "data.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "names", ["names: [car, bus]", "names: {0: car, 1: bus}", "names: {'1': bus, '0': car}"]
)
def test_names_may_be_a_list_or_numbered(tmp_path, names):
    index = formats.read(folder(tmp_path, yaml=f"train: images/train\n{names}\n"), "train")
    assert index.class_names == ("car", "bus")


@pytest.mark.parametrize(
    "paths",
    [
        "train: images/train",
        "path: .\ntrain: images/train",
        "path: ''\ntrain: images/train",
        "path: ../set\ntrain: images/train",
        "path: /somewhere/of/the/exporter\ntrain: images/train",
        "path: elsewhere\ntrain: ../images/train",
        "train: [images/train]",
        "train: ./images/train/",
        "train: list.txt",
        "train: dotted.txt",
    ],
)
def test_the_places_that_a_split_may_mean(tmp_path, paths):
    root = folder(tmp_path / "set", yaml=f"{paths}\nnames: [car]\n")
    (root / "list.txt").write_text("images/train/a.png\n\n")
    (root / "dotted.txt").write_text("./images/train/a.png\n")
    index = formats.read(root, "train")
    assert index.files == ("images/train/a.png",)
    assert len(index.boxes) == 1


def test_a_path_from_the_working_directory(tmp_path, monkeypatch):
    folder(tmp_path / "data/set", yaml="path: data/set\ntrain: images/train\nnames: [car]\n")
    monkeypatch.chdir(tmp_path)
    index = formats.read("data/set", "train")
    assert index.root == "data/set"
    assert index.files == ("images/train/a.png",)


def test_a_list_that_names_a_missing_picture_is_refused(tmp_path):
    root = folder(tmp_path, yaml="train: list.txt\nnames: [car]\n")
    (root / "list.txt").write_text("images/train/gone.png\n")
    with pytest.raises(DataError, match="lists images/train/gone.png, but there is no"):
        formats.read(root, "train")


def test_valid_is_another_word_for_val(tmp_path):
    root = folder(tmp_path, yaml="valid: images/valid\nnames: [car]\n", split="valid")
    assert len(formats.read(root, "val")) == 1


def test_pictures_in_folders_below_and_hidden_files(tmp_path):
    root = folder(tmp_path)
    picture(root / "images/train/deep/B.JPG")
    (root / "images/train/._a.png").write_bytes(b"resource fork")
    (root / "images/train/notes.md").write_text("no picture")
    (root / "labels/train/deep").mkdir()
    (root / "labels/train/deep/B.txt").write_text("1 .5 .5 1 1\n")
    index = formats.read(root, "train")
    assert index.files == ("images/train/a.png", "images/train/deep/B.JPG")
    assert index.labels.tolist() == [0, 1]


def test_only_the_last_images_folder_is_mirrored(tmp_path):
    root = folder(tmp_path / "images" / "set")
    assert len(formats.read(root, "train").boxes) == 1


def test_labels_beside_the_pictures(tmp_path):
    picture(tmp_path / "pics/a.png")
    (tmp_path / "pics/a.txt").write_text("0 .5 .5 .2 .2\n")
    (tmp_path / "data.yaml").write_text("train: pics\nnames: [car]\n")
    assert len(formats.read(tmp_path, "train").boxes) == 1


def test_the_yaml_itself_may_be_named(tmp_path):
    root = folder(tmp_path)
    (root / "data.yaml").rename(root / "other.yaml")
    assert len(formats.read(root / "other.yaml", "train")) == 1
    with pytest.raises(DataError, match="is no data set that is known here"):
        formats.read(root, "train")


def test_a_turned_photograph_is_measured_as_it_is_decoded(tmp_path):
    from PIL import Image

    root = folder(tmp_path)
    image = Image.new("RGB", (80, 40), "red")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(root / "images/train/turned.jpg", exif=exif)
    index = formats.read(root, "train")
    assert index.sizes[1].tolist() == [40, 80]
    assert index.read_image(1).shape == (80, 40, 3)


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n"])
def test_a_file_that_is_no_picture_is_named(tmp_path, content):
    root = folder(tmp_path)
    (root / "images/train/broken.png").write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.png is not a readable picture"):
        formats.read(root, "train")


def test_a_picture_cut_off_after_its_header_is_named_when_it_is_decoded(tmp_path):
    root = folder(tmp_path)
    whole = picture(root / "images/train/cut.png", 400, 300).read_bytes()
    (root / "images/train/cut.png").write_bytes(whole[:60])
    index = formats.read(root, "train")
    with pytest.raises(DataError, match=r"cut\.png is cut off after 60 bytes"):
        index.read_image(1)


def test_a_picture_that_vanished_is_named(tmp_path):
    root = folder(tmp_path)
    index = formats.read(root, "train")
    (root / "images/train/a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png cannot be read: No such file"):
        index.read_image(0)


def test_a_picture_that_changed_size_is_refused(tmp_path):
    root = folder(tmp_path)
    index = formats.read(root, "train")
    picture(root / "images/train/a.png", 60, 60)
    with pytest.raises(DataError, match="decodes to 60x60 but its header says 100x50"):
        index.read_image(0)


@pytest.mark.parametrize(
    ("array", "pixel"),
    [
        (np.full((4, 4), 200, np.uint8), (200, 200, 200)),
        (np.full((4, 4, 4), (10, 20, 30, 0), np.uint8), (30, 20, 10)),
        (np.full((4, 4), 200 * 257, np.uint16), (200, 200, 200)),
        (np.full((4, 4, 3), (10, 20, 30), np.uint8), (30, 20, 10)),
    ],
    ids=["grey", "alpha", "16 bits", "colour"],
)
def test_every_kind_of_picture_becomes_rgb(tmp_path, array, pixel):
    root = folder(tmp_path)
    cv2.imwrite(str(root / "images/train/a.png"), array)
    image = formats.read(root, "train").read_image(0)
    assert image.shape == (4, 4, 3)
    assert tuple(image[0, 0]) == pixel


# --- build_index ---------------------------------------------------------------------------------


def test_the_configured_folder_with_classes_and_a_number_of_pictures(tmp_path):
    root = folder(tmp_path, "0 .5 .5 .2 .2\n2 .5 .5 .4 .4\n1 .5 .5 .6 .6\n")
    picture(root / "images/train/b.png")
    data = DataConfig(root=str(root), classes=("truck", "car"), train_samples=1)
    index = build_index(data, "train")
    assert index.class_names == ("truck", "car")
    assert index.labels.tolist() == [1, 0]
    assert len(index) == 1
    assert index.boxes[1].tolist() == [30, 15, 70, 35]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (DataConfig(), "data.root is not set"),
        (DataConfig(root="nowhere"), "nowhere does not exist"),
        (
            DataConfig(format="coins", root="data/none"),
            r"data/none does not exist \(write it with: python -m detector prepare coins --to data/none\)",
        ),
        (
            DataConfig(format="digits", classes=("eins",)),
            "has no class 'eins'; it has 0, 1",
        ),
        (DataConfig(format="synthetic", classes=("squar",)), r"did you mean 'square'\?"),
        (DataConfig(format="synthetic", classes=("square", "square")), "names a class twice"),
    ],
)
def test_data_that_cannot_be_had_is_one_sentence(data, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=sentence) as caught:
        build_index(data, "val")
    assert "\n" not in str(caught.value)


def test_the_fingerprint_changes_with_a_box_a_name_and_a_class(tmp_path):
    prints = {
        formats.read(folder(tmp_path / "a"), "train").fingerprint(),
        formats.read(folder(tmp_path / "b", "0 .5 .5 .2 .2\n"), "train").fingerprint(),
        formats.read(
            folder(tmp_path / "c", yaml=YAML.replace("truck", "van")), "train"
        ).fingerprint(),
    }
    assert len(prints) == 3
    again = formats.read(folder(tmp_path / "d"), "train").fingerprint()
    assert again in prints


@pytest.mark.shared
def test_coco128_loads(coco128):
    train, val = (build_index(DataConfig(root=str(coco128)), split) for split in ("train", "val"))
    assert (len(train), len(val)) == (112, 16)
    assert train.num_classes == 80
    assert train.class_names[16] == "dog"
    for index in (train, val):
        limits = np.repeat(np.tile(index.sizes, 2), np.diff(index.offsets), axis=0)
        assert (index.boxes >= 0).all()
        assert (index.boxes <= limits).all()
        assert (index.boxes[:, 2:] > index.boxes[:, :2]).all()
        for position in range(len(index)):
            height, width = index.read_image(position).shape[:2]
            assert index.sizes[position].tolist() == [width, height]
