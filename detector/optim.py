"""AdamW with groups by module type, and learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from detector.config import SolverConfig

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)  # noqa: SLF001 - the only common base of torch's batch norms


def build_optimizer(model: nn.Module, solver: SolverConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters, grouped by rate and by decayed or not.

    Norms, biases and scalars are not decayed (D-FINE's recipe). The attribute `backbone` learns at
    `lr * backbone_lr_factor`, each of its `stages` before the last (its `stem` comes first) at
    `stage_lr_decay` times the rate of the one after.
    """
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for rate, decayed, parameter in _classified(model, solver):
        groups.setdefault((rate, decayed), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": rate,
                "base_lr": rate,
                "weight_decay": solver.weight_decay if decayed else 0.0,
            }
            for (rate, decayed), parameters in sorted(groups.items(), key=lambda item: item[0])
        ],
        betas=(0.9, 0.999),
    )


def _classified(model: nn.Module, solver: SolverConfig) -> Iterator[tuple[float, bool, Tensor]]:
    """Yield `(rate, decayed, parameter)`, each trainable parameter once."""
    rates = _backbone_rates(model, solver)
    seen: set[Tensor] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            rate = rates.get(parameter, solver.lr)
            yield rate, parameter.ndim > 1 and not isinstance(module, _NORMS), parameter


def _backbone_rates(model: nn.Module, solver: SolverConfig) -> dict[Tensor, float]:
    """Return the rate of each parameter of the backbone."""
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        return {}
    top = solver.lr * solver.backbone_lr_factor
    rates: dict[Tensor, float] = dict.fromkeys(backbone.parameters(), top)
    stages = [part for part in (getattr(backbone, "stem", None),) if part is not None]
    stages += list(getattr(backbone, "stages", ()))
    for depth, stage in enumerate(reversed(stages)):
        rates.update(dict.fromkeys(stage.parameters(), top * solver.stage_lr_decay**depth))
    return rates


def lr_factor(step: int, *, total_steps: int, solver: SolverConfig) -> float:
    """Return what the base rates are multiplied with in optimizer step `step` (from 0).

    Linear warm-up over `warmup_steps` (at most half the run), then `constant`, `cosine` down to
    `final_lr_factor`, `flat_cosine`: flat up to `flat_fraction` of the run, then cosine (DEIM), or
    `step`: down by `step_factor` at each of the `milestones`, parts of the run.
    """
    warmup = min(solver.warmup_steps, total_steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    if solver.schedule == "constant":
        return 1.0
    if solver.schedule == "step":
        return solver.step_factor ** sum(step >= part * total_steps for part in solver.milestones)
    start = warmup
    if solver.schedule == "flat_cosine":
        start = max(warmup, round(total_steps * solver.flat_fraction))
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    final = solver.final_lr_factor
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Multiply each group's base rate by `factor`; return the highest rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return float(max(group["lr"] for group in optimizer.param_groups))


class StepCounter:
    """Counts the steps that changed weights: an optimizer that a GradScaler skips is not called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        """Be told of a step by the optimizer."""
        self.count += 1


def count_steps(optimizer: torch.optim.Optimizer) -> StepCounter:
    """Return a counter of the steps from now on."""
    counter = StepCounter()
    optimizer.register_step_post_hook(counter)
    return counter
