"""Prediction: original pixels, order, batches, and whatever a user calls a picture."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import nn

from detector import predict as predict_module
from detector.checkpoint import Architecture, LoadedDetector
from detector.config import ConfigError
from detector.data.index import DataError, decode
from detector.pictures import find_pictures, load_picture
from detector.predict import BATCH, Predictor, predict

ORIENTATIONS = range(1, 9)


@dataclass
class Output:
    final: tuple[torch.Tensor, torch.Tensor]


class Brightest(nn.Module):
    """Finds the bright half of a picture: left (class 0) or right (class 1); the rest is unsure."""

    batches: list[int]

    def forward(self, images):
        assert images.dtype == torch.float32
        assert images.max() <= 1
        self.batches.append(len(images))
        half = images.shape[-1] // 2
        right = (images[..., half:].mean((1, 2, 3)) > images[..., :half].mean((1, 2, 3))).long()
        count = len(images)
        logits = torch.full((count, 2, 2), -4.0)
        logits[torch.arange(count), 0, right] = 3.0
        boxes = torch.zeros(count, 2, 4)
        boxes[:, 0] = torch.tensor([0.25, 0.5, 0.5, 1.0])
        boxes[:, 0, 0] += 0.5 * right
        return Output((logits, boxes))


@pytest.fixture
def predictor(monkeypatch):
    model = Brightest().eval()
    model.batches = []
    detector = LoadedDetector(
        model=model,
        architecture=Architecture("hgnetv2_n", 2, 2, 0),
        class_names=("left", "right"),
        image_size=64,
        info={},
    )
    monkeypatch.setattr(predict_module, "load_detector", lambda path, device: detector)
    return Predictor("any.pt")


def drawn(width, height, side):
    image = np.zeros((height, width, 3), np.uint8)
    half = width // 2
    image[:, half:] = 255 * side
    image[:, :half] = 255 * (1 - side)
    return image


def write(path, width, height, side):
    cv2.imwrite(str(path), drawn(width, height, side))
    return path


def colourful():
    """A small picture without any symmetry."""
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def test_boxes_come_in_each_pictures_own_pixels(predictor, tmp_path):
    paths = [write(tmp_path / "a.png", 200, 100, 0), write(tmp_path / "b.png", 40, 80, 1)]
    a, b = predictor(paths)
    assert (a.file, a.width, a.height) == (str(paths[0]), 200, 100)
    assert a.boxes[0].tolist() == [0, 0, 100, 100]
    assert b.boxes[0].tolist() == [20, 0, 40, 80]
    assert (a.names[0], b.names[0]) == ("left", "right")
    assert a.boxes.dtype == np.float64
    assert (np.diff(a.scores) <= 0).all()


def test_only_the_sure_ones_above_a_score(predictor, tmp_path):
    path = write(tmp_path / "a.png", 64, 64, 1)
    (found,) = predictor([path])
    assert len(found.scores) == 4
    (early,) = predictor([path], min_score=0.5)
    for sure in (found.above(0.5), early):
        assert sure.names == ("right",)
        assert len(sure.boxes) == len(sure.scores) == len(sure.labels) == 1


def test_many_pictures_come_in_order_a_few_at_a_time(predictor, tmp_path):
    sides = [k % 3 % 2 for k in range(BATCH * 2 + 3)]
    paths = [write(tmp_path / f"{k}.png", 64 + k, 64, side) for k, side in enumerate(sides)]
    assert [found.labels[0] for found in predictor(iter(paths))] == sides
    assert predictor._network.batches == [BATCH, BATCH, 3]
    predictor._network.batches.clear()
    list(predictor(paths[:5], batch_size=2))
    assert predictor._network.batches == [2, 2, 1]


def test_pictures_are_only_read_when_their_turn_comes(predictor):
    def endless():
        while True:
            yield drawn(64, 64, 1)

    assert next(predictor(endless())).names[0] == "right"


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path,
        str,
        lambda path: decode(str(path)),
        lambda path: decode(str(path)) / np.float32(255),
        lambda path: torch.from_numpy(decode(str(path))).permute(2, 0, 1),
        lambda path: torch.from_numpy(decode(str(path))).permute(2, 0, 1) / 255,
        Pillow.open,
        lambda path: Pillow.open(path).convert("RGBA"),
        lambda path: Pillow.open(path).convert("L"),
    ],
    ids=[
        "path",
        "text",
        "array",
        "float-array",
        "tensor",
        "float-tensor",
        "pil",
        "pil-rgba",
        "pil-grey",
    ],
)
def test_one_picture_may_be_anything(make, predictor, tmp_path):
    path = write(tmp_path / "a.png", 200, 100, 1)
    picture = make(path)
    (found,) = predict(predictor, picture)
    assert found.boxes.tolist() == [[100, 0, 200, 100]]
    assert found.file == (str(path) if isinstance(picture, str | type(path)) else "")
    assert found.as_dict()["predictions"][0]["name"] == "right"


def test_many_may_be_of_many_kinds_or_one_array(predictor, tmp_path):
    left, right = drawn(64, 64, 0), drawn(80, 64, 1)
    path = write(tmp_path / "a.png", 64, 64, 0)
    mixed = [right, path, torch.from_numpy(left).permute(2, 0, 1), Pillow.fromarray(right)]
    assert [f.names[0] for f in predict(predictor, mixed)] == ["right", "left", "left", "right"]
    assert [f.names[0] for f in predict(predictor, np.stack([left, left]))] == ["left", "left"]
    stacked = torch.stack([torch.from_numpy(left).permute(2, 0, 1)] * 2)
    assert [f.names[0] for f in predict(predictor, stacked)] == ["left", "left"]
    assert predict(predictor, []) == []


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_file_and_its_pil_image_are_turned_upright_as_in_training(orientation, tmp_path):
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a.png"
    Pillow.fromarray(colourful()).save(path, exif=exif)
    jpeg = tmp_path / "a.jpg"
    Pillow.fromarray(np.kron(colourful(), np.ones((8, 8, 1), np.uint8))).save(jpeg, exif=exif)
    assert decode(str(jpeg)).shape[:2] == ((56, 40) if orientation > 4 else (40, 56))
    ours, theirs = load_picture(jpeg), load_picture(Pillow.open(jpeg))
    assert ours.shape == theirs.shape
    # Two JPEG decoders differ by a step or two; a wrong turn differs by far more.
    assert np.abs(ours.astype(int) - theirs).mean() < 2
    assert np.array_equal(load_picture(path), load_picture(Pillow.open(path)))


def test_grey_and_alpha_become_three_channels():
    grey = colourful()[:, :, 0]
    for picture in (grey, grey[:, :, None], torch.from_numpy(grey), torch.from_numpy(grey)[None]):
        loaded = load_picture(picture)
        assert loaded.shape == (5, 7, 3)
        assert all(np.array_equal(loaded[:, :, channel], grey) for channel in range(3))
    rgba = np.concatenate([colourful(), grey[:, :, None]], 2)
    assert np.array_equal(load_picture(rgba), colourful())
    assert np.array_equal(load_picture(torch.from_numpy(rgba).permute(2, 0, 1)), colourful())
    deep = Pillow.fromarray(grey.astype(np.uint16) * 256 + 7)
    assert np.array_equal(load_picture(deep)[:, :, 0], grey)


def test_half_precision_tensors_and_views_are_taken():
    image = torch.from_numpy(colourful()).permute(2, 0, 1)
    half = (image.double() / 255).to(torch.float16)
    assert np.array_equal(load_picture(half), colourful())
    turned = load_picture(colourful()[::-1, ::-1])
    assert turned.flags.c_contiguous
    assert np.array_equal(turned, colourful()[::-1, ::-1])


@pytest.mark.parametrize(
    ("picture", "sentence"),
    [
        (np.zeros((3, 4, 5), np.uint8), r"shape \(3, 4, 5\) is no picture.*channels last"),
        (torch.zeros(6, 5, 3), r"shape \(6, 5, 3\) is no picture: channels come first"),
        (np.zeros((0, 4, 3), np.uint8), "has no pixels"),
        (np.full((4, 4, 3), 255.0), r"must lie in 0\.\.1, not 255\.\.255"),
        (np.full((4, 4, 3), np.nan), r"must lie in 0\.\.1, not nan"),
        (np.zeros((4, 4, 3), np.int64), "not int64"),
        (Pillow.new("F", (4, 4)), "mode F"),
        (17, "type int is no picture"),
        (None, "type NoneType is no picture"),
        ([object()], "type object is no picture"),
    ],
)
def test_what_is_no_picture_is_refused_in_one_sentence(picture, sentence, predictor):
    with pytest.raises(DataError, match=sentence):
        predict(predictor, picture)


def test_a_file_that_is_no_picture_is_named(predictor, tmp_path):
    (tmp_path / "a.txt").write_text("no picture")
    with pytest.raises(DataError, match=r"a\.txt is not a picture"):
        list(predictor([tmp_path / "a.txt"]))


def test_numbers_that_make_no_sense_are_refused(predictor):
    with pytest.raises(ConfigError, match="batch_size must be at least 1, not 0"):
        predictor([], batch_size=0)
    with pytest.raises(ConfigError, match="top_k must be at least 1, not -1"):
        predictor([], top_k=-1)


def test_a_device_that_is_not_there_is_refused(predictor):
    with pytest.raises(ConfigError, match="'gpu' is no device"):
        Predictor("any.pt", device="gpu")
    with pytest.raises(ConfigError, match="no device cuda:99 here"):
        Predictor("any.pt", device="cuda:99")
    with pytest.raises(ConfigError, match="is on cpu"):
        predict(predictor, [], device="meta")


def test_folders_and_patterns_become_paths(tmp_path):
    for name in ("b.jpg", "a.PNG", "deep/c.webp", ".hidden.jpg", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")

    def names(*places):
        return [p.removeprefix(f"{tmp_path}/") for p in find_pictures([str(x) for x in places])]

    assert names(tmp_path) == ["a.PNG", "b.jpg", "deep/c.webp"]
    assert names(tmp_path / "*.jpg", tmp_path / "b.jpg") == ["b.jpg"]
    assert names(tmp_path / "**/*.webp", tmp_path / "gone.png") == ["deep/c.webp", "gone.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no pictures in"):
        names(tmp_path / "empty")
    with pytest.raises(DataError, match="No file fits"):
        names(tmp_path / "*.gif")
