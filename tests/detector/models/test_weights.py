"""Weights of every known layout go in and come back; what does not fit is refused in a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from detector.models.detector import Detector, build_detector
from detector.models.specs import SPECS
from detector.models.weights import (
    Layout,
    WeightsError,
    export_state,
    load_backbone,
    load_weights,
)
from tests.detector.models.reference import build_reference, perturb

NAMES = ["dfine_n", "rtdetrv2_r18"]
LAYOUTS: list[Layout] = ["native", "hub", "v5", "original"]


def each_size(layouts: list[Layout]) -> list[Any]:
    """Every size with every layout; all but N and the other family's smallest in the long series."""
    return [
        pytest.param(
            name,
            layout,
            marks=[]
            if name == "dfine_n" or (name, layout) == ("rtdetrv2_r18", "original")
            else pytest.mark.campaign,
        )
        for name in SPECS
        for layout in layouts
    ]


def detector(name: str = "dfine_n", *, num_classes: int = 4, seed: int = 0) -> Detector:
    torch.manual_seed(seed)
    built = build_detector(name, num_classes=num_classes)
    perturb(built, seed)
    return built


def copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone().contiguous() for key, value in state.items()}


def same(first: Detector, second: Detector, *, but: tuple[str, ...] = ()) -> bool:
    other = second.state_dict()
    return all(
        torch.equal(value, other[key])
        for key, value in first.state_dict().items()
        if not key.endswith("num_batches_tracked") and key not in but
    )


@pytest.mark.parametrize(("name", "layout"), each_size(LAYOUTS))
def test_round_trip_is_bit_for_bit(name: str, layout: Layout, tmp_path: Path) -> None:
    source, target = detector(name), detector(name, seed=1)
    state = export_state(source, layout)
    if layout == "original":
        file = tmp_path / "model.pth"
        torch.save({"model": {}, "ema": {"module": state, "updates": 7}, "last_epoch": 3}, file)
    else:
        file = tmp_path / "model.safetensors"
        save_file(copies(state), file)
    assert not same(source, target)
    report = load_weights(target, file)
    assert report.layout == layout
    assert report.reinitialised == ()
    assert same(source, target)


@pytest.mark.parametrize("name", ["dfine_n", "dfine_x", "rtdetrv2_r18", "rtdetrv2_r50"])
def test_v5_names_are_exactly_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        theirs = build_reference(name, num_classes=4, num_queries=10).state_dict()
        ours = export_state(build_detector(name, num_classes=4), "v5")
    derived = ("num_points_scale", "n_points_scale", "num_batches_tracked")
    expected = {k: tuple(v.shape) for k, v in theirs.items() if not k.endswith(derived)}
    found = {k: tuple(v.shape) for k, v in ours.items() if not k.endswith(derived)}
    assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_hub_names_become_the_v5_names_by_transformers_own_rules(name: str) -> None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    built = detector(name)
    rules = get_checkpoint_conversion_mapping("d_fine" if built.spec.fdr else "rt_detr")
    renamed = set()
    for key in export_state(built, "hub"):
        moved = key
        for rule in rules:
            moved = re.sub(rule.source_patterns[0], rule.target_patterns[0], moved)
        renamed.add(moved)
    assert renamed == set(export_state(built, "v5"))


