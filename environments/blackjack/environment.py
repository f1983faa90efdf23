"""`Blackjack-v1` of gymnasium through the general adapter: better words, and moves that win where any do."""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar, Literal

from pydantic import Field

from forge_env.environment.base import EnvironmentConfig
from forge_env.gym.adapter import GymnasiumConfig, GymnasiumEnvironment, make_game
from forge_env.types import Action, Task

Level = Literal[1, 2, 3]
STICK, HIT = 0, 1
BUST_FROM, STAND_FROM = 12, 17
"""From this total on a card can lose the hand; from this one on, without a usable ace, none should be taken."""
DEALS_APART = 10_000_019
"""Between the numbers of the hands that are tried for a task, so that tasks near each other try different ones."""
MOST_HITS = 12
"""After so many cards every hand has more than 21."""


class BlackjackConfig(GymnasiumConfig):
    """The game's rules are gymnasium's; `env_options` may set `natural` or `sab`."""

    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """Of deals, by how hard the right move is to know. 1: the own total says it (below 12, or 17 and more); 2: the
    dealer's card does (12 to 16); 3: an ace that counts 1 or 11. They are met as often as they are dealt."""
    env_id: str = "Blackjack-v1"
    """Gymnasium's name of the game."""
    max_reward: float = 1.0
    """Reward of a perfect episode."""
    actions: list[str] = ["stick", "hit"]
    """What the agent may do."""
    instructions: str = (
        "Play one hand of blackjack. Get closer to 21 than the dealer, but not over it: `hit` takes a card, `stick` "
        "ends your turn, then the dealer draws up to 17. An ace counts 11 where that fits (it is usable), or else 1."
    )
    """What the game is about, shown first."""
    max_turns: int = Field(20, ge=1)
    """Messages in one episode, those that are not an action too."""


def level_of(total: int, usable: int) -> Level:
    """How hard it is to know the first move: see `BlackjackConfig.levels`."""
    if usable:
        return 3
    return 2 if BUST_FROM <= total < STAND_FROM else 1


class Blackjack(GymnasiumEnvironment):
    """One hand of blackjack: reward 1 for a win, 0 for a draw, -1 for a loss."""

    api_version = 1
    config_class: ClassVar[type[EnvironmentConfig]] = BlackjackConfig
    config: BlackjackConfig

    def task(self, split: str, index: int) -> Task:
        """A deal of one of the levels."""
        game = make_game(self.config.env_id, self.config.env_options, self.config.actions)
        try:
            for number in count(index, DEALS_APART):
                task = super().task(split, number)
                observation, _ = game.reset(seed=task.data["seed"])
                total, _, usable = observation
                level = level_of(total, usable)
                if level in self.config.levels:
                    break
        finally:
            game.close()
        return task.model_copy(update={"id": super().task(split, index).id, "difficulty": level})

    def describe(self, observation: Any) -> str:
        """The hand as a player would say it."""
        total, dealer, usable = (int(value) for value in observation)
        ace = " with a usable ace" if usable else ""
        shown = "an ace" if dealer == 1 else str(dealer)
        return f"Your hand: {total}{ace}. The dealer shows {shown}."

    def gold_actions(self, task: Task) -> list[Action] | None:
        """The shortest moves that win, found with the cards known; None where none do."""
        game = make_game(self.config.env_id, self.config.env_options, self.config.actions)
        try:
            for hits in range(MOST_HITS):
                game.reset(seed=task.data["seed"])
                moves = [HIT] * hits + [STICK]
                for move in moves:
                    _, reward, terminated, _, _ = game.step(move)
                    if terminated:
                        break
                if float(reward) >= self.config.max_reward:
                    return [f"<action>{self.config.actions[move]}</action>" for move in moves]
                if terminated and move == HIT:
                    return None  # over 21: more cards don't help
            return None
        finally:
            game.close()
