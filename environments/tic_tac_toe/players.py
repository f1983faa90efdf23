"""Who a model can play against: `opponents: {second: environments.tic_tac_toe:Perfect}`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from environments.tic_tac_toe.game import Board, careless_move, perfect_move, read_board
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.types import Message, Observation, ToolSpec


class Perfect(Policy):
    """Wins where a win can be forced, as soon as it can; never loses where a draw can be had."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """A player, who reads the board from what it was told last."""
        return _Player(perfect_move)


class Careless(Policy):
    """Takes any free cell, at random."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """A player with a random generator of its own."""
        rng = Random(seed)
        return _Player(lambda board: careless_move(board, rng))


class _Player(PolicySession):
    def __init__(self, choose: Callable[[Board], int]) -> None:
        self._choose = choose

    async def reply(self, observation: Observation) -> Reply:
        board = read_board(observation[-1].content)
        return Reply(Message(role="assistant", content=str(self._choose(board))))
