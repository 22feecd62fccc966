"""A run that starts from weights: whose they are, what starts afresh, what is held fixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from detector import hub
from detector.checkpoint import load_checkpoint
from detector.config import ModelConfig
from detector.models.detector import Detector, build_detector
from detector.models.specs import find_spec
from detector.models.weights import WeightsError, export_state
from detector.pretrained import licence_of, start_from_weights
from detector.runtime import Runtime

TrainHere = Callable[..., SimpleNamespace]
HEADS = (
    "selection.score_head,denoising.class_embed,"
    "decoder.score_heads.0,decoder.score_heads.1,decoder.score_heads.2"
)


def network(*, num_classes: int = 3, seed: int = 0, **changes: bool) -> Detector:
    torch.manual_seed(seed)
    spec = dataclasses.replace(find_spec("hgnetv2_n"), **changes)
    return Detector(spec, num_classes=num_classes, num_queries=10, num_denoising=10)


def exported(path: Path, *, num_classes: int) -> Path:
    """A file as the hub has it, by our own exporter; its weights differ from those of seed 0."""
    state = export_state(network(num_classes=num_classes, seed=7), "hub")
    save_file({name: value.clone().contiguous() for name, value in state.items()}, path)
    return path


def test_a_run_starts_from_weights_and_says_which_heads_start_afresh(
    train_here: TrainHere, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = exported(tmp_path / "coco.safetensors", num_classes=80)
    still = ("solver.max_steps=1", "solver.lr=0", "evaluation.interval=9")
    done = train_here("run", f"model.weights={file}", *still)
    out, err = capsys.readouterr()
    assert done.code == 0, err
    assert f"weights_loaded={file} layout=hub tensors=" in out
    assert f"weights_reinitialised={HEADS}" in out.splitlines()
    source = network(num_classes=80, seed=7).state_dict()
    saved = load_checkpoint(done.run.last)
    for trained in (saved["model"], saved["ema"]["model"]):
        for name in ("backbone.stem.stem1.conv.weight", "decoder.pre_box_head.layers.0.weight"):
            assert torch.equal(trained[name], source[name])
    fresh = network(num_classes=3).selection.score_head.bias
    assert torch.equal(saved["model"]["selection.score_head.bias"], fresh)


def test_weights_for_the_same_number_of_classes_keep_their_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = exported(tmp_path / "own.safetensors", num_classes=3)
    model = network()
    start_from_weights(model, ModelConfig(weights=str(file)), Runtime())
    assert "weights_reinitialised=none" in capsys.readouterr().out.splitlines()
    theirs = network(seed=7).selection.score_head.weight
    assert torch.equal(model.selection.score_head.weight, theirs)


def test_backbone_weights_fill_the_backbone_alone(tmp_path: Path) -> None:
    file = exported(tmp_path / "coco.safetensors", num_classes=80)
    model, before = network(), network()
    start_from_weights(model, ModelConfig(backbone_weights=str(file)), Runtime())
    other = network(num_classes=80, seed=7)
    for name, value in model.state_dict().items():
        expected = other if name.startswith("backbone.") else before
        assert torch.equal(value, expected.state_dict()[name]), name


def test_a_run_of_ours_gives_its_averaged_weights(train_here: TrainHere) -> None:
    done = train_here("run", "solver.max_steps=3", "evaluation.interval=9")
    average = load_checkpoint(done.run.last)["ema"]["model"]
    for file in (done.run.last, done.run.best):
        model = build_detector("hgnetv2_n", num_classes=3, num_queries=10, num_denoising=10)
        start_from_weights(model, ModelConfig(weights=str(file)), Runtime())
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in average.items())


@pytest.mark.parametrize("key", ["model.weights", "model.backbone_weights"])
def test_a_file_that_is_not_there_ends_the_run_before_it_trains(
    key: str, train_here: TrainHere, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train_here("run", f"{key}=nowhere.pth")
    assert done.code == 1
    assert "error: There is no weights file nowhere.pth." in capsys.readouterr().err.splitlines()
    assert done.run.steps.rows() == []


def test_a_resume_does_not_need_the_file_any_more(train_here: TrainHere, tmp_path: Path) -> None:
    file = exported(tmp_path / "coco.safetensors", num_classes=80)
    options = (f"model.weights={file}", "evaluation.interval=9")
    assert train_here("run", *options, "solver.max_steps=1").code == 0
    file.unlink()
    assert train_here("run", *options, "solver.max_steps=2", resume="auto").code == 0


def test_where_one_rank_cannot_read_the_file_no_rank_goes_on(tmp_path: Path) -> None:
    class WithoutLuckyNeighbour(Runtime):
        def all_gather(self, value: object) -> list[object]:
            return [value, "There is no weights file there."]

    file = exported(tmp_path / "own.safetensors", num_classes=3)
    with pytest.raises(WeightsError, match="no weights file there"):
        start_from_weights(network(), ModelConfig(weights=str(file)), WithoutLuckyNeighbour())


@pytest.mark.parametrize("key", ["weights", "backbone_weights"])
def test_weights_come_from_the_hub(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = exported(tmp_path / "model.safetensors", num_classes=3)
    asked: list[hub.HubReference] = []

    def fetch(reference: hub.HubReference) -> Path:
        asked.append(reference)
        return file

    monkeypatch.setattr(hub, "fetch", fetch)
    model = network()
    start_from_weights(model, ModelConfig(**{key: "hf://org/name@v1"}), Runtime())
    assert asked == [hub.HubReference("org/name", "v1")]
    assert torch.equal(
        model.backbone.state_dict()["stem.stem1.conv.weight"],
        network(seed=7).backbone.state_dict()["stem.stem1.conv.weight"],
    )
    assert "weights_loaded=hf://org/name@v1 layout=hub" in capsys.readouterr().out


@pytest.mark.parametrize(("local_rank", "fetches"), [(0, 1), (1, 0)])
def test_one_rank_a_machine_downloads_and_all_read_its_file(
    local_rank: int, fetches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = exported(tmp_path / "model.safetensors", num_classes=3)
    asked: list[hub.HubReference] = []

    class OnTheSecondMachine(Runtime):
        """Ranks 2 and 3; the first machine's file lies elsewhere."""

        def all_gather(self, value: object) -> list[object]:
            return ["/first/machine", "", str(file), ""] if isinstance(value, str) else [value]

    def fetch(reference: hub.HubReference) -> Path:
        asked.append(reference)
        return file

    monkeypatch.setattr(hub, "fetch", fetch)
    runtime = OnTheSecondMachine(rank=2 + local_rank, local_rank=local_rank, world_size=4)
    start_from_weights(network(), ModelConfig(weights="hf://org/name"), runtime)
    assert len(asked) == fetches


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("hf://org", "hf://org is no place on the hub: write hf://ORG/NAME"),
        ("hf://org/name", "the hub said no"),
    ],
)
def test_what_the_hub_does_not_give_ends_every_rank_in_one_sentence(
    reference: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(reference: hub.HubReference) -> Path:
        raise hub.HubError("the hub said no.")

    monkeypatch.setattr(hub, "fetch", fetch)
    with pytest.raises(WeightsError, match=sentence):
        start_from_weights(network(), ModelConfig(weights=reference), Runtime())


def test_the_licence_of_published_weights_is_known() -> None:
    assert licence_of("hf://ustc-community/dfine-small-coco") == "Apache-2.0"
    assert licence_of("hf://PekingU/rtdetr_v2_r18vd@main") == "Apache-2.0"
    assert licence_of("hf://somebody/else").startswith("unknown")
    assert licence_of(None).startswith("none")


@pytest.mark.parametrize("resuming", [False, True])
def test_what_the_authors_hold_fixed_is_held_fixed(
    resuming: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = exported(tmp_path / "own.safetensors", num_classes=3)
    model = network(freeze_stem=True, freeze_norm=True)
    start_from_weights(model, ModelConfig(weights=str(file)), Runtime(), resuming=resuming)
    assert "frozen=backbone.stem,backbone.norms" in capsys.readouterr().out.splitlines()
    model.train()
    assert not any(parameter.requires_grad for parameter in model.backbone.stem.parameters())
    norms = [m for m in model.backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert norms
    assert not any(norm.training or norm.weight.requires_grad for norm in norms)


def test_nothing_is_held_fixed_without_weights_or_where_it_is_not_wanted(tmp_path: Path) -> None:
    file = exported(tmp_path / "own.safetensors", num_classes=3)
    for config in (ModelConfig(), ModelConfig(weights=str(file), freeze="none")):
        model = network(freeze_stem=True, freeze_norm=True)
        start_from_weights(model, config, Runtime())
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_resume_with_other_parts_held_fixed_is_one_sentence(
    train_here: TrainHere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = exported(tmp_path / "own.safetensors", num_classes=3)
    assert train_here("run", "solver.max_steps=1", "evaluation.interval=9").code == 0
    monkeypatch.setattr(
        "detector.models.detector.find_spec",
        lambda name: dataclasses.replace(find_spec(name), freeze_stem=True, freeze_norm=True),
    )
    again = train_here("run", f"model.weights={file}", resume="auto")
    assert again.code == 1
    assert "with other parts of the network held fixed" in capsys.readouterr().err
