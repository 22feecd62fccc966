"""Losses against transformers (RT-DETRv2) and against plain Python (D-FINE); ends and gradients."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from detector.boxes import bin_values
from detector.losses import Criterion, LossWeights
from detector.matcher import match, union
from detector.models.decoder import Decoded
from detector.models.detector import DetectorOutput
from detector.models.specs import SPECS
from detector.targets import Targets
from tests.detector.test_boxes import plain_giou

CLASSES = 3


def make_targets(*counts: int, seed: int = 0) -> Targets:
    generator = torch.Generator().manual_seed(seed)
    boxes = [torch.rand(count, 4, generator=generator) * 0.4 + 0.2 for count in counts]
    labels = [torch.randint(CLASSES, (count,), generator=generator) for count in counts]
    return Targets.pad(boxes, labels)


def make_output(
    counts: tuple[int, ...],
    *,
    fdr: bool,
    queries: int = 8,
    layers: int = 3,
    groups: int = 2,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
) -> DetectorOutput:
    generator = torch.Generator().manual_seed(seed)
    spec = SPECS["dfine_n" if fdr else "rtdetrv2_r18"]
    batch = len(counts)

    def logits(*shape: int) -> Tensor:
        values = torch.randn(*shape, CLASSES, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    def boxes(*shape: int) -> Tensor:
        values = torch.rand(*shape, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.2
        return values.to(dtype).requires_grad_()

    def decoded(count: int) -> Decoded:
        shape = (layers, batch, count)
        plain = logits(*shape), boxes(*shape)
        if not fdr:
            return Decoded(*plain)
        corners = torch.randn(*shape, 4 * 33, generator=generator, dtype=torch.float64)
        return Decoded(
            *plain,
            corners.to(dtype).requires_grad_(),
            boxes(*shape[1:]).detach(),
            logits(*shape[1:]),
            boxes(*shape[1:]),
        )

    rows = max(counts)
    return DetectorOutput(
        decoded(queries),
        logits(batch, queries),
        boxes(batch, queries),
        decoded(groups * 2 * rows) if rows and groups else None,
        groups if rows else 0,
        spec,
    )


# --- transformers' loss of RT-DETRv2 -------------------------------------------------------------


@pytest.mark.parametrize("counts", [(0, 1), (1, 3), (40, 0), (2, 5)])
@pytest.mark.parametrize("denoising", [True, False])
def test_rtdetr_total_equals_transformers(counts: tuple[int, ...], denoising: bool) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import RTDetrV2Config
    from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

    targets = make_targets(*counts)
    output = make_output(counts, fdr=False, queries=50, groups=2 if denoising else 0)
    labels = [
        {"class_labels": targets.labels[i, :n], "boxes": targets.boxes[i, :n].double()}
        for i, n in enumerate(counts)
    ]
    meta = None
    outputs_class = output.logits.transpose(0, 1)
    outputs_coord = output.boxes.transpose(0, 1)
    if output.denoised is not None:
        rows, groups = max(counts), output.groups
        start = torch.arange(groups)[:, None] * 2 * rows
        meta = {
            "dn_positive_idx": [(start + torch.arange(n)).flatten() for n in counts],
            "dn_num_group": groups,
            "dn_num_split": [groups * 2 * rows, 50],
        }
        outputs_class = torch.cat((output.denoised.logits.transpose(0, 1), outputs_class), 2)
        outputs_coord = torch.cat((output.denoised.boxes.transpose(0, 1), outputs_coord), 2)
    config = RTDetrV2Config(num_labels=CLASSES)
    total, _, _ = RTDetrForObjectDetectionLoss(
        outputs_class[:, -1],
        labels,
        torch.device("cpu"),
        outputs_coord[:, -1],
        config,
        outputs_class,
        outputs_coord,
        enc_topk_logits=output.encoder_logits,
        enc_topk_bboxes=output.encoder_boxes,
        denoising_meta_values=meta,
    )
    found = Criterion(CLASSES)(output, targets)["total"]
    assert found.item() == pytest.approx(total.item(), rel=1e-6)


# --- D-FINE in plain Python ----------------------------------------------------------------------


def corners_of(box: list[float]) -> list[float]:
    x, y, w, h = box
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def plain_classes(
    logits: list[list[float]], goals: dict[int, tuple[int, float]], loss: str
) -> float:
    """Summed VFL or MAL of one image and layer; `goals` maps a query to label and IoU."""
    total = 0.0
    for query, row in enumerate(logits):
        for label, logit in enumerate(row):
            p = 1 / (1 + math.exp(-logit))
            if query in goals and goals[query][0] == label:
                iou = goals[query][1]
                goal, weight = (iou, iou) if loss == "vfl" else (iou**1.5, 1.0)
            else:
                goal, weight = 0.0, (0.75 * p**2 if loss == "vfl" else p**1.5)
            total -= weight * (goal * math.log(p) + (1 - goal) * math.log(1 - p))
    return total


def plain_edges(
    box: list[float], wanted: list[float], grid: list[float], scale: float
) -> list[tuple[int, float]]:
    """For each edge the left bin and the right bin's weight."""
    x, y, w, h = box
    x1, y1, x2, y2 = corners_of(wanted)
    offsets = [
        (x - x1) / (w / scale) - scale / 2,
        (y - y1) / (h / scale) - scale / 2,
        (x2 - x) / (w / scale) - scale / 2,
        (y2 - y) / (h / scale) - scale / 2,
    ]
    edges = []
    for offset in offsets:
        if offset < grid[0]:
            edges.append((0, 0.0))
        elif offset >= grid[-1]:
            edges.append((31, 1.0))
        else:
            left = max(i for i in range(32) if grid[i] <= offset)
            edges.append((left, (offset - grid[left]) / (grid[left + 1] - grid[left])))
    return edges


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    norm = top + math.log(sum(math.exp(value - top) for value in row))
    return [value - norm for value in row]


