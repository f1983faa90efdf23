"""A self-healing service of all generators of a run; tracks the policy version of each replica's weights.

Requests go through a client (`trainers.generator.client`), which receives every membership change. New weights go to
all replicas except those whose weights are held (`GeneratorPool.held`); these load them after the release:

    one replica        update_weights waits until no holder is left
    several replicas   the least busy one is held and takes no ordinary requests; the others are updated meanwhile

An update does not wait for a replica that takes much longer than the first. Such a replica finishes its requests in
flight, receives no new ones, and keeps loading versions until it has the newest.

Invariant: an ordinary request never samples from weights older than the version it asks for. The staleness of trained
tokens is bounded because a group's requests ask for the version that had arrived when the group was admitted
(`trainers.buffer.window`). A replica refuses a request that asks for newer weights than it has, and the weights used by
a request only get newer. So a version may count as arrived once one replica has it. A starting replica loads the
target version before it serves, and the target is set before any replica is asked to update, so it misses no update.
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
from trainers.actors.replicas import NOTICE_S, Replica, Replicas, ReplicaState
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
    from trainers.weights.transport import Published

Version = tuple[int, int]
"""Number of times the run was set back to earlier weights, and the policy version."""
PATIENCE_S = 1.0
"""An update waits for slower replicas up to twice the first replica's time plus these seconds."""


@dataclass(slots=True)
class _Weights:
    """State of the weights during one life of a replica."""

    life: int = 0
    version: Version = (0, 0)
    holders: int = 0
    exclusive: bool = False
    """Whether the replica refuses ordinary requests."""
    bringing: asyncio.Task[dict[str, float]] | None = None
    """Task that loads the target version."""
    stats: dict[str, float] = field(default_factory=dict)
    """Counters from the replica's last report."""


class HeldWeights:
    """Weights of a replica (`GeneratorClient` has its `key`), which do not change until they are `released`."""

    def __init__(self, client: GeneratorClient, key: tuple[int, int], version: int) -> None:
        self._client = client
        self.key = key
        self.version = version
        self.released = False

    async def generate(self, prompt_ids: ArrayLike, options: SamplingOptions, session: object = None) -> Completion:
        """Sample one completion from these weights; see `GeneratorClient.generate`."""
        if self.released:
            raise GeneratorError(f"the weights of version {self.version} were released")
        return await self._client.generate(prompt_ids, options, session, self.key)


