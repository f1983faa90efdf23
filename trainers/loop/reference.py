"""The reference model as the loop sees it: log-probabilities for a batch, and when a lagging copy catches up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import ReferenceSection
from forge_env.run.account import Account
from forge_env.trajectory import Segment
from trainers.actors.remote import result
from trainers.buffer.types import GroupBuffer


class Reference:
    """The `ReferenceModel` actor. A lagging copy becomes the policy when it is `section.every` versions behind.

    After a resume a lagging copy starts from the policy of the checkpoint: the copy it had, where checkpoints are
    saved at multiples of `every`.

    Args:
        actor: `ReferenceModel`.
        section: of the recipe.
        account: of the actor's time.
    """

    def __init__(self, actor: Any, section: ReferenceSection, account: Account) -> None:
        self._actor = actor
        self.account = account
        self._every = section.every
        self.version = 0
        self._turn = asyncio.Lock()  # the actor does one thing at a time, and its account says which

    async def score(self, buffer: GroupBuffer[Any], step: int) -> dict[str, float]:
        """Give the sequences of `step`, which the buffer holds, their `ref_logprobs`; returns the seconds it took."""
        started = time.perf_counter()
        async with self._turn:
            with self.account.during("score"):
                await result(self._actor.score.call(buffer, step))
        return {"reference_s": time.perf_counter() - started}

    async def logprobs(self, segments: list[Segment]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the target tokens of each segment, float32 [N] each."""
        async with self._turn:
            with self.account.during("score"):
                found: list[NDArray[np.float32]] = await result(self._actor.logprobs.call_one(segments))
        return found

    async def follow(self, version: int) -> None:
        """Policy `version` is published, and held by the store until the next one is."""
        if self._every is not None and version - self.version >= self._every:
            async with self._turn:
                with self.account.during("load weights"):
                    await result(self._actor.load_version.call(version))
            self.version = version
