"""Which parts of a network are held fixed (`model.freeze`), as a table.

Held fixed is more than no gradient: the batch norms of a part also keep their statistics.
"""

from __future__ import annotations

from typing import Final

from torch import nn

from detector.config import ModelConfig
from detector.models.blocks import freeze_norms
from detector.models.detector import Detector

# What each value of `model.freeze` names: parts wholly fixed, parts whose batch norms are. "" is all.
PARTS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "none": ((), ()),
    "stem": (("backbone.stem",), ()),
    "backbone_norms": ((), ("backbone",)),
    "norms": ((), ("",)),
    "backbone": (("backbone",), ()),
}


def hold_fixed(model: Detector, config: ModelConfig) -> tuple[str, ...]:
    """Fix what `model.freeze` names; return what that is, for the log.

    Called after weights are loaded and before the average, the optimizer and DDP are built, which then
    do without the gradients.
    """
    whole, norms = PARTS.get(config.freeze, ((), ()))
    if config.freeze == "auto" and (config.weights or config.backbone_weights):
        whole = ("backbone.stem",) if model.spec.freeze_stem else ()
        norms = ("backbone",) if model.spec.freeze_norm else ()
    for name in (*whole, *norms):
        freeze_norms(model.get_submodule(name))
    for name in whole:
        model.get_submodule(name).requires_grad_(False)
    return (*whole, *(f"{name}.norms".removeprefix(".") for name in norms))


def trainable(model: nn.Module) -> int:
    """Return the number of weights that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
