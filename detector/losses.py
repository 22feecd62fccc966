"""The criterion: classification, box and distribution losses of all layers, stacked.

Everything is computed in at least float32, outside autocast. Nothing is kept between calls and
nothing waits for the device but the matcher's one copy. D-FINE: arXiv:2410.13842; MAL: DEIM,
arXiv:2412.04234; VFL: arXiv:2008.13367.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from detector.boxes import (
    bin_values,
    box_to_bins,
    box_to_distance,
    cxcywh_to_xyxy,
    full,
    giou,
    iou,
)
from detector.matcher import Indices, Matched, Pairs, match, to_pairs, union
from detector.models.decoder import Decoded
from detector.models.detector import DetectorOutput
from detector.models.specs import DetectorSpec
from detector.targets import Targets

__all__ = ["Criterion", "LossWeights", "Matches"]


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Published weights of the terms."""

    classes: float = 1.0
    l1: float = 5.0
    giou: float = 2.0
    fgl: float = 0.15
    ddf: float = 1.5


@dataclass(frozen=True, slots=True)
class Matches:
    """Which query is to find which box.

    Attributes:
        matched: a layer's own matches, for every layer.
        merged: (n, 3) image, query, target: the union over layers; None where it is not used.
    """

    matched: Matched
    merged: Indices | None

    def counts(self, targets: Targets) -> Tensor:
        """(3,) float32: boxes, merged matches and pictures, on the targets' device."""
        merged = 0 if self.merged is None else len(self.merged)
        sizes = targets.counts.new_tensor([merged, len(targets.counts)])
        return torch.cat((targets.counts.sum()[None], sizes)).float()


@dataclass(frozen=True, slots=True)
class _Edges:
    """Queries of one layer with and without a match, in the global batch, a share."""

    matched: Tensor
    others: Tensor
    least: float

    def balance(self) -> tuple[Tensor, Tensor]:
        """Roots of the two numbers."""
        return self.matched.sqrt(), self.others.clamp(min=0).sqrt()


