"""Attention: self-attention with packed projections, and multi-scale deformable attention.

Owns tensors only; masks come from the denoising part, reference boxes from the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.models.sampling import sample

__all__ = ["DeformableAttention", "SelfAttention"]


class SelfAttention(nn.Module):
    """Multi-head self-attention; positions are added to queries and keys, never to values.

    Parameters are named and packed as in `nn.MultiheadAttention`: two matrix products instead of
    three.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        self.reset()

    def reset(self) -> None:
        """Start as small as the linear layers around it."""
        nn.init.normal_(self.in_proj_weight, std=0.01)
        nn.init.zeros_(self.in_proj_bias)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            tokens: (B, N, dim).
            positions: (B or 1, N, dim).
            mask: (N, N), added to the attention's logits.

        Returns:
            (B, N, dim).
        """
        batch, count, dim = tokens.shape
        weight, bias = self.in_proj_weight, self.in_proj_bias
        pair = F.linear(tokens + positions, weight[: 2 * dim], bias[: 2 * dim])
        values = F.linear(tokens, weight[2 * dim :], bias[2 * dim :])
        query, key = pair.view(batch, count, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        values = values.view(batch, count, self.heads, -1).transpose(1, 2)
        if mask is not None:
            mask = mask.to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, values, attn_mask=mask)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(batch, count, dim))
        return output


class DeformableAttention(nn.Module):
    """Each query samples a few points around its box on every level (arXiv:2010.04159).

    Args:
        dim: width of queries and memory.
        heads: attention heads.
        points: sampled points a head takes on each level.
        project: project values and output as RT-DETR does; D-FINE leaves both out.
    """

    offset_scale = 0.5

    def __init__(self, dim: int, heads: int, points: Sequence[int], *, project: bool) -> None:
        super().__init__()
        self.heads = heads
        self.points = tuple(points)
        total = heads * sum(points)
        self.sampling_offsets = nn.Linear(dim, total * 2)
        self.attention_weights = nn.Linear(dim, total)
        self.value_proj = nn.Linear(dim, dim) if project else None
        self.output_proj = nn.Linear(dim, dim) if project else None
        scale = torch.tensor([1 / count for count in points for _ in range(count)])
        self.register_buffer("point_scale", scale[:, None], persistent=False)
        self.point_scale: Tensor
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Heads look in evenly spread directions, the n-th point n steps out."""
        theta = torch.arange(self.heads) * (2 * math.pi / self.heads)
        direction = torch.stack((theta.cos(), theta.sin()), -1)
        direction = direction / direction.abs().max(-1, keepdim=True).values
        steps = torch.cat([torch.arange(1, count + 1) for count in self.points])
        self.sampling_offsets.bias.copy_((direction[:, None] * steps[:, None]).flatten())
        nn.init.zeros_(self.sampling_offsets.weight)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for layer in (self.value_proj, self.output_proj):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(
        self,
        queries: Tensor,
        references: Tensor,
        memory: Tensor,
        shapes: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Attend.

        Args:
            queries: (B, Q, dim).
            references: (B, Q, 4) boxes, centre and size as fractions of the image.
            memory: (B, S, dim).
            shapes: (height, width) of the levels in `memory`.

        Returns:
            (B, Q, dim).
        """
        batch, count, _ = queries.shape
        value = memory if self.value_proj is None else self.value_proj(memory)
        value = value.view(batch, -1, self.heads, value.shape[-1] // self.heads)
        offsets = self.sampling_offsets(queries).view(batch, count, self.heads, -1, 2)
        weights = self.attention_weights(queries).view(batch, count, self.heads, -1).softmax(-1)
        boxes = references[:, :, None, None]
        offsets = offsets * self.point_scale * self.offset_scale * boxes[..., 2:]
        mixed = sample(value, shapes, boxes[..., :2] + offsets, weights, self.points)
        return mixed if self.output_proj is None else self.output_proj(mixed)
