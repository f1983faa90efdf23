"""The parts that losses share. Formulas use l = log-prob now, m = log-prob when sampled, r = exp(l - m)."""

from __future__ import annotations

import torch

from trainers.losses.types import TokenBatch

MAX_LOG_RATIO = 20.0


def token_logprobs_and_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `targets`, [N], and entropy, [N], from logits, [N, V]. Entropy carries no gradient."""
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return chosen, entropy


def log_ratio(batch: TokenBatch) -> torch.Tensor:
    """l - m per token, [N], clamped so that its exponential stays finite."""
    return (batch.logprobs - batch.behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's pessimistic surrogate (Schulman et al. 2017) with separate bounds (DAPO's clip-higher).

    Returns the per-token loss max(-r A, -clip(r, 1 - low, 1 + high) A), [N], and where the clip is active, [N].
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, bounded = -ratio * advantages, -clipped * advantages
    return torch.maximum(plain, bounded), bounded > plain


def ratio_metrics(log_ratios: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far the policy is from the one that sampled: mean ratio, k1 and k3 estimates of KL(m || l)."""
    with torch.no_grad():
        ratio = log_ratios.exp()
        return {
            "ratio_mean": ratio.mean(),
            "kl_k1": -log_ratios.mean(),
            "kl_k3": (ratio - 1 - log_ratios).mean(),
            "logprob_diff": log_ratios.abs().mean(),
        }
