"""The head of a decoder: log-probabilities of targets without the scores of the whole vocabulary in memory.

Scores are computed in tiles, some targets times a part of the vocabulary, and reduced at once. Their maximum, the sum
of their exponentials and the entropy follow from those of the tiles (online softmax, Milakov and Gimelshein 2018, arXiv
1805.02867). The backward pass computes each tile again. N targets over V tokens thus take the memory of one tile
instead of several float32 copies of [N, V], for a third more multiplications in this one layer. Scores that fit into a
single tile are kept instead of recomputed.

With tensor parallelism, each rank has a part of the vocabulary, and the ranks exchange a few numbers per target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear

from trainers.titan.parallel import local

TILE = {"cpu": 2**21, "cuda": 2**26}
"""Number of scores computed at once: as many as fit a CPU's cache; on a GPU, enough work for every multiprocessor."""
ROWS = {"cpu": 2**11, "cuda": 2**13}
"""Maximum number of targets in a tile; the rest of its size is vocabulary."""
LOWEST = -1e30
"""Initial maximum: below every score, but finite, so that its product with 0 is 0."""


class Kernels(NamedTuple):
    """Functions of a tile's scores, [n, v], which they modify: `_fold` and `_slopes`, or these compiled."""

    fold: Callable[..., Any]
    slopes: Callable[..., Any]

    def compiled(self, backend: str = "inductor") -> Kernels:
        """These functions compiled once for all shapes. A GPU then reads and writes a tile less often."""
        return Kernels(*(torch.compile(each, dynamic=True, backend=backend) for each in self))


