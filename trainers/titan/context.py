"""Context parallelism: the tokens of a packed row are split over ranks, and each rank gathers all keys and values.

Each rank takes two pieces of the row, one from the front and one from the back. Causal attention costs more for later
tokens, and this balances the work (as in Llama 3's training, arXiv 2407.21783, section 3.3.2).
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
    """The process group whose ranks share a row, this process's rank in it, and its size."""

    group: dist.ProcessGroup
    rank: int
    degree: int

    def pieces(self, length: int, rank: int) -> tuple[range, range]:
        """The two runs of tokens that `rank` computes in a row of `length`."""
        size = length // (2 * self.degree)
        last = 2 * self.degree - 1 - rank
        return range(rank * size, (rank + 1) * size), range(last * size, (last + 1) * size)

    def tokens(self, length: int, rank: int) -> torch.Tensor:
        """Indices of the tokens that `rank` computes in a row of `length`, [length / degree]."""
        return torch.cat([torch.arange(piece.start, piece.stop) for piece in self.pieces(length, rank)])

    def part(self, batch: Microbatch) -> Microbatch:
        """Reduce a batch to this rank's tokens and the n targets that they predict.

        Other values, such as `advantages`, remain those of the whole batch.
        """
        layout = batch.layout
        assert not isinstance(layout, ContextLayout), "the batch is whole"
        length, device = batch.tokens.shape[1], batch.tokens.device
        in_rank_order = torch.cat([self.tokens(length, rank) for rank in range(self.degree)])
        mine = self.tokens(length, self.rank).to(device)
        local_index = torch.full((length,), -1, device=device)
        local_index[mine] = torch.arange(len(mine), device=device)
        predicted = self.own(batch)
        row = batch.row.part(self.pieces(length, self.rank), in_rank_order.argsort().numpy())
        return replace(
            batch,
            tokens=batch.tokens[:, mine],
            positions=batch.positions[:, mine],
            layout=ContextLayout(type(layout).of(row, device), self.group, self.degree),
            predictors=local_index[batch.predictors[predicted]],
            target_ids=batch.target_ids[predicted],
        )

    def own(self, batch: Microbatch) -> torch.Tensor:
        """Indices of the batch's targets that this rank's tokens predict, [n]."""
        mine = self.tokens(batch.tokens.shape[1], self.rank).to(batch.tokens.device)
        return torch.isin(batch.predictors, mine).nonzero()[:, 0]

    def whole(self, values: torch.Tensor, batch: Microbatch) -> torch.Tensor:
        """Combine each rank's values, [n], into those of all targets, [N]; only this rank's values get a gradient."""
        mine = values.new_zeros(len(batch.target_ids)).index_copy(0, self.own(batch), values)
        combined = mine.detach().clone()
        dist.all_reduce(combined, group=self.group)
        return combined + (mine - mine.detach())


class _GatherTokens(torch.autograd.Function):
    """Gather the tokens of all ranks, [t, F] -> [t * degree, F], in rank order; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
        ctx.layout = layout
        gathered = tokens.new_empty(tokens.shape[0] * layout.degree, *tokens.shape[1:])
        dist.all_gather_single(gathered, tokens.contiguous(), group=layout.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout = ctx.layout
        local = grads[0].new_empty(grads[0].shape[0] // layout.degree, *grads[0].shape[1:])
        dist.reduce_scatter_single(local, grads[0].contiguous(), group=layout.group)
        return local, None


def gather_tokens(tokens: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
    """Gather the tokens of all ranks, [t, ...] -> [T, ...], in rank order."""
    gathered: torch.Tensor = _GatherTokens.apply(tokens, layout)  # type: ignore[no-untyped-call]
    return gathered