@dataclass(frozen=True, slots=True)
class Criterion:
    """Losses of a detector's output; stateless.

    Attributes:
        num_classes: as the detector's.
        loss: classification by varifocal (`vfl`) or matchability-aware (`mal`) loss.
        weights: of the terms in the total.
        share_matches: train boxes on the union of all layers' matches; by default for models
            with fine-grained distributions only, as published.
        alpha: weight of VFL's negatives.
        gamma: exponent, 2.0 for VFL and 1.5 for MAL where None.
        temperature: of the distillation between layers.
    """

    num_classes: int
    loss: Literal["vfl", "mal"] = "vfl"
    weights: LossWeights = LossWeights()
    share_matches: bool | None = None
    alpha: float = 0.75
    gamma: float | None = None
    temperature: float = 5.0

    def __call__(
        self,
        output: DetectorOutput,
        targets: Targets,
        *,
        matches: Matches | None = None,
        total: Callable[[Tensor], Tensor] = lambda counts: counts,
        shares: int = 1,
    ) -> dict[str, Tensor]:
        """Weighted terms, summed over layers, and their `total`.

        Terms are sums over this call's part of a global batch, divided by what the whole of it counts:
        every box weighs the same wherever it lies, and the gradients of the parts add up to those of
        the whole.

        Args:
            output: of a forward pass in training mode.
            targets: the same ones.
            matches: of this output, where `match` has been called before.
            total: from this part's (3,) counts (boxes, matches, pictures) to the global batch's.
            shares: gradients that are averaged: the number of ranks.

        Returns:
            Scalars `loss_vfl` or `loss_mal`, `loss_bbox`, `loss_giou` and, with distributions,
            `loss_fgl` and `loss_ddf`; the same with `_dn` of the denoising queries; `total`.
        """
        with torch.autocast(output.logits.device.type, enabled=False):
            if matches is None:
                matches = self.match(output, targets)
            counts = total(matches.counts(targets)) / shares
            return self._terms(output, targets, matches, counts, least=1 / shares)

    @torch.no_grad()
    def match(self, output: DetectorOutput, targets: Targets) -> Matches:
        """Give the boxes to queries, in every layer."""
        with torch.autocast(output.logits.device.type, enabled=False):
            logits, boxes = _all_layers(output)
            matched = match(logits, boxes, targets)
        return Matches(matched, union(matched.layers) if self.shares_matches(output.spec) else None)

    def shares_matches(self, spec: DetectorSpec) -> bool:
        """True where boxes are trained on the union of the layers' matches."""
        return spec.fdr if self.share_matches is None else self.share_matches

    def _terms(
        self,
        output: DetectorOutput,
        targets: Targets,
        matches: Matches,
        counts: Tensor,
        *,
        least: float,
    ) -> dict[str, Tensor]:
        """Terms of this part; `counts` are the global batch's a share, none taken for fewer than `least`."""
        main, matched, merged = output.decoded, matches.matched, matches.merged
        logits, boxes = _all_layers(output)
        device = logits.device
        class_pairs = to_pairs(matched.layers, device)
        box_pairs = class_pairs if merged is None else to_pairs([merged] * len(logits), device)

        boxes_in_all, matches_in_all, pictures = counts.to(logits.dtype).unbind()
        count = boxes_in_all.clamp(min=least)
        found = boxes_in_all if merged is None else matches_in_all  # matches a layer
        box_count = found.clamp(min=least)

        terms = self._class_and_boxes(
            logits, boxes, targets, class_pairs, box_pairs, count, box_count
        )
        balance = None
        if main.corners is not None:
            layers = len(main.logits)
            rows = matched.layers[:layers] if merged is None else [merged] * layers
            pairs = to_pairs(rows, device)
            edges = _Edges(found, pictures * logits.shape[2] - found, least)
            balance = edges.balance()
            terms |= self._distributions(
                main, output.spec, targets, pairs, box_count, edges, balance
            )

        if output.denoised is None:
            extra = {name: value.new_zeros(()) for name, value in terms.items()}
        else:
            noised = output.denoised
            logits, boxes = _stack(noised)
            share = count * output.groups
            positives = boxes_in_all * output.groups
            layer = _denoising_matches(matched.counts, targets.boxes.shape[1], output.groups)
            pairs = to_pairs([layer] * len(logits), device)
            extra = self._class_and_boxes(logits, boxes, targets, pairs, pairs, share, share)
            if noised.corners is not None and balance is not None:
                pairs = to_pairs([layer] * len(noised.logits), device)
                edges = _Edges(positives, pictures * logits.shape[2] - positives, least)
                extra |= self._distributions(
                    noised, output.spec, targets, pairs, share, edges, balance
                )
        terms |= {f"{name}_dn": value for name, value in extra.items()}
        terms["total"] = torch.stack(list(terms.values())).sum()
        return terms

    def _class_and_boxes(
        self,
        logits: Tensor,
        boxes: Tensor,
        targets: Targets,
        class_pairs: Pairs,
        box_pairs: Pairs,
        count: Tensor,
        box_count: Tensor,
    ) -> dict[str, Tensor]:
        """Terms of (K, B, Q, C) logits and (K, B, Q, 4) boxes."""
        found, wanted = _paired(boxes, targets, box_pairs)
        l1 = F.l1_loss(found, wanted, reduction="sum") / box_count
        overlap = giou(cxcywh_to_xyxy(found), cxcywh_to_xyxy(wanted))
        return {
            f"loss_{self.loss}": self.weights.classes
            * self._classification(logits, boxes, targets, class_pairs)
            / count,
            "loss_bbox": self.weights.l1 * l1,
            "loss_giou": self.weights.giou * (1 - overlap).sum() / box_count,
        }

    def _classification(
        self, logits: Tensor, boxes: Tensor, targets: Targets, pairs: Pairs
    ) -> Tensor:
        """Summed VFL or MAL: a matched query's target is its box's IoU, to a power for MAL."""
        found, wanted = _paired(boxes.detach(), targets, pairs)
        quality = iou(cxcywh_to_xyxy(found), cxcywh_to_xyxy(wanted))
        gamma = self.gamma if self.gamma is not None else {"vfl": 2.0, "mal": 1.5}[self.loss]
        where = (pairs.layer, pairs.image, pairs.query, targets.labels[pairs.image, pairs.target])
        power = logits.detach().sigmoid() ** gamma
        if self.loss == "vfl":
            goal, weight, positive = quality, self.alpha * power, quality
        else:
            goal, weight = quality**gamma, power
            positive = torch.ones_like(goal)
        # Queries are unique in a layer, so plain assignment is enough.
        weight = weight.index_put(where, positive.to(weight.dtype))
        goals = torch.zeros_like(logits).index_put(where, goal.to(logits.dtype))
        return F.binary_cross_entropy_with_logits(logits, goals, weight, reduction="sum")

    def _distributions(
        self,
        decoded: Decoded,
        spec: DetectorSpec,
        targets: Targets,
        pairs: Pairs,
        count: Tensor,
        edges: _Edges,
        balance: tuple[Tensor, Tensor],
    ) -> dict[str, Tensor]:
        """Fine-grained localisation and decoupled distillation focal losses."""
        assert decoded.corners is not None
        assert decoded.initial is not None
        corners = full(decoded.corners)
        corners = corners.reshape(*corners.shape[:-1], 4, spec.bins + 1)
        found, wanted = _paired(full(decoded.boxes).detach(), targets, pairs)
        quality = iou(cxcywh_to_xyxy(found), cxcywh_to_xyxy(wanted))

        values = bin_values(
            bins=spec.bins,
            up=spec.up,
            reg_scale=spec.reg_scale,
            device=corners.device,
            dtype=corners.dtype,
        )
        start = full(decoded.initial)[pairs.image, pairs.query]
        distance = box_to_distance(start, cxcywh_to_xyxy(wanted), reg_scale=spec.reg_scale)
        left, right_weight = box_to_bins(distance, values)
        chosen = corners[pairs.layer, pairs.image, pairs.query].log_softmax(-1)
        at_left = chosen.gather(-1, left[..., None])[..., 0]
        at_right = chosen.gather(-1, left[..., None] + 1)[..., 0]
        entropy = -(at_left * (1 - right_weight) + at_right * right_weight)
        terms = {"loss_fgl": self.weights.fgl * (entropy * quality[:, None]).sum() / count}

        if len(corners) > 1:
            distilled = self._distillation(decoded, corners, pairs, quality, edges, balance)
            terms["loss_ddf"] = self.weights.ddf * distilled
        return terms

    def _distillation(
        self,
        decoded: Decoded,
        corners: Tensor,
        pairs: Pairs,
        quality: Tensor,
        edges: _Edges,
        balance: tuple[Tensor, Tensor],
    ) -> Tensor:
        """KL divergence of each earlier layer's distributions from the last layer's.

        Matched edges weigh by their IoU and the others by the last layer's score; the two means
        (over the edges of the global batch, a layer) are balanced by the roots of their numbers among
        the matching queries.
        """
        students, last = corners[:-1], len(corners) - 1
        teacher = (corners[-1].detach() / self.temperature).log_softmax(-1)
        probability = teacher.exp()
        cross = ((students / self.temperature).log_softmax(-1) * probability).sum(-1)
        divergence = ((probability * teacher).sum(-1) - cross).sum(-1) * self.temperature**2

        student = pairs.layer < last
        where = tuple(index[student] for index in (pairs.layer, pairs.image, pairs.query))
        weight = full(decoded.logits[-1]).detach().sigmoid().amax(-1)
        weight = weight.expand(last, -1, -1).index_put(where, quality[student].to(weight.dtype))
        is_matched = torch.zeros_like(weight).index_put(where, weight.new_ones(()))
        loss = (divergence * weight).flatten(1)
        is_matched = is_matched.flatten(1)
        # Means are over edges, of which a query has four.
        positive = (loss * is_matched).sum(1) / (4 * edges.matched.clamp(min=edges.least))
        negative = (loss * (1 - is_matched)).sum(1) / (4 * edges.others.clamp(min=edges.least))
        up, down = balance
        return ((positive * up + negative * down) / (up + down)).sum()


