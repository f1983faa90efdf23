"""Gymnasium's `FrozenLake-v1` through the general adapter, with a lake per task and shortest paths as gold actions."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any, Literal

from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from pydantic import Field

from environments.seeds import draw_seed
from forge_env.environment.base import resolve_task
from forge_env.gym.adapter import GymnasiumConfig, GymnasiumEnvironment, make_game
from forge_env.types import Action, ResetResult, Task

Level = Literal[1, 2, 3]
SIZES = {1: 4, 2: 6, 3: 8}
"""Side length of a lake in cells, by level."""
SAFE = 0.75
"""Probability that a cell is ice and not a hole."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Row and column offset of each move, in the order of the game's actions."""


class FrozenLakeConfig(GymnasiumConfig):
    """Lake selection and options of the game."""

    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """Levels, drawn uniformly; the lakes are 4, 6 and 8 cells wide."""
    env_id: str = "FrozenLake-v1"
    """Gymnasium's name of the game."""
    max_reward: float = 1.0
    """Reward of a perfect episode."""
    actions: list[str] = list(MOVES)
    """Names of the actions, in gymnasium's order."""
    instructions: str = (
        "Walk over a frozen lake from S to G. F is ice that holds, H is a hole, which ends the game; the cell that "
        "you stand on is in brackets. A step off the lake leaves you where you are."
    )
    """Instructions shown at the start of the episode."""
    max_turns: int = Field(40, ge=1)
    """Maximum number of messages per episode, including those without a valid action."""


class FrozenLake(GymnasiumEnvironment):
    """Walk over a frozen lake with holes: reward 1 at the other side, else 0."""

    api_version = 1
    config_class = FrozenLakeConfig
    config: FrozenLakeConfig

    def task(self, split: str, index: int) -> Task:
        """Return a lake that occurs in no other split."""
        rng = Random(f"frozen_lake/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        seed = int(draw_seed(rng, split))
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=self.config.instructions,
            data={"seed": seed, "public_lake": generate_random_map(SIZES[level], SAFE, seed)},
            difficulty=level,
            split=split,
        )

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Build the task's lake; the ice is not slippery unless `env_options` enables it."""
        await self.close()
        task = resolve_task(self, seed, options)
        given = {"is_slippery": False, **self.config.env_options, "desc": task.data["public_lake"]}
        self._env = make_game(self.config.env_id, given, self.config.actions, show=self.config.show)
        return await super().reset(seed=seed, options={"task": task})

    def gold_actions(self, task: Task) -> list[Action] | None:
        """The moves of a shortest path."""
        return [f"<action>{move}</action>" for move in shortest_way(task.data["public_lake"])]


def shortest_way(lake: list[str]) -> list[str]:
    """Moves of a shortest path from S, in the first corner, to G, in the last. `ValueError`: no path leads to G."""
    size = len(lake)
    ways = {(0, 0): list[str]()}
    queue = deque(ways)
    while queue:
        row, column = cell = queue.popleft()
        if lake[row][column] == "G":
            return ways[cell]
        for move, (down, right) in MOVES.items():
            target = (min(max(row + down, 0), size - 1), min(max(column + right, 0), size - 1))
            if lake[target[0]][target[1]] != "H" and target not in ways:
                ways[target] = [*ways[cell], move]
                queue.append(target)
    raise ValueError("the lake has no safe path to the goal")
