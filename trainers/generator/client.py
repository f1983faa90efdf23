"""Client for requests to generators, usable from any process: chooses a replica and retries when it dies.

The pool (`trainers.generator.pool`) tracks the replicas and calls `update` on every change. A request whose replica
dies is repeated on another one: the tokens sampled so far in this turn are lost; those of earlier turns are in the
prompt. While no replica serves, requests wait for one.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forge_env.errors import GeneratorError
from trainers.actors.remote import ActorDiedError, result
from trainers.actors.router import Router
from trainers.generator.types import (
    Completion,
    EngineFailedError,
    SamplingOptions,
    WeightsHeldError,
    WeightsLostError,
    WeightsOldError,
)

HELD_FIRST = 1 << 20
"""Priority advantage of requests to held weights over all others, because weight updates wait for the holder."""
REPEATS = 3
"""Maximum number of retries after a replica's death; the request itself may be the cause of the deaths."""


@dataclass(frozen=True, slots=True)
class Member:
    """A live replica; a restart begins a new `life`.

    It takes ordinary requests if `serving`: its weights are up to date and, if there are several replicas, not held.
    """

    number: int
    life: int
    actor: Any
    serving: bool

    @property
    def key(self) -> tuple[int, int]:
        """Key of this life of this replica."""
        return self.number, self.life


class GeneratorClient:
    """Client of all generators of a run.

    Args:
        max_num_seqs: maximum number of sequences that one engine decodes together. A conversation moves away from the
            replica that has it in its cache when that replica has more requests in flight than the least busy one, by
            more than an eighth of this number.
    """

    def __init__(self, replicas: int, max_num_seqs: int = 128) -> None:
        self._router = Router(replicas, max(1, max_num_seqs // 8))  # the engine queues what exceeds its batch
        self._members: dict[int, Member] = {}
        self._dead: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], set[asyncio.Timeout]] = {}
        """Timeouts that end the calls in flight, by the key of the replica's life."""
        self._view = 0
        self._name, self._count = uuid.uuid4().hex[:8], itertools.count()

    def update(self, members: Sequence[Member]) -> None:
        """Replace the list of live replicas; calls to replicas that are not in it end with an error."""
        self._members = {member.number: member for member in members}
        alive = {member.key for member in members}
        for key in [key for key in self._waiting if key not in alive]:
            for death in self._waiting.pop(key):  # Monarch may take seconds to report a death
                death.reschedule(asyncio.get_running_loop().time())
        for key in alive:
            self._waiting.setdefault(key, set())
        self._view += 1
        self._router.wake()

    def lives(self, key: tuple[int, int]) -> bool:
        """Whether this life of a replica (`Member.key`) is, as far as this client knows, not over."""
        member = self._members.get(key[0])
        return member is not None and member.key == key and key not in self._dead

    @property
    def in_flight(self) -> list[int]:
        """Number of this client's requests in flight, by replica."""
        return self._router.in_flight

    async def generate(
        self,
        prompt_ids: ArrayLike,
        options: SamplingOptions,
        session: object = None,
        held: tuple[int, int] | None = None,
        at_least: int = 0,
    ) -> Completion:
        """Sample one completion; cancelling the call also aborts the request in its replica.

        Args:
            session: an object that lives as long as the conversation, which stays on one replica if possible.
            held: the `Member.key` of the replica whose held weights must sample it; None for an ordinary request.
            at_least: oldest policy version that may sample it.

        Raises:
            WeightsLostError: the replica whose weights were held is gone.
            GeneratorError: too many replicas died during this request, or the replica raised an error.
        """
        prompt = np.asarray(prompt_ids, np.int32)
        deaths, refused = 0, set[tuple[int, int, int]]()
        member, view = None, 0  # of the current attempt

        def serving() -> list[int]:
            if held is None:
                return self._serving(refused)
            if not self.lives(held):
                raise WeightsLostError("the held weights are gone: their generator died")
            return [held[0]]

        async def ask(number: int) -> Completion:
            nonlocal member, view
            member, view = self._members[number], self._view
            return await self._ask(member, prompt, options, held is not None, at_least)

        def retry(number: int, error: Exception) -> None:
            nonlocal deaths
            assert member is not None
            if isinstance(error, ActorDiedError | EngineFailedError):
                deaths += 1
                self._dead.add(member.key)
                if held is not None:
                    raise WeightsLostError(f"the held weights are gone: {error}") from error
                if deaths > REPEATS:
                    raise GeneratorError(f"{deaths} generators died with this request; the last: {error}") from error
            elif isinstance(error, WeightsHeldError | WeightsOldError) and held is None:
                refused.add((*member.key, view))
            else:
                raise error

        return await self._router.route(ask, serving, retry, session=session, prefix=hash(prompt.tobytes()))

    def _serving(self, refused: set[tuple[int, int, int]]) -> list[int]:
        """List replicas for ordinary requests; replicas that refused are left out until the next `update`."""
        return [
            member.number
            for member in self._members.values()
            if member.serving and member.key not in self._dead and (*member.key, self._view) not in refused
        ]

    async def _ask(
        self, member: Member, prompt: Any, options: SamplingOptions, held: bool, at_least: int
    ) -> Completion:
        request_id = f"{self._name}-{next(self._count)}"
        if held:
            options = replace(options, priority=options.priority - HELD_FIRST)
        waiting, death = self._waiting[member.key], asyncio.timeout(None)  # cheaper than a task for each call
        waiting.add(death)
        try:
            async with death:
                completion: Completion = await result(
                    member.actor.generate.call_one(prompt, options, request_id, held, at_least)
                )
        except asyncio.CancelledError:
            member.actor.abort.broadcast(request_id)
            raise
        except (GeneratorError, ActorDiedError):
            raise
        except Exception as error:  # task boundary: a remote process can raise any exception
            if death.expired():
                raise ActorDiedError(f"generator {member.number} died") from None
            raise GeneratorError(f"generator {member.number} failed: {type(error).__name__}: {error}") from error
        finally:
            waiting.discard(death)
        completion.prompt_ids = prompt  # the replica does not send it back
        return completion
