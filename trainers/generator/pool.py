"""All generators of a run: a service that heals, and knows which weights each replica has.

Requests are a client's (`trainers.generator.client`), which is told of every change. New weights go to all replicas,
but for those whose weights are held (`GeneratorPool.held`), which get them when they are released:

    one replica        update_weights waits until nobody holds
    several replicas   the least busy one is held and serves nobody else; the others are updated meanwhile

Invariant: when `update_weights(v)` returns, no ordinary request samples from weights older than v, which is what bounds
the age of a trained token (`trainers.buffer.window`). Replicas that were updated sample from v; a held one refuses
ordinary requests, and those that it had under way are waited for; one that is down has none, and loads the target
before it serves again. The target is set before anybody is told: a replica that starts meanwhile can't miss it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import ArrayLike

from forge_env.errors import GeneratorError
from trainers.actors.remote import ActorDiedError
from trainers.actors.service import Replica, ReplicaState, Service
from trainers.generator.client import GeneratorClient, Member
from trainers.generator.types import (
    Completion,
    EngineFailedError,
    SamplingOptions,
    WeightsDroppedError,
    WeightsLostError,
)

Version = tuple[int, int]
"""How often the run was set back to earlier weights, and the policy version."""
TOLD_S = 30.0
"""How much later than whoever asked a replica in vain the pool may hear of its death."""


@dataclass(slots=True)
class _Weights:
    """Of one life of a replica."""

    life: int = 0
    version: Version = (0, 0)
    holders: int = 0
    exclusive: bool = False
    """It was told to refuse ordinary requests."""
    stats: dict[str, float] = field(default_factory=dict)
    """As it last told them."""


class HeldWeights:
    """Weights that do not change until they are released.

    Attributes:
        version: their policy version.
        key: of the replica, as `GeneratorClient.generate` wants it.
    """

    def __init__(self, client: GeneratorClient, key: tuple[int, int], version: int) -> None:
        self._client = client
        self.key = key
        self.version = version
        self.released = False

    async def generate(self, prompt_ids: ArrayLike, options: SamplingOptions, session: object = None) -> Completion:
        """One completion from these weights; see `GeneratorClient.generate`.

        Raises:
            WeightsLostError: their replica died.
            GeneratorError: they were released.
        """
        if self.released:
            raise GeneratorError(f"the weights of version {self.version} were released: they are not held any more")
        return await self._client.generate(prompt_ids, options, session, self.key)


class GeneratorPool(Service):
    """All generators of a run.

    Args:
        launches: one for each replica: starts its actor, given the number of its life.
        actor_class: `Generator`.
        max_num_seqs: see `GeneratorClient`.

    Attributes:
        client: asks them from this process.
        model_ready: set when their model folder is there; until then they import vLLM.
        tell: is told, in words, of a replica that dies and of one that is back.
    """

    def __init__(self, launches: Sequence[Callable[[int], Any]], actor_class: Any, max_num_seqs: int = 128) -> None:
        super().__init__(actor_class.options(num_replicas=len(launches)))
        self._launches = launches
        self.max_num_seqs = max_num_seqs
        self.client = GeneratorClient(len(launches), max_num_seqs)
        self.model_ready = asyncio.Event()
        self.tell: Callable[[str], None] = lambda text: None
        self._weights = [_Weights() for _ in launches]
        self._target: Version = (0, 0)
        """What a replica needs to serve once it is up."""
        self._arrived: Version = (0, 0)
        """The newest that `update_weights` has brought to all that were up."""
        self._updates = 0
        """Calls of `update_weights` that have not yet swapped."""
        self._updating = asyncio.Lock()
        self._looked = asyncio.Event()
        self._rejoining: set[asyncio.Future[None]] = set()
        self._followers: list[Callable[[list[Member]], None]] = [self.client.update]
        self._past: dict[str, float] = {}
        """Counters of lives that are over."""

    async def generate(self, prompt_ids: ArrayLike, options: SamplingOptions, session: object = None) -> Completion:
        """One completion; see `GeneratorClient.generate`."""
        return await self.client.generate(prompt_ids, options, session)

    # --- who is there

    def follow(self, told: Callable[[list[Member]], None]) -> None:
        """Tell of the replicas that live, now and whenever that changes."""
        self._followers.append(told)
        told(self.members())

    def members(self) -> list[Member]:
        """The replicas that live."""
        return [
            Member(replica.number, replica.life, replica.actor, self._serves(replica))
            for replica in self.replicas
            if replica.healthy
        ]

    def _serves(self, replica: Replica) -> bool:
        """Whether it takes ordinary requests: one alone always, of several those that are up to date."""
        weights = self._weights[replica.number]
        if not replica.healthy:
            return False
        if self._alone:
            return True
        return not weights.holders and not weights.exclusive and weights.version >= self._arrived

    @property
    def _alone(self) -> bool:
        return sum(replica.metrics.state is not ReplicaState.FAILED for replica in self.replicas) == 1

    def _told(self) -> None:
        """Something has changed: whoever waits looks again, and every client is told."""
        self._looked.set()
        members = self.members()
        for follower in self._followers:
            follower(members)

    def changed(self, replica: Replica) -> None:
        """A replica died, or is back."""
        number = replica.number
        if replica.metrics.state is ReplicaState.RECOVERING:
            for name, value in self._weights[number].stats.items():
                self._past[name] = self._past.get(name, 0.0) + value
            self._weights[number] = _Weights(replica.life)
            self.tell(f"{self.name} {number} died and is started again; the others answer its requests")
        elif replica.healthy and replica.metrics.deaths:
            self.tell(f"{self.name} {number} is back at version {self._weights[number].version[1]}")
        self._told()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._looked.clear()
            await self._looked.wait()

    def check(self) -> None:
        """Raise what has ended a replica for good."""
        if self.failure.done() and not self.failure.cancelled() and (error := self.failure.exception()) is not None:
            raise error

    # --- life

    async def launch(self, replica: Replica) -> Any:
        """Start one life of a replica."""
        return await self._launches[replica.number](replica.life)

    async def set_up(self, replica: Replica) -> None:
        """Load the model, and the weights that the others have."""
        weights = self._weights[replica.number] = _Weights(replica.life)
        await replica.call("preload")
        await self.model_ready.wait()
        await replica.call("setup")
        while weights.version != self._target:
            wanted = self._target
            try:
                await replica.call("update_weights", wanted[1])
            except WeightsDroppedError:  # newer ones are in the store, and will be the target
                await self._until(lambda wanted=wanted: self._target != wanted)  # type: ignore[misc]
            else:
                weights.version = wanted

    # --- weights

    async def update_weights(self, version: int) -> dict[str, float]:
        """Swap the weights everywhere but where they are held; the slowest replica's times, and the pull of each.

        Returns when no ordinary request samples from older weights. With one replica, it waits until nobody holds.
        """
        self._updates += 1
        try:
            async with self._updating:
                await self._until(self._may_update)
                self._target = (self._target[0], version)
                free = [replica for replica in self.replicas if replica.healthy and not self._holders(replica)]
                results = await asyncio.gather(*(self._update(replica, self._target) for replica in free))
                self._arrived = self._target
        finally:
            self._updates -= 1
            self._told()
        await asyncio.gather(*(self._no_older(replica, (self._target[0], version)) for replica in self.replicas))
        times = {replica.number: each for replica, each in zip(free, results, strict=True) if each}
        if not times:
            return {}
        slowest = {name: max(each[name] for each in times.values()) for name in next(iter(times.values()))}
        each_s = {f"generator{number}/pull_s": each["pull_s"] for number, each in times.items()}
        return slowest | each_s if len(times) > 1 else slowest

    async def set_back(self, version: int) -> None:
        """As `update_weights`, to weights that may be older than those there are: the run goes on from there."""
        self._target = self._arrived = (self._target[0] + 1, version)
        await self.update_weights(version)

    def _holders(self, replica: Replica) -> int:
        return self._weights[replica.number].holders

    def _may_update(self) -> bool:
        healthy = [replica for replica in self.replicas if replica.healthy]
        return not healthy or not all(map(self._holders, healthy))

    async def _update(self, replica: Replica, target: Version) -> dict[str, float]:
        """Bring a replica to `target`; nothing if it dies: it comes back with that."""
        weights = self._weights[replica.number]
        try:
            times: dict[str, float] = await replica.call("update_weights", target[1])
            weights.version = target
            self._looked.set()
            await self._take_all(replica, weights)
        except (ActorDiedError, EngineFailedError):
            return {}
        return times

    async def _take_all(self, replica: Replica, weights: _Weights) -> None:
        if weights.exclusive and not weights.holders:
            await replica.call("release")
            weights.exclusive = False

    async def _no_older(self, replica: Replica, version: Version) -> None:
        """Wait until a replica samples for ordinary requests from this version or newer, if at all."""
        weights = self._weights[replica.number]
        if not replica.healthy or weights.version >= version:
            return

        async def quiet() -> None:
            with suppress(ActorDiedError):  # then nothing is under way there
                await replica.call("quiet")

        newer = self._until(lambda: weights.version >= version)
        waiting = [asyncio.ensure_future(work) for work in (quiet(), newer)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[HeldWeights]:
        """The newest weights, which inside do not change, whatever is trained meanwhile.

        Its requests go ahead of all others. Several may hold at once; while new weights wait for the end of that,
        nobody else begins to hold the old ones. Left with `WeightsLostError`, it waits until the death of their replica
        is known, so that whoever holds again then holds others.

        Raises:
            WeightsLostError: the replica that was to be held died.
        """
        await self._until(lambda: self._to_hold() is not None)
        replica = self._to_hold()
        assert replica is not None
        weights = self._weights[replica.number]
        weights.holders += 1
        held = HeldWeights(self.client, (replica.number, replica.life), weights.version[1])
        try:
            if not self._alone and not weights.exclusive:
                weights.exclusive = True
                self._told()
                try:
                    await replica.call("hold")
                except ActorDiedError as error:
                    raise WeightsLostError(f"the weights that were to be held are gone: {error}") from error
            yield held
        except WeightsLostError:
            with suppress(TimeoutError):
                async with asyncio.timeout(TOLD_S):
                    await self._until(lambda: weights is not self._weights[replica.number])
            raise
        finally:
            held.released = True
            weights.holders -= 1
            self._looked.set()
            if not weights.holders and weights is self._weights[replica.number]:  # the replica still lives
                rejoining = asyncio.ensure_future(self._rejoin(replica, weights))
                self._rejoining.add(rejoining)
                rejoining.add_done_callback(self._rejoining.discard)
                await asyncio.shield(rejoining)  # whoever is cancelled here, the replica is needed again

    def _to_hold(self) -> Replica | None:
        """A replica with the newest weights, a held one first; one is left for all others where there are several."""
        if self._updates:
            return None
        for replica in self.replicas:
            if replica.healthy and self._holders(replica) and self._weights[replica.number].version == self._arrived:
                return replica
        serving = [replica for replica in self.replicas if self._serves(replica)]
        if not serving or (len(serving) == 1 and not self._alone):
            return None
        return min(serving, key=lambda replica: self._busy(replica.number))

    def _busy(self, number: int) -> float:
        """Requests in flight, as far as is known here."""
        return self.client.in_flight[number] + self._weights[number].stats.get("in_flight", 0.0)

    async def _rejoin(self, replica: Replica, weights: _Weights) -> None:
        """Bring a replica that was held to the newest weights, and so back to ordinary requests."""
        async with self._updating:
            if weights.holders or weights is not self._weights[replica.number]:
                return
            try:
                if weights.version != self._target:
                    await self._update(replica, self._target)
                else:
                    await self._take_all(replica, weights)
            except (WeightsDroppedError, ActorDiedError):
                return  # newer ones are published, and on their way to every replica; or it starts again
            except Exception as error:  # task boundary: nobody may be left to be told
                if not self.failure.done():
                    self.failure.set_exception(GeneratorError(f"{self.name} {replica.number}: {error}"))
                raise
            self._told()

    # --- figures

    async def stats(self) -> dict[str, float]:
        """Counters summed over replicas and their lives; `replicas`, how many of them are up."""
        healthy = [replica for replica in self.replicas if replica.healthy]
        for weights, told in zip(
            [self._weights[replica.number] for replica in healthy],
            await asyncio.gather(*(replica.call("get_stats") for replica in healthy), return_exceptions=True),
            strict=True,
        ):
            if isinstance(told, dict):
                weights.stats = told
            elif not isinstance(told, ActorDiedError):
                raise told
        every = [self._past | {"in_flight": 0.0}, *(weights.stats for weights in self._weights)]
        names = dict.fromkeys(name for each in every for name in each)
        totals = {name: sum(each.get(name, 0.0) for each in every) for name in names}
        return totals | {"replicas": float(len(healthy))}

    async def halt(self) -> None:
        """Abort everything in flight."""
        await asyncio.gather(*(self._halt(replica) for replica in self.replicas if replica.healthy))

    async def _halt(self, replica: Replica) -> None:
        with suppress(ActorDiedError):
            await replica.call("halt")
