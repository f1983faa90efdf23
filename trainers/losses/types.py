"""What a loss is given and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(slots=True)
class TokenBatch:
    """The target tokens of one microbatch, flat: N tokens of R sequences.

    Attributes:
        logprobs: log-probabilities under the policy being trained, [N], with gradient.
        entropy: entropy of its distribution at each token, [N].
        behavior_logprobs: log-probabilities when the token was sampled, [N].
        advantages: [N].
        sequence_ids: sequence of each token, [N] int64.
        total_tokens: target tokens of the whole minibatch over all microbatches and ranks.
        total_sequences: sequences of the whole minibatch likewise.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_ids: torch.Tensor
    total_tokens: int
    total_sequences: int


@dataclass(slots=True)
class LossOutput:
    """A microbatch's share of the minibatch loss (shares add up), and metrics as means over its tokens."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A policy-gradient loss: a plain class whose constructor's keywords are its options."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The loss of one microbatch."""
