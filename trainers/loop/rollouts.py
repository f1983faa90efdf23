"""Rolling out groups: all episodes of one task at once, tools and generation interleaved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forge_env.config.models import RunConfig
from forge_env.curriculum import make_order
from forge_env.environment import Environment
from forge_env.policy import Policy
from forge_env.rollout import run_episode
from forge_env.trajectory import Trajectory
from trainers.loop.advantages import Group

MakeEnvironment = Callable[[], Environment]


class Rollouts:
    """Plays episodes of one environment with one policy."""

    def __init__(self, config: RunConfig, make_env: MakeEnvironment, policy: Policy) -> None:
        self._config = config
        self._make_env = make_env
        self._tasks = make_env()
        self.order = make_order(config.tasks, self._tasks, self._tasks.splits[0], seed=config.seed)
        self._policy = policy
        self.episodes_running = 0

    async def group(self, index: int) -> Group:
        """All episodes of the task at position `index`; those not done by the deadline are left out."""
        grpo = self._config.grpo
        task = self._tasks.resolve_task(None, {"split": self._tasks.splits[0], "index": self.order[index]})
        running = [
            asyncio.create_task(self._episode(task, f"train-{index}-{member}")) for member in range(grpo.group_size)
        ]
        try:
            done, late = await asyncio.wait(running, timeout=grpo.group_timeout_s)
        except asyncio.CancelledError:
            await _cancel(running)
            raise
        await _cancel(list(late))
        group = Group([task.result() for task in running if task in done])
        if group.valid:
            self.order.record(index, group.mean_reward / self._tasks.max_reward)
        return group

    async def evaluate(self, split: str, count: int, policy: Policy) -> list[Trajectory]:
        """One episode of each of the first `count` tasks of a held-out split, of all where it has fewer."""
        count = min(count, self._tasks.num_tasks(split) or count)
        tasks = [self._tasks.resolve_task(None, {"split": split, "index": index}) for index in range(count)]
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._episode(task, f"{split}-{index}", policy)) for index, task in enumerate(tasks)
            ]
        return [task.result() for task in running]

    async def _episode(self, task: object, name: str, policy: Policy | None = None) -> Trajectory:
        self.episodes_running += 1
        try:
            return await run_episode(
                self._make_env,
                policy or self._policy,
                task=task,  # type: ignore[arg-type]
                environment_name=self._config.environment.name,
                trajectory_id=name,
            )
        finally:
            self.episodes_running -= 1


async def _cancel(tasks: list[asyncio.Task[Trajectory]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
