"""The configurations that come along: each loads, and says what it is meant to."""

from __future__ import annotations

from pathlib import Path

import pytest

from detector.config import ConfigError, list_configs, load_config, packed_configs_dir
from detector.models.specs import find_spec

ROOT = Path(__file__).resolve().parents[3]
ENVIRON = {
    "COCO128_DIR": "data/coco128",
    "DATA_ROOT": "data/mine",
    "DETECTOR_WEIGHTS": "weights/dfine_s.pth",
}
MODELS = {
    "bdd100k_vehicle3": {"hgnetv2_s", "hgnetv2_m"},
    "coco128": {"hgnetv2_n"},
    "coco_traffic5": {"hgnetv2_s", "resnet50"},
    "coins": {"hgnetv2_n"},
    "digits": {"hgnetv2_n"},
    "pennfudan": {"hgnetv2_n", "hgnetv2_s", "resnet18"},
    "recipes": {"finetune", "scratch"},
    "synthetic": {"hgnetv2_n", "hgnetv2_s", "resnet18"},
    "vehicles3": {"hgnetv2_s", "hgnetv2_m", "resnet50"},
    "voc_car": {"hgnetv2_s", "resnet34"},
}
NAMES = sorted(f"{data}/{model}" for data, models in MODELS.items() for model in models)


@pytest.fixture
def load(tmp_path):
    """Loads by name from the package, not from a project."""
    return lambda name, *overrides: load_config(name, overrides, environ=ENVIRON, search=tmp_path)


def test_these_are_all():
    assert packed_configs_dir() == ROOT / "configs"
    assert set(NAMES) <= set(list_configs(ROOT))


@pytest.mark.parametrize("name", NAMES)
def test_each_loads_and_is_of_the_model_it_is_named_after(load, name):
    config = load(name)
    data, model = name.split("/")
    if data != "recipes":
        assert config.model.backbone_name == model
    assert find_spec(config.model.backbone_name)
    assert config.solver.batch_size % 2 == 0  # two cards
    assert config.solver.warmup_steps <= 2000


@pytest.mark.parametrize(
    "data", ["pennfudan", "voc_car", "vehicles3", "bdd100k_vehicle3", "coco_traffic5"]
)
def test_a_staged_set_lies_where_its_archive_unpacks_to(load, data):
    for model in MODELS[data]:
        assert load(f"{data}/{model}").data.root == f"data/{data}"


def test_archives_are_named_and_hashed_where_they_are_known(load):
    data = load("vehicles3/resnet50").data
    assert data.classes == ("car", "bus", "truck")
    assert data.archive_object == (
        "datasets/vehicles3/roboflow-v2-release/vehicles3-roboflow-v2-release.tar.gz"
    )
    assert data.archive_sha256.startswith("df678618")
    assert len(data.archive_sha256) == 64
    for name, key in {
        "bdd100k_vehicle3/hgnetv2_s": "trainval90-seed0/bdd100k_vehicle3-trainval90-seed0.tar.gz",
        "coco_traffic5/hgnetv2_s": "5k1k-seed0-area0002/coco_traffic5-5k1k-seed0-area0002.tar.gz",
    }.items():
        assert load(name).data.archive_object.endswith(key)
        assert load(name).data.archive_sha256 is None


def test_voc_car_keeps_one_class(load):
    assert load("voc_car/resnet34").data.classes == ("car",)


def test_fine_tuning_is_gentle_and_ends_without_mixing(load):
    config = load("recipes/finetune")
    assert config.model.weights == ENVIRON["DETECTOR_WEIGHTS"]
    assert config.data.root == ENVIRON["DATA_ROOT"]
    assert (config.solver.lr, config.solver.backbone_lr_factor) == (2e-4, 0.1)
    assert (config.data.mosaic, config.data.mix_until, config.data.strong_until) == (0.5, 0.5, 0.9)


def test_a_hash_that_is_none_is_refused(load):
    with pytest.raises(
        ConfigError, match="archive_sha256 must be 64 hexadecimal digits, not 'abc'"
    ):
        load("vehicles3/resnet50", "data.archive_sha256=abc")
