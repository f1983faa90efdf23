"""Small packages with a planted bug, to be repaired and judged by hidden tests."""

from environments.repairs.environment import Repairs, RepairsConfig

__all__ = ["Repairs", "RepairsConfig"]
