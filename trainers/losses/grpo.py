"""GRPO and its closest relatives: PPO's clip on the ratio of each token, or of a sequence.

Advantages come from the algorithm (`grpo.advantage`); losses use them unchanged. Every class here has all options of
`PolicyLoss`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from trainers.losses.corrections import OPTIONS, Positive
from trainers.losses.policy import BY_TOKEN, NonNegative, PolicyLoss, Surrogate
from trainers.losses.primitives import Aggregation, ppo_clip, sequence_mean
from trainers.losses.types import Needs, TokenBatch

LowerClip = Annotated[float, Field(ge=0, le=1)]


def _clipped(ratio: torch.Tensor, batch: TokenBatch, clip_low: float, clip_high: float) -> Surrogate:
    loss, low, high = ppo_clip(ratio, batch.advantages, clip_low, clip_high)
    return Surrogate(loss, ratio, low, high)


@dataclass(config=OPTIONS)
class GRPOLoss(PolicyLoss):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300).

        L_t = max(-r_t A_t, -clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   r_t = exp(l_t - m_t)

    m_t is the log-prob under the policy version that sampled token t, so the formula is correct on-policy and
    off-policy. Different from the paper: a separate upper clip (DAPO's), and the mean over the minibatch's tokens, so
    that tokens of long and short answers have the same weight; `aggregation: sequence` is the paper's mean.
    """

    surrogate_needs: ClassVar[Needs] = BY_TOKEN
    """Tokens are independent, and have no gradient without an advantage."""
    clip_low: LowerClip = 0.2
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: NonNegative = 0.28
    """The ratio's upper bound is 1 + clip_high."""

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        """PPO's clip on each token's ratio."""
        return _clipped(log_ratios.exp(), batch, self.clip_low, self.clip_high)


@dataclass(config=OPTIONS)
class DrGRPOLoss(GRPOLoss):
    """GRPO done right (Liu et al. 2025, arXiv 2503.20783): L = 1/(R H) sum_t L_t, L_t as in `GRPOLoss`.

    Different from GRPO: one clip for both sides, and a constant H instead of lengths, so that tokens of a long wrong
    answer, or of a batch of long answers, count no less than others. The paper's other change, advantages that are not
    divided by the group's standard deviation, is `grpo.advantage.name: group_mean`.
    """

    clip_high: NonNegative = 0.2
    """The ratio's upper bound is 1 + clip_high."""
    _: KW_ONLY
    aggregation: Aggregation = "fixed_horizon"
    """Mean over `token`s, over `sequence`s of the mean over their tokens, or per sequence over a `fixed_horizon`."""
    horizon: Positive | None = 512
    """H, in tokens, by which `fixed_horizon` divides a sequence's sum; the paper uses the longest answer allowed."""


@dataclass(config=OPTIONS)
class DAPOLoss(GRPOLoss):
    """DAPO (Yu et al. 2025, arXiv 2503.14476): L_t as in `GRPOLoss`, with a dual clip of 3.

    Different from GRPO: a higher upper clip, which leaves room for unlikely tokens, a mean over tokens, and no KL term.
    All three are already defaults of `GRPOLoss`. This class adds the bound on tokens of negative advantage, which
    implementations add to the paper. Dynamic sampling and the penalty on overlong answers are not part of the loss.
    """

    _: KW_ONLY
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Ratio above which a token with a negative advantage has no gradient."""


@dataclass(config=OPTIONS)
class SimpleGRPOLoss(PolicyLoss):
    """On-policy GRPO: L_t = -exp(l_t - sg(l_t)) A_t + beta KL_t.

    Different from GRPO: the ratio is 1, whichever policy sampled the token, so nothing is clipped and the gradient is
    the plain policy gradient. Correct for `max_off_policy_steps: 0` and one minibatch; otherwise set `correction`.
    """

    surrogate_needs: ClassVar[Needs] = BY_TOKEN
    """Tokens are independent, and have no gradient without an advantage."""
    beta: NonNegative = 0.1
    """Weight of the KL divergence to the reference model; above 0 needs one (`grpo.reference`)."""

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        """The policy gradient; the ratio is used only by `dual_clip` and the metrics."""
        return Surrogate(-(batch.logprobs - batch.logprobs.detach()).exp() * batch.advantages, log_ratios.exp())


@dataclass(config=OPTIONS)
class GSPOLoss(PolicyLoss):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071).

        L_t = max(-s_t A_t, -clip(s_t, 1 - clip_low, 1 + clip_high) A_t),
        s_t = sg(s) exp(l_t - sg(l_t)),   s = exp(mean over the sequence of l - m)

    Different from GRPO: the ratio is that of the sequence, so all or none of its tokens are clipped, and the mean is
    over sequences. A mean of log-ratios is far closer to 0 than a single one, hence the paper's narrow clip; for data
    that is several updates old, widen the clip or set `correction`.
    """

    surrogate_needs: ClassVar[Needs] = Needs(zero_advantage=False, whole_sequences=True)
    """The ratio is that of the whole sequence."""
    clip_low: LowerClip = 3e-4
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: NonNegative = 4e-4
    """The ratio's upper bound is 1 + clip_high."""
    _: KW_ONLY
    aggregation: Aggregation = "sequence"
    """Mean over `token`s, over `sequence`s of the mean over their tokens, or per sequence over a `fixed_horizon`."""

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        """PPO's clip on the sequence's ratio, with each token's own gradient."""
        sequence = sequence_mean(log_ratios.detach(), batch)
        ratio = (sequence + log_ratios - log_ratios.detach()).exp()
        return _clipped(ratio, batch, self.clip_low, self.clip_high)
