"""Next-token cross-entropy on demonstrations."""

from __future__ import annotations

from trainers.losses.types import LossOutput, TokenBatch


class SFTLoss:
    """Mean negative log-likelihood of the demonstrated tokens: L = -1/T sum_t l_t."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The microbatch's share of the minibatch loss."""
        return LossOutput(-batch.logprobs.sum() / batch.total_tokens)
