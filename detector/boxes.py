"""Box arithmetic: formats, overlaps, and the fine-grained distribution over edge offsets.

Every function keeps float32 and float64 as they come and computes half precision in float32
(`full`), whatever autocast says. Boxes are (..., 4); nothing here loops over boxes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = [
    "bin_values",
    "box_to_bins",
    "box_to_distance",
    "cxcywh_to_xyxy",
    "distance_to_box",
    "full",
    "giou",
    "inverse_sigmoid",
    "iou",
    "pairwise_giou",
    "xyxy_to_cxcywh",
]


def full(values: Tensor) -> Tensor:
    """The same values in at least float32."""
    return values.float() if values.dtype in {torch.float16, torch.bfloat16} else values


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """(..., 4) centre and size to corners."""
    centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
    return torch.cat((centre - half, centre + half), -1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """(..., 4) corners to centre and size."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat(((low + high) * 0.5, high - low), -1)


def inverse_sigmoid(values: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Logits of probabilities, finite at 0 and 1: both tails are cut at `eps`.

    In float16 `1 - 1e-5` rounds to 1, so half precision is lifted first.
    """
    values = full(values).clamp(0, 1)
    return torch.log(values.clamp(min=eps) / (1 - values).clamp(min=eps))


def _overlap(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection and union areas of broadcastable (..., 4) corner boxes."""
    width = torch.minimum(first[..., 2], second[..., 2]) - torch.maximum(
        first[..., 0], second[..., 0]
    )
    height = torch.minimum(first[..., 3], second[..., 3]) - torch.maximum(
        first[..., 1], second[..., 1]
    )
    inter = width.clamp(min=0) * height.clamp(min=0)
    area_first = (first[..., 2] - first[..., 0]) * (first[..., 3] - first[..., 1])
    area_second = (second[..., 2] - second[..., 0]) * (second[..., 3] - second[..., 1])
    return inter, area_first + area_second - inter


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """`numerator / denominator`, and 0 where an area is 0 (two boxes without extent)."""
    empty = denominator == 0
    return numerator / denominator.masked_fill(empty, 1) * ~empty


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of broadcastable (..., 4) corner boxes, elementwise: (...)."""
    return _divide(*_overlap(full(first), full(second)))


def giou(first: Tensor, second: Tensor) -> Tensor:
    """Generalised IoU (arXiv:1902.09630) of broadcastable corner boxes, elementwise, in (-1, 1]."""
    first, second = full(first), full(second)
    inter, union = _overlap(first, second)
    width = torch.maximum(first[..., 2], second[..., 2]) - torch.minimum(
        first[..., 0], second[..., 0]
    )
    height = torch.maximum(first[..., 3], second[..., 3]) - torch.minimum(
        first[..., 1], second[..., 1]
    )
    hull = width * height
    return _divide(inter, union) - _divide(hull - union, hull)


def pairwise_giou(first: Tensor, second: Tensor) -> Tensor:
    """GIoU of every (..., N, 4) with every (..., M, 4) corner box: (..., N, M)."""
    return giou(first[..., :, None, :], second[..., None, :, :])


@lru_cache(maxsize=64)
def _bin_values(
    bins: int, up: float, reg_scale: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    bound = abs(up) * abs(reg_scale)
    step = (bound + 1) ** (2 / (bins - 2))
    right = [step**i - 1 for i in range(1, bins // 2)]
    values = [-2 * bound, *(-value for value in reversed(right)), 0.0, *right, 2 * bound]
    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype, device=device)


def bin_values(
    *, bins: int, up: float, reg_scale: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The non-uniform weighting function W(n) of D-FINE (arXiv:2410.13842, eq. 3): (bins + 1,).

    Steps are fine around zero and coarse towards the ends; the two end values are twice the bound.
    """
    return _bin_values(bins, up, reg_scale, device, dtype)


def distance_to_box(reference: Tensor, distance: Tensor, *, reg_scale: float) -> Tensor:
    """Move the four edges of a reference box.

    Args:
        reference: (..., 4) centre and size.
        distance: (..., 4) offsets left, top, right, bottom in units of size / `reg_scale`.
        reg_scale: half of it is the distance of an unmoved edge.

    Returns:
        (..., 4) centre and size.
    """
    centre, unit = reference[..., :2], reference[..., 2:] / reg_scale
    low = centre - (0.5 * reg_scale + distance[..., :2]) * unit
    high = centre + (0.5 * reg_scale + distance[..., 2:]) * unit
    return xyxy_to_cxcywh(torch.cat((low, high), -1))


def box_to_distance(reference: Tensor, corners: Tensor, *, reg_scale: float) -> Tensor:
    """The inverse of `distance_to_box`: (..., 4) offsets that reach corner boxes `corners`."""
    centre, unit = reference[..., :2], reference[..., 2:] / reg_scale + 1e-16
    low = (centre - corners[..., :2]) / unit
    high = (corners[..., 2:] - centre) / unit
    return torch.cat((low, high), -1) - 0.5 * reg_scale


def box_to_bins(distance: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Where an offset lies between two neighbouring bins.

    Args:
        distance: (...) offsets.
        values: (bins + 1,) ascending values of the bins.

    Returns:
        (...) int64 left bin in [0, bins - 1] and (...) weight of the right bin in [0, 1]; offsets
        beyond the ends take the end bin whole.
    """
    left = torch.searchsorted(values, distance.contiguous(), right=True) - 1
    left = left.clamp(0, len(values) - 2)
    low, high = values[left], values[left + 1]
    return left, ((distance - low) / (high - low)).clamp(0, 1)
