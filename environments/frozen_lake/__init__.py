"""FrozenLake: gymnasium's own game, on lakes of growing size."""

from environments.frozen_lake.environment import FrozenLake, FrozenLakeConfig

__all__ = ["FrozenLake", "FrozenLakeConfig"]
