"""FrozenLake: gymnasium's game on lakes of increasing size."""

from environments.frozen_lake.environment import FrozenLake, FrozenLakeConfig

__all__ = ["FrozenLake", "FrozenLakeConfig"]
