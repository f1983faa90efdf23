"""The recipe, folder and state of a run, as in the tests of `run`."""

from tests.forge_env.run.conftest import clock, config, folder, state

__all__ = ["clock", "config", "folder", "state"]
