"""Requests to generators, from whichever process: which replica serves one.

The pool (`trainers.generator.pool`) knows how the replicas are; a client is told (`update`) whenever that changes.
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
from trainers.actors.remote import result
from trainers.actors.service import Router
from trainers.generator.types import Completion, SamplingOptions

HELD_FIRST = 1 << 20
"""Priority of requests for held weights before all others: the pool waits for the holder."""


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
        self._changed = asyncio.Event()
        self._name, self._count = uuid.uuid4().hex[:8], itertools.count()

    def update(self, members: Sequence[Member]) -> None:
        """These replicas live, and no others."""
        self._members = {member.number: member for member in members}
        self._changed.set()

    async def generate(
        self,
        prompt_ids: ArrayLike,
        options: SamplingOptions,
        session: object = None,
        held: tuple[int, int] | None = None,
    ) -> Completion:
        """One completion; a cancelled call ends the request in its replica too.

        Args:
            prompt_ids: tokens to condition on, int32 [P].
            options: how to sample.
            session: the conversation it belongs to, which stays on one replica where it can: an object that lives
                as long as the conversation.
            held: the `Member.key` whose held weights it is for; no other will do.
        """
        prompt = np.asarray(prompt_ids, np.int32)
        serving = await self._serving() if held is None else [held[0]]
        number = self._router.choose(serving, session, hash(prompt.tobytes()))
        try:
            return await self._ask(self._members[number], prompt, options, held is not None)
        finally:
            self._router.done(number)

    async def _serving(self) -> list[int]:
        """Replicas for ordinary requests; waits until there is one."""
        while not (serving := [member.number for member in self._members.values() if member.serving]):
            self._changed.clear()
            await self._changed.wait()
        return serving

    async def _ask(self, member: Member, prompt: Any, options: SamplingOptions, held: bool) -> Completion:
        request_id = f"{self._name}-{next(self._count)}"
        if held:
            options = replace(options, priority=options.priority - HELD_FIRST)
        values = {name: getattr(options, name) for name in options.__slots__}
        try:
            completion: Completion = await result(member.actor.generate.call_one(prompt, values, request_id))
        except asyncio.CancelledError:
            member.actor.abort.broadcast(request_id)
            raise
        except GeneratorError:
            raise
        except Exception as error:  # task boundary: whatever a remote process raised, or Monarch about its end
            raise GeneratorError(f"generator {member.number} failed: {type(error).__name__}: {error}") from error
        return completion