def _fold(scores: torch.Tensor, highest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum m of each row and `highest` [n]; sums of e^z and z e^z for z = scores - m. `scores` becomes z."""
    highest = torch.maximum(highest, scores.amax(1))
    exponentials = scores.sub_(highest[:, None]).exp()
    total = exponentials.sum(1)
    return highest, total, exponentials.mul_(scores).sum(1)


def _slopes(
    scores: torch.Tensor,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    by_logprob: torch.Tensor,
    by_entropy: torch.Tensor | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradient in the scores without its term [y], and derivative of the softcap (see `_Scores`).

    `cap` is temperature / softcap; None: no softcap.
    """
    cap_slope = None if cap is None else 1 - (scores * cap) ** 2
    logprobs = scores.sub_(normalizer[:, None])
    if by_entropy is None:
        return logprobs.exp_().mul_(-by_logprob[:, None]), cap_slope
    slopes = logprobs.exp()
    logprobs.add_(entropy[:, None]).mul_(-by_entropy[:, None])
    return slopes.mul_(logprobs.sub_(by_logprob[:, None])), cap_slope


EAGER = Kernels(_fold, _slopes)


def logprobs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
    softcap: float | None = None,
    tile: tuple[int, int] | None = None,
    kernels: Kernels = EAGER,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each target under softmax(hidden weight^T / temperature), float32 [N] each.

    Both have gradients; the entropy's costs nothing if it isn't used. `hidden` is [N, D], `weight` [V, D], `targets`
    [N].

    Args:
        group: ranks that have other rows of `weight`; each passes the same `hidden` and gets the same result.
        first: token id of this rank's first row of `weight`.
        softcap: bound of scores, applied before the temperature as softcap * tanh(score / softcap); None: unbounded.
        tile: numbers of targets and tokens in a tile; None: chosen by device.
        kernels: functions that are applied to a tile.
    """
    rows, columns = tile or tile_shape(len(hidden), hidden.device.type)
    own = targets - first
    scored: tuple[torch.Tensor, torch.Tensor] = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, own, temperature, softcap, group, rows, columns, kernels
    )
    return scored


def tile_shape(count: int, device: str) -> tuple[int, int]:
    """Numbers of targets and vocabulary tokens in a tile, for `count` targets."""
    rows = max(1, min(count, ROWS[device]))
    return rows, max(1, TILE[device] // rows)


class Head(Linear):  # type: ignore[misc]
    """Last layer of a decoder, which scores only the requested targets.

    The argument name `input` is TorchTitan's, because its sharding rules refer to it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """TorchTitan's fields, and the bound of scores; None: unbounded."""

        softcap: float | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.softcap = config.softcap
        self.kernels = EAGER

    def forward(
        self, input: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of `targets`, [N] each, from hidden states [N, D]."""
        hidden, weight = input, self.weight
        group, first = None, 0
        if isinstance(weight, DTensor):  # tensor parallel: some rows of the weight, all hidden states
            mesh = weight.device_mesh
            group, first = mesh.get_group(), -(-weight.shape[0] // mesh.size()) * mesh.get_local_rank()
            weight = weight.to_local()
        hidden = local(hidden)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        return logprobs_and_entropy(
            hidden, weight, targets, temperature, group=group, first=first, softcap=self.softcap, kernels=self.kernels
        )


class _Scores(torch.autograd.Function):
    """Log-probability and entropy of targets, with tiled forward and backward passes.

    With z the scores, p = softmax(z) and H its entropy: dlog p_y / dz = [y] - p, and dH / dz = -p (log p + H). Capped
    scores z = c tanh(s / c) have the gradient dz / ds = 1 - (z / c)^2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        group: dist.ProcessGroup | None,
        rows: int,
        columns: int,
        kernels: Kernels,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.kernels, ctx.cap = kernels, None if softcap is None else temperature / softcap
        ctx.temperature, ctx.softcap, ctx.group, ctx.rows, ctx.columns = temperature, softcap, group, rows, columns
        sums = _Sums(len(hidden), hidden)
        for part in _parts(len(weight), columns):
            for block in _parts(len(hidden), rows):
                scores = _scores(hidden[block], weight[part], temperature, softcap)
                sums.add(block, scores, *_columns(targets[block], part), kernels)  # now relative to `sums.highest`
        cached = [scores] if rows >= len(hidden) and columns >= len(weight) and softcap is None else []
        relative_to = sums.highest.clone() if cached else torch.zeros_like(sums.highest)
        if group is not None:
            sums.gather(group)
        normalizer = sums.total.log() + sums.highest
        entropy = sums.total.log() - sums.weighted / sums.total
        ctx.save_for_backward(hidden, weight, targets, normalizer - relative_to, entropy, *cached)
        ctx.set_materialize_grads(False)
        return sums.chosen - normalizer, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: torch.Tensor | None, by_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, normalizer, entropy, *cached = ctx.saved_tensors
        by_logprob = torch.zeros_like(normalizer) if by_logprob is None else by_logprob / ctx.temperature
        if by_entropy is not None:
            by_entropy = by_entropy / ctx.temperature
        for_hidden = _real(hidden).new_zeros(hidden.shape) if ctx.needs_input_grad[0] else None
        for_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for part in _parts(len(weight), ctx.columns):
            for block in _parts(len(hidden), ctx.rows):
                if cached:
                    scores = cached[0].clone()
                else:
                    scores = _scores(hidden[block], weight[part], ctx.temperature, ctx.softcap)
                entropy_slope = None if by_entropy is None else by_entropy[block]
                slopes, cap_slope = ctx.kernels.slopes(
                    scores, normalizer[block], entropy[block], by_logprob[block], entropy_slope, ctx.cap
                )
                column, here = _columns(targets[block], part)
                slopes.scatter_add_(1, column, torch.where(here, by_logprob[block], 0.0)[:, None])
                slopes = (slopes if cap_slope is None else slopes.mul_(cap_slope)).to(hidden.dtype)
                if for_hidden is not None:
                    for_hidden[block] += slopes @ weight[part]
                if for_weight is not None:
                    if block.start == 0:
                        for_weight[part] = slopes.t() @ hidden[block]
                    else:
                        for_weight[part].addmm_(slopes.t(), hidden[block])
                del scores, slopes, cap_slope  # before the next tile is made
        if for_hidden is not None:
            if ctx.group is not None:
                dist.all_reduce(for_hidden, group=ctx.group)
            for_hidden = for_hidden.to(hidden.dtype)
        return for_hidden, for_weight, None, None, None, None, None, None, None


class _Sums:
    """Running sums over the scores seen so far, [N] each.

    Attributes:
        highest: their maximum m.
        total: sum of e^(z - m).
        weighted: sum of (z - m) e^(z - m).
        chosen: z of the target; 0 until its tile was added.
    """

    def __init__(self, count: int, like: torch.Tensor) -> None:
        self.highest = _real(like).new_full((count,), LOWEST)
        self.total, self.weighted, self.chosen = (torch.zeros_like(self.highest) for _ in range(3))

    def add(self, own: slice, scores: torch.Tensor, column: torch.Tensor, here: torch.Tensor, kernels: Kernels) -> None:
        """Add the scores of a tile; subtracts the new maximum from `scores` in place."""
        self.chosen[own] += torch.where(here, scores.gather(1, column)[:, 0], 0.0)
        highest, total, weighted = kernels.fold(scores, self.highest[own])
        self._raise(own, highest)
        self.total[own] += total
        self.weighted[own] += weighted

    def gather(self, group: dist.ProcessGroup) -> None:
        """Combine these sums with those of the other ranks."""
        highest = self.highest.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        self._raise(slice(None), highest)
        sums = torch.stack([self.total, self.weighted, self.chosen])
        dist.all_reduce(sums, group=group)
        self.total, self.weighted, self.chosen = sums.unbind()

    def _raise(self, own: slice, highest: torch.Tensor) -> None:
        change = self.highest[own] - highest
        factor = change.exp()
        self.weighted[own] = factor * (self.weighted[own] + change * self.total[own])
        self.total[own] *= factor
        self.highest[own] = highest


def _scores(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, softcap: float | None) -> torch.Tensor:
    """Compute scores, [N, D], [V, D] -> [N, V], as a new tensor that the caller may modify."""
    scores = _real(hidden @ weight.t())
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return scores if temperature == 1 else scores.div_(temperature)


def _real(values: torch.Tensor) -> torch.Tensor:
    """Convert to the precision of sums and exponentials: at least float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _parts(count: int, size: int) -> Iterator[slice]:
    """Split `count` items into slices of `size`; yields at least one slice."""
    for start in range(0, max(count, 1), size):
        yield slice(start, min(start + size, count))


def _columns(targets: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target in `part`, [n, 1], and whether the target is in `part`, [n]; other columns are clamped."""
    column = targets - part.start
    return column.clamp(0, part.stop - part.start - 1)[:, None], (column >= 0) & (targets < part.stop)
