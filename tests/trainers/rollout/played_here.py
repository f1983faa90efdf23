"""Rollout workers in this process: the real ones but for what plays, and a crew in which they can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forge_env as fe
from forge_env.policy import Policy
from forge_env.run import Run
from forge_env.sandbox import SandboxEngine
from tests.trainers.loop.dry_run import NoEngine
from trainers.actors.remote import ActorDiedError
from trainers.algorithms.grpo import Weighing
from trainers.buffer.local import LocalReplayBuffer
from trainers.rollout.local import LocalWorker, WorkerSettings
from trainers.rollout.opening import Opening
from trainers.rollout.rollouts import Crew, Rollouts
from trainers.rollout.types import Group, Links, Preparation

MakeEnvironment = Callable[[], fe.Environment]


class PlayedHere(LocalWorker):
    """A worker with an environment and a policy of the test's own."""

    def __init__(self, settings: WorkerSettings, make_env: MakeEnvironment, policy: Policy) -> None:
        super().__init__(settings)
        self._make_env, self._plays = make_env, policy

    def _make_engine(self) -> SandboxEngine:
        return NoEngine()

    def _maker(self) -> MakeEnvironment:
        return self._make_env

    def _look(self, group: Group) -> Opening | None:
        return None  # there is no model, and no tokenizer

    def _policy(self, version: int) -> Policy:
        return self._plays

    def _held_out_policy(self, held: tuple[int, int] | None) -> Policy:
        return self._plays


class Here(Crew):
    """A crew of such workers. One that is killed is another at the next call."""

    def __init__(
        self,
        run: Run,
        make_env: MakeEnvironment,
        policy: Policy,
        count: int = 1,
        preparation: type[Preparation] = Weighing,
    ) -> None:
        self.memory: Callable[[int], tuple[Mapping[str, Any], Sequence[str]]] = lambda number: ({}, ())
        self._count = count
        self.calls: list[tuple[int, str, Any]] = []
        self._links: Links | None = None
        self._make = lambda number: PlayedHere(
            WorkerSettings(number, run.config, run.folder.root, Path("nowhere"), preparation), make_env, policy
        )
        self._workers: dict[int, LocalWorker] = {}
        self._deaths: dict[int, asyncio.Future[None]] = {}

    @property
    def count(self) -> int:
        return self._count

    async def _worker(self, number: int) -> LocalWorker:
        if number not in self._workers:
            worker = self._workers[number] = self._make(number)
            self._deaths[number] = asyncio.get_running_loop().create_future()
            await worker.setup()
            await worker.restore(*self.memory(number))
            if self._links is not None:
                await worker.connect(self._links)
        return self._workers[number]

    async def connect(self, links: Links) -> None:
        self._links = links
        for worker in self._workers.values():
            await worker.connect(links)

    async def call(self, number: int, endpoint: str, request: Any) -> Any:
        self.calls.append((number, endpoint, request))
        worker = await self._worker(number)
        death, call = self._deaths[number], asyncio.ensure_future(getattr(worker, endpoint)(request))
        try:
            await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise ActorDiedError("its process was killed by signal 9")
            return call.result()
        finally:
            call.cancel()

    def kill(self, number: int) -> None:
        """From one moment to the next."""
        if self._workers.pop(number, None) is not None:
            self._deaths[number].set_result(None)

    async def call_all(self, endpoint: str, *args: Any) -> list[Any]:
        workers = [self._workers.get(number) for number in range(self._count)]
        return [None if worker is None else await getattr(worker, endpoint)(*args) for worker in workers]

    async def restore(self) -> None:
        for number, worker in self._workers.items():
            await worker.restore(*self.memory(number))

    async def close(self) -> list[Any]:
        return await self.call_all("close")


async def rollouts_here(
    run: Run,
    make_env: MakeEnvironment,
    policy: Policy,
    buffer: LocalReplayBuffer[Any],
    *,
    count: int = 1,
    preparation: type[Preparation] = Weighing,
) -> tuple[Rollouts, Here]:
    """The controller's handle over workers in this process."""
    crew = Here(run, make_env, policy, count, preparation)
    rollouts = Rollouts(run, make_env(), crew)
    await rollouts.connect(Links((), buffer))
    return rollouts, crew
