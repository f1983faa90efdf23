"""Single-turn environments: one question, one answer, one reward. Define tasks and a reward function.

    class Reverse(fe.SingleTurnEnvironment):
        def task(self, split, index):
            return fe.Task(id=f"{split}-{index}", prompt=f"Write {index} backwards", gold=str(index)[::-1])

        def reward(self, task, completion):
            return float(completion.strip() == task.gold)

`reward` may have any parameter of reward functions (`forge_env.rewards.rubric`), and may be async. Set `rubric` instead
if one function isn't enough.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from forge_env.environment.base import EnvironmentConfig
from forge_env.environment.tool_environment import ToolEnvironment, ToolEnvironmentConfig
from forge_env.errors import UsageError
from forge_env.rewards.rubric import RewardFunction, Rubric
from forge_env.types import Message


class SingleTurnConfig(ToolEnvironmentConfig):
    """Limits of an episode of one turn, without tools."""

    max_turns: int = Field(1, ge=1, le=1)
    """Always 1."""
    max_tool_calls: int = Field(0, ge=0, le=0)
    """Always 0: there are no tools, and any tool call is answered with an error."""


class SingleTurnEnvironment(ToolEnvironment):
    """An environment whose episodes are one assistant message; its text is the answer, even if it also calls tools.

    A subclass defines `task` (or `tasks`), and `reward(self, task, completion)` or a `rubric`.

    Args:
        config: options, an object of `config_class`; None: the defaults.
        context: `sandboxes`, as for every `Environment`.

    Examples:
        >>> import asyncio
        >>> import forge_env as fe
        >>> class Reverse(fe.SingleTurnEnvironment):
        ...     def task(self, split, index):
        ...         return fe.Task(id=f"{split}-{index}", prompt="Reverse 'abc'.", gold="cba", split=split)
        ...
        ...     def reward(self, task, answer):
        ...         return float(answer == task.gold)
        >>> async def play(answer):
        ...     env = Reverse()
        ...     await env.reset(seed=0)
        ...     return (await env.step(answer))[1]
        >>> asyncio.run(play("cba"))
        1.0
    """

    config_class: ClassVar[type[EnvironmentConfig]] = SingleTurnConfig
    reward: ClassVar[RewardFunction]
    """Reward function for an answer, in place of a `rubric`."""
    _how_to_reward = "define `reward(self, task, completion)`, or set `rubric = fe.Rubric([...])`"
    _reward_is_called = "reward function"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "reward" in vars(cls):
            if "rubric" in vars(cls):
                raise UsageError(f"{cls.__name__} has both `reward` and `rubric`", fix="put the function in the rubric")
            function = vars(cls)["reward"]
            cls.rubric = Rubric(function.__func__ if isinstance(function, staticmethod) else function)

    def is_final(self, message: Message) -> bool:
        """Every message ends the episode."""
        return True
