"""The rollout workers as processes: a service that heals, whose replicas are called by number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from trainers.actors.service import Replica, ReplicaState, Service
from trainers.actors.withdrawal import withdrawn_when_cancelled
from trainers.rollout.local import WorkerSettings
from trainers.rollout.types import Links, WorkerStatus
from trainers.rollout.worker import RolloutWorker

CLOSE_S = 30.0
"""How long workers may take to give up their sandboxes and to write what they have to write."""
Memory = tuple[Mapping[str, Any], Sequence[str]]
logger = logging.getLogger(__name__)


class Crew(Service):
    """Starts workers, starts one again that dies, calls them, ends them.

    Args:
        settings: of each worker.
        placed: for each, what gives the actor's class in its place at each start; by default on this machine.

    Attributes:
        memory: what a worker of a number has to know when it starts: its preparation's state, tasks set aside.
    """

    def __init__(
        self, settings: Sequence[WorkerSettings], placed: Sequence[Callable[[], Awaitable[Any]]] | None = None
    ) -> None:
        super().__init__(RolloutWorker.options(num_replicas=len(settings), mesh_name="rollouts"))
        self.memory: Callable[[int], Memory] = lambda number: ({}, ())
        self._settings = settings
        self._placed = placed
        self._links: Links | None = None
        self._first = asyncio.Event()
        self._moved = asyncio.Event()
        self._closed = False

    @property
    def count(self) -> int:
        """How many workers there are."""
        return len(self._settings)

    # --- life

    async def launch(self, replica: Replica) -> Any:
        """Start the process of a worker."""
        settings = self._settings[replica.number]
        if self._placed is None:
            return await RolloutWorker.options(mesh_name=settings.name).launch(settings)
        return await (await self._placed[replica.number]()).launch(settings)

    async def set_up(self, replica: Replica) -> None:
        """Let a worker know what the one before it knew. The first goes ahead: it may have sandbox images to build."""
        if replica.number:
            await self._first.wait()
        await replica.call("setup")
        self._first.set()
        await replica.call("restore", *self.memory(replica.number))
        told = None
        while told is not self._links:
            told = self._links
            await replica.call("connect", told)

    def changed(self, replica: Replica) -> None:
        """A worker died, or is back: whoever waits for it looks again."""
        self._moved.set()
        self._moved = asyncio.Event()

    # --- calls

    async def connect(self, links: Links) -> None:
        """Tell every worker whom it calls."""
        self._links = links
        await self.call_all("connect", links)

    async def call(self, number: int, endpoint: str, request: Any) -> Any:
        """What an endpoint of a worker answers to a request, which is withdrawn where this is cancelled.

        Raises:
            ActorDiedError: the worker died meanwhile.
            ServiceDownError: it died too often.
        """
        replica = self.replicas[number]
        while not replica.healthy:
            if replica.metrics.state in (ReplicaState.FAILED, ReplicaState.STOPPED):
                await asyncio.shield(self.failure)
            await self._moved.wait()
        return await withdrawn_when_cancelled(
            lambda name: replica.call(endpoint, request, call=name),
            lambda name: replica.call("withdraw", name),
            patience_s=CLOSE_S,
        )

    async def restore(self) -> None:
        """Let every worker know what is to be known when it starts."""
        await asyncio.gather(
            *(replica.call("restore", *self.memory(replica.number)) for replica in self.replicas if replica.healthy)
        )

    async def check_prompts(self) -> None:
        """See `LocalWorker.check_prompts`."""
        await self.replicas[0].call("check_prompts")

    async def close(self) -> list[WorkerStatus | None]:
        """Let every worker come to its end; their last words."""
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_S):
                return await self.call_all("close")
        except TimeoutError:
            logger.warning("a rollout worker did not end within %g s: it is killed", CLOSE_S)
            return []

    async def stop(self) -> None:
        """End the processes."""
        if not self._closed:
            await self.close()
        await super().stop()
