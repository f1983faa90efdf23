"""Environment in which two seats take turns; the seat that takes the last stick wins; and scripted opponents."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Annotated, Any

from pydantic import Field

import forge_env as fe
from environments.nim.game import (
    NAMES,
    Move,
    Piles,
    after,
    careless_move,
    moves,
    nim_sum,
    perfect_move,
    read_move,
    read_state,
    said,
    written,
)
from forge_env.environment.base import EnvironmentConfig
from forge_env.errors import UsageError
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.types import Action, Message, Observation, ResetResult, StepResult, Task, ToolSpec, as_message

LEVELS = {1: (1, 3, (5, 15)), 2: (2, 7, (1, 7)), 3: (3, 7, (1, 7))}
"""Level -> number of piles, maximum sticks per move, and (minimum, maximum) sticks per pile."""
Level = Annotated[int, Field(ge=1, le=len(LEVELS))]


class NimConfig(EnvironmentConfig):
    """Game selection and skill of the demonstrator."""

    levels: list[Level] = Field(default_factory=lambda: sorted(LEVELS), min_length=1)
    """1: one pile, take 1 to 3; 2 and 3: two and three piles, take any number from one. Drawn uniformly."""
    max_turns: int = Field(40, ge=1)
    """Maximum number of moves of both seats together; no game of legal moves is longer."""
    demo_skill: float = Field(0.0, ge=0.0, le=1.0)
    """Probability that a demonstrated move is perfect instead of random."""


class Nim(fe.Environment):
    """Nim for two players; the player who takes the last stick wins."""

    api_version = 1
    config_class = NimConfig
    config: NimConfig
    seats = ("first", "second")

    def task(self, split: str, index: int) -> Task:
        """Return piles from which `first` can force a win."""
        rng = Random(f"nim/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        count, most, (fewest, largest) = LEVELS[level]
        while not nim_sum(piles := tuple(rng.randint(fewest, largest) for _ in range(count)), most):
            pass
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=f"Piles: {written(piles)}.",
            data={"piles": list(piles), "most": most},
            difficulty=level,
            split=split,
        )

    def gold_actions(self, task: Task) -> list[Action]:
        """Moves of both seats under perfect play; `first` wins."""
        return [said(move) for move in _game(task, lambda piles, most: perfect_move(piles, most))]

    def demonstrate(self, task: Task, rng: Random) -> list[Message]:
        """The conversation of one seat in a game whose moves are random except with probability `demo_skill`."""
        skill = self.config.demo_skill

        def choose(piles: Piles, most: int) -> Move:
            return perfect_move(piles, most) if rng.random() < skill else careless_move(piles, most, rng)

        played = _game(task, choose)
        seat = rng.randrange(min(len(played), 2))
        piles, messages = tuple(task.data["piles"]), list[Message]()
        for number, move in enumerate(played):
            if number % 2 == seat:
                before = played[number - 1] if number else None
                messages += [*self._shown(task, piles, before, number < 2), as_message(said(move))]
            piles = after(piles, move)
        return messages

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Set up the piles; `first` moves first."""
        self._task = task = fe.resolve_task(self, seed, options)
        self._piles: Piles = tuple(task.data["piles"])
        self._turns = 0
        self._running = True
        return self._shown(task, self._piles, None, True), {"seat": "first", "task_id": task.id, "split": task.split}

    async def step(self, action: Action) -> StepResult:
        """Make a move. A message without a legal move loses the game."""
        if not getattr(self, "_running", False):
            raise UsageError("step() without a running game", fix="call reset() first")
        seat, other = self.seats[self._turns % 2], self.seats[(self._turns + 1) % 2]
        self._turns += 1
        move = read_move(as_message(action).content)
        legal = move is not None and move in moves(self._piles, self._task.data["most"])
        if move is not None and legal:
            self._piles = after(self._piles, move)
            if any(self._piles):
                if self._turns >= self.config.max_turns:
                    self._running = False
                    return [], 0.0, False, True, {"truncation": "turns", "seat": other, "metrics": self._metrics(True)}
                shown = self._shown(self._task, self._piles, move, self._turns == 1)
                return shown, 0.0, False, False, {"seat": other}
        self._running = False
        won = seat if legal else other
        text = f"{won} has taken the last stick and wins." if legal else f"That is no legal move: {other} wins."
        info = {"seat": other, "rewards": {other: float(not legal)}, "metrics": self._metrics(legal)}
        return [Message(role="user", content=text)], float(legal), True, False, info

    def _metrics(self, legal: bool) -> dict[str, float]:
        return {"turns": float(self._turns), "legal": float(legal)}

    def _shown(self, task: Task, piles: Piles, move: Move | None, new: bool) -> list[Message]:
        """Observation of the seat to move: the rules at its first turn, the opponent's last move, and the piles."""
        rules = (
            f"Nim. A move takes sticks from one pile, at most {task.data['most']}; who takes the last stick wins. "
            f"Answer with a pile and a number, such as {NAMES[0]} 1.\n"
        )
        last_move = "" if move is None else f"The other takes {said(move)}.\n"
        return [Message(role="user", content=f"{rules if new else ''}{last_move}Piles: {written(piles)}.")]


def _game(task: Task, choose: Any) -> list[Move]:
    """Play a whole game with `choose(piles, most)` and return its moves."""
    piles: Piles = tuple(task.data["piles"])
    played: list[Move] = []
    while any(piles):
        played.append(choose(piles, task.data["most"]))
        piles = after(piles, played[-1])
    return played


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
