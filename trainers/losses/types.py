"""What a loss is given, what it returns, and what it may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass(slots=True)
class TokenBatch:
    """The target tokens of one microbatch, flat: N tokens of R whole sequences. There is no padding.

    Attributes:
        logprobs: log-probabilities under the policy being trained, [N], with gradient.
        entropy: entropy of its distribution at each token, [N], with gradient.
        behavior_logprobs: log-probabilities when the token was sampled, [N].
        advantages: [N].
        sequence_ids: sequence of each token, [N] int64 from 0; a sequence's tokens are all in one batch.
        total_tokens: target tokens of the whole minibatch over all microbatches and ranks, as it was admitted: with its
            share of those without signal, which are in no microbatch. What a mean over tokens divides by.
        total_sequences: sequences of the whole minibatch likewise.
        ref_logprobs: log-probabilities under the reference model, [N]; None where the run has none.
        proximal_logprobs: log-probabilities under the policy at the start of the training step, [N]. None: it is the
            policy being trained, as in a step's first update.
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

    @property
    def proximal(self) -> torch.Tensor:
        """`proximal_logprobs`, whichever way they are given, without gradient, [N]."""
        return self.logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs


@dataclass(slots=True)
class LossOutput:
    """A microbatch's share of the minibatch loss (shares add up), and its metrics.

    A metric is the mean over the microbatch's tokens; one whose name ends in `_max` is the largest value.
    """

    loss: torch.Tensor
    """A scalar."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> a scalar."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loss wants beside what every `TokenBatch` holds.

    Attributes:
        reference: `ref_logprobs`; a recipe without a reference model is refused.
        proximal: `proximal_logprobs` in every update but a step's first; costs a forward pass.
    """

    reference: bool = False
    proximal: bool = False


class Loss(Protocol):
    """A policy-gradient loss: a plain class whose constructor's keywords are its options; it may be `Demanding`."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The loss of one microbatch."""


@runtime_checkable
class Demanding(Protocol):
    """A loss that wants more than every `TokenBatch` holds."""

    @property
    def needs(self) -> Needs:
        """What that is."""


def needs(loss: object) -> Needs:
    """What `loss` asks for; nothing where it doesn't say."""
    return loss.needs if isinstance(loss, Demanding) else Needs()
