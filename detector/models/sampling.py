"""Bilinear sampling from several maps at once, the core of deformable attention.

Two ways to the same numbers. `grid_sample` is torch's, for accelerators and for export. On a CPU
with MKL the weighted sum over all sampled points is one product with a sparse matrix, a row for
each query and head and four columns for each point: about three times as fast, forward and back.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor
from torch.autograd.function import once_differentiable

from detector.boxes import full

__all__ = ["sample", "sample_by_grid", "sample_by_matrix"]

Shapes = Sequence[tuple[int, int]]


def _prepare_sparse() -> bool:
    """Whether torch's sparse products run here; says torch's one-time notices about them away."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _csr(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1))
    return True


def _csr(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


_HAS_MKL = _prepare_sparse()


def sample(
    value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor, points: Sequence[int]
) -> Tensor:
    """Weighted sum of bilinear samples from all levels, zero outside the maps.

    Args:
        value: (B, S, heads, C), the tokens of all levels, row by row, finest level first.
        shapes: (height, width) of each level; their products sum to S.
        locations: (B, Q, heads, P, 2) as fractions x, y of the image; P = sum(points).
        weights: (B, Q, heads, P).
        points: how many of the P belong to each level.

    Returns:
        (B, Q, heads * C).
    """
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None  # noqa: SLF001 - torch.jit.is_tracing() is not typed
    method = (
        sample_by_matrix
        if _HAS_MKL and value.device.type == "cpu" and not traced
        else sample_by_grid
    )
    return method(value, shapes, locations, weights, points)


def sample_by_grid(
    value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor, points: Sequence[int]
) -> Tensor:
    """`sample` with one `grid_sample` a level."""
    batch, queries, heads, _, _ = locations.shape
    sizes = [height * width for height, width in shapes]
    grid = (2 * locations - 1).to(value.dtype).transpose(1, 2).flatten(0, 1)
    levels = torch.split(value.permute(0, 2, 3, 1).flatten(0, 1), sizes, 2)
    sampled = [
        F.grid_sample(level.reshape(batch * heads, -1, height, width), part, align_corners=False)
        for level, (height, width), part in zip(
            levels, shapes, torch.split(grid, list(points), 2), strict=True
        )
    ]
    weights = weights.to(value.dtype).transpose(1, 2).flatten(0, 1)
    mixed = torch.cat(sampled, 3).mul(weights[:, None]).sum(3)
    return mixed.view(batch, -1, queries).transpose(1, 2)


def sample_by_matrix(
    value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor, points: Sequence[int]
) -> Tensor:
    """`sample` as a sparse matrix times the tokens; on a CPU only."""
    batch, _, heads, channels = value.shape
    queries = locations.shape[1]
    rows = _pad(full(value), shapes).reshape(-1, channels)
    with torch.autocast("cpu", enabled=False):  # there is no sparse product in half precision
        mixed: Tensor = _SparseSample.apply(  # type: ignore[no-untyped-call]
            rows, full(locations), full(weights), tuple(shapes), tuple(points)
        )
    return mixed.view(batch, queries, heads * channels).to(value.dtype)


def _pad(value: Tensor, shapes: Shapes) -> Tensor:
    """(B, S, heads, C) with a border of zeros around each level, so that no corner lies outside."""
    batch, _, heads, channels = value.shape
    levels = [
        F.pad(level.reshape(batch, *shape, heads, channels), (0, 0, 0, 0, 1, 1, 1, 1))
        for level, shape in zip(
            torch.split(value, [height * width for height, width in shapes], 1), shapes, strict=True
        )
    ]
    return torch.cat([level.flatten(1, 2) for level in levels], 1)


@lru_cache(maxsize=32)
def _geometry(
    shapes: tuple[tuple[int, int], ...], points: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of the P points its level's extent (P, 2), padded width and first padded token (P,)."""
    sizes = [(height + 2) * (width + 2) for height, width in shapes]
    starts = [sum(sizes[:level]) for level in range(len(shapes))]
    counts = torch.tensor(points)
    with torch.inference_mode(mode=False):
        extent = torch.tensor([(width, height) for height, width in shapes], dtype=dtype)
        wide = torch.tensor([width + 2 for _, width in shapes], dtype=torch.int32)
        first = torch.tensor(starts, dtype=torch.int32)
        return tuple(part.repeat_interleave(counts, 0) for part in (extent, wide, first))  # type: ignore[return-value]


class _SparseSample(torch.autograd.Function):
    """Rows of padded tokens (R, C), locations and weights to (B * Q * heads, C)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        locations: Tensor,
        weights: Tensor,
        shapes: tuple[tuple[int, int], ...],
        points: tuple[int, ...],
    ) -> Tensor:
        batch, queries, heads, count = weights.shape
        extent, wide, first = _geometry(shapes, points, locations.dtype)
        # In cells of the padded map, whose border is cell 0; beyond the border all is zero.
        raw = locations * extent + 0.5
        cells = raw.clamp(min=0).minimum(extent + 1)
        # NaN must not become an address; it still reaches the result through the fractions.
        low = cells.floor().minimum(extent).nan_to_num(0.0)
        across, down = (cells - low).unbind(-1)
        column, row = low.int().unbind(-1)
        image = torch.arange(batch, dtype=torch.int32)[:, None, None, None]
        head = torch.arange(heads, dtype=torch.int32)[:, None]
        corner = row * wide + column + first + image * (len(rows) // batch // heads)
        columns = torch.stack(
            [(corner + step) * heads + head for step in (0, 1, wide, wide + 1)], -2
        )
        right = weights * across
        left = weights - right
        low_right, low_left = right * down, left * down
        values = torch.stack((left - low_left, right - low_right, low_left, low_right), -2)

        height = batch * queries * heads
        starts = torch.arange(0, height * 4 * count + 1, 4 * count, dtype=torch.int32)
        matrix = _csr(starts, columns.flatten(), values.flatten(), (height, len(rows)))
        ctx.save_for_backward(rows, weights, across, down, raw == cells, matrix)
        ctx.extent = extent
        product: Tensor = matrix @ rows
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, across, down, inside, matrix = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = _transposed(matrix) @ grad if ctx.needs_input_grad[0] else None
        products = torch.sparse.sampled_addmm(matrix, grad, rows.t(), beta=0.0).values()
        upper_left, upper_right, lower_left, lower_right = products.view(
            *weights.shape[:3], 4, -1
        ).unbind(-2)
        upper, lower = upper_right - upper_left, lower_right - lower_left
        at_top, at_bottom = upper_left + across * upper, lower_left + across * lower
        slope = at_bottom - at_top
        grad_weights = at_top + down * slope
        grad_cells = torch.stack((upper + down * (lower - upper), slope), -1) * weights[..., None]
        return grad_rows, grad_cells * inside * ctx.extent, grad_weights, None, None


def _transposed(matrix: Tensor) -> Tensor:
    """The transpose as a CSR matrix; scipy's counting sort is ten times as fast as torch's."""
    parts = matrix.values(), matrix.col_indices(), matrix.crow_indices()
    turned = sparse.csr_matrix(tuple(part.numpy() for part in parts), shape=matrix.shape).tocsc()
    return _csr(
        torch.from_numpy(turned.indptr),
        torch.from_numpy(turned.indices),
        torch.from_numpy(turned.data),
        (matrix.shape[1], matrix.shape[0]),
    )
