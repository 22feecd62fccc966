from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from detector.config import (
    Config,
    ConfigError,
    find_config,
    list_configs,
    load_config,
    option_names,
    packed_configs_dir,
    referenced_environment,
)

ROOT = Path(__file__).resolve().parents[3]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def sentence(*overrides: str, name: str = "coins/hgnetv2_n") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides, search=ROOT)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_options_are_these() -> None:
    assert option_names() == (
        "model.backbone_name",
        "model.num_queries",
        "model.num_denoising",
        "model.weights",
        "model.backbone_weights",
        "model.freeze",
        "data.format",
        "data.root",
        "data.archive_object",
        "data.archive_sha256",
        "data.train_annotations",
        "data.val_annotations",
        "data.train_images",
        "data.val_images",
        "data.classes",
        "data.image_size",
        "data.train_samples",
        "data.eval_samples",
        "data.seed",
        "data.workers",
        "data.cache",
        "data.horizontal_flip",
        "data.vertical_flip",
        "data.photometric",
        "data.zoom_out",
        "data.iou_crop",
        "data.mosaic",
        "data.mixup",
        "data.mix_until",
        "data.strong_until",
        "data.multi_scale",
        "data.max_unreadable",
        "solver.epochs",
        "solver.batch_size",
        "solver.accumulate",
        "solver.lr",
        "solver.backbone_lr_factor",
        "solver.stage_lr_decay",
        "solver.weight_decay",
        "solver.warmup_steps",
        "solver.schedule",
        "solver.flat_fraction",
        "solver.final_lr_factor",
        "solver.milestones",
        "solver.step_factor",
        "solver.clip_norm",
        "solver.loss",
        "solver.ema_decay",
        "solver.ema_warmup",
        "solver.max_steps",
        "solver.max_skipped_steps",
        "solver.patience",
        "solver.save_interval",
        "solver.checkpoint_steps",
        "runtime.device",
        "runtime.seed",
        "runtime.amp",
        "runtime.amp_init_scale",
        "runtime.output_dir",
        "runtime.max_hours",
        "runtime.timeout_seconds",
        "runtime.callbacks",
        "logging.log_interval",
        "logging.sinks",
        "evaluation.interval",
        "evaluation.batch_size",
        "evaluation.best_metric",
        "evaluation.predictions",
    )


@pytest.mark.parametrize("name", list_configs(ROOT))
def test_every_configuration_of_the_project_loads(name: str) -> None:
    names = ("COCO128_DIR", "DATA_ROOT", "DETECTOR_WEIGHTS")
    config = load_config(name, search=ROOT, environ=dict.fromkeys(names, "/elsewhere"))
    assert config.source.endswith(f"{name}.yaml")


def test_no_torch_and_no_cv2_are_imported() -> None:
    program = "import sys, detector.config; print(*({'torch', 'cv2', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    assert sentence("solver.epoch=3") == (
        "Unknown key 'solver.epoch' in --set solver.epoch=3; did you mean 'solver.epochs'?"
    )


def test_a_key_without_its_section_is_answered_with_it() -> None:
    assert "did you mean 'solver.epochs'?" in sentence("epochs=3")


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "solver:\n  learning_rate: 1\n")
    assert sentence(name=path).startswith(f"Unknown key 'solver.learning_rate' in {path}; did you")


