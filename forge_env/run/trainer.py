"""What the recipe's `method` names: a way to train."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from forge_env.config.recipe import RunConfig
from forge_env.errors import PluginError
from forge_env.plugins import load_plugin
from forge_env.run.run import Run


class Trainer:
    """A trainer that can also say early what is wrong with a recipe. A plain `async def train(run)` is one as well."""

    def check(self, config: RunConfig) -> None:
        """Refuse a recipe that can't be run, before anything is started; by default none."""

    async def __call__(self, run: Run) -> None:
        """Train; returns when it is done, or soon after `run.stop` is set, and raises to fail."""
        raise NotImplementedError


class _Function(Trainer):
    def __init__(self, function: Callable[[Run], Awaitable[None]]) -> None:
        self._function = function

    async def __call__(self, run: Run) -> None:
        await self._function(run)


def load_trainer(method: str) -> Trainer:
    """The trainer that a recipe's `method` names, an entry point of `forge_env.trainers` or `module:attribute`.

    Raises:
        NotRegisteredError: there is none of that name.
        PluginError: it can't be imported, or is not a trainer.
    """
    found = load_plugin("forge_env.trainers", method)
    if isinstance(found, Trainer):
        return found
    if not callable(found):
        raise PluginError(f"method: {method!r} is not a function", fix="write `async def train(run)`")
    return _Function(found)