def _stack(decoded: Decoded) -> tuple[Tensor, Tensor]:
    """All layers' logits and boxes, and those before the first refinement where there are any."""
    logits, boxes = full(decoded.logits), full(decoded.boxes)
    if decoded.pre_logits is None or decoded.pre_boxes is None:
        return logits, boxes
    return (
        torch.cat((logits, full(decoded.pre_logits)[None])),
        torch.cat((boxes, full(decoded.pre_boxes)[None])),
    )


def _paired(boxes: Tensor, targets: Targets, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """(N, 4) predicted and (N, 4) wanted boxes of N pairs."""
    found = boxes[pairs.layer, pairs.image, pairs.query]
    return found, targets.boxes[pairs.image, pairs.target].to(found.dtype)


def _all_layers(output: DetectorOutput) -> tuple[Tensor, Tensor]:
    """Logits and boxes of everything that is matched, the encoder's selection last."""
    logits, boxes = _stack(output.decoded)
    return (
        torch.cat((logits, full(output.encoder_logits)[None])),
        torch.cat((boxes, full(output.encoder_boxes)[None])),
    )


def _denoising_matches(counts: Indices, rows: int, groups: int) -> Indices:
    """(n, 3) image, query, target of the positives: query g * 2M + j belongs to target j."""
    image = np.repeat(np.arange(len(counts)), counts)
    target = np.concatenate([np.arange(0), *(np.arange(count) for count in counts)])
    start = np.arange(groups) * 2 * rows
    query = (start[:, None] + target[None]).ravel()
    return np.stack((np.tile(image, groups), query, np.tile(target, groups)), 1)
