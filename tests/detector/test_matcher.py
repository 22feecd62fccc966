"""Matching: the cheapest assignment, for batches, whatever the costs are."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from detector.matcher import assign, match, matching_cost, union
from detector.targets import Targets


def scene(
    layers: int, counts: tuple[int, ...], queries: int, classes: int = 4, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, Targets]:
    generator = torch.Generator().manual_seed(seed)
    batch = len(counts)
    logits = torch.randn(layers, batch, queries, classes, generator=generator)
    boxes = torch.rand(layers, batch, queries, 4, generator=generator) * 0.5 + 0.1
    wanted = [torch.rand(count, 4, generator=generator) * 0.5 + 0.1 for count in counts]
    labels = [torch.randint(classes, (count,), generator=generator) for count in counts]
    return logits, boxes, Targets.pad(wanted, labels)


def test_assignment_is_the_cheapest_of_all() -> None:
    logits, boxes, targets = scene(2, (3, 1), 5)
    cost = matching_cost(logits, boxes, targets)
    for layer, rows in enumerate(assign(cost, targets.counts).layers):
        for image, count in enumerate((3, 1)):
            table = cost[layer, image, :, :count]
            best = min(
                sum(float(table[query, target]) for target, query in enumerate(choice))
                for choice in permutations(range(5), count)
            )
            own = rows[rows[:, 0] == image]
            assert len(own) == count
            assert sum(float(table[q, t]) for _, q, t in own) == pytest.approx(best)


def test_cost_equals_the_published_formula() -> None:
    logits, boxes, targets = scene(1, (2,), 3)
    cost = matching_cost(logits.double(), boxes.double(), targets)
    from tests.detector.test_boxes import plain_giou

    def corners(box: list[float]) -> list[float]:
        x, y, w, h = box
        return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]

    for query in range(3):
        for target in range(2):
            label = int(targets.labels[0, target])
            p = float(logits.double()[0, 0, query, label].sigmoid())
            positive = 0.25 * (1 - p) ** 2 * -np.log(p + 1e-8)
            negative = 0.75 * p**2 * -np.log(1 - p + 1e-8)
            found = boxes.double()[0, 0, query].tolist()
            wanted = targets.boxes.double()[0, target].tolist()
            l1 = sum(abs(a - b) for a, b in zip(found, wanted, strict=True))
            giou = plain_giou(corners(found), corners(wanted))[1]
            expected = 2 * (positive - negative) + 5 * l1 - 2 * giou
            assert float(cost[0, 0, query, target]) == pytest.approx(expected, abs=1e-9)


def test_a_batch_is_matched_as_its_images_are() -> None:
    logits, boxes, targets = scene(3, (4, 0, 2), 6)
    together = match(logits, boxes, targets).layers
    for image in range(3):
        alone = Targets(*(part[image : image + 1] for part in targets))
        single = match(logits[:, image : image + 1], boxes[:, image : image + 1], alone).layers
        for whole, part in zip(together, single, strict=True):
            own = whole[whole[:, 0] == image]
            assert own[:, 1:].tolist() == part[:, 1:].tolist()


def test_order_of_the_queries_does_not_matter() -> None:
    logits, boxes, targets = scene(1, (4,), 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    first = match(logits, boxes, targets).layers[0]
    second = match(logits[:, :, order], boxes[:, :, order], targets).layers[0]
    assert {(int(order[q]), t) for _, q, t in second} == {(q, t) for _, q, t in first.tolist()}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_query_without_a_finite_cost_is_taken_last(value: float) -> None:
    logits, boxes, targets = scene(1, (3,), 5)
    boxes[0, 0, :2] = value
    matched = match(logits, boxes, targets).layers[0]
    assert len(matched) == 3
    assert sorted(matched[:, 1].tolist()) == [2, 3, 4]
    boxes[:] = value
    assert len(match(logits, boxes, targets).layers[0]) == 3


def test_no_targets_and_more_targets_than_queries() -> None:
    logits, boxes, targets = scene(2, (0, 0), 5)
    assert [len(rows) for rows in match(logits, boxes, targets).layers] == [0, 0]
    logits, boxes, targets = scene(1, (7, 0), 4)
    rows = match(logits, boxes, targets).layers[0]
    assert len(rows) == 4
    assert len(set(rows[:, 1])) == len(set(rows[:, 2])) == 4


def test_half_precision_at_its_ends_matches() -> None:
    logits, boxes, targets = scene(1, (3,), 5)
    logits = (logits * 1e5).clamp(-65504, 65504).half()
    cost = matching_cost(logits, boxes.half(), targets)
    assert cost.dtype == torch.float32
    assert torch.isfinite(cost).all()


def test_union_takes_the_target_most_layers_gave() -> None:
    layers = [
        np.array([[0, 1, 0], [0, 2, 1]]),
        np.array([[0, 1, 0], [0, 2, 2]]),
        np.array([[0, 1, 3], [0, 2, 2], [1, 5, 0]]),
    ]
    assert union(layers).tolist() == [[0, 1, 0], [0, 2, 2], [1, 5, 0]]


def test_union_of_nothing_is_nothing() -> None:
    assert union([np.empty((0, 3), np.int64)] * 2).shape == (0, 3)
