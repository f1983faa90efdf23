"""Publish new weights from the trainer to the generators while the trainer computes the next step.

    trainer: train c | snapshot | train c + 1 ........... | snapshot | ...
                         \\ pull -> swap -> release   \\ ...

The update message to the generators carries the snapshot's location, while the store's index is updated concurrently.
Only one version is in transit: the next snapshot waits until the previous version has arrived, which a generator that
is much slower than the others doesn't delay (`trainers.generator.pool`). The buffer's window allows for this: the
trainer's version is at most one step ahead of the version that has arrived, and that step's groups still hold their
slots (`trainers.buffer.window`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from forge_env.concurrency import gather_or_cancel
from trainers.buffer.types import GroupBuffer
from trainers.generator.pool import GeneratorPool
from trainers.loop.contract import Contract
from trainers.loop.trainer import TrainerHandle

if TYPE_CHECKING:
    from trainers.weights.checksum import Sums
    from trainers.weights.store import Published

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes policy versions in order.

    Args:
        trainer: provides the weights.
        generators: receive the weights.
        buffer: releases groups when a version has arrived.
        tasks: task group of the run; a failure to publish ends the run.
        contract: checks that the weights that arrive are those of the trainer.
    """

    def __init__(
        self,
        trainer: TrainerHandle,
        generators: GeneratorPool,
        buffer: GroupBuffer[Any],
        tasks: asyncio.TaskGroup,
        contract: Contract,
    ) -> None:
        self._trainer = trainer
        self._generators = generators
        self._buffer = buffer
        self._tasks = tasks
        self._contract = contract
        self._under_way: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}

    async def publish(self, version: int) -> None:
        """Take a snapshot of the weights and start sending it as `version`, after the previous version has arrived."""
        await self.settled()
        logger.info(f"Pushing weights for policy version {version}")
        published, indexed = await self._trainer.begin_push(version)
        sums = await self._contract.weights_sent()  # before the next step changes them
        arriving = [self._generators.update_weights(version, published), indexed]
        self._under_way = self._tasks.create_task(self._carry(version, published, sums, arriving))

    async def settled(self) -> None:
        """Wait until the version in transit, if any, has arrived."""
        if self._under_way is not None:
            await asyncio.shield(self._under_way)

    def close(self) -> None:
        """Cancel the version in transit, if any."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _carry(
        self,
        version: int,
        published: Published,
        sums: Sums | None,
        arriving: Sequence[Coroutine[Any, Any, dict[str, float]]],
    ) -> None:
        swapped, pushed = await gather_or_cancel(arriving)
        await self._contract.weights_arrived(version, published, sums)
        await self._buffer.release(version)
        self._metrics = {f"weights/{name}": value for name, value in (pushed | swapped).items()}

    def take_metrics(self) -> dict[str, float]:
        """Return times in seconds and sizes in bytes of the newest version that arrived since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics
