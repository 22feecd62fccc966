"""Box arithmetic against plain Python, its ends, and its gradients."""

from __future__ import annotations

import pytest
import torch

from detector import boxes as B


def plain_giou(a: list[float], b: list[float]) -> tuple[float, float]:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    inter = width * height
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    iou = inter / union if union else 0.0
    return iou, iou - ((hull - union) / hull if hull else 0.0)


CASES = {
    "same": ([0, 0, 1, 1], [0, 0, 1, 1], 1.0, 1.0),
    "disjoint": ([0, 0, 1, 1], [2, 0, 3, 1], 0.0, -1 / 3),
    "nested": ([0, 0, 4, 4], [1, 1, 3, 3], 0.25, 0.25),
    "touching": ([0, 0, 1, 1], [1, 0, 2, 1], 0.0, 0.0),
    "half": ([0, 0, 2, 2], [1, 0, 3, 2], 1 / 3, 1 / 3),
    "corner": ([0, 0, 2, 2], [1, 1, 3, 3], 1 / 7, 1 / 7 - 2 / 9),
    "a point": ([0, 0, 2, 2], [1, 1, 1, 1], 0.0, 0.0),
    "two points": ([1, 1, 1, 1], [1, 1, 1, 1], 0.0, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_overlaps_of_known_boxes(case: str) -> None:
    first, second, iou, giou = CASES[case]
    one, two = torch.tensor(first).double(), torch.tensor(second).double()
    assert float(B.iou(one, two)) == pytest.approx(iou)
    assert float(B.giou(one, two)) == pytest.approx(giou)


def test_overlaps_equal_plain_python() -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 200, 2, 2, generator=generator, dtype=torch.float64)
    first, second = (part.sort(1).values.flatten(1) for part in corners)
    expected = [plain_giou(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    torch.testing.assert_close(B.iou(first, second), torch.tensor(expected).double()[:, 0])
    torch.testing.assert_close(B.giou(first, second), torch.tensor(expected).double()[:, 1])
    assert (B.giou(first, second) > -1).all()
    pairwise = B.pairwise_giou(first[:5], second[:7])
    assert pairwise.shape == (5, 7)
    torch.testing.assert_close(pairwise[3, 6], B.giou(first[3], second[6]))


def test_formats_invert_each_other() -> None:
    boxes = torch.rand(50, 4, dtype=torch.float64)
    torch.testing.assert_close(B.xyxy_to_cxcywh(B.cxcywh_to_xyxy(boxes)), boxes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_inverse_sigmoid_is_finite_at_both_ends(dtype: torch.dtype) -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0], dtype=dtype)
    logits = B.inverse_sigmoid(values)
    assert torch.isfinite(logits).all()
    assert float(logits[2]) == 0
    assert float(logits[0]) == pytest.approx(-11.5129, abs=1e-3)
    assert float(logits[4]) == pytest.approx(11.5129, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_boxes_give_finite_overlaps(dtype: torch.dtype) -> None:
    ends = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [-65504, 0, 65504, 1]])
    ends = ends.to(dtype)
    for function in (B.iou, B.giou):
        assert torch.isfinite(function(ends[:, None], ends[None])).all()


def test_overlaps_pass_the_gradient_check() -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 6, 2, 2, generator=generator, dtype=torch.float64)
    first, second = (part.sort(1).values.flatten(1).requires_grad_() for part in corners)
    assert torch.autograd.gradcheck(B.giou, (first, second))
    assert torch.autograd.gradcheck(B.iou, (first, second))


def values(reg_scale: float = 4.0) -> torch.Tensor:
    return B.bin_values(
        bins=32, up=0.5, reg_scale=reg_scale, device=torch.device("cpu"), dtype=torch.float64
    )


def test_bins_are_symmetric_ascending_and_twice_the_bound_at_the_ends() -> None:
    found = values()
    assert found.shape == (33,)
    assert (found[1:] > found[:-1]).all()
    torch.testing.assert_close(found, -found.flip(0))
    assert found[16] == 0
    assert float(found[-1]) == pytest.approx(2 * 0.5 * 4)
    assert float(found[-2]) == pytest.approx((0.5 * 4 + 1) ** (2 / 30 * 15) - 1)


def test_bins_reproduce_any_distance_within_them_and_saturate_beyond() -> None:
    grid = values()
    wanted = torch.linspace(-4, 4, 401, dtype=torch.float64)
    left, weight = B.box_to_bins(wanted, grid)
    torch.testing.assert_close(grid[left] * (1 - weight) + grid[left + 1] * weight, wanted)
    left, weight = B.box_to_bins(torch.tensor([-9.0, 9.0]).double(), grid)
    assert left.tolist() == [0, 31]
    assert weight.tolist() == [0, 1]


def test_distances_invert_to_the_box() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.rand(100, 4, generator=generator, dtype=torch.float64) + 0.1
    wanted = torch.rand(100, 4, generator=generator, dtype=torch.float64) + 0.1
    distance = B.box_to_distance(reference, B.cxcywh_to_xyxy(wanted), reg_scale=4.0)
    torch.testing.assert_close(B.distance_to_box(reference, distance, reg_scale=4.0), wanted)
