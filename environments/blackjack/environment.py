"""`Blackjack-v1` of gymnasium through the general adapter: better words, and moves that win where any do."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from forge_env.environment.base import EnvironmentConfig
from forge_env.gym.adapter import GymnasiumConfig, GymnasiumEnvironment, make_game
from forge_env.types import Action, Task

STICK, HIT = 0, 1
MOST_HITS = 12
"""After so many cards every hand has more than 21."""


class BlackjackConfig(GymnasiumConfig):
    """The game's rules are gymnasium's; `env_options` may set `natural` or `sab`."""

    env_id: str = "Blackjack-v1"
    """Gymnasium's name of the game."""
    actions: list[str] = ["stick", "hit"]
    """What the agent may do."""
    instructions: str = (
        "Play one hand of blackjack. Get closer to 21 than the dealer, but not over it: `hit` takes a card, `stick` "
        "ends your turn, then the dealer draws up to 17. An ace counts 11 where that fits (it is usable), or else 1."
    )
    """What the game is about, shown first."""
    max_turns: int = Field(20, ge=1)
    """Messages in one episode, those that are not an action too."""


class Blackjack(GymnasiumEnvironment):
    """One hand of blackjack: reward 1 for a win, 0 for a draw, -1 for a loss."""

    api_version = 1
    config_class: ClassVar[type[EnvironmentConfig]] = BlackjackConfig
    config: BlackjackConfig

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
                if float(reward) >= self.max_reward:
                    return [f"<action>{self.config.actions[move]}</action>" for move in moves]
                if terminated and move == HIT:
                    return None  # over 21: more cards don't help
            return None
        finally:
            game.close()
