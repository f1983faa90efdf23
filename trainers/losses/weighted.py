"""Losses that weight each token's gradient by its ratio and never remove it entirely.

Every class here has all options of `PolicyLoss`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from trainers.losses.corrections import OPTIONS, Positive
from trainers.losses.grpo import LowerClip
from trainers.losses.policy import BY_TOKEN, NonNegative, PolicyLoss, Surrogate
from trainers.losses.primitives import mean
from trainers.losses.types import Needs, TokenBatch


def _weighted(batch: TokenBatch, log_ratios: torch.Tensor, least: float, most: float) -> Surrogate:
    """Surrogate with the loss -sg(clip(r, least, most)) A l."""
    ratio = log_ratios.exp()
    weight = ratio.clamp(least, most).detach()
    return Surrogate(-weight * batch.advantages * batch.logprobs, ratio, ratio < least, ratio > most)


@dataclass(config=OPTIONS)
class ReinforceLoss(PolicyLoss):
    """REINFORCE (Williams 1992) with a bounded importance weight.

        L_t = -sg(clip(r_t, 1 - clip_ratio, 1 + clip_ratio)) A_t l_t,   r_t = exp(l_t - m_t)

    Different from GRPO: the clip bounds the weight of a token's gradient, and no token loses its gradient.
    """

    surrogate_needs: ClassVar[Needs] = BY_TOKEN
    """Tokens are independent, and have no gradient without an advantage."""
    clip_ratio: NonNegative = 0.2
    """The weight is clipped to [max(0, 1 - clip_ratio), 1 + clip_ratio]; 0: the weight is always 1."""

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        """The weighted log-prob."""
        return _weighted(batch, log_ratios, max(0.0, 1 - self.clip_ratio), 1 + self.clip_ratio)


@dataclass(config=OPTIONS)
class CISPOLoss(PolicyLoss):
    """Clipped importance weights (MiniMax-M1, Chen et al. 2025, arXiv 2506.13585).

        L_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t l_t,   r_t = exp(l_t - m_t)

    Different from GRPO: unlikely tokens that change the course of an answer, whose ratio leaves the clip range first,
    are still learned. As in the paper, there is no lower bound by default, and only the upper bound is tuned.
    """

    surrogate_needs: ClassVar[Needs] = BY_TOKEN
    """Tokens are independent, and have no gradient without an advantage."""
    clip_low: LowerClip = 1.0
    """The weight's lower bound is 1 - clip_low."""
    clip_high: NonNegative = 4.0
    """The weight's upper bound is 1 + clip_high."""

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        """The weighted log-prob."""
        return _weighted(batch, log_ratios, 1 - self.clip_low, 1 + self.clip_high)


@dataclass(config=OPTIONS)
class SAPOLoss(PolicyLoss):
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347).

        L_t = -4/tau sigmoid(tau (r_t - 1)) A_t,   tau = tau_pos if A_t > 0, else tau_neg,   r_t = exp(l_t - m_t)

    Different from GRPO: a smooth gate instead of the clip. A token's gradient is weighted by 4 g (1 - g) with
    g = sigmoid(tau (r - 1)): 1 on-policy, decreasing on both sides. It decreases faster for negative advantages, which
    move probability to the whole rest of the vocabulary. The paper's mean is `aggregation: sequence`.
    """

    surrogate_needs: ClassVar[Needs] = BY_TOKEN
    """Tokens are independent, and have no gradient without an advantage."""
    tau_pos: Positive = 1.0
    """Temperature for positive advantages; with a larger one the weight decreases faster."""
    tau_neg: Annotated[float, Field(gt=0)] = 1.05
    """Temperature for negative advantages."""

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        """Loss of the gated ratio."""
        ratio = log_ratios.exp()
        tau = torch.where(batch.advantages > 0, ratio.new_tensor(self.tau_pos), ratio.new_tensor(self.tau_neg))
        gate = torch.sigmoid(tau * (ratio - 1))
        loss = -4 / tau * gate * batch.advantages
        return Surrogate(loss, ratio, metrics={"gate_mean": mean(4 * gate * (1 - gate))})
