"""All generators of a run behind one handle: which replica serves a request, and when weights change.

Requests go to the replica that has their conversation or their prompt in its cache (`Router`), new weights to all
replicas, but for those whose weights are held (`GeneratorPool.held`), which get them when they are released:

    one replica        update_weights waits until nobody holds
    several replicas   the least busy one is held and serves nobody else; the others are updated meanwhile

With held weights too, `update_weights(v)` returns when no ordinary request samples from weights older than v, which is
what bounds the age of a trained token (`trainers.buffer.window`): ordinary requests that a held replica still has under
way are waited for, and it takes no new ones before it has the newest weights.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike

from forge_env.errors import GeneratorError
from trainers.actors.remote import result
from trainers.generator.client import HELD_FIRST, Member
from trainers.generator.types import (
    Completion,
    EngineFailedError,
    SamplingOptions,
    WeightsDroppedError,
)

PROMPTS_REMEMBERED = 4096
"""Of new conversations. The members of a group come together, and no cache holds as many prompts."""


class Router:
    """Chooses replicas by prefix and load.

    A turn of a conversation goes where the turn before went, and a new conversation where the same prompt went
    last: there, its keys and values are in the prefix cache. Where that replica has `slack` requests more in
    flight than the least busy one, the cache is worth less than the waiting, and the least busy one is chosen.

    Args:
        replicas: how many there are.
        slack: requests that a replica may be ahead of the least busy one and still be chosen for its cache.
    """

    def __init__(self, replicas: int, slack: int = 16) -> None:
        self.in_flight = [0] * replicas
        self._slack = slack
        self._conversations: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._prompts: OrderedDict[int, int] = OrderedDict()

    def choose(self, prompt_ids: ArrayLike, session: object = None, serving: Sequence[int] | None = None) -> int:
        """The replica for a request; counted as in flight until `done`.

        Args:
            prompt_ids: tokens to condition on, [P].
            session: the conversation: an object that lives as long as it, so that it is remembered as long.
            serving: replicas to choose from; None: all.
        """
        serving = range(len(self.in_flight)) if serving is None else serving
        replica = self.least_busy(serving)
        home = None if session is None else self._conversations.get(session)
        if home is None:
            prompt = hash(np.asarray(prompt_ids, np.int32).tobytes())
            home = self._prompts.pop(prompt, None)
            replica = self._at_home(home, replica, serving)
            self._prompts[prompt] = replica
            if len(self._prompts) > PROMPTS_REMEMBERED:
                self._prompts.popitem(last=False)
        else:
            replica = self._at_home(home, replica, serving)
        if session is not None:
            self._conversations[session] = replica
        self.in_flight[replica] += 1
        return replica

    def least_busy(self, serving: Sequence[int]) -> int:
        """The one of these with the fewest requests in flight."""
        return min(serving, key=self.in_flight.__getitem__)

    def _at_home(self, home: int | None, least_busy: int, serving: Sequence[int]) -> int:
        if home is not None and home in serving and self.in_flight[home] <= self.in_flight[least_busy] + self._slack:
            return home
        return least_busy

    def done(self, replica: int) -> None:
        """A request of this replica has ended."""
        self.in_flight[replica] -= 1


@dataclass(slots=True)
class _Replica:
    actor: Any
    version: int = 0
    holders: int = 0
    ordinary: int = 0
    """Requests under way that are not for held weights."""


class HeldWeights:
    """Weights that do not change until they are released.

    Attributes:
        version: their policy version.
        key: of the replica, as `GeneratorClient.generate` wants it.
    """

    def __init__(self, pool: GeneratorPool, replica: int, version: int) -> None:
        self._pool = pool
        self.key = (replica, 0)
        self.version = version
        self.released = False

    async def generate(self, prompt_ids: ArrayLike, options: SamplingOptions, session: object = None) -> Completion:
        """One completion from these weights; see `GeneratorPool.generate`.

        Raises:
            GeneratorError: they were released.
        """
        if self.released:
            raise GeneratorError(f"the weights of version {self.version} were released: they are not held any more")
        router = self._pool._router
        router.choose(prompt_ids, session, [self.key[0]])
        try:
            return await self._pool._ask(
                self.key[0], prompt_ids, replace(options, priority=options.priority - HELD_FIRST)
            )
        finally:
            router.done(self.key[0])


class GeneratorPool:
    """All generators of a run.

    Args:
        actors: of `Generator`, with the weights of version 0.
        max_num_seqs: sequences that one engine decodes together. A conversation leaves the replica that has it in
            its cache when that one is an eighth of them busier than another.
    """

    def __init__(self, actors: list[Any], max_num_seqs: int = 128) -> None:
        self._replicas = [_Replica(actor) for actor in actors]
        self._router = Router(len(actors), max(1, max_num_seqs // 8))
        self._names = itertools.count()
        self._failure: EngineFailedError | None = None
        self._version = 0
        """The newest that `update_weights` brought."""
        self._updates = 0
        """Calls of `update_weights` that have not yet swapped."""
        self._updating = asyncio.Lock()
        self._changed = asyncio.Event()
        self._rejoining: set[asyncio.Future[None]] = set()
        self._followers: list[Callable[[list[Member]], None]] = []

    def follow(self, told: Callable[[list[Member]], None]) -> None:
        """Tell of the replicas that live, now and whenever that changes."""
        self._followers.append(told)
        told(self.members())

    def members(self) -> list[Member]:
        """The replicas that live."""
        serving = self._serving()
        return [Member(index, 0, own.actor, index in serving) for index, own in enumerate(self._replicas)]

    def _tell(self) -> None:
        for follower in self._followers:
            follower(self.members())

    def check(self) -> None:
        """Raise what has ended an engine: its replica would answer every request at once, with that."""
        if self._failure is not None:
            raise self._failure

    async def generate(self, prompt_ids: ArrayLike, options: SamplingOptions, session: object = None) -> Completion:
        """One completion; a cancelled call ends the request in its replica too.

        Args:
            prompt_ids: tokens to condition on, int32 [P].
            options: how to sample.
            session: the conversation it belongs to, which stays on one replica where it can: an object that lives
                as long as the conversation.
        """
        index = self._router.choose(prompt_ids, session, self._serving())
        replica = self._replicas[index]
        replica.ordinary += 1
        try:
            return await self._ask(index, prompt_ids, options)
        finally:
            replica.ordinary -= 1
            self._router.done(index)
            if replica.version != self._version:
                self._changed.set()

    def _serving(self) -> list[int]:
        """The replicas that ordinary requests go to: one alone always, of several those that are up to date."""
        if len(self._replicas) == 1:
            return [0]
        return [
            index
            for index, replica in enumerate(self._replicas)
            if not replica.holders and replica.version == self._version
        ]

    async def _ask(self, index: int, prompt_ids: ArrayLike, options: SamplingOptions) -> Completion:
        actor, request_id = self._replicas[index].actor, f"pool-{next(self._names)}"
        try:
            values = {name: getattr(options, name) for name in options.__slots__}
            prompt_ids = np.asarray(prompt_ids, np.int32)
            completion: Completion = await result(actor.generate.call_one(prompt_ids, values, request_id))
        except asyncio.CancelledError:
            actor.abort.broadcast(request_id)
            raise
        except EngineFailedError as error:
            self._failed(index, error)
            raise
        except GeneratorError:
            raise
        except Exception as error:  # task boundary: whatever a remote process raised, or Monarch about its end
            raise GeneratorError(f"generator {index} failed: {type(error).__name__}: {error}") from error
        return completion

    def _failed(self, index: int, error: Exception) -> None:
        self._failure = EngineFailedError(f"generator {index}: {error}", fix="see run.log, then --resume")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[HeldWeights]:
        """The newest weights, which inside do not change, whatever is trained meanwhile.

        Its requests go ahead of all others. Several may hold at once; while new weights wait for the end of that,
        nobody else begins to hold the old ones.
        """
        await self._until(lambda: self._to_hold() is not None)
        index = self._to_hold()
        assert index is not None
        replica = self._replicas[index]
        replica.holders += 1
        weights = HeldWeights(self, index, replica.version)
        try:
            self._tell()
            yield weights
        finally:
            weights.released = True
            replica.holders -= 1
            self._changed.set()
            if not replica.holders:
                rejoining = asyncio.ensure_future(self._rejoin(index))
                self._rejoining.add(rejoining)
                rejoining.add_done_callback(self._rejoining.discard)
                await asyncio.shield(rejoining)  # whoever is cancelled here, the replica is needed again

    def _to_hold(self) -> int | None:
        """A replica with the newest weights, a held one first; one is left for all others where there are several."""
        if self._updates:
            return None
        for index, replica in enumerate(self._replicas):
            if replica.holders and replica.version == self._version:
                return index
        serving = self._serving()
        if len(serving) == 1 < len(self._replicas):
            return None
        return self._router.least_busy(serving)

    async def _rejoin(self, index: int) -> None:
        """Bring a replica that was held to the newest weights, and so back to ordinary requests."""
        replica = self._replicas[index]
        async with self._updating:
            if replica.holders or replica.version == self._version:
                return
            try:
                await result(replica.actor.update_weights.call_one(self._version))
            except WeightsDroppedError:
                return  # newer ones are published, and on their way to every replica
            except Exception as error:  # task boundary, as in `_ask`: nobody may be left to be told
                self._failed(index, error)
                raise
            replica.version = self._version
            self._changed.set()
            self._tell()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()

    async def setup(self) -> None:
        """Load the model in every replica."""
        await self._everywhere("setup")

    async def preload(self) -> None:
        """Import vLLM in every replica, ahead of `setup`."""
        await self._everywhere("preload")

    async def update_weights(self, version: int) -> dict[str, float]:
        """Swap the weights everywhere but where they are held; the slowest replica's times.

        Returns when no ordinary request samples from older weights. With one replica, it waits until nobody holds.
        """
        self._updates += 1
        try:
            async with self._updating:
                await self._until(lambda: not all(replica.holders for replica in self._replicas))
                free = [replica for replica in self._replicas if not replica.holders]
                results = await asyncio.gather(
                    *(result(replica.actor.update_weights.call_one(version)) for replica in free)
                )
                for replica in free:
                    replica.version = version
                self._version = version
        finally:
            self._updates -= 1
            self._changed.set()
        self._tell()
        await self._until(lambda: not any(each.ordinary for each in self._replicas if each.version < version))
        return {name: max(each[name] for each in results) for name in results[0]}

    async def stats(self) -> dict[str, float]:
        """Counters summed over replicas."""
        results = await asyncio.gather(*(result(each.actor.get_stats.call_one()) for each in self._replicas))
        names = dict.fromkeys(name for each in results for name in each)
        return {name: sum(each.get(name, 0.0) for each in results) for name in names}

    async def halt(self) -> None:
        """Abort everything in flight."""
        await self._everywhere("halt")

    async def _everywhere(self, endpoint: str) -> None:
        await asyncio.gather(*(result(getattr(each.actor, endpoint).call()) for each in self._replicas))
