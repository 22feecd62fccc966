"""HGNetV2, the convolutional backbone of D-FINE: stem, four stages of densely aggregated blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.models.blocks import ConvNorm
from detector.models.specs import HGNetV2Spec, Stage

__all__ = ["HGNetV2"]


class Stem(nn.Module):
    """Stride 4: two paths over padded 2x2 windows, joined."""

    def __init__(self, middle: int, outputs: int, *, affine: bool) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int, kernel: int, stride: int = 1) -> ConvNorm:
            return ConvNorm(
                inputs, outputs, kernel, stride=stride, activation="relu", affine=affine
            )

        self.stem1 = layer(3, middle, 3, 2)
        self.stem2a = layer(middle, middle // 2, 2)
        self.stem2b = layer(middle // 2, middle, 2)
        self.stem3 = layer(middle * 2, middle, 3, 2)
        self.stem4 = layer(middle, outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, outputs, H/4, W/4)."""
        maps = F.pad(self.stem1(images), (0, 1, 0, 1))
        fine = self.stem2b(F.pad(self.stem2a(maps), (0, 1, 0, 1)))
        pooled = F.max_pool2d(maps, 2, 1, ceil_mode=True)
        joined: Tensor = self.stem4(self.stem3(torch.cat((pooled, fine), 1)))
        return joined


class LightConv(nn.Module):
    """A pointwise convolution without activation, then a depthwise one with it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, affine: bool) -> None:
        super().__init__()
        self.conv1 = ConvNorm(inputs, outputs, 1)
        self.conv2 = ConvNorm(
            outputs, outputs, kernel, groups=outputs, activation="relu", affine=affine
        )

    def forward(self, maps: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H, W)."""
        output: Tensor = self.conv2(self.conv1(maps))
        return output


class Block(nn.Module):
    """A chain of layers whose every output is kept, concatenated and squeezed."""

    def __init__(self, stage: Stage, inputs: int, *, residual: bool, affine: bool) -> None:
        super().__init__()
        self.residual = residual
        self.layers = nn.ModuleList()
        for index in range(stage.layers):
            width = inputs if index == 0 else stage.middle
            self.layers.append(
                LightConv(width, stage.middle, stage.kernel, affine=affine)
                if stage.light
                else ConvNorm(width, stage.middle, stage.kernel, activation="relu", affine=affine)
            )
        total = inputs + stage.layers * stage.middle
        half = stage.outputs // 2
        self.aggregation = nn.Sequential(
            ConvNorm(total, half, 1, activation="relu", affine=affine),
            ConvNorm(half, stage.outputs, 1, activation="relu", affine=affine),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H, W)."""
        kept = [maps]
        for layer in self.layers:
            kept.append(layer(kept[-1]))
        joined: Tensor = self.aggregation(torch.cat(kept, 1))
        return joined + maps if self.residual else joined


class HGNetV2(nn.Module):
    """Backbone that returns the maps of its last `levels` stages, finest first."""

    def __init__(self, spec: HGNetV2Spec, *, affine: bool, levels: int) -> None:
        super().__init__()
        self.levels = levels
        self.stem = Stem(*spec.stem, affine=affine)
        self.stages = nn.ModuleList(self._stage(stage, affine=affine) for stage in spec.stages)

    @staticmethod
    def _stage(stage: Stage, *, affine: bool) -> nn.ModuleDict:
        parts = nn.ModuleDict()
        if stage.downsample:
            parts["downsample"] = ConvNorm(
                stage.inputs, stage.inputs, 3, stride=2, groups=stage.inputs
            )
        parts["blocks"] = nn.Sequential(
            *(
                Block(
                    stage,
                    stage.inputs if index == 0 else stage.outputs,
                    residual=index > 0,
                    affine=affine,
                )
                for index in range(stage.blocks)
            )
        )
        return parts

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) to maps of stride 4, 8, 16, 32, of which the last `levels` are returned."""
        maps = self.stem(images)
        outputs = []
        for stage in self.stages:
            for part in stage.values():  # type: ignore[operator]  # a ModuleDict
                maps = part(maps)
            outputs.append(maps)
        return outputs[-self.levels :]