def plain_dfine(output: DetectorOutput, targets: Targets, loss: str) -> dict[str, float]:
    """Every term, written with loops over layers, images, pairs, edges and bins."""
    spec = output.spec
    grid = bin_values(
        bins=32, up=0.5, reg_scale=4.0, device=torch.device("cpu"), dtype=torch.float64
    ).tolist()
    boxes_wanted, labels = targets.boxes.double().tolist(), targets.labels.tolist()
    counts = targets.counts.tolist()
    terms: dict[str, float] = {}

    def part(decoded: Decoded, layers, class_matches, box_matches, norm, box_norm, suffix) -> None:
        sums = dict.fromkeys(
            (f"loss_{loss}", "loss_bbox", "loss_giou", "loss_fgl", "loss_ddf"), 0.0
        )
        for (logits, boxes), matches in zip(layers, class_matches, strict=True):
            for image in range(len(counts)):
                goals = {}
                for i, query, target in matches:
                    if i == image:
                        iou, _ = plain_giou(
                            corners_of(boxes[image][query]), corners_of(boxes_wanted[image][target])
                        )
                        goals[query] = (labels[image][target], iou)
                sums[f"loss_{loss}"] += plain_classes(logits[image], goals, loss) / norm
            for image, query, target in box_matches:
                found, wanted = boxes[image][query], boxes_wanted[image][target]
                l1 = sum(abs(a - b) for a, b in zip(found, wanted, strict=True))
                sums["loss_bbox"] += 5 * l1 / box_norm
                _, giou = plain_giou(corners_of(found), corners_of(wanted))
                sums["loss_giou"] += 2 * (1 - giou) / box_norm
        corners = decoded.corners.tolist()
        initial = decoded.initial.tolist()
        count = len(corners)
        queries = len(corners[0][0])
        for layer in range(count):
            matched = {}
            boxes = decoded.boxes[layer].tolist()
            for image, query, target in box_matches:
                found, wanted = boxes[image][query], boxes_wanted[image][target]
                iou, _ = plain_giou(corners_of(found), corners_of(wanted))
                matched[image, query] = iou
                edges = plain_edges(initial[image][query], wanted, grid, spec.reg_scale)
                for edge, (left, right) in enumerate(edges):
                    row = log_softmax(corners[layer][image][query][33 * edge : 33 * edge + 33])
                    entropy = -(row[left] * (1 - right) + row[left + 1] * right)
                    sums["loss_fgl"] += 0.15 * entropy * iou / box_norm
            if layer == count - 1:
                continue
            positive, negative = [], []
            for image in range(len(counts)):
                for query in range(queries):
                    best = max(decoded.logits[-1, image, query].tolist())
                    weight = matched.get((image, query), 1 / (1 + math.exp(-best)))
                    for edge in range(4):
                        cut = slice(33 * edge, 33 * edge + 33)
                        own = log_softmax([v / 5 for v in corners[layer][image][query][cut]])
                        last = log_softmax([v / 5 for v in corners[-1][image][query][cut]])
                        kl = sum(math.exp(t) * (t - s) for t, s in zip(last, own, strict=True))
                        place = positive if (image, query) in matched else negative
                        place.append(weight * 25 * kl)
            up, down = balance
            mean_up = sum(positive) / len(positive) if positive else 0.0
            mean_down = sum(negative) / len(negative) if negative else 0.0
            sums["loss_ddf"] += 1.5 * (mean_up * up + mean_down * down) / (up + down)
        terms.update({name + suffix: value for name, value in sums.items()})

    main = output.decoded
    layers = [(a.tolist(), b.tolist()) for a, b in zip(main.logits, main.boxes, strict=True)]
    layers.append((main.pre_logits.tolist(), main.pre_boxes.tolist()))
    layers.append((output.encoder_logits.tolist(), output.encoder_boxes.tolist()))
    stacked = torch.tensor([a for a, _ in layers]), torch.tensor([b for _, b in layers])
    per_layer = [rows.tolist() for rows in match(*stacked, targets).layers]
    merged = union(match(*stacked, targets).layers).tolist()
    edges, total = 4 * len(merged), 4 * main.logits.shape[1] * main.logits.shape[2]
    balance = (math.sqrt(edges), math.sqrt(total - edges))
    norm = max(sum(counts), 1)
    part(main, layers, per_layer, merged, norm, max(len(merged), 1), "")

    noised = output.denoised
    rows = max(counts)
    positives = [
        (image, group * 2 * rows + target, target)
        for group in range(output.groups)
        for image, count in enumerate(counts)
        for target in range(count)
    ]
    layers = [(a.tolist(), b.tolist()) for a, b in zip(noised.logits, noised.boxes, strict=True)]
    layers.append((noised.pre_logits.tolist(), noised.pre_boxes.tolist()))
    share = norm * output.groups
    part(noised, layers, [positives] * len(layers), positives, share, share, "_dn")
    return terms


