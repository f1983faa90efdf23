"""Tasks in Harbor's and in Terminal-Bench's format."""

from environments.harbor.environment import Harbor, HarborConfig

__all__ = ["Harbor", "HarborConfig"]
