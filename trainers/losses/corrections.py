"""Off-policy corrections, for tokens sampled by another policy. They can be combined with every loss.

Generators use different kernels and older weights than the trainer. Without a correction, a loss takes its ratio to
the policy that sampled, so a single clip must bound both the trainer's updates and the age of the data. With a
correction, the ratio is taken to the *proximal* policy, the policy at the start of the training step, and each token
gets a weight from the ratio of that policy to the one that sampled it:

    L = w_t * surrogate(exp(l_t - p_t), A_t),      k_t = exp(p_t - m_t),      w_t = a bounded k_t

Corrections differ in the bound. By `level`, k is the ratio of the token, the product of the ratios of its sequence
(unbiased, but noisy for long sequences), or their geometric mean.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from trainers.losses.primitives import Level, log_ratio, over_level
from trainers.losses.types import TokenBatch

OPTIONS = ConfigDict(extra="forbid", use_attribute_docstrings=True)
Positive = Annotated[float, Field(gt=0)]


def _weights(batch: TokenBatch, level: Level) -> torch.Tensor:
    """k, [N]: ratio of the proximal policy to the policy that sampled."""
    return over_level(log_ratio(batch.proximal, batch.behavior_logprobs), batch, level).exp()


@dataclass(config=OPTIONS)
class TIS:
    """Truncated importance sampling: w = min(k, cap) (Ionides 2008; for rollouts of another engine Yao et al. 2025).

    Every token keeps its gradient; tokens that the generator found much less likely count at most `cap` times.
    """

    cap: Positive = 2.0
    """Maximum weight."""
    level: Level = "token"
    """Ratio of a `token`, a whole `sequence`, or its `geometric` mean."""
    name: Literal["tis"] = Field("tis", kw_only=True)
    """Name of the correction."""

    def __call__(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, and a mask of the tokens whose weight is bounded, [N] each."""
        weights = _weights(batch, self.level)
        return weights.clamp(max=self.cap), weights > self.cap


@dataclass(config=OPTIONS)
class IcePop:
    """Masked importance sampling: w = k where low <= k <= high, else 0 (Ling team 2025, arXiv 2510.18855).

    Tokens on which the two policies disagree too much, in either direction, have no gradient at all.
    """

    low: Annotated[float, Field(ge=0)] = 0.5
    """Smallest ratio that is trained on."""
    high: Positive = 5.0
    """Largest ratio that is trained on."""
    level: Level = "token"
    """Ratio of a `token`, a whole `sequence`, or its `geometric` mean."""
    name: Literal["icepop"] = Field("icepop", kw_only=True)
    """Name of the correction."""

    @model_validator(mode="after")
    def _ordered(self) -> IcePop:
        if self.low >= self.high:
            raise ValueError("low must be less than high")
        return self

    def __call__(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, and a mask of the tokens whose weight is bounded, [N] each."""
        weights = _weights(batch, self.level)
        outside = (weights < self.low) | (weights > self.high)
        return weights.masked_fill(outside, 0), outside


@dataclass(config=OPTIONS)
class Decoupled:
    """The decoupled objective: w = k, and no gradient beyond `cap` (Hilton et al. 2021, arXiv 2110.00641; AReaL,
    arXiv 2505.24298).

    The clip bounds the change from the proximal policy; the weight corrects for the age of the data.
    """

    cap: Positive | None = 5.0
    """Tokens with a larger weight have no gradient; null: no limit."""
    level: ClassVar[Level] = "token"
    """The ratio is per token."""
    name: Literal["decoupled"] = Field("decoupled", kw_only=True)
    """Name of the correction."""

    def __call__(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, and a mask of the tokens whose weight is bounded, [N] each."""
        weights = _weights(batch, "token")
        outside = weights > (float("inf") if self.cap is None else self.cap)
        return weights.masked_fill(outside, 0), outside


Correction = Annotated[TIS | IcePop | Decoupled, Field(discriminator="name")]
CORRECTIONS: dict[str, type] = {"tis": TIS, "icepop": IcePop, "decoupled": Decoupled}
