"""The share of the trained change that reaches generators which compute in fewer bits than the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainers.model.rounding import Change
from trainers.titan.model import TitanModel
from trainers.titan.parallel import local, whole
from trainers.titan.shards import start_of

SAMPLED = 8192
"""Maximum weights of each tensor that are compared."""
ROWS = 8
"""Rows of each adapted layer that are compared."""


class Rounding:
    """Compares a sample of the weights with the same ones before the first update, as they are and rounded.

    With adapters, the base weights are the start. Every method is a collective of the model's ranks.
    """

    def __init__(self, model: TitanModel) -> None:
        self._model = model
        self._start = [] if model.adapters is not None else [sample.clone() for sample in self._samples()]

    def kept(self) -> float:
        """The share of the change since the start that is left after rounding to the model's data type."""
        change = Change()
        for before, after in self._pairs():
            change.add(before, after, self._model.dtype)
        totals = self._model.ranks.together({"exact": change.exact, "rounded": change.rounded})
        return Change(exact=totals["exact"], rounded=totals["rounded"]).share

    def _samples(self) -> Iterator[torch.Tensor]:
        for parameter in self._model.module.parameters():
            values = local(parameter.detach()).flatten()
            yield values[:: max(1, len(values) // SAMPLED)]

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if (adapters := self._model.adapters) is None:
            yield from zip(self._start, self._samples(), strict=True)
            return
        for layer in adapters.layers:
            module = self._model.module.get_submodule(layer.titan)
            up, down = (whole(part.weight.detach()) for part in (module.lora_b, module.lora_a))
            row, column = start_of(module.weight)
            weight = local(module.weight.detach())[:ROWS]
            up, down = up[row : row + len(weight)], down[:, column : column + weight.shape[1]]
            yield weight, torch.addmm(weight, up, down, alpha=adapters.scaling)
