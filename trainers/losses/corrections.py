"""What to do about tokens that another policy sampled: corrections that go with every loss.

Generators run other kernels and older weights than the trainer. The ratio of a loss may be taken to the policy that
sampled (no correction): then one clip has to bound both the trainer's steps and the data's age. Or it is taken to the
*proximal* policy, the one at the start of the training step, and each token is weighted once by how far that policy
is from the one that sampled it:

    L = w_t * surrogate(exp(l_t - p_t), A_t),      k_t = exp(p_t - m_t),      w_t = a bounded k_t

Corrections differ in the bound. k is of a token; of its whole sequence, the product (unbiased, noisy in long
sequences); or the product's geometric mean (`level`).
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
    """k, [N]: proximal policy over the one that sampled."""
    return over_level(log_ratio(batch.proximal, batch.behavior_logprobs), batch, level).exp()


@dataclass(config=OPTIONS)
class TIS:
    """Truncated importance sampling: w = min(k, cap) (Ionides 2008; for rollouts of another engine Yao et al. 2025).

    Every token keeps a gradient; those the generator found much less likely count at most `cap` times.
    """

    cap: Positive = 2.0
    """Largest weight."""
    level: Level = "token"
    """Ratio of a `token`, a whole `sequence`, or its `geometric` mean."""
    name: Literal["tis"] = Field("tis", kw_only=True)
    """Which correction."""

    def __call__(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and where they are bounded, [N] each."""
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
    """Which correction."""

    @model_validator(mode="after")
    def _ordered(self) -> IcePop:
        if self.low >= self.high:
            raise ValueError("low must be less than high")
        return self

    def __call__(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and where they are bounded, [N] each."""
        weights = _weights(batch, self.level)
        outside = (weights < self.low) | (weights > self.high)
        return weights.masked_fill(outside, 0), outside


@dataclass(config=OPTIONS)
class Decoupled:
    """The decoupled objective: w = k, and no gradient beyond `cap` (Hilton et al. 2021, arXiv 2110.00641; AReaL,
    arXiv 2505.24298).

    The clip bounds the step from the proximal policy, the weight accounts for the data's age.
    """

    cap: Positive | None = 5.0
    """Tokens of a larger weight have no gradient; null: all have."""
    level: ClassVar[Level] = "token"
    """The ratio is per token."""
    name: Literal["decoupled"] = Field("decoupled", kw_only=True)
    """Which correction."""

    def __call__(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and where they are bounded, [N] each."""
        weights = _weights(batch, "token")
        outside = weights > (float("inf") if self.cap is None else self.cap)
        return weights.masked_fill(outside, 0), outside


Correction = Annotated[TIS | IcePop | Decoupled, Field(discriminator="name")]
CORRECTIONS: dict[str, type] = {"tis": TIS, "icepop": IcePop, "decoupled": Decoupled}