def test_original_names_are_those_of_the_authors_files() -> None:
    dfine = export_state(detector("dfine_n"), "original")
    for key in (
        "backbone.stem.stem2a.conv.weight",
        "backbone.stem.stem1.lab.scale",
        "backbone.stages.2.downsample.bn.running_mean",
        "backbone.stages.3.blocks.0.layers.1.conv2.bn.weight",
        "backbone.stages.0.blocks.0.aggregation.1.lab.bias",
        "encoder.input_proj.1.norm.weight",
        "encoder.encoder.0.layers.0.self_attn.in_proj_weight",
        "encoder.encoder.0.layers.0.linear1.bias",
        "encoder.lateral_convs.0.conv.weight",
        "encoder.fpn_blocks.0.cv2.0.bottlenecks.1.conv2.norm.bias",
        "encoder.pan_blocks.0.cv3.1.conv.weight",
        "encoder.downsample_convs.0.0.cv2.conv.weight",
        "decoder.decoder.layers.2.gateway.gate.weight",
        "decoder.decoder.layers.0.cross_attn.sampling_offsets.bias",
        "decoder.decoder.lqe_layers.1.reg_conf.layers.0.weight",
        "decoder.denoising_class_embed.weight",
        "decoder.enc_output.proj.weight",
        "decoder.enc_score_head.bias",
        "decoder.enc_bbox_head.layers.2.weight",
        "decoder.dec_score_head.2.weight",
        "decoder.dec_bbox_head.0.layers.1.bias",
        "decoder.pre_bbox_head.layers.0.weight",
        "decoder.query_pos_head.layers.1.weight",
        "decoder.up",
        "decoder.reg_scale",
    ):
        assert key in dfine, key
    rtdetr = export_state(detector("rtdetrv2_r18"), "original")
    for key in (
        "backbone.conv1.conv1_1.conv.weight",
        "backbone.conv1.conv1_3.norm.weight",
        "backbone.res_layers.0.blocks.0.short.conv.weight",
        "backbone.res_layers.1.blocks.0.short.conv.conv.weight",
        "backbone.res_layers.3.blocks.1.branch2b.norm.running_var",
        "encoder.fpn_blocks.0.bottlenecks.2.conv1.conv.weight",
        "encoder.downsample_convs.1.conv.weight",
        "decoder.input_proj.0.conv.weight",
        "decoder.decoder.layers.0.cross_attn.value_proj.weight",
        "decoder.decoder.layers.0.norm2.weight",
    ):
        assert key in rtdetr, key


def test_older_spellings_are_understood(tmp_path: Path) -> None:
    source, target = detector("rtdetrv2_r18"), detector("rtdetrv2_r18", seed=1)
    old = {}
    for key, value in export_state(source, "original").items():
        name = re.sub(r"enc_output\.(proj|norm)", lambda m: f"enc_output.{m[1] == 'norm':d}", key)
        name = re.sub(
            r"^(encoder\.input_proj\.\d)\.(conv|norm)",
            lambda m: f"{m[1]}.{m[2] == 'norm':d}",
            name,
        )
        old["module." + name] = value
    assert "module.encoder.input_proj.0.1.weight" in old
    assert "module.decoder.enc_output.0.weight" in old
    torch.save({"model": old}, tmp_path / "model.pth")
    load_weights(target, tmp_path / "model.pth")
    assert same(source, target)


def test_the_averaged_weights_are_taken_where_a_file_has_both(tmp_path: Path) -> None:
    source, plain, target = detector(), detector(seed=1), detector(seed=2)
    content = {
        "model": export_state(plain, "original"),
        "ema": {"module": export_state(source, "original"), "updates": 7},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
    }
    torch.save(content, tmp_path / "model.pth")
    load_weights(target, tmp_path / "model.pth")
    assert same(source, target)


def test_a_tied_copy_serves_where_the_decoders_own_is_left_out(tmp_path: Path) -> None:
    source, target = detector(), detector(seed=1)
    state = {
        key: value
        for key, value in copies(export_state(source, "hub")).items()
        if not key.startswith(("model.decoder.class_embed", "model.decoder.bbox_embed"))
    }
    save_file(state, tmp_path / "m.safetensors")
    load_weights(target, tmp_path / "m.safetensors")
    assert same(source, target)


def test_other_classes_start_the_heads_afresh_and_say_which(tmp_path: Path) -> None:
    source, target = detector(num_classes=80), detector(num_classes=2, seed=1)
    save_file(copies(export_state(source, "hub")), tmp_path / "m.safetensors")
    report = load_weights(target, tmp_path / "m.safetensors")
    expected = {"denoising.class_embed.weight"}
    for kind in ("weight", "bias"):
        expected |= {f"selection.score_head.{kind}"}
        expected |= {f"decoder.score_heads.{layer}.{kind}" for layer in range(3)}
    assert set(report.reinitialised) == expected
    own, other = target.state_dict(), source.state_dict()
    for key, value in other.items():
        if key not in expected and not key.endswith("num_batches_tracked"):
            assert torch.equal(own[key], value), key
    assert target.selection.score_head.bias[0].item() == pytest.approx(-0.6931, abs=1e-4)


