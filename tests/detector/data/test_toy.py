"""Built-in sets: deterministic, disjoint, with boxes that fit, and the same as a folder."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from detector.config import DataConfig
from detector.data import formats, toy
from detector.data.index import DataError, MissingPackageError, build_index
from detector.data.prepare import prepare

NAMES = ("coins", "digits", "synthetic")


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_pictures_and_other_seed_others(name):
    first, second = (toy.make(name, "train", count=4, seed=1) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    assert all(np.array_equal(a, b) for a, b in zip(first.images, second.images, strict=True))
    other = toy.make(name, "train", count=4, seed=2)
    assert other.fingerprint() != first.fingerprint()


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_does_not_depend_on_how_many_are_made(name):
    few, many = toy.make(name, "val", count=2), toy.make(name, "val", count=5)
    assert many.head(2).fingerprint() == few.fingerprint()
    assert np.array_equal(many.images[1], few.images[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["train", "val"])
def test_boxes_lie_inside_and_every_picture_has_one(name, split):
    index = toy.make(name, split, count=40)
    assert all(image.shape == (192, 192, 3) and image.dtype == np.uint8 for image in index.images)
    assert (np.diff(index.offsets) >= 1).all()
    assert (index.boxes >= 0).all()
    assert (index.boxes <= 192).all()
    assert ((index.boxes[:, 2:] - index.boxes[:, :2]) >= 4).all()
    assert index.labels.max() < index.num_classes


def test_all_coins_of_the_photograph_are_found_where_they_are():
    photograph = toy.coin_photograph()
    assert len(photograph.boxes) == 24
    sides = photograph.boxes[:, 2:] - photograph.boxes[:, :2]
    assert sides.min() >= 33
    assert sides.max() <= 66
    for coin, (x1, y1, x2, y2) in enumerate(photograph.boxes, start=1):
        inside = photograph.owner[y1:y2, x1:x2] == coin
        assert inside.sum() == (photograph.owner == coin).sum()
        assert inside.mean() > 0.55  # a disc fills 0.785 of its square, a worn one less


def test_coins_of_train_and_val_share_no_pixel_of_the_photograph():
    """Every crop is found again in its own part of the photograph, and in the other is not."""
    import cv2

    photograph = toy.coin_photograph()
    left = photograph.grey[:, : toy.COIN_BORDER].copy()
    right = photograph.grey[:, toy.COIN_BORDER :].copy()
    across = (photograph.boxes[:, 0] < toy.COIN_BORDER) & (photograph.boxes[:, 2] > toy.COIN_BORDER)
    assert across.sum() == 1
    ((x1, y1, x2, y2),) = photograph.boxes[across]
    left[y1:y2, x1:] = right[y1:y2, : x2 - toy.COIN_BORDER] = 0  # neither may show this one

    def best_match(image, part):
        scores = []
        for side in range(toy.COIN_CROP[0], toy.COIN_CROP[1] + 1):
            crop = cv2.resize(image[..., 0], (side, side), interpolation=cv2.INTER_AREA)
            scores.append(cv2.matchTemplate(part, crop, cv2.TM_CCOEFF_NORMED).max())
        return max(scores)

    for split, own, other in (("train", left, right), ("val", right, left)):
        for image in toy.make("coins", split, count=3).images:
            assert best_match(image, own) > 0.98
            assert best_match(image, other) < 0.9


def test_digits_of_train_and_val_come_from_different_samples(monkeypatch):
    samples, targets = toy._digit_samples()
    drawn = {}
    for split, kept in (
        ("train", slice(toy.DIGITS_TRAIN, None)),
        ("val", slice(0, toy.DIGITS_TRAIN)),
    ):
        changed = samples.copy()
        changed[kept] = 0.5  # were the other split's samples used, pictures would change
        before = toy.make("digits", split, count=20)
        monkeypatch.setattr(toy, "_digit_samples", lambda changed=changed: (changed, targets))
        after = toy.make("digits", split, count=20)
        monkeypatch.undo()
        drawn[split] = all(
            np.array_equal(a, b) for a, b in zip(before.images, after.images, strict=True)
        )
    assert drawn == {"train": True, "val": True}


def test_every_class_is_there():
    assert set(toy.make("digits", "val").labels) == set(range(10))
    assert set(toy.make("synthetic", "val").labels) == {0, 1, 2}


def test_synthetic_boxes_are_the_extent_of_their_shape():
    rng = np.random.default_rng(0)
    for shape in toy.SHAPES:
        mask = toy._shape_mask(shape, int(rng.integers(20, 60)))
        x1, y1, x2, y2 = toy._extent(mask)
        assert mask[y1:y2, x1:x2].any(0).all()
        assert mask.sum() == mask[y1:y2, x1:x2].sum()


def test_the_configuration_makes_them_in_memory():
    data = DataConfig(format="coins", train_samples=3, eval_samples=2, seed=5)
    train, val = build_index(data, "train"), build_index(data, "val")
    assert (len(train), len(val)) == (3, 2)
    assert train.fingerprint() == toy.make("coins", "train", count=3, seed=5).fingerprint()
    assert train.image_paths == ()
    assert len(build_index(DataConfig(format="coins"), "val")) == 60


def test_an_unknown_set_is_refused():
    with pytest.raises(DataError, match=r"no built-in set 'coin' \(did you mean 'coins'\?\)"):
        toy.make("coin", "train")


@pytest.mark.parametrize(
    ("name", "package", "pip"),
    [("coins", "skimage", "scikit-image"), ("digits", "sklearn", "scikit-learn")],
)
def test_a_missing_package_is_named_with_its_pip_line(name, package, pip, monkeypatch):
    toy.coin_photograph.cache_clear()
    toy._digit_samples.cache_clear()
    real = builtins.__import__

    def without(wanted, *arguments, **keywords):
        if wanted.split(".")[0] == package:
            raise ImportError(wanted)
        return real(wanted, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=f"pip install {pip}"):
        toy.make(name, "train", count=1)


# --- prepare -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_folder_reads_back_as_the_very_same_index(name, tmp_path):
    seen = []
    target = prepare(
        name,
        to=tmp_path / "new" / name,
        train=6,
        val=3,
        seed=3,
        on_progress=lambda *n: seen.append(n),
    )
    assert seen == [(done, 9) for done in range(1, 10)]
    for split, count in (("train", 6), ("val", 3)):
        made, read = toy.make(name, split, count=count, seed=3), formats.read(target, split)
        assert read.fingerprint() == made.fingerprint()
        assert np.array_equal(read.boxes, made.boxes)
        assert read.class_names == made.class_names
        assert read.notes == ()
        for position in range(count):
            assert np.array_equal(read.read_image(position), made.read_image(position))
    assert sorted(path.name for path in target.iterdir()) == ["data.yaml", "images", "labels"]


def test_preparing_twice_gives_the_same_bytes(tmp_path):
    folders = [prepare("synthetic", to=tmp_path / name, train=2, val=1) for name in "ab"]
    files = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in folders
    ]
    assert files[0] == files[1]


def test_an_empty_folder_is_filled_and_a_full_one_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    prepare("synthetic", to=tmp_path / "empty", train=1, val=1)
    with pytest.raises(DataError, match="exists and is not empty"):
        prepare("synthetic", to=tmp_path / "empty", train=1, val=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_an_interrupted_preparation_leaves_nothing(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("synthetic", to=tmp_path / "set", train=2, val=1, on_progress=stop)
    assert list(tmp_path.iterdir()) == []
