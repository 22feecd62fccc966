"""Bipartite matching of queries and boxes, for all layers of a batch at once.

One cost tensor on the device, one copy to the host, one assignment a layer and image there
(scipy), index arrays back. Pure: no state, no random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from detector.boxes import cxcywh_to_xyxy, full, pairwise_giou
from detector.targets import Targets

__all__ = [
    "CostWeights",
    "Matched",
    "Pairs",
    "assign",
    "match",
    "matching_cost",
    "to_pairs",
    "union",
]

Indices = npt.NDArray[np.int64]

# Stands for NaN and infinity: far above any real cost, small enough to keep the others' digits.
_FORBIDDEN = 1e6


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Weights of the matching cost and the focal parameters of its class part (DETR's)."""

    classes: float = 2.0
    l1: float = 5.0
    giou: float = 2.0
    alpha: float = 0.25
    gamma: float = 2.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """N matched (layer, image, query, target) quadruples, four (N,) int64 tensors."""

    layer: Tensor
    image: Tensor
    query: Tensor
    target: Tensor


def matching_cost(
    logits: Tensor, boxes: Tensor, targets: Targets, *, weights: CostWeights | None = None
) -> Tensor:
    """Cost of giving each target to each query.

    Args:
        logits: (K, B, Q, C), K layers.
        boxes: (K, B, Q, 4) centre and size.
        targets: of B images, padded to M.
        weights: DETR's published ones by default.

    Returns:
        (K, B, Q, M); NaN and infinities are replaced by a large finite cost.
    """
    weights = weights or CostWeights()
    chosen = targets.labels[None, :, None].expand(*logits.shape[:3], -1)
    scores = full(logits.gather(3, chosen)).sigmoid()
    positive = weights.alpha * (1 - scores) ** weights.gamma * -(scores + 1e-8).log()
    negative = (1 - weights.alpha) * scores**weights.gamma * -(1 - scores + 1e-8).log()
    boxes, wanted = full(boxes), targets.boxes.to(full(boxes).dtype)[None]
    l1 = torch.cdist(boxes, wanted.expand(len(boxes), -1, -1, -1), p=1)
    overlap = pairwise_giou(cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(wanted))
    cost = weights.classes * (positive - negative) + weights.l1 * l1 - weights.giou * overlap
    return torch.nan_to_num(cost, nan=_FORBIDDEN, posinf=_FORBIDDEN, neginf=_FORBIDDEN)


@dataclass(frozen=True, slots=True)
class Matched:
    """A batch's assignment, on the host.

    Attributes:
        layers: K arrays (n, 3) of image, query, target; min(Q, count) rows an image.
        counts: (B,) real targets an image.
    """

    layers: list[Indices]
    counts: Indices


def assign(cost: Tensor, counts: Tensor) -> Matched:
    """Cheapest one-to-one assignment of every layer and image.

    Args:
        cost: (K, B, Q, M).
        counts: (B,) real targets an image.
    """
    layers, batch, queries, width = cost.shape
    # Counts ride along: one copy, and so one wait, a step.
    flat = torch.cat((cost.flatten(), counts.to(cost.dtype))).cpu().numpy()
    table = flat[:-batch].reshape(layers, batch, queries, width)
    sizes = flat[-batch:].astype(np.int64)
    matched = []
    for layer in table:
        rows = [np.empty((0, 3), np.int64)]
        for image, size in enumerate(sizes):
            if size:
                query, target = linear_sum_assignment(layer[image, :, :size])
                rows.append(np.stack((np.full_like(query, image), query, target), 1))
        matched.append(np.concatenate(rows))
    return Matched(matched, sizes)


def union(matched: list[Indices]) -> Indices:
    """All layers' matches as one: a query takes the target most layers gave it.

    D-FINE's global optimal localisation matching (arXiv:2410.13842, section 4.2). Ties go to the
    target that comes first. Rows of the (n, 3) result are sorted by image, then query.
    """
    pairs, votes = np.unique(np.concatenate(matched), axis=0, return_counts=True)
    order = np.lexsort((pairs[:, 2], -votes, pairs[:, 1], pairs[:, 0]))
    pairs = pairs[order]
    first = np.ones(len(pairs), bool)
    first[1:] = (pairs[1:, :2] != pairs[:-1, :2]).any(1)
    chosen: Indices = pairs[first]
    return chosen


def to_pairs(matched: list[Indices], device: torch.device) -> Pairs:
    """The layers' (n, 3) arrays as one flat set of pairs on the device."""
    layer = np.concatenate([np.full(len(rows), index) for index, rows in enumerate(matched)])
    table = np.concatenate((layer[:, None], np.concatenate(matched)), 1).T.astype(np.int64)
    return Pairs(*torch.from_numpy(np.ascontiguousarray(table)).to(device).unbind())


@torch.no_grad()
def match(logits: Tensor, boxes: Tensor, targets: Targets) -> Matched:
    """`matching_cost` and `assign` in one call."""
    return assign(matching_cost(logits, boxes, targets), targets.counts)