@pytest.mark.parametrize(("name", "layout"), each_size(["v5", "original"]))
def test_a_backbones_file_fills_the_backbone_alone(
    name: str, layout: Layout, tmp_path: Path
) -> None:
    source, target, before = detector(name), detector(name, seed=1), detector(name, seed=1)
    prefix = "model.backbone.model." if layout == "v5" else "backbone."
    state = {
        key.removeprefix(prefix): value
        for key, value in export_state(source, layout).items()
        if key.startswith(prefix)
    }
    state["fc.weight"] = torch.zeros(3, 3)
    torch.save(state, tmp_path / "b.pth")
    report = load_backbone(target, tmp_path / "b.pth")
    assert report.loaded > 100
    assert all(
        torch.equal(value, source.backbone.state_dict()[key])
        for key, value in target.backbone.state_dict().items()
    )
    assert torch.equal(target.encoder.aifi.linear1.weight, before.encoder.aifi.linear1.weight)


def refusal(target: Detector, file: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        load_weights(target, file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_another_size_is_refused_and_the_first_misfit_named(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file(copies(export_state(detector("dfine_n"), "hub")), file)
    with torch.device("cpu"):
        target = build_detector("dfine_s", num_classes=4)
    message = refusal(target, file)
    assert "does not fit dfine_s" in message
    assert "model.encoder" in message


def test_a_missing_and_a_superfluous_name_are_refused(tmp_path: Path) -> None:
    state = copies(export_state(detector(), "hub"))
    file = tmp_path / "m.safetensors"
    save_file(state | {"model.more.weight": torch.zeros(1)}, file)
    assert "it has model.more.weight besides" in refusal(detector(), file)
    del state["model.enc_output.0.bias"]
    save_file(state, file)
    assert "it lacks model.enc_output.0.bias" in refusal(detector(), file)


def test_other_constants_are_refused(tmp_path: Path) -> None:
    state = copies(export_state(detector(), "hub"))
    state["model.decoder.reg_scale"] = torch.tensor([8.0])
    save_file(state, tmp_path / "m.safetensors")
    assert "reg_scale is 8, not 4" in refusal(detector(), tmp_path / "m.safetensors")


@pytest.mark.parametrize("kind", [".safetensors", ".pth", "old.pth"])
def test_a_cut_file_is_refused_wherever_it_is_cut(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"m{kind}"
    state = copies(export_state(detector(), "original"))
    if kind == ".safetensors":
        save_file(state, file)
    else:
        torch.save({"model": state}, file, _use_new_zipfile_serialization=kind == ".pth")
    content, target = file.read_bytes(), detector()
    before = copies(target.state_dict())
    for kept in (0, 1, 7, 8, 9, 64, 5000, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:kept])
        assert "cannot be read as weights" in refusal(target, file), kept
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_a_file_is_told_by_its_content_where_its_name_says_nothing(tmp_path: Path) -> None:
    source, target = detector(), detector(seed=1)
    save_file(copies(export_state(source, "hub")), tmp_path / "weights.bin")
    load_weights(target, tmp_path / "weights.bin")
    assert same(source, target)


def test_a_whole_checkpoint_of_the_authors_is_read_with_its_schedulers(tmp_path: Path) -> None:
    source, target = detector(), detector(seed=1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter], lr=1e-4)
    parameter.grad = torch.ones(2)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [500])
    torch.save(
        {
            "date": "2024-10-18T01:02:03",
            "last_epoch": 7,
            "model": {},
            "ema": {"module": export_state(source, "original"), "updates": 9},
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
        },
        tmp_path / "last.pth",
    )
    load_weights(target, tmp_path / "last.pth")
    assert same(source, target)


def test_a_file_that_does_not_fit_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    target = detector(num_classes=2, seed=1)
    before = copies(target.state_dict())
    state = copies(export_state(detector(), "hub"))
    save_file(state | {"model.more.weight": torch.zeros(1)}, tmp_path / "m.safetensors")
    refusal(target, tmp_path / "m.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_a_file_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, (f"open({str(marker)!r}, 'w').close()",))

    torch.save({"model": Evil()}, tmp_path / "m.pth")
    assert "cannot be read as weights" in refusal(detector(), tmp_path / "m.pth")
    assert not marker.exists()


def test_other_contents_are_refused(tmp_path: Path) -> None:
    assert "There is no weights file" in refusal(detector(), tmp_path / "none.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    assert "holds a list" in refusal(detector(), tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    assert "holds no tensors" in refusal(detector(), tmp_path / "empty.pth")
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "fc.safetensors")
    assert "is no detector's weights" in refusal(detector(), tmp_path / "fc.safetensors")