@pytest.mark.parametrize("counts", [(0, 1), (3, 2), (0, 6)])
@pytest.mark.parametrize("loss", ["vfl", "mal"])
def test_dfine_terms_equal_plain_python(counts: tuple[int, ...], loss: str) -> None:
    targets = make_targets(*counts)
    output = make_output(counts, fdr=True)
    found = Criterion(CLASSES, loss=loss)(output, targets)
    expected = plain_dfine(output, targets, loss)
    assert set(found) == {*expected, "total"}
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert found["total"].item() == pytest.approx(sum(expected.values()), rel=1e-6)


# --- the criterion's own promises ----------------------------------------------------------------


def test_weights_scale_their_terms() -> None:
    targets, output = make_targets(2, 1), make_output((2, 1), fdr=True)
    plain = Criterion(CLASSES)(output, targets)
    weights = LossWeights(classes=2, l1=10, giou=0, fgl=0.3, ddf=3)
    weighted = Criterion(CLASSES, weights=weights)(output, targets)
    for name, factor in {"vfl": 2, "bbox": 2, "giou": 0, "fgl": 2, "ddf": 2}.items():
        for suffix in ("", "_dn"):
            key = f"loss_{name}{suffix}"
            assert weighted[key].item() == pytest.approx(factor * plain[key].item(), rel=1e-9), key


def part_of(output: DetectorOutput, image: int) -> DetectorOutput:
    """The output of one picture of the batch."""
    rows = slice(image, image + 1)

    def cut(decoded: Decoded | None) -> Decoded | None:
        if decoded is None:
            return None
        values = [decoded.logits[:, rows], decoded.boxes[:, rows]]
        if decoded.corners is not None:
            values += [decoded.corners[:, rows], decoded.initial[rows]]
            values += [decoded.pre_logits[rows], decoded.pre_boxes[rows]]
        return Decoded(*values)

    return DetectorOutput(
        cut(output.decoded),
        output.encoder_logits[rows],
        output.encoder_boxes[rows],
        cut(output.denoised),
        output.groups,
        output.spec,
    )


@pytest.mark.parametrize("fdr", [True, False])
@pytest.mark.parametrize("counts", [(2, 1), (0, 1), (0, 0), (7, 0)])
@pytest.mark.parametrize("shares", [1, 2])
def test_the_parts_of_a_batch_add_up_to_the_whole(
    counts: tuple[int, ...], fdr: bool, shares: int
) -> None:
    """Also where a part has no box: as micro-batches, and as ranks whose gradients are averaged."""
    criterion = Criterion(CLASSES)
    targets, output = make_targets(*counts), make_output(counts, fdr=fdr)
    whole = criterion(output, targets)
    parts = [part_of(output, image) for image in range(2)]
    wanted = [Targets(*(values[i : i + 1] for values in targets)) for i in range(2)]
    matches = [criterion.match(*pair) for pair in zip(parts, wanted, strict=True)]
    total = sum(one.counts(labels) for one, labels in zip(matches, wanted, strict=True))
    assert total.tolist()[::2] == [sum(counts), 2]
    terms = [
        criterion(part, labels, matches=one, total=lambda _: total, shares=shares)
        for part, labels, one in zip(parts, wanted, matches, strict=True)
    ]
    for name, value in whole.items():
        found = sum(one[name].item() for one in terms) / shares
        assert found == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("fdr", [True, False])
