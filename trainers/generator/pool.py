"""All generators of a run: a service that heals, and knows which weights each replica has.

Requests are a client's (`trainers.generator.client`), which is told of every change. New weights go to all replicas,
but for those whose weights are held (`GeneratorPool.held`), which get them when they are released:

    one replica        update_weights waits until nobody holds
    several replicas   the least busy one is held and serves nobody else; the others are updated meanwhile

A replica that takes much longer than the first is not waited for: it goes on with what it has under way, is asked for
nothing else, and loads version after version until it has the newest.

Invariant: an ordinary request samples from no weights older than it asks for. What bounds the age of a trained token is
that a group's requests ask for the version that had arrived when it was admitted (`trainers.buffer.window`). A replica
refuses a request that asks for newer weights than it has, and the weights under a request only get newer. So nobody
has to be waited for before a version counts as arrived, as long as some replica has it. One that starts loads the
target before it serves, which is set before anybody is told: it can't miss it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from forge_env.errors import GeneratorError
from trainers.actors.remote import ActorDiedError
from trainers.actors.service import TOLD_S, Replica, ReplicaState, Service
from trainers.generator.client import GeneratorClient, Member
from trainers.generator.types import (
    Completion,
    EngineFailedError,
    SamplingOptions,
    WeightsDroppedError,
    WeightsLostError,
)

if TYPE_CHECKING:
    from trainers.weights.checksum import Served
    from trainers.weights.store import Published

Version = tuple[int, int]
"""How often the run was set back to earlier weights, and the policy version."""
PATIENCE_S = 1.0
"""How much longer than twice the time of the first replica the others may take for new weights, and be waited for."""


@dataclass(slots=True)
class _Weights:
    """Of one life of a replica."""

    life: int = 0
    version: Version = (0, 0)
    holders: int = 0
    exclusive: bool = False
    """It was told to refuse ordinary requests."""
    bringing: asyncio.Task[dict[str, float]] | None = None
    """It is brought to the target."""
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
        self._published: Published | None = None
        """Where that lies; None: the store knows."""
        self._arrived: Version = (0, 0)
        """The newest that counts as arrived: who has an older one serves no ordinary request."""
        self._updates = 0
        """Calls of `update_weights` that have not yet swapped."""
        self._updating = asyncio.Lock()
        self._looked = asyncio.Event()
        self._followers: list[Callable[[list[Member]], None]] = [self.client.update]
        self._past: dict[str, float] = {}
        """Counters of lives that are over."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._loading: set[int] = set()
        """Replicas that load their model."""

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
        """Whether it takes ordinary requests: those that are up to date; of several, those that nobody holds."""
        weights = self._weights[replica.number]
        if not replica.healthy or weights.version < self._arrived:
            return False
        return self._alone or not (weights.holders or weights.exclusive)

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
        self._loading.discard(number)
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
        await self._awake.wait()
        self._loading.add(replica.number)
        await replica.call("setup")
        await self._load(replica, weights)

    async def stop(self) -> None:
        """End every replica."""
        for weights in self._weights:
            if weights.bringing is not None:
                weights.bringing.cancel()
        await super().stop()

    # --- rest

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Inside, all stand still and have given back memory of their GPUs (`Generator.sleep`).

        A replica that dies comes back afterwards: it would need memory to load its model.
        """
        self._awake.clear()
        try:
            await self._until(lambda: not self._loading)
            await self._tell_healthy("sleep")
            yield
        finally:
            await self._tell_healthy("wake")
            self._awake.set()

    async def _tell_healthy(self, endpoint: str) -> None:
        calls = (replica.call(endpoint) for replica in self.replicas if replica.healthy)
        for told in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(told, BaseException) and not isinstance(told, ActorDiedError | EngineFailedError):
                raise told

    # --- weights

    async def update_weights(self, version: int, published: Published | None = None) -> dict[str, float]:
        """Swap the weights everywhere but where they are held; the slowest replica's times, and the pull of each.

        Returns when they have arrived: in all replicas but those that take much longer than the first (`behind`, their
        number), which have them later. With one replica, it waits until nobody holds.

        Args:
            version: of the policy.
            published: where it lies; by default every replica asks the store.
        """
        return await self._bring_all(version, published, patient=False)

    async def set_back(self, version: int, published: Published | None = None) -> None:
        """As `update_weights`, to weights that may be older than those there are: the run goes on from there.

        Waits for all replicas: versions don't say any more which weights are older.
        """
        self._aim_at((self._target[0] + 1, version), published)
        self._arrived = self._target
        await self._bring_all(version, published, patient=True)

    def _aim_at(self, target: Version, published: Published | None) -> None:
        """Have another target; a replica whose weights were dropped on its way to the last one waits for it."""
        self._target, self._published = target, published
        self._looked.set()

    async def _bring_all(self, version: int, published: Published | None, *, patient: bool) -> dict[str, float]:
        self._updates += 1
        try:
            async with self._updating:
                await self._until(self._may_update)
                self._aim_at((self._target[0], version), published)
                free = [replica for replica in self.replicas if replica.healthy and not self._holders(replica)]
                bringing = {replica.number: self._bring(replica) for replica in free}
                await self._arrive(bringing.values(), patient=patient)
                self._arrived = self._target
        finally:
            self._updates -= 1
            self._told()
        times = {number: each for number, task in bringing.items() if task.done() and (each := task.result())}
        if not times:
            return {}
        slowest = {name: max(each[name] for each in times.values()) for name in next(iter(times.values()))}
        if len(bringing) > 1:
            slowest["behind"] = float(sum(not task.done() for task in bringing.values()))
        each_s = {f"generator{number}/pull_s": each["pull_s"] for number, each in times.items()}
        return slowest | each_s if len(times) > 1 else slowest

    async def _arrive(self, bringing: Iterable[asyncio.Task[dict[str, float]]], *, patient: bool) -> None:
        """Wait until the target is where it has to be.

        Raises:
            GeneratorError: what kept a replica from loading it.
        """
        clock = asyncio.get_running_loop().time
        waiting, began, until = set(bringing), clock(), None
        while waiting and (until is None or clock() < until):
            timeout = None if until is None else until - clock()
            _, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            there = any(replica.healthy and self._has_target(replica) for replica in self.replicas)
            if until is None and there and not patient:
                until = clock() + (clock() - began) + PATIENCE_S

    def _has_target(self, replica: Replica) -> bool:
        return self._weights[replica.number].version == self._target

    def _holders(self, replica: Replica) -> int:
        return self._weights[replica.number].holders

    def _may_update(self) -> bool:
        healthy = [replica for replica in self.replicas if replica.healthy]
        return not healthy or not all(map(self._holders, healthy))

    def _bring(self, replica: Replica) -> asyncio.Task[dict[str, float]]:
        """Have a replica brought to the target, whatever that becomes meanwhile."""
        weights = self._weights[replica.number]
        if weights.bringing is None or weights.bringing.done():
            weights.bringing = asyncio.create_task(self._catch_up(replica, weights))
        return weights.bringing

    async def _catch_up(self, replica: Replica, weights: _Weights) -> dict[str, float]:
        """See `_bring`; the times of the last version. Nothing if it dies: it comes back with the target.

        What else keeps it from that is the pool's `failure`: nobody may be left who waits for it.
        """
        times: dict[str, float] = {}
        try:
            while weights.version != self._target or (weights.exclusive and not weights.holders):
                times = await self._load(replica, weights) or times
                if weights.exclusive and not weights.holders:
                    await replica.call("release")
                    weights.exclusive = False
        except (ActorDiedError, EngineFailedError):
            return {}
        except Exception as error:  # noqa: BLE001 - task boundary
            why, fix = getattr(error, "message", error), getattr(error, "fix", None)
            failure = GeneratorError(f"{self.name} {replica.number}: {why}", fix=fix)
            failure.__cause__ = error
            if not self.failure.done():
                self.failure.set_exception(failure)
            return {}
        self._told()
        return times

    async def _load(self, replica: Replica, weights: _Weights) -> dict[str, float]:
        """Load the target, and what it becomes meanwhile; the times of the last version.

        Raises:
            ActorDiedError: the replica died.
        """
        times: dict[str, float] = {}
        while weights.version != self._target:
            wanted = self._target
            try:
                times = await replica.call("update_weights", wanted[1], self._published)
            except WeightsDroppedError:  # there are newer ones, or will be, and they will be the target
                await self._until(lambda wanted=wanted: self._target != wanted or self._over(weights))  # type: ignore[misc]
            except GeneratorError:
                if self._target == wanted or self._over(weights):
                    raise
            else:
                weights.version = wanted
                self._looked.set()
            if self._over(weights):
                raise ActorDiedError("it is started again")
        return times

    def _over(self, weights: _Weights) -> bool:
        """Whether the life of a replica is over."""
        return all(weights is not each for each in self._weights)

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
                self._bring(replica)

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

    # --- figures

    async def checksums(self, published: Published | None = None) -> dict[int, Served]:
        """Of the weights that each replica has that is up, by its number; see `Generator.checksums`."""
        healthy = [replica for replica in self.replicas if replica.healthy]
        calls = (replica.call("checksums", published) for replica in healthy)
        found = {}
        for replica, told in zip(healthy, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(told, ActorDiedError | EngineFailedError | WeightsDroppedError):
                continue  # it will have others
            if isinstance(told, BaseException):
                raise told
            found[replica.number] = told
        return found

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
