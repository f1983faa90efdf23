"""Experts of mixtures, in the precision of the surrounding arithmetic instead of always bfloat16."""

from __future__ import annotations

import torch
from torch import nn
from torchtitan.models.common.moe import GroupedExperts

from trainers.compat.torchtitan import same_config
from trainers.titan.parallel import local


class Experts(GroupedExperts):  # type: ignore[misc]
    """TorchTitan's experts in the precision of the surrounding arithmetic; subclasses override `apply_experts`."""

    Config = same_config(GroupedExperts)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its tokens, [R, D] -> [R, D].

        Tokens are sorted by expert; `num_tokens_per_expert_E` [E] counts those of each.
        """
        kind = x_RD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_RD.dtype
        ends = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        return self.apply_experts(x_RD.to(dtype), ends).type_as(x_RD)

    def apply_experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its rows, [R, D] -> [R, D]; `ends` [E] are the indices after the last row of each."""
        gate, up = (self.product(rows, weight.mT, ends) for weight in (self.w1_EFD, self.w3_EFD))
        return self.product(nn.functional.silu(gate) * up, self.w2_EDF.mT, ends)

    def product(self, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of each expert by its matrix, [R, X] and [E, X, Y] -> [R, Y]."""
        out: torch.Tensor = self._grouped_mm(A=rows, B_t=local(matrices).to(rows.dtype), offs=ends)
        return out
