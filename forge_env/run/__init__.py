"""A run: its folder, its metrics, what it shows, and the report it leaves."""

from forge_env.run.folder import RunFolder
from forge_env.run.run import Run

__all__ = ["Run", "RunFolder"]
