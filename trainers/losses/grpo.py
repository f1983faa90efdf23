"""GRPO's loss with an importance ratio to the policy that sampled each token."""

from __future__ import annotations

from trainers.losses.primitives import log_ratio, ppo_clip, ratio_metrics
from trainers.losses.types import LossOutput, TokenBatch


class GRPOLoss:
    """Clipped, importance-corrected policy gradient (Shao et al. 2024, arXiv 2402.03300).

        L = 1/T sum_t max(-r_t A_t, -clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   r_t = exp(l_t - m_t)

    T counts the target tokens of the whole minibatch, so long answers weigh no less per token than short ones
    (Dr. GRPO, arXiv 2503.20783); m_t is the log-prob under the exact policy version that sampled token t, which
    makes the same formula right on-policy and off-policy.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28) -> None:
        if clip_low < 0 or clip_high < 0:
            raise ValueError("clip_low and clip_high must not be negative")
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The microbatch's share of the minibatch loss."""
        log_ratios = log_ratio(batch)
        per_token, clipped = ppo_clip(log_ratios.exp(), batch.advantages, self.clip_low, self.clip_high)
        metrics = {**ratio_metrics(log_ratios), "clip_fraction": clipped.float().mean()}
        return LossOutput(per_token.sum() / batch.total_tokens, metrics)
