"""What a detector promises beside parity: sizes, few tokens, every parameter trained, no leak."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from detector.config import ModelConfig
from detector.freezing import hold_fixed
from detector.losses import Criterion
from detector.models.denoising import Denoising
from detector.models.detector import build_detector, postprocess
from detector.models.specs import SPECS, find_spec
from detector.runtime import synchronize_norms
from detector.targets import Targets

# Millions, 80 classes. Published: 4, 10, 19, 31, 62 (D-FINE) and 20, 31, 42 (RT-DETRv2).
PARAMETERS = {
    "dfine_n": 3.782691,
    "dfine_s": 10.321875,
    "dfine_m": 19.590062,
    "dfine_l": 31.289846,
    "dfine_x": 62.715478,
    "rtdetrv2_r18": 20.184464,
    "rtdetrv2_r34": 31.441668,
    "rtdetrv2_r50": 42.944620,
}


def targets(*counts: int, num_classes: int = 3, seed: int = 0) -> Targets:
    generator = torch.Generator().manual_seed(seed)
    boxes = [0.2 + 0.3 * torch.rand(count, 4, generator=generator) for count in counts]
    labels = [torch.randint(num_classes, (count,), generator=generator) for count in counts]
    return Targets.pad(boxes, labels)


@pytest.mark.parametrize("name", SPECS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        detector = build_detector(name, num_classes=80)
    millions = sum(parameter.numel() for parameter in detector.parameters()) / 1e6
    assert millions == pytest.approx(PARAMETERS[name], abs=1e-6)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'hgnetv2_s'"):
        find_spec("hgnetv2_ss")
    assert find_spec("resnet50").name == "rtdetrv2_r50"


def test_no_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one class"):
        build_detector("dfine_n", num_classes=0)


@pytest.mark.parametrize("name", ["dfine_n", "rtdetrv2_r18"])
@pytest.mark.parametrize("side", [64, 96])
def test_fewer_tokens_than_queries_uses_them_all(name: str, side: int) -> None:
    detector = build_detector(name, num_classes=2).eval()
    with torch.no_grad():
        logits, boxes = detector(torch.rand(2, 3, side, side)).final
    tokens = sum((side // stride) ** 2 for stride in detector.spec.strides)
    assert logits.shape == (2, tokens, 2)
    assert boxes.shape == (2, tokens, 4)
    assert torch.isfinite(logits).all()
    assert torch.isfinite(boxes).all()


@pytest.mark.parametrize("name", ["dfine_n", "rtdetrv2_r18"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_at_its_ends_gives_finite_boxes_and_losses(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    detector = no_dropout_train(build_detector(name, num_classes=3, num_queries=12))
    with torch.no_grad():  # distributions and moves of boxes near the largest number of the type
        for head in [*detector.decoder.box_heads, detector.selection.box_head]:
            head.layers[-1].bias.normal_(std=1e5).clamp_(-60000, 60000)
    wanted = targets(2, 1)
    with torch.autocast("cpu", dtype=dtype):
        output = detector(torch.rand(2, 3, 64, 64), wanted, torch.Generator().manual_seed(1))
        losses = Criterion(3)(output, wanted)
    for decoded in (output.decoded, output.denoised):
        assert decoded.boxes.dtype == torch.float32
        assert torch.isfinite(decoded.boxes).all()
        assert torch.isfinite(decoded.logits).all()
    assert all(torch.isfinite(value) for value in losses.values()), losses


@pytest.mark.parametrize("name", ["dfine_n", "rtdetrv2_r18"])
@pytest.mark.parametrize("counts", [(0, 0), (0, 3), (2, 1)])
def test_every_parameter_gets_a_finite_gradient(name: str, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    detector = build_detector(name, num_classes=3).train()
    wanted = targets(*counts)
    output = detector(torch.rand(2, 3, 64, 64), wanted, torch.Generator().manual_seed(1))
    Criterion(3)(output, wanted)["total"].backward()
    for key, parameter in detector.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


def test_a_batch_whose_rows_are_all_padding_trains_too() -> None:
    detector = build_detector("dfine_n", num_classes=3).train()
    wanted = targets(2, 1)._replace(counts=torch.zeros(2, dtype=torch.int64))
    output = detector(torch.rand(2, 3, 64, 64), wanted, torch.Generator().manual_seed(1))
    losses = Criterion(3)(output, wanted)
    losses["total"].backward()
    assert all(torch.isfinite(value) for value in losses.values())
    assert all(parameter.grad is not None for parameter in detector.parameters())


def test_training_outputs_all_layers_and_evaluation_the_last() -> None:
    detector = build_detector("dfine_n", num_classes=3, num_queries=12).train()
    pictures = torch.rand(2, 3, 64, 96)
    trained = detector(pictures, targets(1, 4))
    assert trained.logits.shape == (3, 2, 12, 3)
    assert trained.groups == 100 // 4
    assert trained.denoised is not None
    assert trained.denoised.logits.shape == (3, 2, 200, 3)
    detector.eval()
    with torch.no_grad():
        assert detector(pictures).logits.shape == (1, 2, 12, 3)


def no_dropout_train(detector: nn.Module) -> nn.Module:
    detector.train()
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return detector


def test_training_without_denoising_equals_evaluation() -> None:
    detector = no_dropout_train(build_detector("dfine_n", num_classes=3, num_queries=12))
    pictures = torch.rand(2, 3, 64, 96)
    with torch.no_grad():
        trained = detector(pictures)
        evaluated = detector.eval()(pictures)
    assert torch.equal(trained.final[0], evaluated.final[0])
    assert torch.equal(trained.final[1], evaluated.final[1])


@pytest.mark.parametrize("name", ["dfine_n", "rtdetrv2_r18"])
def test_denoising_queries_never_reach_the_matching_ones(name: str) -> None:
    torch.manual_seed(0)
    detector = no_dropout_train(build_detector(name, num_classes=3, num_queries=12))
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    pictures, wanted = torch.rand(2, 3, 64, 96), targets(2, 4)
    with torch.no_grad():
        first = detector(pictures, wanted, torch.Generator().manual_seed(1))
        second = detector(pictures, targets(2, 4, seed=9), torch.Generator().manual_seed(2))
    assert not torch.equal(first.denoised.logits, second.denoised.logits)
    for kept, moved in zip(first.final, second.final, strict=True):
        assert torch.equal(kept, moved)
    assert torch.equal(first.logits, second.logits)


def test_gradients_of_one_image_are_those_of_two_alike() -> None:
    torch.manual_seed(0)
    detector = no_dropout_train(build_detector("dfine_n", num_classes=3, num_queries=12)).double()
    picture = torch.rand(1, 3, 64, 96, dtype=torch.float64)
    gradients = []
    for batch in (1, 2):
        detector.zero_grad()
        output = detector(picture.repeat(batch, 1, 1, 1))
        (output.logits.square().sum() + output.boxes.square().sum()).div(batch).backward()
        gradients.append({k: p.grad for k, p in detector.named_parameters() if p.grad is not None})
    for key, grad in gradients[0].items():
        torch.testing.assert_close(grad, gradients[1][key], msg=key)


def test_denoising_groups_do_not_see_each_other() -> None:
    noised = Denoising(3, 8, count=6)(targets(1, 2), torch.Generator().manual_seed(0))
    assert noised.groups == 3
    mask = noised.mask(5)
    size = 2 * 2
    for row in range(17):
        for column in range(17):
            own = row // size if row < 12 else None
            other = column // size if column < 12 else None
            visible = other is None if own is None else other in {None, own}
            assert (mask[row, column] == 0) == visible, (row, column)


def test_denoising_noise_is_a_function_of_its_generator() -> None:
    part = Denoising(3, 8)
    first = part(targets(3, 5), torch.Generator().manual_seed(4))
    second = part(targets(3, 5), torch.Generator().manual_seed(4))
    third = part(targets(3, 5), torch.Generator().manual_seed(5))
    assert torch.equal(first.references, second.references)
    assert not torch.equal(first.references, third.references)


def test_denoising_positives_stay_near_and_a_quarter_of_labels_flip() -> None:
    from detector.boxes import cxcywh_to_xyxy, iou

    wanted = targets(*[10] * 50, num_classes=50)
    part = Denoising(50, 1, count=100)
    with torch.no_grad():  # an embedding that names its row
        part.class_embed.weight.copy_(torch.arange(51.0)[:, None])
    noised = part(wanted, torch.Generator().manual_seed(0))
    labels = noised.content[..., 0].long().reshape(50, 10, 2, 10)
    flipped = (labels != wanted.labels[:, None, None]).float().mean()
    assert float(flipped) == pytest.approx(0.25 * 49 / 50, abs=0.02)
    boxes = noised.references.sigmoid().reshape(50, 10, 2, 10, 4)
    overlap = iou(cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(wanted.boxes)[:, None, None])
    positive, negative = overlap[:, :, 0].mean(), overlap[:, :, 1].mean()
    assert positive > 2 * negative
    centres = (boxes[..., :2] - wanted.boxes[:, None, None, :, :2]).abs()
    assert (centres[:, :, 0] <= 0.5 * wanted.boxes[:, None, None, :, 2:][:, :, 0] + 1e-5).all()


def test_frozen_norms_keep_their_statistics_and_their_state_names() -> None:
    detector = build_detector("dfine_n", num_classes=2)
    names = list(detector.state_dict())
    hold_fixed(detector, ModelConfig(freeze="stem"))
    hold_fixed(detector, ModelConfig(freeze="backbone_norms"))
    detector.train()
    before = {key: value.clone() for key, value in detector.backbone.state_dict().items()}
    detector(torch.rand(2, 3, 64, 64))
    after = detector.backbone.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert list(detector.state_dict()) == names
    assert not any(parameter.requires_grad for parameter in detector.backbone.stem.parameters())
    assert detector.encoder.input_proj[0].norm.training


def test_frozen_norms_stay_frozen_where_the_others_are_synchronised_over_ranks() -> None:
    detector = build_detector("dfine_n", num_classes=2)
    hold_fixed(detector, ModelConfig(freeze="backbone_norms"))
    synchronize_norms(detector)
    assert not any(isinstance(part, nn.SyncBatchNorm) for part in detector.backbone.modules())
    assert isinstance(detector.encoder.input_proj[0].norm, nn.SyncBatchNorm)


def test_postprocess_scales_to_pixels_and_sorts() -> None:
    logits = torch.tensor([[[0.0, 2.0], [1.0, -1.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.5, 0.5], [0.25, 0.25, 0.5, 0.5]]])
    ((found, scores, labels),) = postprocess(logits, boxes, torch.tensor([[200, 100]]), top_k=3)
    assert labels.tolist() == [1, 0, 0]
    torch.testing.assert_close(scores, torch.tensor([2.0, 1.0, 0.0]).sigmoid())
    whole: Tensor = torch.tensor([50.0, 25.0, 150.0, 75.0], dtype=torch.float64)
    torch.testing.assert_close(found[0], whole)
    torch.testing.assert_close(found[1], torch.tensor([0, 0, 100, 50], dtype=torch.float64))
    torch.testing.assert_close(found[2], whole)
