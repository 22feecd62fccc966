"""The decoder: query selection, then layers that refine a box each.

With `spec.fdr` a layer refines a distribution over edge offsets (D-FINE, arXiv:2410.13842);
without it, the box's logits (RT-DETR). Box arithmetic runs in float32 under autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.boxes import bin_values, distance_to_box, full, inverse_sigmoid
from detector.models.attention import DeformableAttention, SelfAttention
from detector.models.blocks import MLP
from detector.models.specs import DetectorSpec

__all__ = ["Decoded", "Decoder", "QuerySelection", "Selected"]

Shapes = Sequence[tuple[int, int]]


@lru_cache(maxsize=32)
def anchors(
    shapes: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Logits of one square anchor a token, and which tokens are valid.

    Returns:
        (1, S, 4) logits, of which those near the border are as large as the type allows, and
        (1, S, 1) bool or None where every token is valid.
    """
    with torch.inference_mode(mode=False):
        levels = []
        for level, (height, width) in enumerate(shapes):
            y = (torch.arange(height, dtype=torch.float64) + 0.5) / height
            x = (torch.arange(width, dtype=torch.float64) + 0.5) / width
            side = torch.full((height, width), 0.05 * 2.0**level, dtype=torch.float64)
            centre = torch.meshgrid(y, x, indexing="ij")
            levels.append(torch.stack((centre[1], centre[0], side, side), -1).reshape(-1, 4))
        boxes = torch.cat(levels)[None]
        valid = ((boxes > 0.01) & (boxes < 0.99)).all(-1, keepdim=True)
        logits = torch.log(boxes / (1 - boxes)).to(dtype)
        logits = logits.masked_fill(~valid, torch.finfo(dtype).max)
        return logits.to(device), None if bool(valid.all()) else valid.to(device)


@dataclass(frozen=True, slots=True)
class Selected:
    """The encoder's best tokens: content (B, K, dim), references and their logits, and scores."""

    content: Tensor
    references: Tensor
    logits: Tensor

    @property
    def boxes(self) -> Tensor:
        """(B, K, 4) centre and size."""
        return self.references.sigmoid()


class QuerySelection(nn.Module):
    """Scores every token and turns the best ones into queries."""

    def __init__(self, dim: int, num_classes: int, num_queries: int) -> None:
        super().__init__()
        self.num_queries = num_queries
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.score_head = nn.Linear(dim, num_classes)
        self.box_head = MLP(dim, dim, 4, 3)

    def forward(self, memory: Tensor, shapes: Shapes) -> Selected:
        """(B, S, dim) memory to min(num_queries, S) queries an image."""
        dtype = full(memory).dtype
        prior, valid = anchors(tuple(shapes), memory.device, dtype)
        if valid is not None:
            memory = memory * valid
        tokens = self.norm(self.proj(memory))
        logits = self.score_head(tokens)
        count = min(self.num_queries, tokens.shape[1])
        chosen = logits.max(-1).values.topk(count, 1).indices[..., None]
        tokens = tokens.gather(1, chosen.expand(-1, -1, tokens.shape[-1]))
        prior = prior.expand(memory.shape[0], -1, -1).gather(1, chosen.expand(-1, -1, 4))
        logits = logits.gather(1, chosen.expand(-1, -1, logits.shape[-1]))
        return Selected(tokens.detach(), full(self.box_head(tokens)) + prior, full(logits))


class Gate(nn.Module):
    """Learns how much of the residual and of the update to keep."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * dim, 2 * dim)
        self.norm = nn.LayerNorm(dim)

    @torch.no_grad()
    def reset(self) -> None:
        """Start with both gates half open."""
        self.gate.weight.zero_()
        self.gate.bias.zero_()

    def forward(self, residual: Tensor, update: Tensor) -> Tensor:
        """Two (B, Q, dim) to one."""
        keep, take = self.gate(torch.cat((residual, update), -1)).sigmoid().chunk(2, -1)
        mixed: Tensor = self.norm(keep * residual + take * update)
        return mixed


class LQE(nn.Module):
    """Location quality estimator: a score's correction from how peaked the distributions are."""

    top = 4

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.reg_conf = MLP(4 * (self.top + 1), hidden, 1, 2)

    def reset(self) -> None:
        """Start without a correction."""
        self.reg_conf.zero_last()

    def forward(self, probabilities: Tensor) -> Tensor:
        """(B, Q, 4, bins + 1) probabilities to a (B, Q, 1) correction."""
        peaks = probabilities.topk(self.top, -1).values
        statistics = torch.cat((peaks, peaks.mean(-1, keepdim=True)), -1).flatten(2)
        correction: Tensor = self.reg_conf(statistics)
        return correction


class DecoderLayer(nn.Module):
    """Self-attention, deformable cross-attention, feed-forward; post-norm."""

    def __init__(self, spec: DetectorSpec) -> None:
        super().__init__()
        dim = spec.decoder_dim
        self.self_attn = SelfAttention(dim, spec.heads)
        self.norm1 = nn.LayerNorm(dim)
        self.cross_attn = DeformableAttention(dim, spec.heads, spec.points, project=not spec.fdr)
        self.gateway = Gate(dim) if spec.fdr else None
        self.norm2 = None if spec.fdr else nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, spec.decoder_ffn)
        self.linear2 = nn.Linear(spec.decoder_ffn, dim)
        self.norm3 = nn.LayerNorm(dim)

    def forward(
        self,
        queries: Tensor,
        positions: Tensor,
        references: Tensor,
        memory: Tensor,
        shapes: Shapes,
        mask: Tensor | None,
    ) -> Tensor:
        """(B, Q, dim) queries to (B, Q, dim); see `DeformableAttention` for the rest."""
        queries = self.norm1(queries + self.self_attn(queries, positions, mask))
        update = self.cross_attn(queries + positions, references, memory, shapes)
        if self.gateway is not None:
            queries = self.gateway(queries, update)
        elif self.norm2 is not None:
            queries = self.norm2(queries + update)
        queries = queries + self.linear2(F.relu(self.linear1(queries)))
        # The largest finite float16, so that an overflow in half precision stays a number.
        output: Tensor = self.norm3(queries.clamp(-65504, 65504))
        return output


