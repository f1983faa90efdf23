"""Inputs and outputs of losses, and the inputs that a loss can declare as needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, runtime_checkable

import torch

from trainers.buffer.sequences import Computed


@dataclass(slots=True)
class TokenBatch:
    """The target tokens of one microbatch, flat, N tokens. There is no padding.

    A sequence is an episode: the tokens that the policy sampled in all its segments (forks, conversations). All tokens
    of a sequence are in one batch if the loss needs this (`Needs.whole_sequences`).

    Attributes:
        logprobs: log-probabilities under the policy being trained, [N], with gradient.
        entropy: entropy of its distribution at each token, [N], with gradient.
        behavior_logprobs: log-probabilities when the token was sampled, [N].
        advantages: advantage of each token, [N].
        sequence_ids: sequence of each token, [N] int64, non-negative.
        total_tokens: target tokens of the whole minibatch over all microbatches and ranks, including its share of
            tokens that are not computed (`Needs.zero_advantage`). Denominator of means over tokens.
        total_sequences: sequences of the whole minibatch, counted in the same way.
        ref_logprobs: log-probabilities under the reference model, [N]; None if the run has no reference model.
        proximal_logprobs: log-probabilities under the policy at the start of the training step, [N]. None if that is
            the policy being trained, as in a step's first update.
        sequence_targets: target tokens of each token's whole sequence, [N]; None if all are in this batch.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_ids: torch.Tensor
    total_tokens: float
    total_sequences: float
    ref_logprobs: torch.Tensor | None = None
    proximal_logprobs: torch.Tensor | None = None
    sequence_targets: torch.Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[TokenBatch]) -> TokenBatch:
        """Concatenate several microbatches of one minibatch."""
        named: dict[str, torch.Tensor] = {}
        for item in fields(cls):
            values = [value for part in parts if isinstance(value := getattr(part, item.name), torch.Tensor)]
            if len(values) == len(parts):
                named[item.name] = torch.cat(values)
        return replace(parts[0], **named)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> TokenBatch:
        """Copy to a device."""
        moved = {
            item.name: value.to(device)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), torch.Tensor)
        }
        return replace(self, **moved)  # type: ignore[arg-type]

    @property
    def proximal(self) -> torch.Tensor:
        """`proximal_logprobs`, or `logprobs` without gradient if they are None, [N]."""
        return self.logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs


@dataclass(slots=True)
class LossOutput:
    """A microbatch's share of the minibatch loss (shares add up), and its metrics.

    A metric is the mean over the microbatch's tokens, or their maximum if its name ends in `_max`.
    """

    loss: torch.Tensor
    """Loss, a scalar."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metrics by name, scalars."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Inputs that a loss needs. `zero_advantage` and `whole_sequences` default to true: safe for any loss, but costly.

    Attributes:
        reference: needs `ref_logprobs`; a recipe without a reference model is refused.
        proximal: needs `proximal_logprobs` in every update but a step's first; costs a forward pass.
        zero_advantage: needs tokens without an advantage, at which a term of the loss (KL, entropy) has a gradient. If
            false, segments without any advantage are not computed, but still count in the totals.
        whole_sequences: needs all tokens of a sequence in one batch, because it combines their log-probabilities. If
            false, the segments of a sequence may be in different batches; `TokenBatch.sequence_targets` has its length.
    """

    reference: bool = False
    proximal: bool = False
    zero_advantage: bool = True
    whole_sequences: bool = True

    @property
    def computed(self) -> Computed:
        """Segments of a batch that must be computed."""
        if self.zero_advantage:
            return "all"
        return "sequences" if self.whole_sequences else "segments"


class Loss(Protocol):
    """A policy-gradient loss: a plain class whose constructor's keywords are its options. It can be `Demanding`."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Compute the microbatch's share of the minibatch loss."""


@runtime_checkable
class Demanding(Protocol):
    """A loss that declares the inputs it needs."""

    needs: Needs


def needs(loss: object) -> Needs:
    """The needs that `loss` declares; `Needs()` by default."""
    return loss.needs if isinstance(loss, Demanding) else Needs()
