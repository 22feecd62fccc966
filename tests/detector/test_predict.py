"""Prediction from files: original pixels, order, batches."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from detector import predict as predict_module
from detector.checkpoint import LoadedDetector
from detector.data.index import DataError
from detector.predict import BATCH, Predictor


@dataclass
class Output:
    final: tuple[torch.Tensor, torch.Tensor]


class Brightest(nn.Module):
    """Finds the bright half of a picture: left (class 0) or right (class 1); the rest is unsure."""

    def forward(self, images):
        assert images.dtype == torch.float32
        assert images.max() <= 1
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
    detector = LoadedDetector(
        model=Brightest().eval(), class_names=("left", "right"), image_size=64, info={}
    )
    monkeypatch.setattr(predict_module, "load_detector", lambda path, device: detector)
    return Predictor("any.pt")


def write(path, width, height, side):
    image = np.zeros((height, width, 3), np.uint8)
    half = width // 2
    image[:, half:] = 255 * side
    image[:, :half] = 255 * (1 - side)
    cv2.imwrite(str(path), image)
    return path


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
    (found,) = predictor([write(tmp_path / "a.png", 64, 64, 1)])
    assert len(found.scores) == 4
    sure = found.above(0.5)
    assert sure.names == ("right",)
    assert len(sure.boxes) == len(sure.scores) == len(sure.labels) == 1


def test_many_pictures_come_in_order(predictor, tmp_path):
    sides = [k % 3 % 2 for k in range(BATCH * 2 + 3)]
    paths = [write(tmp_path / f"{k}.png", 64 + k, 64, side) for k, side in enumerate(sides)]
    assert [found.labels[0] for found in predictor(iter(paths))] == sides


def test_a_file_that_is_no_picture_is_named(predictor, tmp_path):
    (tmp_path / "a.txt").write_text("no picture")
    with pytest.raises(DataError, match=r"a\.txt is not a picture"):
        list(predictor([tmp_path / "a.txt"]))
