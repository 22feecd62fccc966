"""Sampling against a loop, both ways, at the borders and beyond, with gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from detector.models.attention import DeformableAttention
from detector.models.sampling import sample_by_grid, sample_by_matrix

SHAPES, POINTS = [(3, 4), (2, 1)], (2, 3)
WAYS = {"grid": sample_by_grid, "matrix": sample_by_matrix}


def inputs(seed: int = 0, *, queries: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(2, 14, 2, 3, generator=generator, dtype=torch.float64)
    locations = torch.rand(2, queries, 2, 5, 2, generator=generator, dtype=torch.float64)
    weights = torch.rand(2, queries, 2, 5, generator=generator, dtype=torch.float64)
    return value, locations * 1.6 - 0.3, weights.softmax(-1)


def by_loop(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    batch, queries, heads, _, _ = locations.shape
    output = torch.zeros(batch, queries, heads, value.shape[3], dtype=value.dtype)
    for image in range(batch):
        for query in range(queries):
            for head in range(heads):
                point, start = 0, 0
                for (height, width), count in zip(SHAPES, POINTS, strict=True):
                    for _ in range(count):
                        x, y = locations[image, query, head, point].tolist()
                        x, y = x * width - 0.5, y * height - 0.5
                        for row in (math.floor(y), math.floor(y) + 1):
                            for column in (math.floor(x), math.floor(x) + 1):
                                if 0 <= row < height and 0 <= column < width:
                                    share = (1 - abs(x - column)) * (1 - abs(y - row))
                                    token = value[image, start + row * width + column, head]
                                    weight = weights[image, query, head, point]
                                    output[image, query, head] += weight * share * token
                        point += 1
                    start += height * width
    return output.flatten(2)


@pytest.mark.parametrize("way", WAYS)
def test_equals_a_loop(way: str) -> None:
    value, locations, weights = inputs()
    found = WAYS[way](value, SHAPES, locations, weights, POINTS)
    torch.testing.assert_close(found, by_loop(value, locations, weights))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_pass_the_check(way: str) -> None:
    parts = [part.requires_grad_() for part in inputs(queries=1)]

    def function(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return WAYS[way](value, SHAPES, locations, weights, POINTS)

    assert torch.autograd.gradcheck(function, parts)


def test_both_ways_give_the_same_gradients() -> None:
    gradients = []
    for way in WAYS.values():
        parts = [part.requires_grad_() for part in inputs(1)]
        mixed = way(parts[0], SHAPES, parts[1], parts[2], POINTS)
        (mixed * torch.arange(mixed.numel()).view_as(mixed)).sum().backward()
        gradients.append([part.grad for part in parts])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("place", [-1e9, -0.5, 0.0, 1.0, 1.5, 1e9, math.inf, -math.inf])
def test_places_at_and_beyond_the_border(place: float) -> None:
    value, locations, weights = inputs()
    locations[..., 0] = place
    found = sample_by_matrix(value, SHAPES, locations, weights, POINTS)
    assert torch.isfinite(found).all()
    if math.isfinite(place) and abs(place) < 1e6:
        torch.testing.assert_close(found, by_loop(value, locations, weights))
    else:
        assert not found.any()


def test_a_location_that_is_no_number_shows_and_touches_nothing_else() -> None:
    value, locations, weights = inputs()
    expected = sample_by_matrix(value, SHAPES, locations, weights, POINTS)
    locations[0, 1, 0, 2, 1] = math.nan
    found = sample_by_matrix(value, SHAPES, locations, weights, POINTS)
    assert found[0, 1, :3].isnan().all()
    assert torch.equal(found[0, 1, 3:], expected[0, 1, 3:])
    assert torch.equal(found[1], expected[1])


def test_half_precision_keeps_its_type() -> None:
    value, locations, weights = (part.to(torch.bfloat16) for part in inputs())
    found = sample_by_matrix(value, SHAPES, locations, weights, POINTS)
    assert found.dtype == torch.bfloat16


def test_attention_starts_by_looking_around_the_box() -> None:
    attention = DeformableAttention(16, 4, (2, 3), project=False)
    offsets = attention.sampling_offsets.bias.view(4, 5, 2)
    assert offsets[0, 0].tolist() == [1, 0]
    torch.testing.assert_close(offsets[1, 4], torch.tensor([0.0, 3.0]), atol=1e-6, rtol=0)
