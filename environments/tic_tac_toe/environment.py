"""Environment in which two seats take turns from a position in which `first` can force a win."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Literal

from pydantic import Field

import forge_env as fe
from environments.tic_tac_toe.game import (
    Board,
    after,
    careless_move,
    cells,
    has_won,
    is_over,
    perfect_move,
    read_board,
    read_move,
    turned,
    wins,
    written,
)
from forge_env.environment.base import EnvironmentConfig
from forge_env.errors import UsageError
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.types import Action, Message, Observation, ResetResult, StepResult, Task, ToolSpec, as_message

Level = Literal[1, 2, 3]
IN_FIVE = 5
"""One in this many positions, counted without symmetric duplicates, belongs to `eval`."""


class TicTacToeConfig(EnvironmentConfig):
    """Selection of positions and skill of the demonstrator."""

    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """Numbers of moves `first` needs to win under perfect play. Drawn uniformly."""
    demo_skill: float = Field(0.0, ge=0.0, le=1.0)
    """Probability that a demonstrated move is perfect instead of random."""


class TicTacToe(fe.Environment):
    """Tic-tac-toe for two, from positions in which the first player can force a win."""

    api_version = 1
    config_class = TicTacToeConfig
    config: TicTacToeConfig
    seats = ("first", "second")

    def task(self, split: str, index: int) -> Task:
        """Return a position of one of the levels; `eval` shares none with other splits, even turned or mirrored."""
        rng = Random(f"tic_tac_toe/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        held_out = split == "eval"
        boards = [board for position, board in enumerate(wins()[level]) if (position % IN_FIVE == 0) == held_out]
        board = turned(rng.choice(boards), rng)
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=written(board),
            data={"public_board": board},
            difficulty=level,
            split=split,
        )

    def gold_actions(self, task: Task) -> list[Action]:
        """Moves of both seats under perfect play; `first` wins."""
        return [str(cell) for cell in _game(task, perfect_move)]

    def demonstrate(self, task: Task, rng: Random) -> list[Message]:
        """The conversation of one seat in a game whose moves are random except with probability `demo_skill`."""

        def choose(board: Board) -> int:
            return perfect_move(board) if rng.random() < self.config.demo_skill else careless_move(board, rng)

        played = _game(task, choose)
        seat, board = rng.randrange(min(len(played), 2)), task.data["public_board"]
        messages = list[Message]()
        for number, cell in enumerate(played):
            if number % 2 == seat:
                before = played[number - 1] if number else None
                messages += [_shown(board, before, self.seats[seat], number < 2), as_message(str(cell))]
            board = after(board, cell)
        return messages

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Set up the board; `first` plays X and moves first."""
        task = fe.resolve_task(self, seed, options)
        self._board: Board = task.data["public_board"]
        self._turns = 0
        self._running = True
        return [_shown(self._board, None, "first", True)], {"seat": "first", "task_id": task.id, "split": task.split}

    async def step(self, action: Action) -> StepResult:
        """Take a cell. A message that names no free cell loses the game; a draw is worth 0.5 to both seats."""
        if not getattr(self, "_running", False):
            raise UsageError("step() without a running game", fix="call reset() first")
        seat, other = self.seats[self._turns % 2], self.seats[(self._turns + 1) % 2]
        self._turns += 1
        cell = read_move(as_message(action).content)
        if cell is None or cell not in cells(self._board):
            return self._end(other, 0.0, 1.0, f"That is no free cell: {other} wins.", legal=False)
        self._board = after(self._board, cell)
        if not is_over(self._board):
            return [_shown(self._board, cell, other, self._turns == 1)], 0.0, False, False, {"seat": other}
        won = has_won(self._board, "XO"[self.seats.index(seat)])
        earned = 1.0 if won else 0.5
        result = f"{seat} wins." if won else "Nobody wins."
        return self._end(other, earned, 1.0 - earned, f"{written(self._board)}\n{result}", legal=True)

    def _end(self, other: str, earned: float, others: float, said: str, *, legal: bool) -> StepResult:
        self._running = False
        metrics = {"turns": float(self._turns), "legal": float(legal)}
        info = {"seat": other, "rewards": {other: others}, "metrics": metrics}
        return [Message(role="user", content=said)], earned, True, False, info


def _game(task: Task, choose: Any) -> list[int]:
    """Play a whole game with `choose(board)` and return the cells taken."""
    board: Board = task.data["public_board"]
    played: list[int] = []
    while not is_over(board):
        played.append(choose(board))
        board = after(board, played[-1])
    return played


def _shown(board: Board, before: int | None, seat: str, new: bool) -> Message:
    """Observation of the seat to move: the rules at its first turn, the opponent's last move, and the board."""
    mark = "X" if seat == "first" else "O"
    rules = f"Tic-tac-toe. You are {mark}; three in a line win. Answer with the number of a free cell.\n"
    last_move = "" if before is None else f"The other takes {before}.\n"
    return Message(role="user", content=f"{rules if new else ''}{last_move}{written(board)}")


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
