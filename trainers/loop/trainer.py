"""The trainer as the loop sees it: one object, however many processes it has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from forge_env.config.recipe import OptimizerSection
from trainers.actors.remote import agreed, result
from trainers.loop.reference import Reference


class TrainerHandle:
    """The trainer's endpoints as methods."""

    def __init__(self, actor: Any, folder: Path) -> None:
        self._actor = actor
        self.folder = folder
        self.reference: Reference | None = None

    async def configure(self, optimizer: OptimizerSection, **options: Any) -> None:
        """Begin a phase of training (see `TitanTrainer.configure`)."""
        await result(self._actor.configure.call(optimizer, **options))

    async def train_step(self, sequences: list[Any]) -> dict[str, float]:
        """Update the weights from one batch, which the reference model has seen where there is one (`reference`)."""
        metrics: dict[str, float] = await agreed(self._actor.train.call(sequences))
        return metrics

    async def push_weights(self, version: int) -> dict[str, float]:
        """Publish the weights; a lagging reference model may become this version."""
        metrics: dict[str, float] = await agreed(self._actor.push_weights.call(version))
        if self.reference is not None:
            await self.reference.follow(version)
        return metrics

    async def begin_push(self, version: int) -> asyncio.Future[dict[str, float]]:
        """Start to publish the weights as they are now; what is returned ends when they can be pulled.

        Training may go on at once.
        """
        metrics: dict[str, float] = await agreed(self._actor.begin_push.call(version))
        arrival = self._actor.pushed.call()  # sent now, ahead of whatever the trainer is asked next

        async def arrived() -> dict[str, float]:
            published: dict[str, float] = await agreed(arrival)
            if self.reference is not None:
                await self.reference.follow(version)
            return metrics | published

        return asyncio.ensure_future(arrived())

    async def save(self, folder: str) -> None:
        """Write weights and training state."""
        await result(self._actor.save.call(folder))

    async def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        await result(self._actor.load.call(folder))

    async def save_model(self, folder: str) -> None:
        """Write a Hugging Face folder."""
        await result(self._actor.save_model.call(folder))

    async def logprobs(self, sequences: list[Any]) -> list[list[float]]:
        """Log-probabilities of target tokens under the current weights."""
        values: list[list[float]] = await agreed(self._actor.logprobs.call(sequences))
        return values
