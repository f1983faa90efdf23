"""The sections of a recipe about the reinforcement learning itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forge_env.config.base import NonNegative, Positive, Section


class LossSection(Section):
    """Which policy-gradient loss, by its registered name, with its options."""

    name: str = "grpo"
    """Entry point in `forge_env.losses`, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that loss (`clip_low`, `clip_high`, ...)."""


class ReferenceSection(Section):
    """The model that a loss with `beta` keeps the policy close to."""

    source: Literal["none", "initial", "lagging"] = "none"
    """`initial`: the policy as it was before RL; `lagging`: a copy of the policy, renewed every `every` steps."""
    every: Positive | None = None
    """Training steps between two renewals of a lagging copy."""
    with_gpus: bool = False
    """On a GPU of its own; else on the CPU."""

    @model_validator(mode="after")
    def _lagging(self) -> ReferenceSection:
        if (self.source == "lagging") != (self.every is not None):
            raise ValueError("every goes with source=lagging, and it with every")
        if self.with_gpus and self.source == "none":
            raise ValueError("with_gpus: there is no reference model while source is none")
        return self


class ReplaySection(Section):
    """Which complete groups a training step is given. Any choice keeps within `grpo.max_off_policy_steps`."""

    sampling: str = "fifo"
    """Which groups come first: `fifo`, `freshest`, `prioritized` (drawn in proportion to the mean size of their \
advantages), `random`; another installed rule, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that rule (`alpha` of `prioritized`)."""
    max_uses: Positive = 1
    """Training steps that may use a group, at most `max_off_policy_steps` + 1. Above 1, fewer groups are rolled out: \
one in `max_uses` groups of a step is new, more where more are complete, and used ones fill the other places."""
    capacity: Positive | None = None
    """Groups kept for another use; unset: all that are young enough."""
    eviction: str = "oldest"
    """Which of them leave first beyond the capacity: `oldest`, `least_advantage`, `most_used`; another installed \
rule, or `module:Class`."""

    @model_validator(mode="after")
    def _capacity(self) -> ReplaySection:
        if self.capacity is not None and self.max_uses == 1:
            raise ValueError("capacity is for groups kept for another use: set max_uses above 1")
        if self.eviction != "oldest" and self.capacity is None:
            raise ValueError("eviction is for groups beyond the capacity: set capacity")
        return self


class GRPOSection(Section):
    """The asynchronous loop."""

    steps: Positive = 60
    """Training steps."""
    groups_per_step: Positive = 24
    """Prompts in one training step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Episodes of one prompt; their mean reward is the baseline."""
    max_off_policy_steps: NonNegative = 2
    """Bound on the age of every trained token, in policy updates. 0: synchronous, on-policy."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO); off: Dr. GRPO."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature of rollouts, within what vLLM samples at."""
    max_tokens_per_turn: Positive = 160
    """Sampled tokens in one assistant message."""
    group_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """So long after the model's first answer in it a group trains with the members that finished."""
    filter_groups: bool = False
    """Leave out groups whose rewards are all equal, and roll out others in their place: every step trains on \
`groups_per_step` groups with signal."""
    replay: ReplaySection = ReplaySection()
    """Order, re-use and eviction of complete groups."""
    loss: LossSection = LossSection()
    """The loss."""
    reference: ReferenceSection = ReferenceSection()
    """The reference model of its KL term. With `source` set, the divergence is logged whether `beta` is 0 or not."""

    @model_validator(mode="after")
    def _reuse(self) -> GRPOSection:
        young_enough = self.max_off_policy_steps + 1
        if self.replay.max_uses > young_enough:
            raise ValueError(f"replay.max_uses: a group is young enough for max_off_policy_steps + 1 = {young_enough}")
        return self
