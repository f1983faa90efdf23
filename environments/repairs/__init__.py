"""Small packages with a planted bug that the agent repairs; hidden tests determine the reward."""

from environments.repairs.environment import Repairs, RepairsConfig

__all__ = ["Repairs", "RepairsConfig"]