@dataclass(frozen=True, slots=True)
class Decoded:
    """What the layers say, over all queries (denoising first); L is 1 in evaluation mode.

    Attributes:
        logits: (L, B, Q, C).
        boxes: (L, B, Q, 4) centre and size.
        corners: (L, B, Q, 4 * (bins + 1)) logits of the edges' distributions, D-FINE only.
        initial: (B, Q, 4) boxes that the distributions refine, detached, D-FINE only.
        pre_logits, pre_boxes: (B, Q, C) and (B, Q, 4) before the first refinement, D-FINE only.
    """

    logits: Tensor
    boxes: Tensor
    corners: Tensor | None = None
    initial: Tensor | None = None
    pre_logits: Tensor | None = None
    pre_boxes: Tensor | None = None


class Decoder(nn.Module):
    """Layers with a score head and a box head each."""

    def __init__(self, spec: DetectorSpec, num_classes: int) -> None:
        super().__init__()
        dim = spec.decoder_dim
        outputs = 4 * (spec.bins + 1) if spec.fdr else 4
        self.spec = spec
        self.query_pos_head = MLP(4, 2 * dim, dim, 2)
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(spec.layers))
        self.score_heads = nn.ModuleList(nn.Linear(dim, num_classes) for _ in range(spec.layers))
        self.box_heads = nn.ModuleList(MLP(dim, dim, outputs, 3) for _ in range(spec.layers))
        self.pre_box_head = MLP(dim, dim, 4, 3) if spec.fdr else None
        self.lqe_layers = nn.ModuleList(LQE() for _ in range(spec.layers if spec.fdr else 0))

    def reset(self) -> None:
        """Start with layers that leave the boxes where they are."""
        for head in self.box_heads:
            assert isinstance(head, MLP)
            head.zero_last()

    def forward(
        self,
        queries: Tensor,
        references: Tensor,
        memory: Tensor,
        shapes: Shapes,
        mask: Tensor | None = None,
    ) -> Decoded:
        """Refine.

        Args:
            queries: (B, Q, dim) content.
            references: (B, Q, 4) logits of boxes.
            memory: (B, S, dim) encoder tokens.
            shapes: (height, width) of the levels in `memory`.
            mask: (Q, Q) to add to self-attention's logits.
        """
        refine = self._refine_distribution if self.spec.fdr else self._refine_box
        return refine(queries, references.detach().sigmoid(), memory, shapes, mask)

    def _wanted(self, index: int) -> bool:
        """Whether this layer's scores are of use: all in training, the last one otherwise."""
        return self.training or index == len(self.layers) - 1

    def _refine_box(
        self,
        queries: Tensor,
        boxes: Tensor,
        memory: Tensor,
        shapes: Shapes,
        mask: Tensor | None,
    ) -> Decoded:
        scores: list[Tensor] = []
        refined: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            positions = self.query_pos_head(boxes)
            queries = layer(queries, positions, boxes, memory, shapes, mask)
            change = full(self.box_heads[index](queries))
            new = (change + inverse_sigmoid(boxes)).sigmoid()
            boxes = new.detach()
            if self._wanted(index):
                scores.append(full(self.score_heads[index](queries)))
                refined.append(new)
        return Decoded(torch.stack(scores), torch.stack(refined))

    def _refine_distribution(
        self,
        queries: Tensor,
        boxes: Tensor,
        memory: Tensor,
        shapes: Shapes,
        mask: Tensor | None,
    ) -> Decoded:
        spec = self.spec
        assert self.pre_box_head is not None
        values = bin_values(
            bins=spec.bins,
            up=spec.up,
            reg_scale=spec.reg_scale,
            device=boxes.device,
            dtype=boxes.dtype,
        )
        scores: list[Tensor] = []
        refined: list[Tensor] = []
        kept: list[Tensor] = []
        previous: Tensor | None = None
        corners: Tensor | None = None
        initial = pre_boxes = boxes
        pre_logits: Tensor | None = None
        for index, layer in enumerate(self.layers):
            positions = self.query_pos_head(boxes).clamp(-10, 10)
            queries = layer(queries, positions, boxes, memory, shapes, mask)
            if index == 0:
                pre_boxes = (full(self.pre_box_head(queries)) + inverse_sigmoid(boxes)).sigmoid()
                initial = pre_boxes.detach()
            change = self.box_heads[index](queries if previous is None else queries + previous)
            corners = full(change) if corners is None else full(change) + corners
            # One softmax serves the box and the quality estimate.
            probabilities = corners.reshape(*corners.shape[:-1], 4, -1).softmax(-1)
            new = distance_to_box(initial, probabilities @ values, reg_scale=spec.reg_scale)
            boxes, previous = new.detach(), queries.detach()
            if self._wanted(index):
                raw = full(self.score_heads[index](queries))
                pre_logits = raw if pre_logits is None else pre_logits
                scores.append(raw + full(self.lqe_layers[index](probabilities)))
                refined.append(new)
                kept.append(corners)
        return Decoded(
            torch.stack(scores),
            torch.stack(refined),
            torch.stack(kept),
            initial,
            pre_logits,
            pre_boxes,
        )
