"""Continuing a recorded episode: its actions are played again up to a point, and a policy goes on from there.

No snapshot of the environment is needed, and none is taken. Every answer of the environment is compared with the
recorded one; an environment that answers differently ends the continuation, because its state may differ too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from forge_env.environment.base import Environment
from forge_env.errors import InfrastructureError
from forge_env.policy import LimitReached, Policy, PolicySession, Reply
from forge_env.rollout.episode import open_session
from forge_env.trajectory import Turn
from forge_env.types import Message, Observation, Task

DIFFERS = "differs"
"""Name of the limit that ends a continuation whose environment answered differently than recorded."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A point of an episode: before turn number `turn` (from 0), or after the first `calls` tool calls of that turn."""

    turn: int
    calls: int = 0

    @property
    def replies(self) -> int:
        """Number of recorded messages that are played up to this point."""
        return self.turn + (self.calls > 0)


class Continuation(Policy):
    """Plays the recorded messages up to a point, then continues with another policy; for one episode.

    Args:
        point: point up to which they are played. After some calls of a turn, its message is cut to these calls.
        then: policy that continues. It gets the conversation so far as its first observation.

    Attributes:
        differed: first turn before which the environment answered differently than recorded; None: it didn't.
    """

    def __init__(self, turns: Sequence[Turn], point: Point, then: Policy, *, seed: int | None) -> None:
        self.turns, self.point, self.then, self.seed = turns, point, then, seed
        self.name = then.name
        self.differed: int | None = None

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """Open the conversation."""
        self.differed = None  # of an earlier attempt
        return _Continuing(self, env, task)


class _Continuing(PolicySession):
    def __init__(self, owner: Continuation, env: Environment, task: Task) -> None:
        self._owner, self._env, self._task = owner, env, task
        self._history: list[Message] = []
        self._next = 0
        self._inner: PolicySession | None = None

    async def reply(self, observation: Observation) -> Reply:
        owner, number = self._owner, self._next
        self._next += 1
        if number <= owner.point.turn and observation != owner.turns[number].observation:
            owner.differed = number
            raise LimitReached(DIFFERS)
        if number < owner.point.replies:
            reply = recorded_reply(owner.turns[number].reply, owner.point.calls if number == owner.point.turn else 0)
            self._history += [*observation, reply.message]
            return reply
        if self._inner is None:
            self._inner = open_session(owner.then, self._env, self._task, seed=owner.seed)
            before = [(turn.observation, turn.reply) for turn in owner.turns[:number]]
            if owner.point.calls or not before or not self._inner.resume(before):
                observation = [*self._history, *observation]
        return await self._inner.reply(observation)

    def unanswered(self) -> InfrastructureError | None:
        return None if self._inner is None else self._inner.unanswered()


def recorded_reply(reply: Reply, calls: int) -> Reply:
    """A recorded reply, cut to its first `calls` tool calls unless that is 0; a cut reply has no tokens."""
    if not calls:
        return replace(reply)
    message = reply.message.model_copy(update={"tool_calls": reply.message.tool_calls[:calls]})
    return Reply(message, metadata=dict(reply.metadata))


def continuation_seed(seed: int | None, point: Point, number: int) -> int:
    """Seed of a continuation's policy, below 2**31; depends only on the episode's seed, the point and its number."""
    text = f"{seed}/{point.turn}/{point.calls}/{number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest()) >> 1
