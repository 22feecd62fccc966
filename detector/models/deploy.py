"""The same network for inference only: batch norms and RepVGG branches folded into convolutions.

`deployed` makes a copy; the model it is given, and with it checkpoints and training, stay as they
are. RepVGG: arXiv:2101.03697.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from detector.models.blocks import ConvNorm
from detector.models.detector import Detector
from detector.models.encoder import RepVGGBlock

__all__ = ["deployed"]


@torch.no_grad()
def deployed(detector: Detector) -> Detector:
    """A copy for inference: equal outputs up to rounding, fewer operations, no gradients.

    On a CPU its convolutions lie channels last, which their forward pass likes and their backward
    pass does not. Do not save its state: the keys are those of the folded network.
    """
    network = copy.deepcopy(detector).eval().requires_grad_(False)
    for module in list(network.modules()):
        if isinstance(module, ConvNorm):
            module.conv = fuse_conv_bn_eval(module.conv, module.norm)
            module.register_module("norm", nn.Identity())
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, RepVGGBlock):
                setattr(module, name, _merged(child))
    if all(parameter.device.type == "cpu" for parameter in network.parameters()):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # nn.Module's stub lacks it
    return network


def _merged(block: RepVGGBlock) -> nn.Sequential:
    """The folded 1x1 convolution as the centre of the 3x3 one's kernel."""
    wide, narrow = block.conv1.conv, block.conv2.conv
    assert wide.bias is not None
    assert narrow.bias is not None
    wide.weight += F.pad(narrow.weight, (1, 1, 1, 1))
    wide.bias += narrow.bias
    return nn.Sequential(wide, nn.SiLU())
