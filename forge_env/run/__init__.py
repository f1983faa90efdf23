"""A training run: its folder, metrics, events and outcome."""

from forge_env.run.folder import RunFolder
from forge_env.run.run import Run

__all__ = ["Run", "RunFolder"]
