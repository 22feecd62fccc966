"""Batches: a pure function of seed, epoch and step, whatever the ranks, workers, caches and starts."""

from __future__ import annotations

import dataclasses

import cv2
import numpy as np
import pytest
import torch

from detector.config import DataConfig
from detector.data import formats, toy
from detector.data.augment import resize
from detector.data.index import Annotated, DataError, make_index
from detector.data.loader import EvalLoader, TrainLoader
from detector.data.prepare import prepare
from detector.runtime import Runtime

CONFIG = DataConfig(
    format="synthetic",
    image_size=64,
    horizontal_flip=0.5,
    vertical_flip=0.5,
    photometric=0.5,
    zoom_out=0.3,
    iou_crop=0.5,
)


@pytest.fixture(scope="module")
def index():
    return toy.make("synthetic", "train", count=26)


def train(index, *, config=CONFIG, global_batch=4, rank=0, world_size=1, seed=0):
    return TrainLoader(
        index,
        config=config,
        global_batch=global_batch,
        rank=rank,
        world_size=world_size,
        seed=seed,
    )


def equal(a, b):
    return (
        torch.equal(a.images, b.images)
        and all(torch.equal(x, y) for x, y in zip(a.targets, b.targets, strict=True))
        and torch.equal(a.image_ids, b.image_ids)
        and torch.equal(a.original_sizes, b.original_sizes)
    )


def test_a_batch_has_the_documented_shapes_and_types(index):
    batch = next(train(index).epoch(0))
    assert batch.images.shape == (4, 3, 64, 64)
    assert batch.images.dtype == torch.uint8
    most = int(batch.targets.counts.max())
    assert batch.targets.boxes.shape == (4, most, 4)
    assert batch.targets.boxes.dtype == torch.float32
    assert batch.targets.labels.dtype == torch.int64
    assert ((batch.targets.boxes >= 0) & (batch.targets.boxes <= 1)).all()
    assert batch.original_sizes.tolist() == [[192, 192]] * 4


def test_targets_are_the_boxes_as_fractions(index):
    plain = dataclasses.replace(
        CONFIG, horizontal_flip=0, vertical_flip=0, photometric=0, zoom_out=0, iou_crop=0
    )
    for batch in train(index, config=plain).epoch(0):
        for row, position in enumerate(batch.image_ids.tolist()):
            rows = index.rows(position)
            x1, y1, x2, y2 = (index.boxes[rows] / 192).T
            expected = np.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], 1)
            count = int(batch.targets.counts[row])
            np.testing.assert_allclose(batch.targets.boxes[row, :count], expected, atol=1e-6)
            assert batch.targets.labels[row, :count].tolist() == index.labels[rows].tolist()
            assert not batch.targets.boxes[row, count:].any()
            resized = resize(index.images[position], 64)
            assert np.array_equal(batch.images[row].permute(1, 2, 0), resized)


def test_an_epoch_shows_each_picture_at_most_once_and_drops_the_rest(index):
    loader = train(index)
    assert loader.steps_per_epoch == 6
    batches = list(loader.epoch(0))
    ids = torch.cat([batch.image_ids for batch in batches])
    assert len(batches) == 6
    assert len(ids) == len(set(ids.tolist())) == 24


def test_epochs_and_seeds_differ_and_repeat(index):
    assert all(
        equal(a, b) for a, b in zip(train(index).epoch(3), train(index).epoch(3), strict=True)
    )
    orders = {
        tuple(train(index, seed=seed).order(epoch)) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


def test_a_picture_is_augmented_anew_each_epoch(index):
    loader = train(index, global_batch=26)
    seen = []
    for epoch in (0, 1):
        (batch,) = loader.epoch(epoch)
        seen.append(batch.images[batch.image_ids.argsort()])
    changed = (seen[0] != seen[1]).flatten(1).any(1)
    assert changed.float().mean() > 0.8


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_world_size_trains_on_the_same_pixels_in_the_same_steps(index, world_size):
    ranks = [train(index, rank=rank, world_size=world_size).epoch(1) for rank in range(world_size)]
    for whole in train(index).epoch(1):
        parts = [next(rank) for rank in ranks]
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part.image_ids for part in parts]), whole.image_ids)
        boxes = [
            part.targets.boxes[row, :count]
            for part in parts
            for row, count in enumerate(part.targets.counts.tolist())
        ]
        expected = [
            whole.targets.boxes[row, :count]
            for row, count in enumerate(whole.targets.counts.tolist())
        ]
        assert all(torch.equal(a, b) for a, b in zip(boxes, expected, strict=True))
    assert all(next(rank, None) is None for rank in ranks)


