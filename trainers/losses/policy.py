"""Base class of policy-gradient losses: corrections, KL to a reference, entropy, aggregation, metrics."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from forge_env.errors import UsageError, did_you_mean
from trainers.losses.corrections import CORRECTIONS, OPTIONS, Correction, Positive
from trainers.losses.primitives import (
    Aggregation,
    KLEstimator,
    aggregate,
    dual_clip,
    kl_estimate,
    largest,
    log_ratio,
    mean,
)
from trainers.losses.types import LossOutput, Needs, TokenBatch

NonNegative = Annotated[float, Field(ge=0)]


@dataclasses.dataclass(slots=True)
class Surrogate:
    """Per-token loss computed from ratios and advantages.

    Attributes:
        loss: loss per token, [N].
        ratio: probability ratio per token, [N].
        low: tokens at which the lower bound on the ratio is active, [N] bool; None if there is no bound.
        high: tokens at which the upper bound on the ratio is active, [N] bool; None if there is no bound.
        metrics: additional metrics.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


BY_TOKEN = Needs(zero_advantage=False, whole_sequences=False)
"""Needs of a surrogate with independent tokens, whose gradients are proportional to their advantages."""


@dataclass(config=OPTIONS, kw_only=True)
class PolicyLoss:
    """A policy-gradient loss. Subclasses define `surrogate`; the rest is common:

        L = mean over tokens of   w_t * dual_clip(surrogate_t)  +  beta * KL_t  -  entropy_coef * H_t

    Without `correction`, w = 1 and ratios are to the policy that sampled; a correction determines the weights, and the
    ratios are to the proximal policy (see `trainers.losses.corrections`).
    """

    surrogate_needs: ClassVar[Needs] = Needs()
    """Needs of `surrogate` alone. A class that defines `surrogate` without them gets the default, which costs most."""

    beta: NonNegative = 0.0
    """Weight of the KL divergence to the reference model; above 0 needs one (`grpo.reference`)."""
    kl: KLEstimator = "k3"
    """Estimator of that KL divergence."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    aggregation: Aggregation = "token"
    """Mean over `token`s, over `sequence`s of the mean over their tokens, or per sequence over a `fixed_horizon`."""
    horizon: Positive | None = None
    """Number of tokens by which `fixed_horizon` divides a sequence's sum."""
    correction: Correction | None = None
    """Off-policy correction: `tis`, `icepop`, `decoupled`, or one with options, `{name: tis, cap: 3}`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Ratio above which a token with a negative advantage has no gradient."""

    @field_validator("correction", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        name = value.get("name") if isinstance(value, dict) else value
        if isinstance(name, str) and name not in CORRECTIONS:
            guess = did_you_mean(name, CORRECTIONS)
            hint = f"did you mean {guess!r}?" if guess else f"available: {', '.join(CORRECTIONS)}"
            raise ValueError(f"there is no correction {name!r}: {hint}")
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _no_idle_option(self) -> PolicyLoss:
        if (self.aggregation == "fixed_horizon") != (self.horizon is not None):
            raise ValueError("horizon and aggregation=fixed_horizon need each other: set both or neither")
        if self.kl != "k3" and self.beta == 0:
            raise ValueError(f"kl={self.kl} has no effect while beta is 0")
        return self

    def __init_subclass__(cls) -> None:
        if "surrogate" in vars(cls) and "surrogate_needs" not in vars(cls):
            cls.surrogate_needs = Needs()

    @property
    def needs(self) -> Needs:
        """Inputs that the trainer must provide."""
        surrogate, correction = self.surrogate_needs, self.correction
        return Needs(
            reference=surrogate.reference or self.beta > 0,
            proximal=surrogate.proximal or correction is not None,
            zero_advantage=surrogate.zero_advantage or self.beta > 0 or self.entropy_coef > 0,
            whole_sequences=surrogate.whole_sequences or (correction is not None and correction.level != "token"),
        )

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        """Compute the loss of each token from the logarithm of its ratio, [N]."""
        raise NotImplementedError

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The microbatch's share of the minibatch loss."""
        anchor = batch.behavior_logprobs if self.correction is None else batch.proximal
        surrogate = self.surrogate(batch, log_ratio(batch.logprobs, anchor))
        metrics = {**policy_metrics(batch), **_ratio_metrics(surrogate)}
        loss = surrogate.loss
        if self.dual_clip is not None:
            loss, bounded = dual_clip(loss, surrogate.ratio, batch.advantages, self.dual_clip)
            metrics["dual_clip_fraction"] = mean(bounded)
        if self.correction is not None:
            weights, bounded = self.correction(batch)
            loss = weights * loss
            metrics |= {"weight_mean": mean(weights), "weight_max": largest(weights), "weight_bounded": mean(bounded)}
        if batch.ref_logprobs is not None:
            divergence = kl_estimate(batch.logprobs, batch.ref_logprobs, self.kl)
            metrics["kl_ref"] = mean(divergence)
            if self.beta:
                loss = loss + self.beta * divergence
        elif self.beta:
            raise UsageError(
                f"beta={self.beta}: a KL divergence needs a reference model, but there is none",
                fix="set grpo.reference.source=initial, or beta to 0",
            )
        if self.entropy_coef:
            loss = loss - self.entropy_coef * batch.entropy
        return LossOutput(aggregate(loss, batch, self.aggregation, self.horizon), metrics)


def policy_metrics(batch: TokenBatch) -> dict[str, torch.Tensor]:
    """Distance of the policy from the one that sampled: KL(m || l), estimated as k1 and k3.

    `mismatch` is the absolute difference between the log-probs of the trainer at the start of the step and those of the
    generator.
    """
    with torch.no_grad():
        moved = log_ratio(batch.logprobs, batch.behavior_logprobs)
        mismatch = (batch.proximal - batch.behavior_logprobs).abs()
        return {
            "kl_k1": mean(-moved),
            "kl_k3": mean(moved.exp() - 1 - moved),
            "mismatch_mean": mean(mismatch),
            "mismatch_max": largest(mismatch),
        }


def _ratio_metrics(surrogate: Surrogate) -> dict[str, torch.Tensor]:
    none = torch.zeros_like(surrogate.ratio, dtype=torch.bool)
    low = none if surrogate.low is None else surrogate.low
    high = none if surrogate.high is None else surrogate.high
    return {
        "ratio_mean": mean(surrogate.ratio),
        "ratio_max": largest(surrogate.ratio),
        "clip_fraction": mean(low | high),
        "clip_fraction_low": mean(low),
        "clip_fraction_high": mean(high),
        **surrogate.metrics,
    }
