"""The environment: two seats take turns from a position in which `first` can force a win."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar, Literal

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
    read_move,
    turned,
    wins,
    written,
)
from forge_env.environment.base import EnvironmentConfig
from forge_env.errors import UsageError
from forge_env.types import Action, Message, ResetResult, StepResult, Task, as_message

Level = Literal[1, 2, 3]
IN_FIVE = 5
"""Of positions that are not alike, one in so many belongs to `eval`."""


class TicTacToeConfig(EnvironmentConfig):
    """Which positions, and how the demonstrator plays."""

    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """How many moves of its own `first` needs to win, if it plays perfectly. Drawn evenly."""
    demo_skill: float = Field(0.0, ge=0.0, le=1.0)
    """How likely a move of a demonstration is the perfect one, and not just any free cell."""


class TicTacToe(fe.Environment):
    """Tic-tac-toe, for two, from positions in which the one who moves first can force a win."""

    api_version = 1
    config_class: ClassVar[type[EnvironmentConfig]] = TicTacToeConfig
    config: TicTacToeConfig
    seats = ("first", "second")

    def task(self, split: str, index: int) -> Task:
        """A position of one of the levels; none of `eval` is like one of another split, turned or mirrored."""
        rng = Random(f"tic_tac_toe/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        held_out = split == "eval"
        boards = [board for place, board in enumerate(wins()[level]) if (place % IN_FIVE == 0) == held_out]
        board = turned(rng.choice(boards), rng)
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=written(board),
            data={"public_board": board},
            difficulty=level,
            split=split,
        )

    def gold_actions(self, task: Task) -> list[Action]:
        """Both seats play perfectly, so `first` wins."""
        return [str(cell) for cell in _game(task, perfect_move)]

    def demonstrate(self, task: Task, rng: Random) -> list[Message]:
        """What one of the seats saw and said in a game of mostly random moves."""

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
        """Set up the board; `first` has the X and is to move."""
        task = self.resolve_task(seed, options)
        self._board: Board = task.data["public_board"]
        self._turns = 0
        self._running = True
        return [_shown(self._board, None, "first", True)], {"seat": "first", "task_id": task.id, "split": task.split}

    async def step(self, action: Action) -> StepResult:
        """Take a cell. A message that names no free one loses the game; a draw is worth half to both."""
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
        said = f"{seat} wins." if won else "Nobody wins."
        return self._end(other, earned, 1.0 - earned, f"{written(self._board)}\n{said}", legal=True)

    def _end(self, other: str, earned: float, others: float, said: str, *, legal: bool) -> StepResult:
        self._running = False
        metrics = {"turns": float(self._turns), "legal": float(legal)}
        info = {"seat": other, "rewards": {other: others}, "metrics": metrics}
        return [Message(role="user", content=said)], earned, True, False, info


def _game(task: Task, choose: Any) -> list[int]:
    """The cells of a whole game."""
    board: Board = task.data["public_board"]
    played: list[int] = []
    while not is_over(board):
        played.append(choose(board))
        board = after(board, played[-1])
    return played


def _shown(board: Board, before: int | None, seat: str, new: bool) -> Message:
    """What the seat that moves next is told: the rules at its first turn, what the other took, the board."""
    mark = "X" if seat == "first" else "O"
    rules = f"Tic-tac-toe. You are {mark}; three in a line win. Answer with the number of a free cell.\n"
    told = "" if before is None else f"The other takes {before}.\n"
    return Message(role="user", content=f"{rules if new else ''}{told}{written(board)}")
