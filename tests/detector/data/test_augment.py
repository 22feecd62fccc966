"""Boxes stay with what they are around, whatever is done to the picture."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from detector.config import DataConfig
from detector.data import formats
from detector.data.augment import (
    Augmentation,
    Sample,
    flip_horizontal,
    flip_vertical,
    iou_crop,
    mixup,
    mosaic,
    photometric,
    render,
    resample,
    resize,
    stretch,
    training_side,
    zoom_out,
)
from detector.data.loader import TrainLoader

SIZE = 160
COLOURS = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255)], np.uint8)


def painted(rng, *, colours=range(5), sides=(60, 400)):
    """A dark picture with rectangles of the given colours (its labels), one each, apart."""
    height, width = rng.integers(*sides, 2).tolist()
    image = np.zeros((height, width, 3), np.uint8)
    boxes, labels = [], []
    for colour in colours:
        w, h = int(rng.integers(6, width // 2)), int(rng.integers(6, height // 2))
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        apart = all(
            x > x2 + 2 or x + w < x1 - 2 or y > y2 + 2 or y + h < y1 - 2 for x1, y1, x2, y2 in boxes
        )
        if apart:
            boxes.append((x, y, x + w, y + h))
            labels.append(colour)
            image[y : y + h, x : x + w] = COLOURS[colour]
    return Sample(image, np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64))


NEAR = 3
"""Pixels around a box in which its rectangle is looked for: another of its colour may be farther off."""


def cover(image, label, *, full=1.0):
    """How much of each pixel has the colour, which is pure at `full` of 255."""
    part = np.full(image.shape[:2], np.inf)
    for channel in range(3):
        value = image[..., channel] / 255.0 / full
        part = np.minimum(part, value if COLOURS[label][channel] else 1 - value)
    return part


def extent(mask):
    """The box around the true pixels as xyxy, far edges exclusive; None where there is none."""
    xs, ys = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return np.array([xs[0], ys[0], xs[-1] + 1, ys[-1] + 1], float) if xs.size else None


def around(box, margin):
    x1, y1 = np.maximum(np.floor(box[:2]).astype(int) - margin, 0)
    x2, y2 = np.ceil(box[2:]).astype(int) + margin
    return slice(y1, y2), slice(x1, x2)


def distances(result, *, full=1.0):
    """How far each box that is not too thin to have a pixel of its own is from what is seen."""
    found = []
    for box, label in zip(result.boxes, result.labels.tolist(), strict=True):
        if (box[2:] - box[:2]).min() >= 3:
            ys, xs = around(box, NEAR)
            seen = extent(cover(result.image[ys, xs], label, full=full) > 0.5)
            assert seen is not None, "a box without its rectangle"
            found.append(float(np.abs(seen + [xs.start, ys.start] * 2 - box).max()))
    return found


def unboxed(result):
    """Colours of which more than a few pixels are seen outside of all boxes of that colour."""
    missing = []
    for label in range(5):
        mask = cover(result.image, label) > 0.5
        for box in result.boxes[result.labels == label]:
            mask[around(box, 2)] = False
        rest = cv2.erode(mask.astype(np.uint8), np.ones((3, 3), np.uint8), borderValue=0)
        if rest.any():
            missing.append(label)
    return missing


def alone(sample):
    """Reads the one sample, whichever is asked for."""
    return {"read": lambda position, least: sample, "pictures": 1}


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
    seen = []
    for _ in range(300):
        result = pipeline(0, rng, size=SIZE, **alone(painted(rng)))
        assert result.image.shape == (SIZE, SIZE, 3)
        assert len(result.boxes) == len(result.labels)
        seen += distances(result)
    assert len(seen) > 300
    assert max(seen) <= 1.0


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_thousand_pictures_through_the_whole_pipeline_keep_their_boxes(tmp_path, kind):
    """From files to tensors: mosaic, zoom, crop, flips and the reduced decoding of large JPEGs."""
    rng = np.random.default_rng(7)
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    count = 500
    for number in range(count):
        sample = painted(rng, colours=[number % 5], sides=(150, 800))
        height, width = sample.image.shape[:2]
        quality = [cv2.IMWRITE_JPEG_QUALITY, 100] if kind == "jpg" else []
        cv2.imwrite(str(tmp_path / f"images/{number:04}.{kind}"), sample.image[..., ::-1], quality)
        x1, y1, x2, y2 = (sample.boxes[0] / np.tile([width, height], 2)).tolist()
        row = (
            f"{number % 5} {(x1 + x2) / 2:.12g} {(y1 + y2) / 2:.12g} {x2 - x1:.12g} {y2 - y1:.12g}"
        )
        (tmp_path / f"labels/{number:04}.txt").write_text(row)
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [r, g, b, y, m]\n")
    config = DataConfig(
        image_size=SIZE,
        vertical_flip=0.5,
        zoom_out=0.5,
        iou_crop=0.5,
        mosaic=0.3,
        max_unreadable=0,
    )
    index = formats.read(tmp_path, "train")
    loader = TrainLoader(index, config=config, global_batch=count // 20)
    seen, pictures, mosaics = [], 0, 0
    for batch in loader.epoch(0):
        for image, boxes, labels, many in zip(
            batch.images.permute(0, 2, 3, 1).numpy(), *batch.targets, strict=True
        ):
            rows = int(many)
            middle, side = boxes[:rows, :2].numpy() * SIZE, boxes[:rows, 2:].numpy() * SIZE
            result = Sample(
                image,
                np.concatenate([middle - side / 2, middle + side / 2], 1),
                labels[:rows].numpy(),
            )
            mosaics += rows > 1
            pictures += 1
            seen += distances(result)
            assert not unboxed(result)
    assert pictures == count
    assert mosaics > 80
    assert len(seen) > 500
    assert max(seen) <= 1.0


def test_no_box_is_left_without_its_rectangle_and_none_lost_by_flips():
    rng = np.random.default_rng(2)
    for _ in range(100):
        sample = painted(rng)
        result = Augmentation(horizontal_flip=1, vertical_flip=1)(
            0, rng, size=SIZE, **alone(sample)
        )
        assert len(result.boxes) == len(sample.boxes)


def test_a_crop_drops_the_boxes_that_left():
    rng = np.random.default_rng(3)
    dropped = 0
    for _ in range(200):
        sample = painted(rng)
        height, width = sample.image.shape[:2]
        (x1, y1, x2, y2), kept = iou_crop((0, 0, width, height), sample.boxes, rng)
        assert 0 <= x1 < x2 <= width
        assert 0 <= y1 < y2 <= height
        if kept is None:
            continue
        result = render(sample.keep(kept), (x1, y1, x2, y2), SIZE)
        assert (result.boxes >= 0).all()
        assert (result.boxes <= SIZE).all()
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


def test_zoom_out_puts_the_whole_picture_somewhere_into_a_wider_frame():
    rng = np.random.default_rng(4)
    factors = []
    for _ in range(200):
        x1, y1, x2, y2 = zoom_out((0, 0, 100, 50), rng)
        assert x1 <= 0
        assert y1 <= 0
        assert x2 >= 100
        assert y2 >= 50
        factors.append((x2 - x1) / 100)
    assert min(factors) < 1.2
    assert 3.8 < max(factors) <= 4


def test_what_lies_around_the_picture_is_black_and_the_boxes_move_along():
    image = np.full((50, 100, 3), 200, np.uint8)
    sample = Sample(image, np.array([[0, 0, 100, 50], [20, 10, 40, 20]], np.float32), np.arange(2))
    result = render(sample, (-100, -50, 100, 50), 100)
    assert result.boxes.tolist() == [[50, 50, 100, 100], [60, 60, 70, 70]]
    assert (result.image[50:, 50:] == 200).all()
    assert result.image.sum() == 50 * 50 * 3 * 200


def test_a_frame_beside_the_picture_is_empty():
    sample = Sample(
        np.full((8, 8, 3), 9, np.uint8), np.array([[0, 0, 8, 8]], np.float32), np.ones(1)
    )
    result = render(sample, (8, 8, 16, 16), 32)
    assert not result.image.any()
    assert result.boxes.shape == (0, 4)


def test_a_mosaic_shows_four_whole_pictures_each_in_its_quarter():
    samples = [
        Sample(
            np.full((20 + 10 * k, 90, 3), COLOURS[k], np.uint8),
            np.array([[0, 0, 90, 20 + 10 * k]], np.float32),
            np.array([k]),
        )
        for k in range(4)
    ]
    result = mosaic(
        (0, 1, 2, 3), np.random.default_rng(5), read=lambda k, least: samples[k], size=SIZE
    )
    (_, _, x, y), *_ = result.boxes.tolist()
    assert 0.35 * SIZE <= x <= 0.65 * SIZE
    assert 0.35 * SIZE <= y <= 0.65 * SIZE
    assert result.boxes.tolist() == [
        [0, 0, x, y],
        [x, 0, SIZE, y],
        [0, y, x, SIZE],
        [x, y, SIZE, SIZE],
    ]
    assert result.labels.tolist() == [0, 1, 2, 3]
    for k in range(4):
        assert extent(cover(result.image, k) > 0.5).tolist() == result.boxes[k].tolist()


def test_a_blend_keeps_the_boxes_of_both():
    rng = np.random.default_rng(6)
    measured = []
    for _ in range(200):
        first, second = (stretch(painted(rng, colours=[k]), SIZE) for k in (0, 2))
        share = float(rng.uniform(0.45, 0.55))
        result = mixup(first, second, share)
        assert result.labels.tolist() == [0, 2]
        for one, full, channel in ((first, share, 0), (second, 1 - share, 2)):
            seen = np.zeros_like(result.image)
            seen[..., channel] = result.image[..., channel]  # the other one lies in another channel
            part = Sample(seen, one.boxes, one.labels)
            measured += distances(part, full=full)
    assert len(measured) > 300
    assert max(measured) <= 1.0


def test_light_and_colour_leave_boxes_and_the_source_alone():
    rng = np.random.default_rng(5)
    sample = painted(rng)
    before = sample.image.copy()
    results = [photometric(sample, np.random.default_rng(k)) for k in range(20)]
    assert np.array_equal(sample.image, before)
    assert all(result.boxes is sample.boxes for result in results)
    assert sum(not np.array_equal(result.image, before) for result in results) > 12


def test_light_and_colour_do_not_colour_what_is_grey():
    grey = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (4, 1, 3))
    sample = Sample(grey, np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    changed = 0
    for seed in range(40):
        image = photometric(sample, np.random.default_rng(seed)).image.astype(int)
        assert (image.max(2) - image.min(2)).max() <= 1
        changed += bool((image != grey).any())
    assert changed > 20


def test_the_pipeline_is_a_function_of_the_generator_alone():
    samples = [painted(np.random.default_rng(k)) for k in range(4)]
    before = [sample.image.copy() for sample in samples]
    pipeline = Augmentation(0.5, 0.5, 0.9, 0.5, 0.8, mosaic=0.5, mixup=0.5)
    read = {"read": lambda position, least: samples[position], "pictures": 4}
    for seed in range(10):
        first, second, other = (
            pipeline(0, np.random.default_rng(k), size=64, **read) for k in (seed, seed, seed + 1)
        )
        assert np.array_equal(first.image, second.image)
        assert np.array_equal(first.boxes, second.boxes)
        assert not np.array_equal(first.image, other.image)
    assert all(np.array_equal(a, s.image) for a, s in zip(before, samples, strict=True))


def test_switching_one_thing_on_leaves_the_flips_as_they_were():
    sample = painted(np.random.default_rng(9), colours=[1])

    def flipped(**more):
        pipeline = Augmentation(0.5, 0.5, **more)
        results = [
            pipeline(0, np.random.default_rng(k), size=SIZE, **alone(sample)) for k in range(16)
        ]
        return [result.boxes.tolist() for result in results]

    assert flipped() == flipped(photometric=1.0)
    assert len({str(boxes) for boxes in flipped()}) == 4


def test_pictures_without_boxes_pass_through():
    empty = Sample(
        np.full((50, 70, 3), 9, np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
    )
    for strength in (0.5, 1.0):
        pipeline = Augmentation(1, 1, 1, 1, 1, mosaic=strength, mixup=strength)
        for seed in range(20):
            result = pipeline(0, np.random.default_rng(seed), size=32, **alone(empty))
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


def test_shrinking_averages_and_skips_no_pixel():
    image = np.random.default_rng(8).integers(0, 256, (128, 256, 3)).astype(np.uint8)
    small = resample(image, 32, 32)
    blocks = image.reshape(32, 4, 32, 8, 3).mean((1, 3))
    assert np.abs(small - blocks).max() <= 2  # rounded once a halving


@pytest.mark.parametrize("spread", [0.0, 0.25, 0.5])
def test_a_side_to_train_at_is_one_of_the_multiples_around_the_configured(spread):
    sides = {
        training_side(1, epoch=0, step=step, image_size=320, spread=spread) for step in range(300)
    }
    reach = int(320 * spread) // 32 * 32
    assert sides == set(range(320 - reach, 320 + reach + 1, 32))
