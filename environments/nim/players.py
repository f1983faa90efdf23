"""Scripted opponents: `opponents: {second: environments.nim:Perfect}`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from environments.nim.game import Move, Piles, careless_move, perfect_move, read_state, said
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.types import Message, Observation, ToolSpec


class Perfect(Policy):
    """Perfect play: wins every game in which it can force a win."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """A player that parses the piles from the conversation."""
        return _Player(perfect_move)


class Careless(Policy):
    """Plays random legal moves."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """A player with a separate random generator, seeded by `seed`."""
        rng = Random(seed)
        return _Player(lambda piles, most: careless_move(piles, most, rng))


class _Player(PolicySession):
    def __init__(self, choose: Callable[[Piles, int], Move]) -> None:
        self._choose = choose
        self._shown: list[str] = []

    async def reply(self, observation: Observation) -> Reply:
        self._shown += [message.content for message in observation]
        return Reply(Message(role="assistant", content=said(self._choose(*read_state(self._shown)))))
