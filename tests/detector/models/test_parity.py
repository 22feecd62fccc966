"""The network is the published one: every size equals transformers' with perturbed weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from detector.models.detector import Detector, DetectorOutput, build_detector
from detector.models.weights import load_weights

QUICK = ["dfine_n", "dfine_s", "rtdetrv2_r18"]
FULL = ["dfine_m", "dfine_l", "dfine_x", "rtdetrv2_r34", "rtdetrv2_r50"]
SIZES = [*QUICK, *(pytest.param(name, marks=pytest.mark.campaign) for name in FULL)]


def pair(
    name: str, folder: Path, *, num_classes: int = 80, num_queries: int = 100
) -> tuple[nn.Module, Detector]:
    """transformers' perturbed model and ours with its weights, which went through a file."""
    pytest.importorskip("transformers")
    from tests.detector.models.reference import build_reference, perturb

    torch.manual_seed(0)
    theirs = build_reference(name, num_classes=num_classes, num_queries=num_queries)
    perturb(theirs, seed=1)
    file = folder / "model.safetensors"
    save_file({key: value.clone() for key, value in theirs.state_dict().items()}, file)
    ours = build_detector(name, num_classes=num_classes, num_queries=num_queries)
    report = load_weights(ours, file)
    assert report.layout == "v5"
    assert report.reinitialised == ()
    return theirs.eval(), ours.eval()


def images(batch: int, height: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(batch, 3, height, width, generator=generator, dtype=torch.float64).to(dtype)


def distance(first: Tensor, second: Tensor) -> float:
    assert first.shape == second.shape
    return float((first - second).abs().max())


def outputs(theirs: nn.Module, ours: Detector, pictures: Tensor) -> tuple[object, DetectorOutput]:
    with torch.no_grad():
        return theirs(pictures), ours(pictures)


@pytest.mark.parametrize("name", SIZES)
def test_equals_transformers_in_float64(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(name, tmp_path)
    expected, found = outputs(theirs.double(), ours.double(), images(1, 320, 480))
    logits, boxes = found.final
    assert expected.logits.std() > 0.1, "a vacuous comparison"
    assert distance(expected.logits, logits) < 1e-9
    assert distance(expected.pred_boxes, boxes) < 1e-9
    if found.decoded.corners is not None:
        corners = expected.intermediate_predicted_corners[:, -1]
        assert corners.std() > 0.01
        assert distance(corners, found.decoded.corners[-1]) < 1e-9


@pytest.mark.campaign
@pytest.mark.parametrize("name", [*QUICK, *FULL])
@pytest.mark.parametrize(
    ("batch", "side", "num_classes", "num_queries"), [(1, 640, 80, 300), (3, 320, 1, 40)]
)
def test_equals_transformers_at_other_inputs(
    name: str, batch: int, side: int, num_classes: int, num_queries: int, tmp_path: Path
) -> None:
    theirs, ours = pair(name, tmp_path, num_classes=num_classes, num_queries=num_queries)
    expected, found = outputs(theirs.double(), ours.double(), images(batch, side, side))
    assert distance(expected.logits, found.final[0]) < 1e-9
    assert distance(expected.pred_boxes, found.final[1]) < 1e-9


@pytest.mark.parametrize("name", SIZES)
def test_equals_transformers_in_float32(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(name, tmp_path)
    expected, found = outputs(theirs, ours, images(1, 320, 480, torch.float32))
    scores = expected.enc_outputs_class.max(-1).values
    chosen = scores.topk(100, 1).indices
    picked = expected.enc_outputs_class.gather(1, chosen[..., None].expand(-1, -1, 80))
    assert distance(picked, found.encoder_logits) < 1e-4, "other tokens were selected"
    assert distance(expected.logits, found.final[0]) < 1e-4
    assert distance(expected.pred_boxes, found.final[1]) < 1e-5


@pytest.mark.parametrize("name", SIZES)
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(name, tmp_path)
    pictures = images(2, 128, 192)
    theirs, ours = theirs.double().train(), ours.double().train()
    for module in [*theirs.modules(), *ours.modules()]:
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # batch statistics of a 4x6 map only add noise to the comparison
    expected, found = theirs.model(pictures), ours(pictures)
    decoded = found.decoded
    logits, boxes = decoded.logits, decoded.boxes
    if decoded.pre_logits is not None:  # transformers counts these as one more layer
        logits = torch.cat((decoded.pre_logits[None], logits))
        boxes = torch.cat((decoded.pre_boxes[None], boxes))
    pairs = [
        (expected.intermediate_logits.transpose(0, 1), logits),
        (expected.intermediate_reference_points.transpose(0, 1), boxes),
        (expected.enc_topk_logits, found.encoder_logits),
        (expected.enc_topk_bboxes, found.encoder_boxes),
    ]
    if decoded.corners is not None:
        pairs.append((expected.intermediate_predicted_corners.transpose(0, 1), decoded.corners))
    generator = torch.Generator().manual_seed(3)
    for first, second in pairs:
        assert distance(first.detach(), second.detach()) < 1e-9
        # A plain sum would vanish in the layer norms: weigh every output differently.
        weight = torch.randn(first.shape, generator=generator, dtype=torch.float64)
        (first * weight).sum().backward(retain_graph=True)
        (second * weight).sum().backward(retain_graph=True)
    mirror = build_detector(name, num_classes=80, num_queries=100).double()
    gradients = {
        key: torch.zeros_like(value) if value.grad is None else value.grad
        for key, value in theirs.named_parameters()
    }
    statistics = {key: torch.zeros_like(value) for key, value in theirs.named_buffers()}
    file = tmp_path / "gradients.safetensors"
    constants = {
        key: value.detach().clone()
        for key, value in theirs.named_parameters()
        if key.endswith((".up", ".reg_scale"))
    }
    save_file(
        {k: v.clone().contiguous() for k, v in (gradients | statistics | constants).items()}, file
    )
    load_weights(mirror, file)
    wanted = dict(mirror.named_parameters())
    compared = 0
    for key, parameter in ours.named_parameters():
        grad = parameter.grad
        expected_grad = wanted[key].detach()
        if not expected_grad.any():  # the denoising embedding, and the backbone's frozen norms
            continue
        assert distance(expected_grad, grad) <= 1e-6 * float(expected_grad.abs().max()), key
        compared += 1
    assert compared > 0.7 * sum(1 for _ in ours.parameters())
