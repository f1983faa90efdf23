"""Trainers: the implementations that a recipe's `method` names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from forge_env.config.recipe import RunConfig
from forge_env.errors import PluginError, UsageError
from forge_env.plugins import load_plugin
from forge_env.run.fingerprint import Replayed
from forge_env.run.recording import Recording
from forge_env.run.run import Run


@dataclass(frozen=True, slots=True)
class Question:
    """Optional inputs of `Trainer.plan` besides the recipe.

    Attributes:
        gpus: such as 8xH100; None: as many H100 as the recipe asks for.
        prompt: tokens of an episode that are not sampled; None: the trainer assumes a number.
        reply: tokens of an episode that are sampled; None: the trainer assumes a number.
        price: cost of one GPU for an hour.
    """

    gpus: str | None = None
    prompt: int | None = None
    reply: int | None = None
    price: float | None = None


@dataclass(frozen=True, slots=True)
class ReplayQuestion:
    """Optional inputs of `Trainer.replay`.

    Attributes:
        after: step after which the replay begins, or `changed` applies. The steps since the newest checkpoint before it
            are computed too.
        last: last step; None: the last recorded one.
        model: checkpoint folder that the run started from; None: the recorded one.
        changed: settings instead of the recorded ones; None: nothing is changed.
        tokens: also sample the recorded replies again.
    """

    after: int = 0
    last: int | None = None
    model: str | None = None
    changed: RunConfig | None = None
    tokens: bool = False


class Trainer:
    """A trainer that can also check a recipe early. A plain `async def train(run)` is a trainer as well."""

    def check(self, config: RunConfig) -> None:
        """Refuse a recipe that can't be run, before anything is started; by default none is refused.

        Args:
            config: the whole recipe.
        """

    def plan(self, config: RunConfig, question: Question) -> Iterator[str]:
        """Yield lines with the memory, time and cost that a recipe will take; by default this raises UsageError.

        Args:
            config: the whole recipe.
            question: GPUs, lengths and price to assume.
        """
        raise UsageError(
            f"method={config.method} can't forecast a recipe",
            fix="derive it from forge_env.run.trainer.Trainer, with a method `plan`",
        )

    def replay(self, recording: Recording, config: RunConfig, question: ReplayQuestion) -> Iterator[Replayed]:
        """Train recorded steps again and compare each with its record; by default this raises UsageError.

        Args:
            recording: the recorded run.
            config: its recipe.
            question: which steps, and what to change.
        """
        raise UsageError(
            f"method={config.method} can't replay a run", fix="replay a run of method=grpo or method=distillation"
        )

    async def __call__(self, run: Run) -> None:
        """Train; return when done, or soon after `run.stop` is set, and raise to fail."""
        raise NotImplementedError


class _Function(Trainer):
    def __init__(self, function: Callable[[Run], Awaitable[None]]) -> None:
        self._function = function

    async def __call__(self, run: Run) -> None:
        await self._function(run)


def load_trainer(method: str) -> Trainer:
    """Load the trainer that a recipe's `method` names, an entry point of `forge_env.trainers` or `module:attribute`.

    Raises:
        NotRegisteredError: there is none of that name.
        PluginError: it can't be imported, or is not a trainer.
    """
    trainer = load_plugin("forge_env.trainers", method)
    if isinstance(trainer, Trainer):
        return trainer
    if not callable(trainer):
        raise PluginError(f"method: {method!r} is not a function", fix="write `async def train(run)`")
    return _Function(trainer)
