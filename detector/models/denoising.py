"""Contrastive denoising (arXiv:2203.03605): noised ground truth as extra queries, in groups.

Owns the noise and the attention mask that keeps it from leaking. Noise comes from an explicit
generator on the CPU, so it is a pure function of the generator's seed on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from detector.boxes import cxcywh_to_xyxy, inverse_sigmoid, xyxy_to_cxcywh
from detector.targets import Targets

__all__ = ["Denoising", "NoisedQueries"]


@dataclass(frozen=True, slots=True)
class NoisedQueries:
    """What denoising adds in front of the matching queries.

    Attributes:
        content: (B, D, dim) noised class embeddings; D = groups * 2 * M.
        references: (B, D, 4) logits of noised boxes. In each group the first M rows are positives,
            one a row of the targets; the next M are negatives.
        groups: how many times each box is repeated.
    """

    content: Tensor
    references: Tensor
    groups: int

    def mask(self, matching: int) -> Tensor:
        """(D + matching, D + matching) to add to attention logits: 0, or -inf where hidden.

        Matching queries see no denoising query, and groups do not see each other.
        """
        count = self.content.shape[1]
        device = self.content.device
        group = torch.arange(count + matching, device=device) // (count // self.groups)
        group = group.clamp(max=self.groups)  # the matching queries are one more group
        hidden = (group[:, None] != group[None]) & (group[None] < self.groups)
        return torch.zeros(hidden.shape, device=device).masked_fill(hidden, -torch.inf)


class Denoising(nn.Module):
    """Draws noised copies of the targets.

    Args:
        num_classes: classes; row `num_classes` of the embedding is padding.
        dim: width of the queries.
        count: about how many positives to draw an image: each box is repeated
            max(1, count // M) times. 0 switches denoising off.
        label_noise: twice the share of labels that are replaced at random.
        box_noise: how far an edge moves, in halves of the box's side: positives up to 1 times
            this, negatives 1 to 2 times.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        count: int = 100,
        label_noise: float = 0.5,
        box_noise: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.count = count
        self.label_noise = label_noise
        self.box_noise = box_noise
        self.class_embed = nn.Embedding(num_classes + 1, dim, padding_idx=num_classes)

    def forward(
        self,
        targets: Targets,
        generator: torch.Generator | Sequence[torch.Generator] | None,
    ) -> NoisedQueries | None:
        """Noised queries for a batch, or None when there is nothing to noise.

        With one generator a picture, a picture's noise does not depend on its place in the batch.
        """
        rows = targets.boxes.shape[1]
        if self.count <= 0 or rows == 0:
            return None
        groups = max(1, self.count // rows)
        boxes = targets.boxes.repeat(1, 2 * groups, 1)
        labels = targets.labels.masked_fill(~targets.mask, self.num_classes)
        labels = labels.repeat(1, 2 * groups)
        negative = torch.arange(labels.shape[1], device=labels.device) // rows % 2

        uniform = _uniform((*labels.shape, 10), generator).to(labels.device)
        flip = (uniform[..., 0] < self.label_noise / 2) & (labels < self.num_classes)
        random_labels = (uniform[..., 1] * self.num_classes).long().clamp(max=self.num_classes - 1)
        labels = torch.where(flip, random_labels, labels)

        sign = (uniform[..., 2:6] < 0.5) * 2.0 - 1.0
        shift = (uniform[..., 6:] + negative[:, None]) * sign * self.box_noise
        half = boxes[..., 2:] * 0.5
        corners = (cxcywh_to_xyxy(boxes) + shift * half.repeat(1, 1, 2)).clamp(0, 1)
        references = inverse_sigmoid(xyxy_to_cxcywh(corners))
        return NoisedQueries(self.class_embed(labels), references, groups)


def _uniform(
    shape: tuple[int, ...], generator: torch.Generator | Sequence[torch.Generator] | None
) -> Tensor:
    """Random numbers in 0..1 on the CPU; from a sequence of generators, one for each first index."""
    if generator is None or isinstance(generator, torch.Generator):
        return torch.rand(shape, generator=generator)
    return torch.stack([torch.rand(shape[1:], generator=one) for one in generator])