def test_an_unknown_section_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "solvers:\n  lr: 1\n")
    assert sentence(name=path) == f"Unknown section 'solvers' in {path}; did you mean 'solver'."


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("solver.epochs=banana", "solver.epochs must be an integer, not 'banana'"),
        ("solver.epochs=1.5", "solver.epochs must be an integer, not '1.5'"),
        ("solver.epochs=true", "solver.epochs must be an integer, not 'true'"),
        ("solver.epochs=", "solver.epochs must be an integer"),
        ("runtime.amp=1", "runtime.amp must be true or false, not '1'"),
        ("solver.lr=fast", "solver.lr must be a number, not 'fast'"),
        ("solver.lr=nan", "solver.lr must be at least 0, not nan"),
        (
            "solver.schedule=steps",
            "solver.schedule must be one of flat_cosine, cosine, step, constant, not 'steps'",
        ),
        ("solver.milestones=[0.5, 2]", "solver.milestones must be from 0 to 1, not 2.0"),
        ("solver.milestones=late", "solver.milestones must be a number, not 'late'"),
        ("solver.patience=0", "solver.patience must be at least 1, not 0"),
        (
            "logging.sinks=tensorbord",
            "logging.sinks must be one of tensorboard, wandb, mlflow, not 'tensorbord'",
        ),
        (
            "runtime.callbacks=push.py",
            "runtime.callbacks must be a list of module:function, not 'push.py'",
        ),
        ("solver.batch_size=0", "solver.batch_size must be at least 1, not 0"),
        ("data.horizontal_flip=2", "data.horizontal_flip must be from 0 to 1, not 2.0"),
        (
            "data.image_size=100",
            "data.image_size must be a multiple of 32, not 100; 96 and 128 are",
        ),
        (
            "model.backbone_name=hgnetv2_q",
            "model.backbone_name in --set model.backbone_name=hgnetv2_q: There is no model 'hgnetv2_q'",
        ),
        ("solver.lr=inf", "solver.lr must be finite, at least 0, not inf"),
        ("solver.lr=1" + 400 * "0", "solver.lr must be finite, at least 0, not inf"),
        ("solver.epochs=2001-13-45", "solver.epochs must be an integer, not '2001-13-45'"),
        ("solver.lr=2001-13-45", "solver.lr must be a number, not '2001-13-45'"),
        ("data.workers=100000", "data.workers must be from 0 to 256, not 100000"),
        ("data.image_size=1048576", "data.image_size must be from 32 to 8192, not 1048576"),
        ("runtime.seed=18446744073709551616", "runtime.seed must be from 0 to 9223372036854775807"),
        ("runtime.timeout_seconds=1e30", "runtime.timeout_seconds must be from 1 to 10000000"),
        (
            "model.freeze=all",
            "model.freeze must be one of auto, none, stem, backbone_norms, norms, backbone, not 'all'",
        ),
        (
            "model.weights=hf://org",
            "model.weights (in --set model.weights=hf://org): hf://org is no place on the hub",
        ),
        ("solver.lr", "'solver.lr' is not an override; write section.key=value"),
    ],
)
def test_a_wrong_value_is_one_sentence(override: str, expected: str) -> None:
    assert sentence(override).startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("solver.lr=1e-4", 1e-4),
        ("solver.lr=1", 1.0),
        ("solver.max_steps=20", 20),
        ("solver.max_steps=none", None),
        ("data.root=123", "123"),
        ("data.root=a=b", "a=b"),
        ("data.classes=car, bus", ("car", "bus")),
        ("data.classes=[car]", ("car",)),
        ("data.classes=null", ()),
        ("solver.milestones=[0.5,0.75]", (0.5, 0.75)),
        ("solver.milestones=1", (1.0,)),
        ("logging.sinks=tensorboard,mlflow", ("tensorboard", "mlflow")),
        ("runtime.callbacks=a.b:c", ("a.b:c",)),
        ("data.root=~", None),
        ("runtime.amp=false", False),
    ],
)
def test_an_override_is_read_by_the_type_of_its_key(override: str, expected: object) -> None:
    config = load_config("coins/hgnetv2_n", [override], search=ROOT)
    section, _, key = override.partition("=")[0].partition(".")
    value = getattr(getattr(config, section), key)
    assert (value, type(value)) == (expected, type(expected))


def test_the_last_override_wins() -> None:
    config = load_config("coins/hgnetv2_n", ["solver.epochs=3", "solver.epochs=4"], search=ROOT)
    assert config.solver.epochs == 4


