"""The rollout workers as processes: a service that restarts dead workers and calls each by its number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from trainers.actors.served import withdrawn_when_cancelled
from trainers.actors.service import Replica, ReplicaState, Service
from trainers.rollout.local import WorkerSettings
from trainers.rollout.types import Links, WorkerStatus
from trainers.rollout.worker import RolloutWorker

CLOSE_S = 30.0
"""Seconds that workers have to release their sandboxes and write pending records."""
Memory = tuple[Mapping[str, Any], Sequence[str]]
logger = logging.getLogger(__name__)


class Crew(Service):
    """Starts, calls, restarts and stops the rollout workers.

    Args:
        settings: one per worker.
        placed: one function per worker, called at each start: it returns the actor class, configured for the host to
            start on. None: all workers start on this machine.

    Attributes:
        memory: maps a worker's number to the state to restore when it starts: its preparation's state and the ids of
            tasks that are set aside.
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
        """Number of workers."""
        return len(self._settings)

    # --- start and restart

    async def launch(self, replica: Replica) -> Any:
        """Start a worker's process."""
        settings = self._settings[replica.number]
        if self._placed is None:
            return await RolloutWorker.options(mesh_name=settings.name).launch(settings)
        return await (await self._placed[replica.number]()).launch(settings)

    async def set_up(self, replica: Replica) -> None:
        """Set up a worker and give it the state and the links that its predecessor had.

        Worker 0 is set up before the others, since it may have to build sandbox images.
        """
        if replica.number:
            await self._first.wait()
        await replica.call("setup")
        self._first.set()
        await replica.call("restore", *self.memory(replica.number))
        sent = None
        while sent is not self._links:
            sent = self._links
            await replica.call("connect", sent)

    def changed(self, replica: Replica) -> None:
        """Wake the calls that wait for a worker: its state has changed."""
        self._moved.set()
        self._moved = asyncio.Event()

    # --- calls

    async def connect(self, links: Links) -> None:
        """Send every worker the actors that it calls."""
        self._links = links
        await self.call_all("connect", links)

    async def call(self, number: int, endpoint: str, request: Any) -> Any:
        """Call an endpoint of one worker and return its answer; cancelling this withdraws the request.

        Waits until the worker is healthy.

        Raises:
            ActorDiedError: the worker died during the call.
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
        """Restore the state (`memory`) of every healthy worker."""
        await asyncio.gather(
            *(replica.call("restore", *self.memory(replica.number)) for replica in self.replicas if replica.healthy)
        )

    async def check_prompts(self) -> None:
        """See `LocalWorker.check_prompts`."""
        await self.replicas[0].call("check_prompts")

    async def close(self) -> list[WorkerStatus | None]:
        """Stop all workers; return their final status."""
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_S):
                return await self.call_all("close")
        except TimeoutError:
            logger.warning("a rollout worker did not end within %g s: it is killed", CLOSE_S)
            return []

    async def stop(self) -> None:
        """Close the workers, if that hasn't happened yet, and end their processes."""
        if not self._closed:
            await self.close()
        await super().stop()
