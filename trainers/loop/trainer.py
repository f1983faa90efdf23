"""The trainer as the loop sees it: one object, however many processes it has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import OptimizerSection
from forge_env.run.account import Account
from forge_env.run.timeline import Timeline
from forge_env.trajectory import Segment
from trainers.actors.remote import agreed, result
from trainers.buffer.sequences import Computed
from trainers.buffer.types import GroupBuffer, Reservation
from trainers.loop.reference import Reference

if TYPE_CHECKING:
    from trainers.losses.types import Loss
    from trainers.weights.checksum import Sums
    from trainers.weights.store import Published


class TrainerHandle:
    """The trainer's endpoints as methods."""

    def __init__(self, actor: Any, folder: Path) -> None:
        self.actor = actor
        self.folder = folder
        self.reference: Reference | BaseReference | None = None
        self._computed: Computed = "all"

    async def configure(self, optimizer: OptimizerSection, *, loss: Loss, **options: Any) -> None:
        """Begin a phase of training (see `TitanTrainer.configure`)."""
        from trainers.losses.types import needs  # takes seconds: torch

        self._computed = needs(loss).computed
        await result(self.actor.configure.call(optimizer, loss=loss, **options))

    async def train_step(self, sequences: list[Segment]) -> dict[str, float]:
        """Update the weights from one batch, all of which is learned."""
        metrics: dict[str, float] = await agreed(self.actor.train.call(sequences))
        return metrics

    async def train_on(
        self, buffer: GroupBuffer[Any], reservation: Reservation, account: Account | None = None
    ) -> dict[str, float]:
        """Update the weights from the groups that a step was given; the data goes from the buffer to who computes it.

        Where there is a reference model, it goes first. A step without signal is one too: the schedule counts steps.

        Args:
            account: is told of what is done.
        """
        metrics: dict[str, float] = {}
        if self.reference is not None:
            if account is not None:
                account.enter("wait for the reference")
            metrics = await self.reference.score(buffer, reservation.step, self._computed)
        if account is not None:
            account.enter("train")
        trained: dict[str, float] = await agreed(self.actor.train_on.call(buffer, reservation.step))
        return metrics | trained

    async def release_memory(self) -> None:
        """Give back memory of the GPUs that is not in use."""
        await result(self.actor.release_memory.call())

    async def score_base(self, buffer: GroupBuffer[Any], step: int) -> None:
        """Set `ref_logprobs` of the segments of `step` that will be computed, from the model without adapters."""
        await result(self.actor.score_base.call(buffer, step))

    async def push_weights(self, version: int) -> Published:
        """Publish the weights, and wait until the index has them; where they lie."""
        published, indexed = await self.begin_push(version)
        await indexed
        return published

    async def begin_push(self, version: int) -> tuple[Published, Coroutine[Any, Any, dict[str, float]]]:
        """Publish the weights as they are now. Training may go on at once.

        Returns:
            Where they lie, and a coroutine that ends, with seconds and bytes, when the index has them and a lagging
            reference model, if it is due, has become this version.
        """
        published, begun = await agreed(self.actor.begin_push.call(version))
        entered = self.actor.pushed.call()  # sent now, ahead of whatever the trainer is asked next

        async def indexed() -> dict[str, float]:
            metrics: dict[str, float] = begun | await agreed(entered)
            if self.reference is not None:
                await self.reference.follow(version)
            return metrics

        return published, indexed()

    async def checksums(self) -> Sums:
        """Of the weights as they are now, over all ranks, by tensor (`trainers.weights.checksum`)."""
        from trainers.weights.checksum import together

        return together((await result(self.actor.checksums.call())).values())

    async def begin_save(self, folder: str) -> asyncio.Future[dict[str, float]]:
        """Start to write weights and training state as they are now; what is returned ends when they are written.

        Training may go on at once.
        """
        begun = await agreed(self.actor.begin_save.call(folder))
        writing = self.actor.saved.call()  # sent now, as in `begin_push`

        async def written() -> dict[str, float]:
            metrics: dict[str, float] = begun | await agreed(writing)
            return metrics

        return asyncio.ensure_future(written())

    async def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        await result(self.actor.load.call(folder))

    async def save_model(self, folder: str, dtype: str = "float32") -> None:
        """Write a Hugging Face folder."""
        await result(self.actor.save_model.call(folder, dtype))

    async def logprobs(self, sequences: list[Segment]) -> list[NDArray[np.float32]]:
        """Log-probabilities of target tokens under the current weights."""
        values: list[NDArray[np.float32]] = await agreed(self.actor.logprobs.call(sequences))
        return values


class BaseReference:
    """The policy before RL where adapters are trained: the trainer's own processes compute it, without them.

    Attributes:
        actor: that rollout workers could ask: none.
        version: of the policy that it is.
    """

    actor = None
    version = 0

    def __init__(self, trainer: TrainerHandle) -> None:
        self._trainer = trainer

    async def score(self, buffer: GroupBuffer[Any], step: int, computed: Computed = "all") -> dict[str, float]:
        """Like `Reference.score`, for the segments that the trainer's loss needs."""
        started = time.perf_counter()
        await self._trainer.score_base(buffer, step)
        return {"reference_s": time.perf_counter() - started}

    async def follow(self, version: int) -> None:
        """It never changes."""

    async def look(self, timeline: Timeline | None) -> None:
        """What it does is in the trainer's account."""

    def take_times(self) -> dict[str, float]:
        """Likewise."""
        return {}