def test_a_variable_is_taken_from_the_environment() -> None:
    config = load_config("coco128/hgnetv2_n", search=ROOT, environ={"COCO128_DIR": "/photographs"})
    assert config.data.root == "/photographs"


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match="needs the environment variable COCO128_DIR"):
        load_config("coco128/hgnetv2_n", search=ROOT, environ={})


def test_a_variable_behind_an_override_is_not_needed() -> None:
    config = load_config("coco128/hgnetv2_n", ["data.root=data/x"], search=ROOT, environ={})
    assert config.data.root == "data/x"
    assert referenced_environment("coco128/hgnetv2_n", ["data.root=data/x"], search=ROOT) == ()
    assert referenced_environment("coco128/hgnetv2_n", search=ROOT) == ("COCO128_DIR",)


def test_the_project_is_looked_in_before_the_package(tmp_path: Path) -> None:
    own = write(tmp_path / "configs" / "coins" / "hgnetv2_n.yaml", "solver:\n  epochs: 5\n")
    assert find_config("coins/hgnetv2_n", tmp_path) == Path(own)
    assert find_config("configs/coins/hgnetv2_n.yaml", tmp_path) == Path(own)


def test_the_package_has_presets_for_a_project_without_any(tmp_path: Path) -> None:
    expected = packed_configs_dir() / "coins" / "hgnetv2_n.yaml"
    assert find_config("configs/coins/hgnetv2_n.yaml", tmp_path) == expected
    assert find_config("coins/hgnetv2_n", tmp_path) == expected


def test_an_unknown_configuration_lists_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'coinz/hgnetv2_n'.*nearest: coins/hgnetv2_n"):
        load_config("coinz/hgnetv2_n", search=tmp_path)


def test_broken_yaml_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "solver: [1\n")
    assert f"{path} is not valid YAML" in sentence(name=path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "solver:\n  lr: 1\nsolver:\n  epochs: 2\n")
    assert "'solver' stands twice" in sentence(name=path)
    path = write(tmp_path / "a.yaml", "solver:\n  lr: 1\n  lr: 2\n")
    assert "'lr' stands twice" in sentence(name=path)


@pytest.mark.parametrize("value", ["2001-13-45", "1" + 5000 * "0"])
def test_a_value_that_yaml_itself_stumbles_over_is_one_sentence(value: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", f"solver:\n  lr: {value}\n")
    assert sentence(name=path).startswith(f"{path} is not valid YAML")


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path: Path) -> None:
    assert "There is no configuration" in sentence(name="a" * 5000)


def test_weights_of_the_whole_and_of_the_backbone_exclude_each_other() -> None:
    message = sentence("model.weights=a.pth", "model.backbone_weights=b.pth")
    assert message.endswith("set one of them to null.")


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config("coins/hgnetv2_n", ["data.classes=[coin]"], search=ROOT)
    path = write(tmp_path / "resolved.yaml", config.to_yaml())
    assert dataclasses.replace(load_config(path), source="") == dataclasses.replace(
        config, source=""
    )


def test_a_list_in_a_file_is_read_like_one_in_an_override(tmp_path: Path) -> None:
    text = "solver:\n  milestones: [1, 0.5]\nlogging:\n  sinks: [tensorboard]\n"
    config = load_config(write(tmp_path / "a.yaml", text))
    assert config.solver.milestones == (1.0, 0.5)
    assert config.logging.sinks == ("tensorboard",)
    path = write(tmp_path / "b.yaml", "solver:\n  milestones: 0.5\n")
    assert "solver.milestones must be a list of numbers, not '0.5'" in sentence(name=path)
    path = write(tmp_path / "c.yaml", "logging:\n  sinks: wandb\n")
    assert "logging.sinks must be a list of names, not 'wandb'" in sentence(name=path)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().solver.epochs = 3  # type: ignore[misc]
