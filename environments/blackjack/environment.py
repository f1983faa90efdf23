"""Gymnasium's `Blackjack-v1` through the general adapter, with a readable description of the hand and gold actions."""

from __future__ import annotations

from itertools import count
from typing import Any, Literal

from pydantic import Field

from forge_env.gym.adapter import GymnasiumConfig, GymnasiumEnvironment, make_game
from forge_env.types import Action, Task

Level = Literal[1, 2, 3]
STICK, HIT = 0, 1
BUST_FROM, STAND_FROM = 12, 17
"""Lowest total at which a card can bust the hand; lowest total, without a usable ace, at which to stick."""
DEALS_APART = 10_000_019
"""Step between the deals that are tried for one task, so that neighboring tasks try different deals."""
MOST_HITS = 12
"""Number of hits after which every hand exceeds 21."""


class BlackjackConfig(GymnasiumConfig):
    """Options of the game. The rules are gymnasium's; `env_options` may set `natural` or `sab`."""

    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """Difficulty of the deals. 1: the player's total alone decides the move (below 12, or at least 17); 2: the dealer's
    card matters too (12 to 16); 3: the hand has an ace that counts 1 or 11. Levels occur as often as they are dealt."""
    env_id: str = "Blackjack-v1"
    """Gymnasium's name of the game."""
    max_reward: float = 1.0
    """Reward of a perfect episode."""
    actions: list[str] = ["stick", "hit"]
    """Names of the actions, in gymnasium's order."""
    instructions: str = (
        "Play one hand of blackjack. Get closer to 21 than the dealer, but not over it: `hit` takes a card, `stick` "
        "ends your turn, then the dealer draws up to 17. An ace counts 11 where that fits (it is usable), or else 1."
    )
    """Instructions shown at the start of the episode."""
    max_turns: int = Field(20, ge=1)
    """Maximum number of messages per episode, including those without a valid action."""


def level_of(total: int, usable: int) -> Level:
    """Difficulty of the first move; see `BlackjackConfig.levels`."""
    if usable:
        return 3
    return 2 if BUST_FROM <= total < STAND_FROM else 1


class Blackjack(GymnasiumEnvironment):
    """One hand of blackjack: reward 1 for a win, 0 for a draw, -1 for a loss."""

    api_version = 1
    config_class = BlackjackConfig
    config: BlackjackConfig

    def task(self, split: str, index: int) -> Task:
        """Return a deal of one of the configured levels."""
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
        """Describe the hand in a sentence."""
        total, dealer, usable = (int(value) for value in observation)
        ace = " with a usable ace" if usable else ""
        shown = "an ace" if dealer == 1 else str(dealer)
        return f"Your hand: {total}{ace}. The dealer shows {shown}."

    def gold_actions(self, task: Task) -> list[Action] | None:
        """Shortest winning moves, found by replaying the deal; None if the deal can't be won."""
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