class GeneratorPool(Replicas):
    """All generators of a run.

    Args:
        launches: one function for each replica; it starts the replica's actor, given the number of its life.

    Attributes:
        client: client for requests from this process.
        model_ready: set when the model folder exists; replicas only import vLLM until then.
        tell: callback that receives a text message when a replica dies or is back.
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
        """Version that every replica has to load."""
        self._published: Published | None = None
        """Location of the target's weights; None: replicas ask TorchStore."""
        self._arrived: Version = (0, 0)
        """Newest version that counts as arrived; replicas with an older one serve no ordinary requests."""
        self._updates = 0
        """Number of `update_weights` calls that have not finished their swap."""
        self._updating = asyncio.Lock()
        self._followers: list[Callable[[list[Member]], None]] = [self.client.update]
        self._past: dict[str, float] = {}
        """Counters summed over lives that have ended."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._loading: set[int] = set()
        """Numbers of the replicas that are loading their model."""

    async def generate(self, prompt_ids: ArrayLike, options: SamplingOptions, session: object = None) -> Completion:
        """Sample one completion; see `GeneratorClient.generate`."""
        return await self.client.generate(prompt_ids, options, session)

    # --- membership

    def follow(self, told: Callable[[list[Member]], None]) -> None:
        """Call `told` with the live replicas, now and after every change."""
        self._followers.append(told)
        told(self.members())

    def members(self) -> list[Member]:
        """List the live replicas."""
        return [Member(replica.number, replica.life, replica.actor, self._serves(replica)) for replica in self.healthy]

    def _serves(self, replica: Replica) -> bool:
        """Whether a replica takes ordinary requests: it is up to date and, unless it is the only one, not held."""
        weights = self._weights[replica.number]
        if not replica.healthy or weights.version < self._arrived:
            return False
        return self._alone or not (weights.holders or weights.exclusive)

    @property
    def _alone(self) -> bool:
        return sum(replica.metrics.state is not ReplicaState.FAILED for replica in self.replicas) == 1

    def _told(self) -> None:
        """Wake all waiters of `until` and notify every follower of a change."""
        self.notify()
        members = self.members()
        for follower in self._followers:
            follower(members)

    def changed(self, replica: Replica) -> None:
        """Handle the death or the return of a replica."""
        number = replica.number
        self._loading.discard(number)
        if replica.metrics.state is ReplicaState.RECOVERING:
            for name, value in self._weights[number].stats.items():
                self._past[name] = self._past.get(name, 0.0) + value
            self._weights[number] = _Weights(replica.life)
            self.tell(f"{self.name} {number} died and is being restarted; the others answer its requests")
        elif replica.healthy and replica.metrics.deaths:
            self.tell(f"{self.name} {number} is back at version {self._weights[number].version[1]}")
        self._told()

    # --- life

    async def launch(self, replica: Replica) -> Any:
        """Start one life of a replica."""
        return await self._launches[replica.number](replica.life)

    async def set_up(self, replica: Replica) -> None:
        """Load the model, then the target weights."""
        weights = self._weights[replica.number] = _Weights(replica.life)
        await replica.call("preload")
        await self.model_ready.wait()
        await self._awake.wait()
        self._loading.add(replica.number)
        await replica.call("setup")
        await self._load(replica, weights)

    async def stop(self) -> None:
        """Stop every replica."""
        for weights in self._weights:
            if weights.bringing is not None:
                weights.bringing.cancel()
        await super().stop()

    # --- sleep

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Context in which all replicas are paused and have freed GPU memory (`Generator.sleep`).

        A replica that dies inside is restarted afterwards, because loading its model needs memory.
        """
        self._awake.clear()
        try:
            await self.until(lambda: not self._loading)
            await self._tell_healthy("sleep")
            yield
        finally:
            await self._tell_healthy("wake")
            self._awake.set()

    async def _tell_healthy(self, endpoint: str) -> None:
        for result in (await self.call_healthy(endpoint)).values():
            if isinstance(result, BaseException) and not isinstance(result, ActorDiedError | EngineFailedError):
                raise result

    # --- weights

    async def update_weights(self, version: int, published: Published | None = None) -> dict[str, float]:
        """Swap the weights of all replicas that are not held; without a location, they ask TorchStore.

        Does not wait for replicas that take much longer than the first (see `PATIENCE_S`); these load the weights
        later. Waits while every replica is held.

        Returns:
            The slowest replica's times in seconds; with several replicas also `behind`, the number of replicas
            that were not waited for, and each replica's pull time.
        """
        return await self._bring_all(version, published, patient=False)

    async def set_back(self, version: int, published: Published | None = None) -> None:
        """Swap in weights that may be older than the current ones; the run continues from them.

        Unlike `update_weights`, this waits for all replicas, because version numbers no longer order the weights.
        """
        self._aim_at((self._target[0] + 1, version), published)
        self._arrived = self._target
        await self._bring_all(version, published, patient=True)

    def _aim_at(self, target: Version, published: Published | None) -> None:
        """Set the target; wakes replicas that wait for a new one because the last one's weights were dropped."""
        self._target, self._published = target, published
        self.notify()

    async def _bring_all(self, version: int, published: Published | None, *, patient: bool) -> dict[str, float]:
        self._updates += 1
        try:
            async with self._updating:
                await self.until(lambda: not self.healthy or not all(map(self._holders, self.healthy)))
                self._aim_at((self._target[0], version), published)
                free = [replica for replica in self.healthy if not self._holders(replica)]
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
        """Wait until the replicas have the target; if `patient`, until all tasks are done."""
        clock = asyncio.get_running_loop().time
        waiting, began, until = set(bringing), clock(), None
        while waiting and (until is None or clock() < until):
            timeout = None if until is None else until - clock()
            _, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            arrived = any(self._weights[replica.number].version == self._target for replica in self.healthy)
            if until is None and arrived and not patient:
                until = clock() + (clock() - began) + PATIENCE_S

    def _holders(self, replica: Replica) -> int:
        return self._weights[replica.number].holders

    def _bring(self, replica: Replica) -> asyncio.Task[dict[str, float]]:
        """Start a task that loads the target into a replica, or return the running one; follows target changes."""
        weights = self._weights[replica.number]
        if weights.bringing is None or weights.bringing.done():
            weights.bringing = asyncio.create_task(self._catch_up(replica, weights))
        return weights.bringing

    async def _catch_up(self, replica: Replica, weights: _Weights) -> dict[str, float]:
        """Load the target, and return the times of the last version loaded.

        The times are empty if the replica dies; it is restarted with the target. Any other error becomes the pool's
        `failure`, since no caller may be left to await this task.
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
            message, fix = getattr(error, "message", error), getattr(error, "fix", None)
            failure = GeneratorError(f"{self.name} {replica.number}: {message}", fix=fix)
            failure.__cause__ = error
            if not self.failure.done():
                self.failure.set_exception(failure)
            return {}
        self._told()
        return times

    async def _load(self, replica: Replica, weights: _Weights) -> dict[str, float]:
        """Load the target until it no longer changes, and return the times of the last version loaded."""
        times: dict[str, float] = {}
        while weights.version != self._target:
            wanted = self._target
            try:
                times = await replica.call("update_weights", wanted[1], self._published)
            except WeightsDroppedError:  # newer weights exist or will exist, and become the target
                await self.until(lambda wanted=wanted: self._target != wanted or self._over(weights))  # type: ignore[misc]
            except GeneratorError:
                if self._target == wanted or self._over(weights):
                    raise
            else:
                weights.version = wanted
                self.notify()
            if self._over(weights):
                raise ActorDiedError("it is being restarted")
        return times

    def _over(self, weights: _Weights) -> bool:
        """Whether the replica life with these weights has ended."""
        return all(weights is not each for each in self._weights)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[HeldWeights]:
        """Context that holds the newest weights: they do not change inside, even if training publishes newer ones.

        Requests to held weights have priority over all others. Holds may overlap, but while an update waits, no new
        hold begins. On leaving with `WeightsLostError`, this waits until the pool has noticed the replica's death, so
        that the next hold uses another replica.
        """
        await self.until(lambda: self._to_hold() is not None)
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
                    raise WeightsLostError(f"the weights to be held are gone: {error}") from error
            yield held
        except WeightsLostError:
            with suppress(TimeoutError):
                async with asyncio.timeout(NOTICE_S):
                    await self.until(lambda: weights is not self._weights[replica.number])
            raise
        finally:
            held.released = True
            weights.holders -= 1
            self.notify()
            if not weights.holders and weights is self._weights[replica.number]:  # the replica is still alive
                self._bring(replica)

    def _to_hold(self) -> Replica | None:
        """Choose a replica with the newest weights to hold, or None if that is not possible now.

        Replicas that are already held come first. With several replicas, one is always left for ordinary requests.
        """
        if self._updates:
            return None
        for replica in self.healthy:
            if self._holders(replica) and self._weights[replica.number].version == self._arrived:
                return replica
        serving = [replica for replica in self.replicas if self._serves(replica)]
        if not serving or (len(serving) == 1 and not self._alone):
            return None
        return min(serving, key=lambda replica: self._busy(replica.number))

    def _busy(self, number: int) -> float:
        """Requests in flight from this process's client plus those in the replica's last report."""
        return self.client.in_flight[number] + self._weights[number].stats.get("in_flight", 0.0)

    # --- statistics

    async def checksums(self, published: Published | None = None) -> dict[int, Served]:
        """Compute weight checksums of all healthy replicas, by replica number; see `Generator.checksums`."""
        served = {}
        for number, result in (await self.call_healthy("checksums", published)).items():
            if isinstance(result, ActorDiedError | EngineFailedError | WeightsDroppedError):
                continue  # the replica will load other weights
            if isinstance(result, BaseException):
                raise result
            served[number] = result
        return served

    async def stats(self) -> dict[str, float]:
        """Sum the counters over replicas and their lives; `replicas` is the number of healthy replicas."""
        weights = list(self._weights)  # a replica that dies meanwhile gets new ones
        results = await self.call_healthy("get_stats")
        for number, result in results.items():
            if isinstance(result, dict):
                weights[number].stats = result
            elif not isinstance(result, ActorDiedError):
                raise result
        counters = [self._past | {"in_flight": 0.0}, *(weights.stats for weights in self._weights)]
        names = dict.fromkeys(name for each in counters for name in each)
        totals = {name: sum(each.get(name, 0.0) for each in counters) for name in names}
        return totals | {"replicas": float(len(results))}

    async def halt(self) -> None:
        """Abort all requests in flight."""
        await self._tell_healthy("halt")
