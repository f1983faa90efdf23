"""Requests to generators, from whichever process: which replica serves one, and what when that dies.

The pool (`trainers.generator.pool`) knows how the replicas are; a client is told (`update`) whenever that changes. A
request whose replica dies is made again on another one: the tokens that it had sampled of this turn are lost, those of
turns before are the caller's. Where no replica serves just now, requests wait for one.
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
"""Priority of requests for held weights before all others: the pool waits for the holder."""
REPEATS = 3
"""How often a request is made again because its replica died; it may be what killed them."""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that lives.

    Attributes:
        number: among all replicas.
        life: how often it was started.
        actor: its `Generator`.
        serving: whether it takes ordinary requests: it has the newest weights, and nobody holds them.
    """

    number: int
    life: int
    actor: Any
    serving: bool

    @property
    def key(self) -> tuple[int, int]:
        """Of this life of this replica."""
        return self.number, self.life


class GeneratorClient:
    """Asks the generators of a run.

    Args:
        replicas: how many there are.
        max_num_seqs: sequences that one engine decodes together. A conversation leaves the replica that has it in
            its cache when that one is an eighth of them busier than another.
    """

    def __init__(self, replicas: int, max_num_seqs: int = 128) -> None:
        self._router = Router(replicas, max(1, max_num_seqs // 8))
        self._members: dict[int, Member] = {}
        self._dead: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], set[asyncio.Timeout]] = {}
        """What ends the calls under way, by the life that is asked."""
        self._view = 0
        self._changed = asyncio.Event()
        self._name, self._count = uuid.uuid4().hex[:8], itertools.count()

    def update(self, members: Sequence[Member]) -> None:
        """These replicas live, and no others."""
        self._members = {member.number: member for member in members}
        alive = {member.key for member in members}
        for key in [key for key in self._waiting if key not in alive]:
            for death in self._waiting.pop(key):  # Monarch may take seconds to tell
                death.reschedule(asyncio.get_running_loop().time())
        for key in alive:
            self._waiting.setdefault(key, set())
        self._view += 1
        self._changed.set()

    def lives(self, key: tuple[int, int]) -> bool:
        """Whether this life of a replica (`Member.key`) is not known to be over."""
        member = self._members.get(key[0])
        return member is not None and member.key == key and key not in self._dead

    @property
    def in_flight(self) -> list[int]:
        """Requests of this client under way, by replica."""
        return self._router.in_flight

    async def generate(
        self,
        prompt_ids: ArrayLike,
        options: SamplingOptions,
        session: object = None,
        held: tuple[int, int] | None = None,
        at_least: int = 0,
    ) -> Completion:
        """One completion; a cancelled call ends the request in its replica too.

        Args:
            prompt_ids: tokens to condition on, int32 [P].
            options: how to sample.
            session: the conversation it belongs to, which stays on one replica where it can: an object that lives
                as long as the conversation.
            held: the `Member.key` whose held weights it is for; no other will do.
            at_least: the oldest version of the weights that may sample it.

        Raises:
            WeightsLostError: the replica whose weights were held is gone.
            GeneratorError: replica after replica died of it.
        """
        prompt = np.asarray(prompt_ids, np.int32)
        prefix, deaths, refused = hash(prompt.tobytes()), 0, set[tuple[int, int, int]]()
        while True:
            member = await self._choose(session, prefix, held, refused)
            view = self._view
            try:
                return await self._ask(member, prompt, options, held is not None, at_least)
            except (ActorDiedError, EngineFailedError) as error:
                deaths += 1
                self._dead.add(member.key)
                if held is not None:
                    raise WeightsLostError(f"the weights that were held are gone: {error}") from error
                if deaths > REPEATS:
                    raise GeneratorError(f"{deaths} generators died with this request; the last: {error}") from error
            except (WeightsHeldError, WeightsOldError):
                if held is not None:
                    raise
                refused.add((*member.key, view))
            finally:
                self._router.done(member.number)

    async def _choose(
        self, session: object, prefix: int, held: tuple[int, int] | None, refused: set[tuple[int, int, int]]
    ) -> Member:
        """The replica for a request; counted as in flight."""
        if held is not None:
            if not self.lives(held):
                raise WeightsLostError("the weights that were held are gone: their generator died")
            return self._members[self._router.choose([held[0]], session, prefix)]
        while not (serving := self._serving(refused)):
            self._changed.clear()
            await self._changed.wait()
        return self._members[self._router.choose(serving, session, prefix)]

    def _serving(self, refused: set[tuple[int, int, int]]) -> list[int]:
        """Replicas for ordinary requests, but for those that have just refused: the news of why are on their way."""
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
        waiting, death = self._waiting[member.key], asyncio.timeout(None)  # a task for each call would cost more
        waiting.add(death)
        try:
            async with death:
                completion: Completion = await result(
                    member.actor.generate.call_one(prompt, _values(options), request_id, held, at_least)
                )
        except asyncio.CancelledError:
            member.actor.abort.broadcast(request_id)
            raise
        except (GeneratorError, ActorDiedError):
            raise
        except Exception as error:  # task boundary: whatever a remote process raised
            if death.expired():
                raise ActorDiedError(f"generator {member.number} died") from None
            raise GeneratorError(f"generator {member.number} failed: {type(error).__name__}: {error}") from error
        finally:
            waiting.discard(death)
        completion.prompt_ids = prompt  # the replica leaves it out
        return completion


def _values(options: SamplingOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__slots__}
