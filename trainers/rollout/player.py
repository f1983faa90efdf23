"""Playing groups, all episodes of one task at once, and held-out episodes; tools and generation interleaved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b

from forge_env.config.recipe import RunConfig
from forge_env.environment.base import Environment
from forge_env.errors import EnvironmentBugError, environment_code
from forge_env.policy import Policy
from forge_env.rollout.episode import run_episode
from forge_env.run.account import Account, Accounts, OnSpan
from forge_env.run.timeline import Span
from forge_env.trajectory import Trajectory
from forge_env.types import Task
from trainers.rollout.types import BUG, Group

MakeEnvironment = Callable[[], Environment]


class Player:
    """Plays episodes of the recipe's environment with a policy.

    A bug in the environment's own code costs the episode it happens in: that is invalid, and its task is set aside.

    Args:
        config: the recipe.
        make_env: a fresh environment for each episode.
        policy: plays groups.
        warn: told what a person should know.
        on_span: told of what the first episode of each group did, and of the groups; None: nobody wants to know.

    Attributes:
        set_aside: ids of tasks whose environment has raised; they are not played again.
        ended: episodes that have come to their end.
    """

    def __init__(
        self,
        config: RunConfig,
        make_env: MakeEnvironment,
        policy: Policy,
        *,
        warn: Callable[[str], object],
        on_span: Callable[[Span], None] | None = None,
    ) -> None:
        self._config = config
        self._make_env = make_env
        self._tasks = make_env()
        self._policy = policy
        self._warn = warn
        self._on_span = on_span
        self.set_aside: set[str] = set()
        self.accounts = Accounts("episodes")
        self.ended = 0

    @property
    def max_reward(self) -> float:
        """The environment's highest reward."""
        return self._tasks.max_reward

    async def group(self, position: int, index: int) -> Group:
        """All episodes of a training task; those not done by the deadline are left out.

        The time of a group begins with its first answer from the model: what waits behind other groups is not late.

        Args:
            position: of the group in the order of tasks, for its name.
            index: of the task.
        """
        started = time.perf_counter()
        name, split = f"group {position}", self._tasks.splits[0]
        try:
            task = self._task(split, index)
            if task.id in self.set_aside:
                reason = f"task {task.id!r} is set aside: its environment raised"
                return Group([self._lost(f"{name}-0", task.id, reason)])
            group = await self._play_group(task, position)
            if group.valid:
                with environment_code(f"{type(self._tasks).__name__}.score_group", task.id):
                    await self._tasks.score_group(task, group.valid)
        except EnvironmentBugError as error:  # of the task as such: of `task`, or of `score_group`
            group = Group([self._buggy(f"train-{position}", f"{split}/{index}", error)])
        if self._on_span is not None:
            self._on_span(Span("groups", name, name, started, time.perf_counter()))
        return group

    async def _play_group(self, task: Task, position: int) -> Group:
        grpo = self._config.grpo
        deadline = asyncio.timeout(None)

        def begin() -> None:
            if deadline.when() is None:
                deadline.reschedule(asyncio.get_running_loop().time() + grpo.group_timeout_s)

        running = [
            asyncio.create_task(self._episode(task, f"train-{position}-{member}", self._policy, on_answer=begin))
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
        return Group([task.result() for task in done])

    async def held_out(self, split: str, index: int, policy: Policy) -> Trajectory:
        """One episode of a held-out task."""
        name = held_out_name(split, index)
        try:
            return await self._episode(self._task(split, index), name, policy)
        except EnvironmentBugError as error:
            return self._buggy(name, f"{split}/{index}", error)

    def _task(self, split: str, index: int) -> Task:
        with environment_code(f"{type(self._tasks).__name__}.task", f"{split}/{index}"):
            return self._tasks.resolve_task(None, {"split": split, "index": index})

    async def _episode(
        self, task: Task, name: str, policy: Policy, on_answer: Callable[[], None] = lambda: None
    ) -> Trajectory:
        account = Account(name, "reset", on_span=self._show(name))

        def watch(doing: str) -> None:
            if account.doing == "generate" and doing == "environment":
                on_answer()
            account.enter(doing)

        self.accounts.open(account)
        try:
            return await run_episode(
                self._make_env,
                policy,
                task=task,
                environment_name=self._config.environment.name,
                trajectory_id=name,
                seed=episode_seed(self._config.seed, name),
                watch=watch,
            )
        except EnvironmentBugError as error:
            self.set_aside.add(task.id)
            return self._buggy(name, task.id, error)
        finally:
            self.accounts.close(account)
            self.ended += 1

    def _buggy(self, name: str, task_id: str, error: EnvironmentBugError) -> Trajectory:
        """The invalid episode of a bug in the environment."""
        self._warn(f"an episode is left out, and its task set aside: {error}")
        return self._lost(name, task_id, f"{BUG}{error}")

    def _lost(self, name: str, task_id: str, error: str) -> Trajectory:
        return Trajectory(name, self._config.environment.name, task_id, valid=False, error=error)

    def _show(self, name: str) -> OnSpan | None:
        """One episode of a group stands for all on the timeline, which would grow to hundreds of megabytes."""
        show = self._on_span
        if show is None or not name.endswith("-0"):
            return None
        return lambda actor, doing, start, end: show(Span("episodes", actor, doing, start, end))


def held_out_name(split: str, index: int) -> str:
    """Of the episode of a held-out task."""
    return f"{split}-{index}"


def episode_seed(run_seed: int, name: str) -> int:
    """The seed of an episode, below 2**32: the same whenever and beside whatever else it is played."""
    return int.from_bytes(blake2b(f"{run_seed}/{name}".encode(), digest_size=4).digest())


async def _cancel(tasks: list[asyncio.Task[Trajectory]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