def test_a_resumed_epoch_goes_on_with_the_batches_it_would_have_had(index):
    whole = list(train(index).epoch(2))
    rest = list(train(index).epoch(2, start_step=4))
    assert len(rest) == 2
    assert all(equal(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert list(train(index).epoch(2, start_step=6)) == []


def test_positions_tell_what_a_step_will_show(index):
    loader = train(index, rank=1, world_size=2)
    for step, batch in enumerate(loader.epoch(5)):
        assert loader.positions(5, step).tolist() == batch.image_ids.tolist()


def test_worker_processes_change_nothing(index):
    config = dataclasses.replace(CONFIG, workers=2)
    loader = train(index, config=config)
    try:
        for epoch, start in ((0, 0), (1, 3)):
            expected = train(index).epoch(epoch, start_step=start)
            got = loader.epoch(epoch, start_step=start)
            assert all(equal(a, b) for a, b in zip(expected, got, strict=True))
    finally:
        loader.close()


def test_a_cache_changes_nothing_and_reads_each_file_once(tmp_path, monkeypatch):
    from detector.data import index as index_module

    root = prepare("synthetic", to=tmp_path / "set", train=8, val=2)
    index = formats.read(root, "train")
    reads = []
    real = index_module.decode
    monkeypatch.setattr(
        index_module, "decode", lambda path, **more: reads.append(path) or real(path, **more)
    )
    batches = {}
    for cache in ("auto", "none", "ram"):
        reads.clear()
        loader = train(index, config=dataclasses.replace(CONFIG, cache=cache))
        batches[cache] = [batch for epoch in range(2) for batch in loader.epoch(epoch)]
        assert len(reads) == (16 if cache == "none" else 8)
    for cache in ("none", "ram"):
        assert all(equal(a, b) for a, b in zip(batches["auto"], batches[cache], strict=True))


def test_a_set_beyond_the_memory_is_not_cached(tmp_path, monkeypatch):
    from detector.data import loader as loader_module

    monkeypatch.setattr(loader_module, "CACHE_BYTES", 192 * 192 * 3 * 8 * 2 - 1)
    index = formats.read(prepare("synthetic", to=tmp_path / "set", train=8, val=2), "train")
    assert train(index)._source.samples._cache is not None
    assert train(index, world_size=2)._source.samples._cache is None


@pytest.fixture
def folder(tmp_path):
    """A set of 12 drawn pictures on disk; the index was made before anything broke."""
    root = prepare("synthetic", to=tmp_path / "set", train=12, val=6)
    return root, formats.read(root, "train"), formats.read(root, "val")


def breaks(root, index, position, content=b"torn"):
    if content is None:
        (root / index.files[position]).unlink()
    else:
        (root / index.files[position]).write_bytes(content)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("content", [b"torn", None], ids=["corrupt", "missing"])
def test_a_picture_that_breaks_in_mid_epoch_gives_its_place_to_the_next(
    folder, capfd, content, workers
):
    root, index, _ = folder
    config = dataclasses.replace(CONFIG, workers=workers)
    whole = list(train(index, config=config).epoch(0))
    breaks(root, index, 5, content)
    loader = train(index, config=config)
    try:
        batches = list(loader.epoch(0)) + list(loader.epoch(1))
    finally:
        loader.close()
    for before, after in zip(whole, batches, strict=False):
        expected = [6 if id_ == 5 else id_ for id_ in before.image_ids.tolist()]
        assert after.image_ids.tolist() == expected
        same = before.image_ids == after.image_ids
        assert torch.equal(before.images[same], after.images[same])
    (sentence,) = loader.unreadable
    assert sentence.startswith(str(root / index.files[5]))
    said = [line for line in capfd.readouterr().out.splitlines() if "picture_unreadable=" in line]
    assert said == [f"picture_unreadable={sentence} The next one takes its place."]


def test_the_replacement_is_the_same_after_a_resume_and_on_other_ranks(folder):
    root, index, _ = folder
    breaks(root, index, 5)
    breaks(root, index, 6)
    config = dataclasses.replace(CONFIG, max_unreadable=0.5, mosaic=0.5, mixup=0.5)
    whole = list(train(index, config=config).epoch(1))
    rest = list(train(index, config=config).epoch(1, start_step=1))
    assert all(equal(a, b) for a, b in zip(whole[1:], rest, strict=True))
    ranks = [list(train(index, config=config, rank=k, world_size=2).epoch(1)) for k in range(2)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([rank[step].images for rank in ranks]), batch.images)
    assert not {5, 6} & {id_ for batch in whole for id_ in batch.image_ids.tolist()}


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_broken_pictures_end_the_run_in_one_sentence(folder, workers):
    root, index, _ = folder
    for position in (2, 5, 9):
        breaks(root, index, position)
    config = dataclasses.replace(CONFIG, workers=workers, max_unreadable=0.2)
    loader = train(index, config=config)
    with pytest.raises(
        DataError, match=r"^3 of the 12 pictures of set/train .*max_unreadable=0\.2.*\.png"
    ) as caught:
        list(loader.epoch(0))
    assert "\n" not in str(caught.value)
    loader.close()


def test_a_share_of_none_tolerates_none(folder):
    root, index, _ = folder
    breaks(root, index, 0)
    with pytest.raises(DataError, match="1 of the 12 pictures"):
        list(train(index, config=dataclasses.replace(CONFIG, max_unreadable=0.0)).epoch(0))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_lost_disk_is_no_broken_picture(folder, workers):
    root, index, _ = folder
    for position in range(12):
        breaks(root, index, position, None)
    config = dataclasses.replace(CONFIG, workers=workers, max_unreadable=1.0)
    loader = train(index, config=config)
    with pytest.raises(
        DataError, match="^8 pictures of set/train in a row cannot be read"
    ) as caught:
        list(loader.epoch(0))
    assert "\n" not in str(caught.value)
    loader.close()


def test_a_broken_picture_is_left_out_of_an_evaluation(folder, capsys):
    root, _, index = folder
    breaks(root, index, 2)
    breaks(root, index, 3)
    loader = EvalLoader(index, config=dataclasses.replace(CONFIG, max_unreadable=0.5), batch_size=2)
    batches = list(loader)
    assert [batch.image_ids.tolist() for batch in batches] == [[0, 1], [4, 5]]
    assert len(loader.unreadable) == 2
    assert capsys.readouterr().out.count("Nothing counts as found in it.") == 2


# --- the course of a run -------------------------------------------------------------------------


def test_strong_augmentation_ends_before_the_run_does(index):
    config = dataclasses.replace(CONFIG, mosaic=1.0, mixup=0.5, mix_until=0.5, strong_until=0.9)
    loader = TrainLoader(index, config=config, global_batch=4, epochs=10)
    at = loader.schedule.at
    assert [at(epoch).mosaic for epoch in range(10)] == [1.0] * 5 + [0.0] * 5
    assert [at(epoch).mixup for epoch in range(10)] == [0.5] * 5 + [0.0] * 5
    assert [at(epoch).iou_crop for epoch in range(10)] == [0.5] * 9 + [0.0]
    assert [at(epoch).photometric for epoch in range(10)] == [0.5] * 9 + [0.0]
    assert {at(epoch).horizontal_flip for epoch in range(10)} == {0.5}
    shorter = TrainLoader(index, config=config, global_batch=4, epochs=100, max_steps=11)
    assert shorter.schedule.mix_epochs == 1  # of two epochs with six steps each


def test_the_side_of_a_step_is_the_same_on_every_rank_and_varies(index):
    config = dataclasses.replace(CONFIG, image_size=640, multi_scale=0.25)
    ranks = [
        TrainLoader(
            index, config=config, global_batch=4, rank=rank, world_size=2, seed=3, epochs=10
        )
        for rank in range(2)
    ]
    places = [(epoch, step) for epoch in range(9) for step in range(200)]
    sides = [ranks[0].side(*place) for place in places]
    assert sides == [ranks[1].side(*place) for place in places]
    assert set(sides) == set(range(480, 801, 32))
    # the middle stands three times among thirteen
    assert sides.count(640) / len(sides) == pytest.approx(3 / 13, abs=0.03)
    assert {ranks[0].side(9, step) for step in range(50)} == {640}
    assert train(index).side(0, 0) == 64


def test_pictures_are_resized_where_they_are_normalised(index):
    batch = next(train(index).epoch(0))
    same = Runtime().to_input(batch.images, side=64)
    assert torch.equal(same, batch.images.float() / 255)
    assert same.is_contiguous()
    for side in (32, 96):
        moved = Runtime().to_input(batch.images, side=side)
        assert moved.shape == (4, 3, side, side)
        assert moved.mean((2, 3)) == pytest.approx(same.mean((2, 3)), abs=0.02)


def test_mosaics_and_blends_hold_the_boxes_of_several_pictures(index):
    config = dataclasses.replace(CONFIG, mosaic=1.0, mixup=1.0, zoom_out=0, iou_crop=0)
    (batch,) = train(index, config=config, global_batch=26).epoch(0)
    alone = np.diff(index.offsets)
    assert batch.targets.counts.sum() > 6 * alone.sum()  # 8 but for what became too small


# --- pictures ------------------------------------------------------------------------------------


def photographs(root, count=6, size=(400, 301)):
    """JPEGs, much larger than the network's side."""
    width, height = size
    rng = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    (root / "labels").mkdir()
    for number in range(count):
        small = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        image = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(root / f"images/{number}.jpg"), image)
        (root / f"labels/{number}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (root / "data.yaml").write_text("train: images\nval: images\nnames: [thing]\n")
    return formats.read(root, "train")


def test_a_large_jpeg_is_decoded_no_larger_than_is_of_use(tmp_path):
    index = photographs(tmp_path)
    assert [index.reduction(0, side) for side in (301, 151, 150, 75, 38, 37, 1)] == [
        1, 1, 2, 4, 4, 8, 8,
    ]  # fmt: skip
    assert index.read_image(0, reduction=4).shape == (76, 100, 3)
    assert toy.make("synthetic", "train", count=1).reduction(0, 8) == 1


def test_a_reduced_jpeg_gives_nearly_the_pixels_and_the_boxes_of_the_whole(tmp_path, monkeypatch):
    index = photographs(tmp_path)
    config = DataConfig(image_size=64, horizontal_flip=0.0)
    (reduced,) = train(index, config=config, global_batch=6).epoch(0)
    monkeypatch.setattr(type(index), "reduction", lambda *_: 1)
    (whole,) = train(index, config=config, global_batch=6).epoch(0)
    difference = (reduced.images.float() - whole.images.float()).abs()
    assert 0 < difference.mean() < 5  # patches of full contrast, moved by less than a pixel
    # 301 rows become 76 of 4: boxes keep to the pixels, not to the edge that was added
    assert (reduced.targets.boxes - whole.targets.boxes).abs().max() <= 3 / 304


def test_the_cache_keeps_pictures_as_small_as_they_are_decoded(tmp_path, monkeypatch):
    from detector.data import loader as loader_module

    index = photographs(tmp_path)
    monkeypatch.setattr(loader_module, "CACHE_BYTES", 100 * 76 * 3 * 6)
    small = train(index, config=DataConfig(image_size=64))
    assert small._source.samples._cache is not None
    assert train(index, config=DataConfig(image_size=160))._source.samples._cache is None
    for _ in small.epoch(0):
        pass
    assert {image.shape for image in small._source.samples._cache.values()} == {(76, 100, 3)}


def test_crowds_are_not_trained_on():
    rows = [
        Annotated(
            "a.png",
            32,
            32,
            boxes=np.array([[0, 0, 8, 8], [8, 8, 30, 30]], float),
            labels=np.array([0, 0]),
            iscrowd=np.array([True, False]),
        )
    ]
    index = make_index(
        rows, name="x", root="", class_names=("a",), images=[np.zeros((32, 32, 3), np.uint8)]
    )
    config = DataConfig(image_size=32, horizontal_flip=0)
    (batch,) = train(index, config=config, global_batch=1).epoch(0)
    assert batch.targets.counts.tolist() == [1]


def test_a_batch_without_any_box_is_whole(index):
    background = dataclasses.replace(index, offsets=np.zeros_like(index.offsets))
    batch = next(train(background).epoch(0))
    assert batch.targets.boxes.shape == (4, 0, 4)
    assert batch.targets.counts.tolist() == [0] * 4


def test_what_cannot_be_batched_is_refused(index):
    with pytest.raises(
        DataError, match="fewer than one batch of 32; lower solver.batch_size to 26"
    ):
        train(index, global_batch=32)
    with pytest.raises(ValueError, match="cannot be divided over 3 ranks"):
        train(index, world_size=3)
    empty = index.keep_classes(["circle"]).head(1)
    empty = dataclasses.replace(
        empty, boxes=empty.boxes[:0], labels=empty.labels[:0], offsets=np.zeros(2, np.int64)
    )
    with pytest.raises(DataError, match="has no box in any of its 1 pictures"):
        train(empty, global_batch=1)


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (3, 0), (2, 1)])
def test_evaluation_shows_every_picture_once_over_all_ranks(index, world_size, workers):
    config = dataclasses.replace(CONFIG, workers=workers)
    ids = []
    for rank in range(world_size):
        loader = EvalLoader(index, config=config, batch_size=4, rank=rank, world_size=world_size)
        batches = list(loader)
        assert len(batches) == len(loader)
        ids += [id_ for batch in batches for id_ in batch.image_ids.tolist()]
        assert all(len(batch.images) <= 4 for batch in batches)
        loader.close()
    assert sorted(ids) == list(range(26))


def test_evaluation_does_not_augment_and_keeps_every_box(index):
    first, second = (list(EvalLoader(index, config=CONFIG, batch_size=5)) for _ in range(2))
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))
    counts = torch.cat([batch.targets.counts for batch in first])
    assert counts.tolist() == np.diff(index.offsets).tolist()


def test_more_ranks_than_pictures_leave_some_without_work(index):
    loader = EvalLoader(index.head(2), config=CONFIG, batch_size=4, rank=2, world_size=3)
    assert len(loader) == 0
    assert list(loader) == []