def test_terms_are_the_same_with_and_without_boxes(fdr: bool) -> None:
    criterion = Criterion(CLASSES)
    some = criterion(make_output((2, 1), fdr=fdr), make_targets(2, 1))
    none = criterion(make_output((0, 0), fdr=fdr), make_targets(0, 0))
    assert list(some) == list(none)
    assert all(torch.isfinite(value) for value in none.values())
    assert none["loss_bbox"].item() == 0


@pytest.mark.parametrize("loss", ["vfl", "mal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_at_its_ends_gives_finite_losses(loss: str, dtype: torch.dtype) -> None:
    targets = make_targets(2, 3)
    output = make_output((2, 3), fdr=True, dtype=dtype)
    with torch.no_grad():
        for decoded in (output.decoded, output.denoised):
            decoded.logits.copy_((decoded.logits * 1e5).clamp(-60000, 60000))
            decoded.corners.copy_((decoded.corners * 1e5).clamp(-60000, 60000))
            decoded.boxes[..., :2, :] = 0
            decoded.boxes[..., 2:4, :] = 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = Criterion(CLASSES, loss=loss)(output, targets)
    losses["total"].backward()
    for name, value in losses.items():
        assert torch.isfinite(value), name
        assert value.dtype == torch.float32
    for decoded in (output.decoded, output.denoised):
        for part in (decoded.logits, decoded.boxes, decoded.corners):
            assert torch.isfinite(part.grad).all()


@pytest.mark.parametrize("term", ["loss_bbox", "loss_giou", "loss_fgl", "loss_ddf"])
def test_gradients_of_the_terms_pass_the_check(term: str) -> None:
    targets = make_targets(2, 1)
    output = make_output((2, 1), fdr=True, queries=4, layers=2, groups=1)
    boxes, corners = output.decoded.boxes.detach(), output.decoded.corners.detach()

    def function(value: Tensor) -> Tensor:
        """The term as a function of what it is meant to train; weights and teacher are detached."""
        boxes_now, corners_now = boxes, corners
        if term == "loss_fgl":
            corners_now = value
        elif term == "loss_ddf":
            corners_now = torch.cat((value, corners[1:]))
        else:
            boxes_now = value
        moved = Decoded(
            output.decoded.logits.detach(),
            boxes_now,
            corners_now,
            output.decoded.initial,
            output.decoded.pre_logits,
            output.decoded.pre_boxes,
        )
        changed = DetectorOutput(
            moved, output.encoder_logits, output.encoder_boxes, None, 0, output.spec
        )
        return Criterion(CLASSES)(changed, targets)[term]

    start = {"loss_fgl": corners, "loss_ddf": corners[:1]}.get(term, boxes)
    assert torch.autograd.gradcheck(function, (start.clone().requires_grad_(),), fast_mode=True)


def test_the_teacher_is_not_trained_by_its_students() -> None:
    targets, output = make_targets(2, 1), make_output((2, 1), fdr=True)
    Criterion(CLASSES)(output, targets)["loss_ddf"].backward()
    grad = output.decoded.corners.grad
    assert grad[:-1].any()
    assert not grad[-1].any()


@pytest.mark.parametrize("loss", ["vfl", "mal"])
def test_classification_pulls_each_score_to_its_goal(loss: str) -> None:
    """The gradient of a logit is weight * (p - goal): neither the weight nor the goal is trained."""
    targets, output = make_targets(2, 1), make_output((2, 1), fdr=False, groups=0)
    Criterion(CLASSES, loss=loss)(output, targets)[f"loss_{loss}"].backward()
    logits, boxes = output.logits.detach(), output.boxes.detach()
    p = logits.sigmoid()
    weight = 0.75 * p**2 if loss == "vfl" else p**1.5
    goal = torch.zeros_like(p)
    for layer, rows in enumerate(match(logits, boxes, targets).layers):
        for image, query, target in rows.tolist():
            found, wanted = boxes[layer, image, query], targets.boxes[image, target].double()
            quality, _ = plain_giou(corners_of(found.tolist()), corners_of(wanted.tolist()))
            place = layer, image, query, int(targets.labels[image, target])
            goal[place] = quality if loss == "vfl" else quality**1.5
            weight[place] = quality if loss == "vfl" else 1.0
    torch.testing.assert_close(output.logits.grad, weight * (p - goal) / 3)
    assert output.boxes.grad is None or not output.boxes.grad.any()
