"""Context parallelism: the tokens of a packed row split over ranks, each seeing all keys and values.

Every rank takes two pieces of the row, one from the front and one from the back, since causal attention costs more the
further back a token is (the balance of Llama 3's training, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from trainers.titan.batch import Microbatch
from trainers.titan.layout import ContextLayout


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share a row, and which of them this process is."""

    group: dist.ProcessGroup
    rank: int
    degree: int

    def tokens(self, length: int, rank: int) -> torch.Tensor:
        """The tokens of a row of `length` that are `rank`'s, [length / degree]."""
        pieces = torch.arange(length).view(2 * self.degree, -1)
        return torch.cat([pieces[rank], pieces[2 * self.degree - 1 - rank]])

    def part(self, batch: Microbatch) -> Microbatch:
        """This rank's tokens of a packed batch, and the n targets that they predict; values stay those of the batch."""
        length, device = batch.tokens.shape[1], batch.tokens.device
        keys = torch.cat([self.tokens(length, rank) for rank in range(self.degree)]).to(device)
        mine = self.tokens(length, self.rank).to(device)
        place = torch.full((length,), -1, device=device)
        place[mine] = torch.arange(len(mine), device=device)
        own = self.own(batch)
        sequence = (batch.positions[0] == 0).cumsum(0)
        visible = (sequence[mine, None] == sequence[keys]) & (mine[:, None] >= keys)
        return replace(
            batch,
            tokens=batch.tokens[:, mine],
            positions=batch.positions[:, mine],
            layout=ContextLayout(visible, self.group, self.degree),
            predictors=place[batch.predictors[own]],
            target_ids=batch.target_ids[own],
        )

    def own(self, batch: Microbatch) -> torch.Tensor:
        """Which of the batch's targets this rank's tokens predict, [n]."""
        mine = self.tokens(batch.tokens.shape[1], self.rank).to(batch.tokens.device)
        return torch.isin(batch.predictors, mine).nonzero()[:, 0]

    def whole(self, values: torch.Tensor, batch: Microbatch) -> torch.Tensor:
        """Values of all targets, [N], from each rank's own, [n]; the gradient goes to this rank's own only."""
        mine = values.new_zeros(len(batch.target_ids)).index_copy(0, self.own(batch), values)
        everyone = mine.detach().clone()
        dist.all_reduce(everyone, group=self.group)
        return everyone + (mine - mine.detach())


class _GatherTokens(torch.autograd.Function):
    """[t, F] of every rank -> [t * degree, F], in the order of ranks; gradients of all are added up."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
        ctx.layout = layout
        gathered = tokens.new_empty(tokens.shape[0] * layout.degree, *tokens.shape[1:])
        dist.all_gather_single(gathered, tokens.contiguous(), group=layout.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout = ctx.layout
        own = grads[0].new_empty(grads[0].shape[0] // layout.degree, *grads[0].shape[1:])
        dist.reduce_scatter_single(own, grads[0].contiguous(), group=layout.group)
        return own, None


def gather_tokens(tokens: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
    """[t, ...] of this rank -> [T, ...] of all, in the order of ranks."""
    gathered: torch.Tensor = _GatherTokens.apply(tokens, layout)  # type: ignore[no-untyped-call]
    return gathered
