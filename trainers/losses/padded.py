"""Adapter for losses written for padded rows: `forward(logprobs, ref_logprobs, advantages, padding_mask)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from forge_env.errors import PluginError, UsageError
from trainers.losses.policy import policy_metrics
from trainers.losses.primitives import kl_estimate, mean
from trainers.losses.types import LossOutput, TokenBatch, needs

ROWS = ("logprobs", "ref_logprobs", "behavior_logprobs", "proximal_logprobs", "entropy")
ARGUMENTS = (*ROWS, "advantages", "padding_mask")


class PaddedLoss:
    """A `Loss` that calls a loss of padded rows, such as a `torch.nn.Module`, with the arguments in its signature:

        logprobs, ref_logprobs, behavior_logprobs, proximal_logprobs, entropy    [R, T] each
        advantages                                                               [R, 1]
        padding_mask                                                             [R, T], 1 for tokens, 0 for padding

    The microbatch has R sequences, the longest with T target tokens; padding is 0. The padded loss returns either
    per-token losses, [R, T], which are averaged over the minibatch's tokens, or a scalar, which is taken as the mean
    over the microbatch's tokens and weighted by their share.

    Args:
        loss: the padded loss. The object itself is called, not its `forward`, so that a module's hooks run.
        name: name of the loss in error messages.
    """

    def __init__(self, loss: Callable[..., torch.Tensor], name: str = "") -> None:
        self.loss = loss
        self.name = name or type(loss).__name__
        parameters = _parameters(loss)
        required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
        if unknown := [key for key in required if key not in ARGUMENTS]:
            raise PluginError(
                f"loss {self.name!r} has unknown parameters: {', '.join(unknown)}", fix=f"known: {', '.join(ARGUMENTS)}"
            )
        if by_position := [key for key in parameters if parameters[key].kind is inspect.Parameter.POSITIONAL_ONLY]:
            raise PluginError(
                f"loss {self.name!r} takes `{by_position[0]}` by position only",
                fix="remove the `/`: arguments are passed by name",
            )
        self._arguments = [key for key in parameters if key in ARGUMENTS]
        declared = needs(loss)
        self.needs = replace(
            declared,
            reference=declared.reference or "ref_logprobs" in required,
            proximal=declared.proximal or "proximal_logprobs" in self._arguments,
        )

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The microbatch's share of the minibatch loss."""
        metrics = policy_metrics(batch)
        if batch.ref_logprobs is not None:
            metrics["kl_ref"] = mean(kl_estimate(batch.logprobs, batch.ref_logprobs, "k3"))
        elif self.needs.reference:
            raise UsageError(f"loss {self.name!r} needs a reference model", fix="set grpo.reference.source=initial")
        if not len(batch.logprobs):
            return LossOutput(batch.logprobs.sum(), metrics)
        rows, columns = places(batch.sequence_ids)
        value = self.loss(**{key: self._argument(key, batch, rows, columns) for key in self._arguments})
        share = 1 / max(batch.total_tokens, 1)
        if value.ndim == 0:
            return LossOutput(value * len(batch.logprobs) * share, metrics)
        return LossOutput(value[rows, columns].sum() * share, metrics)

    def _argument(self, key: str, batch: TokenBatch, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor | None:
        if key == "padding_mask":
            return pad(torch.ones_like(batch.logprobs), rows, columns)
        if key == "advantages":
            padded = pad(batch.advantages, rows, columns)
            if not torch.equal(padded[rows, 0], batch.advantages):
                raise UsageError(
                    f"loss {self.name!r} takes one advantage per sequence, but they differ between tokens",
                    fix="make it take a TokenBatch (docs/losses.md)",
                )
            return padded[:, :1]
        values = batch.proximal if key == "proximal_logprobs" else getattr(batch, key)
        return None if values is None else pad(values, rows, columns)


def _parameters(loss: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of a module's `forward`, or else of the call; empty if there is no signature."""
    try:
        return inspect.signature(getattr(loss, "forward", loss)).parameters
    except (TypeError, ValueError):  # built-in functions
        return {}


def is_padded(loss: Any) -> bool:
    """Whether `loss` is written for padded rows rather than a `TokenBatch`."""
    return "logprobs" in _parameters(loss)


def places(sequence_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each token in padded rows, [N] each; a sequence's tokens keep their order."""
    _, rows, lengths = torch.unique(sequence_ids, return_inverse=True, return_counts=True)
    order = torch.argsort(rows, stable=True)
    starts = lengths.cumsum(0) - lengths
    columns = torch.empty_like(rows)
    columns[order] = torch.arange(len(rows), device=rows.device) - starts[rows[order]]
    return rows, columns


def pad(values: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Scatter flat values, [N], into padded rows of zeros, [R, T]; differentiable."""
    shape = (int(rows.max()) + 1, int(columns.max()) + 1)
    return values.new_zeros(shape).index_put((rows, columns), values)
