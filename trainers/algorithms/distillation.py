"""On-policy distillation: the student samples, the teacher says how likely it would have been to say the same.

    d_t = log p_teacher(x_t) - log p_student(x_t)        for every token x_t that the student sampled
    A_t = d_t - mean of d over the group's tokens

The mean of d over the student's own tokens is the negative reverse KL divergence (metric `reward/teacher_kl`). Raising
what the teacher finds likelier and lowering what it finds less likely moves the student towards it where the student
goes: dense credit, a token at a time, without rewards (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543). The mean is a
baseline: it leaves the gradient's direction alone and takes noise out of it. The environment still plays, limits and
records the episodes, and its reward is logged as ever.

    method: distillation
    grpo:
      reference: {source: path, path: a/checkpoint/with/the/same/vocabulary}

All around it (rollouts, buffer, staleness bound, importance-corrected loss) is GRPO's.
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
from trainers.loop.system import Method, System
from trainers.rollout.types import Group, Preparation, ScoreFunction


class Preferring(Preparation):
    """In the rollout workers: a token is as good as the teacher likes it better than the student did."""

    def __init__(self, config: RunConfig, score: ScoreFunction) -> None:
        super().__init__(config, score)
        self.mask = make_mask(config.grpo.mask)

    async def __call__(self, group: Group) -> PackedGroup | None:
        """Ask the teacher about every token that was sampled."""
        played = [episode for own in group.by_seat() for episode in own.valid]
        preferences = [await self.preference(episode) for episode in played]
        episodes = [  # a copy: the group's own are being written to disk
            replace(episode, metrics={**episode.metrics, "teacher_kl": -float(preferred.mean())})
            for episode, preferred in zip(played, preferences, strict=True)
        ]
        baseline = np.concatenate(preferences).mean()
        masks = [learned(self.mask(episode), episode) for episode in episodes]
        return pack(episodes, [preferred - baseline for preferred in preferences], masks)

    async def preference(self, episode: Trajectory) -> NDArray[np.float32]:
        """By how much the teacher prefers each sampled token of an episode, float32 [sampled]."""
        segments = episode.segments()
        theirs = np.concatenate(await self.score(segments))
        preferred: NDArray[np.float32] = theirs - np.concatenate([own.logprobs[own.mask] for own in segments])
        return preferred


class Distillation(GRPO):
    """Towards a teacher, on what the student itself does."""

    preparation: ClassVar[type[Preparation]] = Preferring

    def __init__(self, system: System) -> None:
        super().__init__(system)
        system.trainer.reference = None  # the workers ask the teacher; the trainer has nobody to compare with

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse a recipe without a teacher, or with parts that mean nothing here."""
        from trainers.losses.load import make_loss  # takes seconds: torch
        from trainers.losses.types import needs

        section, usual = config.grpo, type(config.grpo).model_fields
        if section.reference.source != "path":  # the policy's own copies would teach it to stay as it is
            raise UsageError(
                "method=distillation has no teacher",
                fix="use grpo.reference.source=path grpo.reference.path=CHECKPOINT",
            )
        for name in ("advantage", "filter"):
            if getattr(section, name) != usual[name].default:
                raise UsageError(
                    f"grpo.{name} means nothing to method=distillation: the teacher gives the advantages",
                    fix=f"leave grpo.{name} out",
                )
        if needs(make_loss(section.loss)).reference:
            raise UsageError(
                "method=distillation: the reference model is the teacher, so grpo.loss can't be compared with one",
                fix="use grpo.loss.options.beta=0",
            )
        make_mask(section.mask)


train = Method(Distillation)
