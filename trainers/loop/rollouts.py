"""Rolling out groups: all episodes of one task at once, tools and generation interleaved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from forge_env.config.recipe import RunConfig
from forge_env.display.terminal import duration
from forge_env.environment.base import Environment
from forge_env.policy import Policy
from forge_env.rollout.episode import run_episode
from forge_env.run.account import Account, Accounts, OnSpan
from forge_env.run.timeline import Timeline
from forge_env.tasks.curriculum import make_order
from forge_env.trajectory import Trajectory
from forge_env.types import Task
from trainers.loop.advantages import Group

MakeEnvironment = Callable[[], Environment]


class Rollouts:
    """Plays episodes of one environment with one policy."""

    def __init__(
        self, config: RunConfig, make_env: MakeEnvironment, policy: Policy, timeline: Timeline | None = None
    ) -> None:
        self._config = config
        self._make_env = make_env
        self._tasks = make_env()
        self.order = make_order(config.tasks, self._tasks, self._tasks.splits[0], seed=config.seed)
        self._policy = policy
        self._timeline = timeline
        self.accounts = Accounts("episodes")
        self.episodes_ended = 0

    @property
    def episodes_running(self) -> int:
        """Episodes under way."""
        return len(self.accounts.open_accounts)

    def longest_waiting(self) -> str:
        """What the episode that has done one thing for the longest is doing, in words."""
        oldest = min(self.accounts.open_accounts, key=lambda account: account.since, default=None)
        if oldest is None:
            return "no episode is under way"
        return f"episode {oldest.actor} has been in '{oldest.doing}' for {duration(time.perf_counter() - oldest.since)}"

    async def group(self, index: int) -> Group:
        """All episodes of the task at position `index`; those not done by the deadline are left out.

        The time of a group begins with its first answer from the model: what waits behind other groups is not late.
        """
        grpo = self._config.grpo
        task = self._tasks.resolve_task(None, {"split": self._tasks.splits[0], "index": self.order[index]})
        deadline = asyncio.timeout(None)

        def begin() -> None:
            if deadline.when() is None:
                deadline.reschedule(asyncio.get_running_loop().time() + grpo.group_timeout_s)

        running = [
            asyncio.create_task(self._episode(task, f"train-{index}-{member}", on_answer=begin))
            for member in range(grpo.group_size)
        ]
        done: list[asyncio.Task[Trajectory]] = []
        try:
            with suppress(TimeoutError):
                async with deadline:
                    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            done = [task for task in running if task.done()]
        finally:
            await _cancel([task for task in running if task not in done])
        group = Group([task.result() for task in done])
        if group.valid:
            await self._tasks.score_group(task, group.valid)
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

    async def _episode(
        self,
        task: Task,
        name: str,
        policy: Policy | None = None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> Trajectory:
        account = Account(name, "reset", on_span=self._on_span(name))

        def watch(doing: str) -> None:
            if account.doing == "generate" and doing == "environment":
                on_answer()
            account.enter(doing)

        with self.accounts.open(account):
            try:
                return await run_episode(
                    self._make_env,
                    policy or self._policy,
                    task=task,
                    environment_name=self._config.environment.name,
                    trajectory_id=name,
                    watch=watch,
                )
            finally:
                self.episodes_ended += 1

    def _on_span(self, name: str) -> OnSpan | None:
        """One episode of a group stands for all on the timeline, which would grow to hundreds of megabytes."""
        timeline = self._timeline
        if timeline is None or not name.endswith("-0"):
            return None
        return lambda actor, doing, start, end: timeline.overlapping("episodes", actor, doing, start, end)


async def _cancel(tasks: list[asyncio.Task[Trajectory]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
