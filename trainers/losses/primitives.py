"""Components of losses, each tested separately.

Notation of this package, for a token t: l, m, p and q are its log-probs under the policy being trained, the policy that
sampled it, the policy at the start of the training step, and the reference model. A is its advantage, and sg(x) is x
without gradient. Tensors have N tokens, flat over R sequences, which are episodes, as in `TokenBatch`.
"""

from __future__ import annotations

from typing import Literal

import torch

from trainers.losses.types import TokenBatch

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "fixed_horizon"]
Level = Literal["token", "sequence", "geometric"]

MAX_LOG_RATIO = 20.0


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Logarithm of a probability ratio per token, [N], clamped so that its exponential stays finite.

    Clamped tokens have no gradient: with such a ratio they carry no information about the policy.
    """
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Sum over each token's sequence, [N] -> [N]."""
    ids = batch.sequence_ids
    sums = values.new_zeros(int(ids.max()) + 1 if len(ids) else 0).index_add(0, ids, values)
    return sums[ids]


def sequence_mean(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Mean over each token's sequence, [N] -> [N]."""
    return sequence_sum(values, batch) / sequence_sum(torch.ones_like(values), batch)


def sequence_targets(batch: TokenBatch) -> torch.Tensor:
    """For each token, the number of target tokens in its whole sequence, including other microbatches, [N]."""
    if batch.sequence_targets is not None:
        return batch.sequence_targets
    return sequence_sum(torch.ones_like(batch.logprobs.detach()), batch)


def over_level(log_ratios: torch.Tensor, batch: TokenBatch, level: Level) -> torch.Tensor:
    """Log-ratio at each token: its own, that of its sequence (the product), or the product's geometric mean, [N]."""
    if level == "sequence":
        return sequence_sum(log_ratios, batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return sequence_mean(log_ratios, batch) if level == "geometric" else log_ratios


def ppo_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's pessimistic surrogate (Schulman et al. 2017, arXiv 1707.06347), with separate lower and upper bounds.

    Returns the per-token loss max(-r A, -clip(r, 1 - low, 1 + high) A), and masks of the tokens whose gradient is
    removed by the lower and by the upper clip, [N] each.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, bounded = -ratio * advantages, -clipped * advantages
    active = bounded > plain
    return torch.maximum(plain, bounded), active & (advantages < 0), active & (advantages > 0)


def dual_clip(
    loss: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dual clip (Ye et al. 2020, arXiv 1912.09729): min(L, -c A) for A < 0.

    PPO's clip leaves L = -r A unbounded for a negative advantage and a large ratio. Such a token gets the constant loss
    -c A instead, without gradient. Returns the per-token loss and a mask of the tokens that are bounded, [N] each.
    """
    active = (advantages < 0) & (ratio > bound)
    return torch.where(active, -bound * advantages, loss), active


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), [N] (Schulman 2020, joschu.net/blog/kl-approx.html).

    With d = q - l:  k1 = -d (unbiased, may be negative),  k2 = d^2 / 2 (biased, its gradient is that of the KL),
    k3 = e^d - 1 - d (unbiased, never negative, its gradient is not that of the KL far from the reference).
    The gradient of k1 itself is zero in expectation, so the gradient of k2 is used for it.
    """
    difference = log_ratio(ref_logprobs, logprobs)
    if estimator == "k3":
        return difference.exp() - 1 - difference
    squared = difference.square() / 2
    return squared if estimator == "k2" else squared + (-difference - squared).detach()


def aggregate(values: torch.Tensor, batch: TokenBatch, how: Aggregation, horizon: float | None = None) -> torch.Tensor:
    """A microbatch's share of the minibatch mean of per-token `values`, [N] -> [].

    token:         1/T sum_t v_t, T target tokens in the minibatch: all tokens have the same weight.
    sequence:      1/R sum_i 1/T_i sum_t v_t: all sequences have the same weight, so tokens of long ones have less.
    fixed_horizon: 1/(R H) sum_t v_t: as `token`, but minibatches of longer sequences have more weight.
    """
    sequences = max(batch.total_sequences, 1)
    if how == "sequence":
        return values.div(sequence_targets(batch)).sum() / sequences
    if how == "fixed_horizon":
        assert horizon is not None
        return values.sum() / (sequences * horizon)
    return values.sum() / max(batch.total_tokens, 1)


def mean(values: torch.Tensor) -> torch.Tensor:
    """Mean for a metric: without gradient, 0 if there are no values."""
    return values.detach().sum() / max(len(values), 1)


def largest(values: torch.Tensor) -> torch.Tensor:
    """Maximum for a metric: without gradient, 0 if there are no values."""
    return values.detach().max() if len(values) else values.new_zeros(())
