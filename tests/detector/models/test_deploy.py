"""The network folded for inference gives what the trained one gives, and leaves that one alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from detector.config import ModelConfig
from detector.freezing import hold_fixed
from detector.models.deploy import deployed
from detector.models.detector import Detector, build_detector


def trained(name: str) -> Detector:
    """A detector whose norms are far from the identity."""
    torch.manual_seed(0)
    detector = build_detector(name, num_classes=3, num_queries=12).double().eval()
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        for module in detector.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)
    return detector


@pytest.mark.parametrize("name", ["dfine_n", "rtdetrv2_r18"])
def test_the_folded_network_gives_the_same_boxes_and_scores(name: str) -> None:
    detector = trained(name)
    pictures = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        expected, found = detector(pictures).final, deployed(detector)(pictures).final
    assert expected[0].std() > 1e-3
    for wanted, given in zip(expected, found, strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-9)


def test_the_folded_network_has_no_norm_over_a_batch_and_no_second_branch() -> None:
    network = deployed(trained("rtdetrv2_r18"))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert type(network.encoder.fpn_blocks[0].bottlenecks[0]) is nn.Sequential


def test_folding_leaves_the_given_detector_as_it_was() -> None:
    detector = trained("dfine_n").train()
    before = {key: value.clone() for key, value in detector.state_dict().items()}
    deployed(detector)
    assert detector.training
    assert all(parameter.requires_grad for parameter in detector.parameters())
    after = detector.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_frozen_norms_fold_too() -> None:
    detector = trained("dfine_n")
    hold_fixed(detector, ModelConfig(freeze="stem"))
    hold_fixed(detector, ModelConfig(freeze="backbone_norms"))
    pictures = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        expected, found = detector(pictures).final, deployed(detector)(pictures).final
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-9)
