"""ResNet-vd, the convolutional backbone of RT-DETR: a deep stem, pooled shortcuts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from detector.models.blocks import ConvNorm
from detector.models.specs import ResNetSpec

__all__ = ["ResNet"]


class Residual(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3, 1x1 where `bottleneck`; the stride is the 3x3's.

    Args:
        inputs: channels in.
        outputs: channels out.
        stride: 1 or 2; with 2 the shortcut averages 2x2 windows before its convolution.
        bottleneck: see above; the inner width is then a quarter of `outputs`.
        project: whether the shortcut has a convolution.
    """

    def __init__(
        self, inputs: int, outputs: int, *, stride: int, bottleneck: bool, project: bool
    ) -> None:
        super().__init__()
        self.stride = stride
        if bottleneck:
            width = outputs // 4
            self.convs = nn.Sequential(
                ConvNorm(inputs, width, 1, activation="relu"),
                ConvNorm(width, width, 3, stride=stride, activation="relu"),
                ConvNorm(width, outputs, 1),
            )
        else:
            self.convs = nn.Sequential(
                ConvNorm(inputs, outputs, 3, stride=stride, activation="relu"),
                ConvNorm(outputs, outputs, 3),
            )
        self.shortcut = ConvNorm(inputs, outputs, 1) if project else None

    def forward(self, maps: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        kept = F.avg_pool2d(maps, 2, 2, ceil_mode=True) if self.stride == 2 else maps
        if self.shortcut is not None:
            kept = self.shortcut(kept)
        return F.relu(self.convs(maps) + kept)


class ResNet(nn.Module):
    """Backbone that returns the maps of its last `levels` stages, finest first."""

    def __init__(self, spec: ResNetSpec, *, levels: int) -> None:
        super().__init__()
        self.levels = levels
        self.stem = nn.Sequential(
            ConvNorm(3, 32, 3, stride=2, activation="relu"),
            ConvNorm(32, 32, 3, activation="relu"),
            ConvNorm(32, 64, 3, activation="relu"),
        )
        inputs = 64
        self.stages = nn.ModuleList()
        for stage, (outputs, count) in enumerate(zip(spec.channels, spec.blocks, strict=True)):
            blocks = [
                Residual(
                    inputs if index == 0 else outputs,
                    outputs,
                    stride=2 if stage > 0 and index == 0 else 1,
                    bottleneck=spec.bottleneck,
                    project=index == 0,
                )
                for index in range(count)
            ]
            self.stages.append(nn.Sequential(*blocks))
            inputs = outputs

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) to maps of stride 4, 8, 16, 32, of which the last `levels` are returned."""
        maps = F.max_pool2d(self.stem(images), 3, 2, 1)
        outputs = []
        for stage in self.stages:
            maps = stage(maps)
            outputs.append(maps)
        return outputs[-self.levels :]
