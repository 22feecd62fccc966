"""The hybrid encoder: attention within the coarsest level, then fusion down and up the levels.

One class for both families. D-FINE fuses with RepNCSPELAN4 and shrinks with SCDown; RT-DETR fuses
with CSPRepLayer and shrinks with one convolution (arXiv:2304.08069, figure 4).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.models.attention import SelfAttention
from detector.models.blocks import ConvNorm, to_tokens
from detector.models.specs import DetectorSpec

__all__ = ["HybridEncoder"]


@lru_cache(maxsize=32)
def sine_positions(
    height: int, width: int, dim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """(1, height * width, dim) sine and cosine of y, then of x, at dim / 4 frequencies."""
    with torch.inference_mode(mode=False):
        omega = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
        rows = torch.arange(height, dtype=torch.float64).outer(omega)
        columns = torch.arange(width, dtype=torch.float64).outer(omega)
        vertical = torch.cat((rows.sin(), rows.cos()), 1)[:, None].expand(-1, width, -1)
        horizontal = torch.cat((columns.sin(), columns.cos()), 1)[None].expand(height, -1, -1)
        return torch.cat((vertical, horizontal), 2).reshape(1, -1, dim).to(device, dtype)


class AIFI(nn.Module):
    """One transformer layer over the tokens of a single level."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, ffn)
        self.linear2 = nn.Linear(ffn, dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, dim, H, W) in and out, contiguous."""
        dim, height, width = map(int, maps.shape[1:])  # fixed in an export
        tokens = to_tokens(maps)
        positions = sine_positions(height, width, dim, maps.device, maps.dtype)
        tokens = self.norm1(tokens + self.self_attn(tokens, positions))
        tokens = self.norm2(tokens + self.linear2(F.gelu(self.linear1(tokens))))
        # Contiguous, or DDP warns that gradient strides differ from its buckets' (pytorch#47163).
        merged: Tensor = tokens.transpose(1, 2).reshape(maps.shape).contiguous()
        return merged


class RepVGGBlock(nn.Module):
    """A 3x3 and a 1x1 convolution, summed, then SiLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(dim, dim, 3)
        self.conv2 = ConvNorm(dim, dim, 1)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, dim, H, W) in and out."""
        return F.silu(self.conv1(maps) + self.conv2(maps))


class CSPRepLayer(nn.Module):
    """Two 1x1 paths, one of them through RepVGG blocks, summed."""

    def __init__(self, inputs: int, hidden: int, outputs: int, blocks: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(inputs, hidden, 1, activation="silu")
        self.conv2 = ConvNorm(inputs, hidden, 1, activation="silu")
        self.bottlenecks = nn.Sequential(*(RepVGGBlock(hidden) for _ in range(blocks)))
        self.conv3 = ConvNorm(hidden, outputs, 1, activation="silu") if hidden != outputs else None

    def forward(self, maps: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H, W)."""
        joined: Tensor = self.bottlenecks(self.conv1(maps)) + self.conv2(maps)
        return joined if self.conv3 is None else self.conv3(joined)


class RepNCSPELAN4(nn.Module):
    """Split, two CSP stages in a row, everything concatenated (GELAN, arXiv:2402.13616)."""

    def __init__(self, dim: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.cv1 = ConvNorm(2 * dim, 2 * dim, 1, activation="silu")
        self.cv2 = self._stage(dim, hidden, blocks)
        self.cv3 = self._stage(hidden, hidden, blocks)
        self.cv4 = ConvNorm(2 * dim + 2 * hidden, dim, 1, activation="silu")

    @staticmethod
    def _stage(inputs: int, hidden: int, blocks: int) -> nn.Sequential:
        return nn.Sequential(
            CSPRepLayer(inputs, hidden, hidden, blocks),
            ConvNorm(hidden, hidden, 3, activation="silu"),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """(B, 2 dim, H, W) to (B, dim, H, W)."""
        whole = self.cv1(maps)
        first = self.cv2(whole[:, whole.shape[1] // 2 :])
        second = self.cv3(first)
        fused: Tensor = self.cv4(torch.cat((whole, first, second), 1))
        return fused


class SCDown(nn.Module):
    """Pointwise, then a depthwise convolution of stride 2, both without activation."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cv1 = ConvNorm(dim, dim, 1)
        self.cv2 = ConvNorm(dim, dim, 3, stride=2, groups=dim)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, dim, H, W) to (B, dim, H/2, W/2)."""
        output: Tensor = self.cv2(self.cv1(maps))
        return output


class HybridEncoder(nn.Module):
    """Projects the backbone's levels to one width, attends on the coarsest, fuses FPN and PAN."""

    def __init__(self, spec: DetectorSpec) -> None:
        super().__init__()
        dim, steps = spec.encoder_dim, len(spec.strides) - 1
        self.input_proj = nn.ModuleList(ConvNorm(width, dim, 1) for width in spec.channels)
        self.aifi = AIFI(dim, spec.heads, spec.encoder_ffn)
        self.lateral_convs = nn.ModuleList(
            ConvNorm(dim, dim, 1, activation="none" if spec.elan else "silu") for _ in range(steps)
        )
        self.fpn_blocks = nn.ModuleList(self._fusion(spec) for _ in range(steps))
        self.downsample_convs = nn.ModuleList(
            SCDown(dim) if spec.elan else ConvNorm(dim, dim, 3, stride=2, activation="silu")
            for _ in range(steps)
        )
        self.pan_blocks = nn.ModuleList(self._fusion(spec) for _ in range(steps))

    @staticmethod
    def _fusion(spec: DetectorSpec) -> nn.Module:
        dim = spec.encoder_dim
        if spec.elan:
            return RepNCSPELAN4(dim, round(spec.expansion * dim // 2), spec.blocks)
        return CSPRepLayer(2 * dim, int(spec.expansion * dim), dim, spec.blocks)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Backbone maps, finest first, to maps of one width at the same strides."""
        maps = [project(level) for project, level in zip(self.input_proj, features, strict=True)]
        maps[-1] = self.aifi(maps[-1])

        top = maps.pop()
        laterals: list[Tensor] = []
        for lateral, block in zip(self.lateral_convs, self.fpn_blocks, strict=True):
            top = lateral(top)
            laterals.append(top)
            finer = maps.pop()
            top = block(torch.cat((_enlarge(top, finer), finer), 1))

        outputs = [top]
        for down, block in zip(self.downsample_convs, self.pan_blocks, strict=True):
            outputs.append(block(torch.cat((down(outputs[-1]), laterals.pop()), 1)))
        return outputs


def _enlarge(coarse: Tensor, like: Tensor) -> Tensor:
    """Nearest neighbour to the finer level's size (twice as large where sides divide evenly)."""
    return F.interpolate(coarse, size=[int(side) for side in like.shape[-2:]], mode="nearest")
