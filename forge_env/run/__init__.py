"""A training run: its folder, metrics, live display and final report."""

from forge_env.run.folder import RunFolder
from forge_env.run.run import Run

__all__ = ["Run", "RunFolder"]
