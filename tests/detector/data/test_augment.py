"""Boxes stay with what they are around, whatever is done to the picture."""

from __future__ import annotations

import numpy as np
import pytest

from detector.data.augment import (
    Augmentation,
    Sample,
    flip_horizontal,
    flip_vertical,
    iou_crop,
    photometric,
    resize,
    stretch,
    zoom_out,
)

SIZE = 160


def painted(rng):
    """A dark picture with up to five bright rectangles, each of its own colour and apart."""
    height, width = rng.integers(60, 400, 2)
    image = np.zeros((height, width, 3), np.uint8)
    boxes = []
    for _ in range(int(rng.integers(1, 6))):
        w, h = int(rng.integers(6, width // 2)), int(rng.integers(6, height // 2))
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        apart = all(
            x > x2 + 2 or x + w < x1 - 2 or y > y2 + 2 or y + h < y1 - 2 for x1, y1, x2, y2 in boxes
        )
        if apart:
            # the red, green and blue sums tell the rectangles apart after any resampling
            boxes.append((x, y, x + w, y + h))
            image[y : y + h, x : x + w] = COLOURS[len(boxes) - 1]
    labels = np.arange(len(boxes), dtype=np.int64)
    return Sample(image, np.array(boxes, np.float32), labels)


COLOURS = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255)], np.uint8)


def extent(image, label):
    """Where the rectangle's colour prevails, to a fraction of a pixel; None where it is not."""
    cover = np.ones(image.shape[:2])
    for channel in range(3):
        value = image[..., channel] / 255.0
        cover = np.minimum(cover, value if COLOURS[label][channel] else 1 - value)
    if cover.max() < 0.4:
        return None
    xs = np.flatnonzero((cover > 0.5).any(0))
    ys = np.flatnonzero((cover > 0.5).any(1))
    if not xs.size:
        return None
    return np.array([xs[0], ys[0], xs[-1] + 1, ys[-1] + 1], float)


@pytest.mark.parametrize(
    "pipeline",
    [
        Augmentation(horizontal_flip=0.5, vertical_flip=0.5),
        Augmentation(zoom_out=1.0),
        Augmentation(iou_crop=1.0),
        Augmentation(horizontal_flip=0.5, vertical_flip=0.5, zoom_out=0.5, iou_crop=0.8),
    ],
    ids=["flips", "zoom out", "crop", "all"],
)
def test_every_box_is_within_a_pixel_of_its_rectangle(pipeline):
    rng = np.random.default_rng(1)
    seen = 0
    for _ in range(300):
        result = pipeline(painted(rng), rng, size=SIZE)
        assert result.image.shape == (SIZE, SIZE, 3)
        assert len(result.boxes) == len(result.labels)
        for box, label in zip(result.boxes, result.labels, strict=True):
            if (box[2:] - box[:2]).min() < 3:
                continue  # too thin to have a pixel of its own colour
            found = extent(result.image, label)
            assert found is not None
            assert np.abs(found - box).max() <= 1.0
            seen += 1
    assert seen > 300


def test_no_box_is_left_without_its_rectangle_and_none_lost_by_flips():
    rng = np.random.default_rng(2)
    for _ in range(100):
        sample = painted(rng)
        result = Augmentation(horizontal_flip=1, vertical_flip=1)(sample, rng, size=SIZE)
        assert len(result.boxes) == len(sample.boxes)


def test_a_crop_drops_the_boxes_that_left():
    rng = np.random.default_rng(3)
    dropped = 0
    for _ in range(200):
        sample = painted(rng)
        result = iou_crop(sample, rng)
        height, width = result.image.shape[:2]
        assert (result.boxes >= 0).all()
        assert (result.boxes <= [width, height, width, height]).all()
        assert len(result.boxes) >= 1
        dropped += len(sample.boxes) - len(result.boxes)
    assert dropped > 50


def test_flips_by_hand():
    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    sample = Sample(image, np.array([[0, 0, 1, 2]], np.float32), np.array([7]))
    assert flip_horizontal(sample).boxes.tolist() == [[2, 0, 3, 2]]
    assert flip_vertical(sample).boxes.tolist() == [[0, 0, 1, 2]]
    assert np.array_equal(flip_horizontal(sample).image[0, 0], image[0, 2])
    assert np.array_equal(flip_vertical(sample).image[0, 0], image[1, 0])
    twice = flip_vertical(flip_vertical(flip_horizontal(flip_horizontal(sample))))
    assert np.array_equal(twice.image, image)
    assert twice.boxes.tolist() == sample.boxes.tolist()


def test_zoom_out_moves_the_picture_and_its_boxes_alike():
    rng = np.random.default_rng(4)
    sample = painted(rng)
    result = zoom_out(sample, rng)
    x, y = (result.boxes[0, :2] - sample.boxes[0, :2]).astype(int)
    height, width = sample.image.shape[:2]
    assert np.array_equal(result.image[y : y + height, x : x + width], sample.image)
    assert result.image.sum() == sample.image.sum()


def test_light_and_colour_leave_boxes_and_the_source_alone():
    rng = np.random.default_rng(5)
    sample = painted(rng)
    before = sample.image.copy()
    results = [photometric(sample, np.random.default_rng(k)) for k in range(20)]
    assert np.array_equal(sample.image, before)
    assert all(result.boxes is sample.boxes for result in results)
    assert sum(not np.array_equal(result.image, before) for result in results) > 12


def test_the_pipeline_is_a_function_of_the_generator_alone():
    sample = painted(np.random.default_rng(6))
    before = sample.image.copy()
    pipeline = Augmentation(0.5, 0.5, 0.9, 0.5, 0.8)
    first, second, other = (pipeline(sample, np.random.default_rng(k), size=64) for k in (1, 1, 2))
    assert np.array_equal(first.image, second.image)
    assert np.array_equal(first.boxes, second.boxes)
    assert not np.array_equal(first.image, other.image)
    assert np.array_equal(sample.image, before)


def test_pictures_without_boxes_pass_through():
    empty = Sample(
        np.full((50, 70, 3), 9, np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
    )
    for seed in range(20):
        result = Augmentation(1, 1, 1, 1, 1)(empty, np.random.default_rng(seed), size=32)
        assert result.image.shape == (32, 32, 3)
        assert result.boxes.shape == (0, 4)


def test_stretch_drops_what_is_thinner_than_a_pixel():
    image = np.zeros((100, 1000, 3), np.uint8)
    boxes = np.array([[0, 0, 9, 50], [0, 0, 100, 50]], np.float32)
    result = stretch(Sample(image, boxes, np.array([0, 1])), 100)
    assert result.labels.tolist() == [1]
    assert result.boxes.tolist() == [[0, 0, 10, 50]]


def test_a_picture_of_the_right_size_is_not_copied():
    image = np.zeros((32, 32, 3), np.uint8)
    assert resize(image, 32) is image
