"""Weighted mixture of several environments.

    fe.make("mixture", environments={"coding_rlvr": {"weight": 3}, "gsm8k": {}})

Every task belongs to one component, which runs the episode; the component's name is the task's first tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from forge_env.environment.base import Environment, EnvironmentConfig, resolve_task
from forge_env.environment.optional import gold_actions, random_action, score_group, seats_of
from forge_env.environment.tool_environment import given_answer
from forge_env.errors import UsageError
from forge_env.registry import make
from forge_env.tasks.order import MixtureOrder
from forge_env.trajectory import Trajectory
from forge_env.types import Action, ResetResult, StepResult, Task, ToolSpec


class Component(BaseModel):
    """One environment of a mixture."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Relative number of tasks of this component."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of this environment."""


class MixtureConfig(EnvironmentConfig):
    """The environments of the mixture and their weights."""

    environments: dict[str, Component] = Field(min_length=1)
    """Registered environment name -> weight and options."""


class Mixture(Environment):
    """Weighted mixture of several environments."""

    config_class = MixtureConfig

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        components: dict[str, Component] = self.config.environments
        self.components = {
            name: make(name, sandboxes=self.sandboxes, **{"seed": self.config.seed, **component.options})
            for name, component in components.items()
        }
        weights = {name: component.weight for name, component in components.items()}
        self.seats = tuple(
            dict.fromkeys(seat for component in self.components.values() for seat in seats_of(component))
        )
        self._order = MixtureOrder(weights, seed=self.config.seed)
        self._current: Environment | None = None

    def task(self, split: str, index: int) -> Task:
        """The `index`-th task: the component's task, with the component's name in front of id and tags."""
        name, position = self._order[index]
        component = self.components[name]
        count = component.num_tasks(split)
        task = component.task(split, position if count is None else position % count)
        return task.model_copy(update={"id": f"{name}/{task.id}", "tags": [name, *task.tags]})

    @property
    def tools(self) -> list[ToolSpec]:
        """Tools of the current component; empty before `reset`."""
        return self._current.tools if self._current is not None else []

    @property
    def reusable(self) -> bool:
        """Whether every component is reusable."""
        return all(component.reusable for component in self.components.values())

    def _component_of(self, task: Task) -> tuple[Environment, Task]:
        name = task.tags[0] if task.tags else ""
        if name not in self.components:
            raise UsageError(f"task {task.id!r} does not belong to this mixture")
        component_task = task.model_copy(update={"id": task.id.removeprefix(f"{name}/"), "tags": task.tags[1:]})
        return self.components[name], component_task

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode of the component that the task belongs to."""
        task = resolve_task(self, seed, options)
        component, component_task = self._component_of(task)
        if self._current is not None and self._current is not component:
            await self._current.close()
        self._current, self.seats = component, seats_of(component)
        observation, info = await component.reset(seed=seed, options={"task": component_task})
        return observation, {**info, "task_id": task.id}

    async def step(self, action: Action) -> StepResult:
        """Step the current component."""
        if self._current is None:
            raise UsageError("step() without a running episode", fix="call reset() first")
        return await self._current.step(action)

    async def truncate(self, reason: str) -> tuple[float, dict[str, float]]:
        """Truncate the current component's episode."""
        return (0.0, {}) if self._current is None else await self._current.truncate(reason)

    def credits(self) -> Mapping[str, float]:
        """Credits of the current component."""
        credits = getattr(self._current, "credits", None)
        return {} if credits is None else credits()

    def given_answer(self) -> str | None:
        """Answer of the current component's episode."""
        return None if self._current is None else given_answer(self._current)

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Score the group with the task's component."""
        component, component_task = self._component_of(task)
        await score_group(component, component_task, trajectories)

    def gold_actions(self, task: Task) -> list[Action] | None:
        """Gold actions of the task's component."""
        component, component_task = self._component_of(task)
        return gold_actions(component, component_task)

    def random_action(self, rng: Random) -> Action | None:
        """A random action of the current component."""
        return None if self._current is None else random_action(self._current, rng)

    async def close(self) -> None:
        """Close the current component."""
        if self._current is not None:
            await self._current.close()
