"""Scripted opponents: `opponents: {second: environments.tic_tac_toe:Perfect}`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from environments.tic_tac_toe.game import Board, careless_move, perfect_move, read_board
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.types import Message, Observation, ToolSpec


class Perfect(Policy):
    """Perfect play: wins as fast as possible if it can force a win, and never loses if it can force a draw."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """A player that parses the board from the last message."""
        return _Player(perfect_move)


class Careless(Policy):
    """Plays random free cells."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """A player with a separate random generator, seeded by `seed`."""
        rng = Random(seed)
        return _Player(lambda board: careless_move(board, rng))


class _Player(PolicySession):
    def __init__(self, choose: Callable[[Board], int]) -> None:
        self._choose = choose

    async def reply(self, observation: Observation) -> Reply:
        board = read_board(observation[-1].content)
        return Reply(Message(role="assistant", content=str(self._choose(board))))
