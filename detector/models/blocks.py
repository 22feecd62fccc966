"""Small parts that backbone, encoder and decoder share: convolution with norm, MLP, frozen norm."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "ConvNorm", "FrozenBatchNorm2d", "LearnableAffine", "freeze_norms", "to_tokens"]

Activation = Literal["relu", "silu", "none"]


def to_tokens(maps: Tensor) -> Tensor:
    """(B, C, H, W) to (B, H * W, C)."""
    if maps.requires_grad and maps.device.type == "cpu":
        # torch's batch norm on the CPU (2.13) takes the channels of a gradient for pixels where a
        # batch of one has contiguous maps and the gradient is laid out the other way, as here.
        maps.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return maps.flatten(2).transpose(1, 2)


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that stays in evaluation mode: running statistics, no gradients.

    The state's keys are those of `nn.BatchNorm2d`, so freezing never changes a checkpoint.
    """

    def train(self, mode: bool = True) -> FrozenBatchNorm2d:  # noqa: ARG002 - the point of it
        """Stay in evaluation mode."""
        super().train(False)
        return self


def freeze_norms(module: nn.Module) -> None:
    """Turn every batch norm below `module` into a frozen one, in place."""
    for child in module.modules():
        if type(child) is nn.BatchNorm2d:
            child.__class__ = FrozenBatchNorm2d
            child.requires_grad_(False)
            child.train(False)


class LearnableAffine(nn.Module):
    """One scale and one shift for a whole map (the learnable affine block of PP-LCNet/HGNetV2)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, maps: Tensor) -> Tensor:
        """Any shape in, the same shape out."""
        return self.scale * maps + self.bias


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, activation, and optionally a learnable affine."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: Activation = "none",
        affine: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False
        )
        self.norm = nn.BatchNorm2d(outputs)
        self.activation: Activation = activation
        self.lab = LearnableAffine() if affine and activation != "none" else None

    def forward(self, maps: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H', W')."""
        maps = self.norm(self.conv(maps))
        if self.activation == "relu":
            maps = F.relu(maps, inplace=True)
        elif self.activation == "silu":
            maps = F.silu(maps)
        return maps if self.lab is None else self.lab(maps)


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int, layers: int) -> None:
        super().__init__()
        widths = [inputs, *[hidden] * (layers - 1), outputs]
        self.layers = nn.ModuleList(nn.Linear(low, high) for low, high in pairwise(widths))

    def forward(self, values: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            values = layer(values)
            if index < last:
                values = F.relu(values)
        return values

    @torch.no_grad()
    def zero_last(self) -> None:
        """Start with zero output, so that what this head refines starts unrefined."""
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        last.weight.zero_()
        last.bias.zero_()
