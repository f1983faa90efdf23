"""On-policy distillation: the student samples, and a teacher's log-probabilities of the sampled tokens give advantages.

    d_t = log p_teacher(x_t) - log p_student(x_t)        for every token x_t that the student sampled
    A_t = d_t - mean of d over the group's tokens

The mean of d over the student's tokens is the negative reverse KL divergence (metric `reward/teacher_kl`). Raising
the tokens that the teacher finds likelier and lowering the others moves the student towards the teacher on the
student's own samples, with credit per token and without rewards (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543).
The mean is a baseline: it reduces the variance of the gradient without changing its expected direction.
The environment still runs, limits and records the episodes, and its reward is logged as usual.

    method: distillation
    grpo:
      reference: {source: path, path: a/checkpoint/with/the/same/vocabulary}

Everything else (rollouts, buffer, staleness bound, importance-corrected loss) is shared with GRPO.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.trajectory import Trajectory
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.parts import learned, make_mask
from trainers.buffer.packed import PackedGroup, pack
from trainers.loop.method import Method
from trainers.loop.system import System
from trainers.rollout.types import Group, Preparation, ScoreFunction


class Preferring(Preparation):
    """Preparation of groups in the rollout workers: advantages from the teacher's preference for each token."""

    def __init__(self, config: RunConfig, score: ScoreFunction) -> None:
        super().__init__(config, score)
        self.mask = make_mask(config.grpo.mask)

    async def __call__(self, group: Group) -> PackedGroup | None:
        """Score all sampled tokens with the teacher, and pack the group with the resulting advantages."""
        played = [episode for seat in group.by_seat() for episode in seat.valid]
        preferences = [await self.preference(episode) for episode in played]
        episodes = [  # copies: the group's episodes are being written to disk
            replace(episode, metrics={**episode.metrics, "teacher_kl": -float(preferred.mean())})
            for episode, preferred in zip(played, preferences, strict=True)
        ]
        baseline = np.concatenate(preferences).mean()
        masks = [learned(self.mask(episode), episode) for episode in episodes]
        return pack(episodes, [preferred - baseline for preferred in preferences], masks)

    async def preference(self, episode: Trajectory) -> NDArray[np.float32]:
        """Teacher's minus student's log-probability of each sampled token of an episode, float32 [sampled]."""
        segments = episode.segments()
        teacher = np.concatenate(await self.score(segments))
        preferred: NDArray[np.float32] = teacher - np.concatenate([each.logprobs[each.mask] for each in segments])
        return preferred


class Distillation(GRPO):
    """Distillation of a teacher into the policy, on episodes sampled by the policy."""

    preparation: ClassVar[type[Preparation]] = Preferring

    def __init__(self, system: System) -> None:
        super().__init__(system)
        system.trainer.reference = None  # only the workers use it, as the teacher

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Check a recipe; refuse one without a teacher or with options that have no effect here."""
        from trainers.losses.load import make_loss  # imports torch, which takes seconds
        from trainers.losses.types import needs

        section, fields = config.grpo, type(config.grpo).model_fields
        if section.reference.source != "path":  # copies of the policy would teach it not to change
            raise UsageError(
                "method=distillation has no teacher",
                fix="use grpo.reference.source=path grpo.reference.path=CHECKPOINT",
            )
        for name in ("advantage", "filter"):
            if getattr(section, name) != fields[name].default:
                raise UsageError(
                    f"grpo.{name} is not used by method=distillation: the teacher gives the advantages",
                    fix=f"leave grpo.{name} out",
                )
        if needs(make_loss(section.loss)).reference:
            raise UsageError(
                "method=distillation: the reference model is the teacher, so grpo.loss can't have a KL penalty",
                fix="use grpo.loss.options.beta=0",
            )
        make_mask(section.mask)


train = Method(Distillation)
