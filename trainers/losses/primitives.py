"""The parts that losses are made of; each is tested alone.

In formulas of this package, for a token t: l is its log-prob under the policy being trained, m under the policy that
sampled it, p under the policy at the start of the training step, q under the reference; A its advantage; sg(x) is x
without gradient. N tokens are flat over R sequences, which are episodes, as in `TokenBatch`.
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
    """log of a probability ratio per token, [N], clamped so that its exponential stays finite.

    Where the clamp is active there is no gradient: so far off, a token says nothing about the policy.
    """
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The sum over a token's sequence, at each of its tokens: [N] -> [N]."""
    ids = batch.sequence_ids
    sums = values.new_zeros(int(ids.max()) + 1 if len(ids) else 0).index_add(0, ids, values)
    return sums[ids]


def sequence_mean(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The mean over a token's sequence, at each of its tokens: [N] -> [N]."""
    return sequence_sum(values, batch) / sequence_sum(torch.ones_like(values), batch)


def sequence_targets(batch: TokenBatch) -> torch.Tensor:
    """For each token, the number of target tokens in its whole sequence, including other microbatches, [N]."""
    if batch.sequence_targets is not None:
        return batch.sequence_targets
    return sequence_sum(torch.ones_like(batch.logprobs.detach()), batch)


def over_level(log_ratios: torch.Tensor, batch: TokenBatch, level: Level) -> torch.Tensor:
    """Log-ratios of tokens, of whole sequences (their product), or its geometric mean, at each token: [N] -> [N]."""
    if level == "sequence":
        return sequence_sum(log_ratios, batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return sequence_mean(log_ratios, batch) if level == "geometric" else log_ratios


def ppo_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's pessimistic surrogate (Schulman et al. 2017, arXiv 1707.06347) with a bound of its own for each side.

    Returns the per-token loss max(-r A, -clip(r, 1 - low, 1 + high) A), and where the lower and where the upper clip
    takes the gradient away; [N] each.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, bounded = -ratio * advantages, -clipped * advantages
    active = bounded > plain
    return torch.maximum(plain, bounded), active & (advantages < 0), active & (advantages > 0)


def dual_clip(
    loss: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dual clip (Ye et al. 2020, arXiv 1912.09729): min(L, -c A) where A < 0.

    PPO's clip leaves L = -r A unbounded for a negative advantage and a large ratio. There the loss becomes the constant
    -c A: the token has no gradient. Returns the per-token loss and where the bound is active, [N] each.
    """
    active = (advantages < 0) & (ratio > bound)
    return torch.where(active, -bound * advantages, loss), active


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), [N] (Schulman 2020, joschu.net/blog/kl-approx.html).

    With d = q - l:  k1 = -d (unbiased, may be negative),  k2 = d^2 / 2 (biased, its gradient is that of the KL),
    k3 = e^d - 1 - d (unbiased, never negative, its gradient is not that of the KL far from the reference).
    The gradient of k1 as it stands is zero on average, so its gradient is taken to be that of k2.
    """
    difference = log_ratio(ref_logprobs, logprobs)
    if estimator == "k3":
        return difference.exp() - 1 - difference
    squared = difference.square() / 2
    return squared if estimator == "k2" else squared + (-difference - squared).detach()


def aggregate(values: torch.Tensor, batch: TokenBatch, how: Aggregation, horizon: float | None = None) -> torch.Tensor:
    """A microbatch's share of the minibatch mean of per-token `values`, [N] -> [].

    token:         1/T sum_t v_t, T target tokens in the minibatch: every token weighs the same.
    sequence:      1/R sum_i 1/T_i sum_t v_t: every sequence weighs the same, so a long one less per token.
    fixed_horizon: 1/(R H) sum_t v_t: as `token`, but a minibatch of longer sequences weighs more.
    """
    sequences = max(batch.total_sequences, 1)
    if how == "sequence":
        return values.div(sequence_targets(batch)).sum() / sequences
    if how == "fixed_horizon":
        assert horizon is not None
        return values.sum() / (sequences * horizon)
    return values.sum() / max(batch.total_tokens, 1)


def mean(values: torch.Tensor) -> torch.Tensor:
    """The mean as a metric: without gradient, 0 for no values."""
    return values.detach().sum() / max(len(values), 1)


def largest(values: torch.Tensor) -> torch.Tensor:
    """The maximum as a metric: without gradient, 0 for no values."""
    return values.detach().max() if len(values) else values.new_zeros(())
