"""Rolling out groups: all episodes of one task at once, tools and generation interleaved."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.display.terminal import duration
from forge_env.environment.base import Environment
from forge_env.errors import EnvironmentBugError, ForgeError, environment_code
from forge_env.policy import Policy
from forge_env.rollout.episode import run_episode
from forge_env.run import Run
from forge_env.run.account import Account, Accounts, OnSpan
from forge_env.tasks.curriculum import make_order
from forge_env.trajectory import Trajectory
from forge_env.types import Task

MakeEnvironment = Callable[[], Environment]
RECENT = 100
"""Tasks over which the rate of bugs in the environment is taken."""
FEWEST = 20
"""Tasks below which there is no rate yet."""
BUG = "EnvironmentBugError: "
"""How the error of an episode begins that the environment's own code has ended, as in an evaluation's record."""


@dataclass(slots=True)
class Group:
    """Episodes of one task."""

    episodes: list[Trajectory]

    @property
    def valid(self) -> list[Trajectory]:
        """Episodes that count: nothing but the agent decided how they went, and it sampled something."""
        return [episode for episode in self.episodes if episode.valid and episode.num_sampled_tokens]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Of the valid episodes, [E]."""
        return np.array([episode.reward for episode in self.valid], np.float64)

    @property
    def mean_reward(self) -> float:
        """Of the valid episodes; 0 without any."""
        return float(self.rewards.mean()) if self.valid else 0.0


@dataclass(slots=True)
class Totals:
    """Counts since the start of the run."""

    tokens_generated: int = 0
    episodes: int = 0
    episodes_invalid: int = 0
    episodes_late: int = 0
    forks: int = 0
    groups_filtered: int = 0
    tokens_filtered: int = 0

    @classmethod
    def since(cls, earlier: Mapping[str, Any]) -> Totals:
        """Counts that go on from the summary of an earlier session of the run."""
        return cls(**{field.name: int(earlier.get(field.name) or 0) for field in fields(cls)})

    def count(self, group: Group, group_size: int) -> None:
        """Add a group that has been rolled out."""
        self.episodes += len(group.episodes)
        self.episodes_late += group_size - len(group.episodes)
        self.episodes_invalid += sum(not episode.valid for episode in group.episodes)
        self.tokens_generated += sum(episode.num_sampled_tokens for episode in group.episodes)
        self.forks += sum(turn.reply.forked for episode in group.episodes for turn in episode.turns)

    def drop(self, group: Group) -> None:
        """A group was rolled out and is not trained on."""
        self.groups_filtered += 1
        self.tokens_filtered += sum(episode.num_sampled_tokens for episode in group.valid)

    def summary(self) -> dict[str, int]:
        """For summary.json."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """What is not trained on so far."""
        return {
            "episode/invalid": float(self.episodes_invalid),
            "episode/late": float(self.episodes_late),
            "episode/forks": float(self.forks),
            "groups/filtered": float(self.groups_filtered),
        }


class Rollouts:
    """Plays episodes of the recipe's environment with a policy, and keeps their record.

    A bug in the environment's own code costs the episode it happens in: that is invalid, counted and shown, and its
    task is set aside, so that the run and every resumed one go on with the others.

    Attributes:
        order: which task comes when.
        set_aside: ids of tasks whose environment has raised; they are not played again.
        totals: counts since the start of the run.
    """

    def __init__(self, run: Run, make_env: MakeEnvironment, policy: Policy) -> None:
        config = run.config
        self._run = run
        self._config = config
        self._make_env = make_env
        self._tasks = make_env()
        self.order = make_order(config.tasks, self._tasks, self._tasks.splits[0], seed=config.seed)
        self._policy = policy
        self._timeline = run.timeline
        self._bugs: deque[bool] = deque(maxlen=RECENT)
        self._last_bug = ""
        self.set_aside: set[str] = set()
        self.totals = Totals.since(run.earlier)
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

    async def group(self, position: int) -> Group:
        """All episodes of the task at `position`; those not done by the deadline are left out.

        The time of a group begins with its first answer from the model: what waits behind other groups is not late.

        Raises:
            ForgeError: the environment's own code fails too often.
        """
        started = time.perf_counter()
        name, split = f"group {position}", self._tasks.splits[0]
        try:
            task = self._task(split, self.order[position])
            if task.id in self.set_aside:
                return Group(
                    [self._lost(f"{name}-0", task.id, f"task {task.id!r} is set aside: its environment raised")]
                )
            group = await self._play_group(task, position)
            if group.valid:
                with environment_code(f"{type(self._tasks).__name__}.score_group", task.id):
                    await self._tasks.score_group(task, group.valid)
                self.order.record(position, group.mean_reward / self._tasks.max_reward)
        except EnvironmentBugError as error:  # of the task as such: of `task`, or of `score_group`
            group = Group([self._buggy(f"train-{position}", f"{split}/{position}", error)])
        self.totals.count(group, self._config.grpo.group_size)
        for episode in group.episodes:
            self._run.trajectory(episode, "train")
        await self._run.drain()
        self._watch_bugs(group.episodes)
        if self._timeline is not None:
            self._timeline.overlapping("groups", name, name, started, time.perf_counter())
        return group

    async def _play_group(self, task: Task, position: int) -> Group:
        grpo = self._config.grpo
        deadline = asyncio.timeout(None)

        def begin() -> None:
            if deadline.when() is None:
                deadline.reschedule(asyncio.get_running_loop().time() + grpo.group_timeout_s)

        running = [
            asyncio.create_task(self._episode(task, f"train-{position}-{member}", on_answer=begin))
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

    async def evaluate(self, split: str, count: int, policy: Policy) -> list[Trajectory]:
        """One episode of each of the first `count` tasks of a held-out split, of all where it has fewer."""
        count = min(count, self._tasks.num_tasks(split) or count)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._held_out(split, index, policy)) for index in range(count)]
        return [task.result() for task in running]

    async def _held_out(self, split: str, index: int, policy: Policy) -> Trajectory:
        name = f"{split}-{index}"
        try:
            episode = await self._episode(self._task(split, index), name, policy)
        except EnvironmentBugError as error:
            episode = self._buggy(name, f"{split}/{index}", error)
        self._watch_bugs([episode])
        return episode

    def _task(self, split: str, index: int) -> Task:
        with environment_code(f"{type(self._tasks).__name__}.task", f"{split}/{index}"):
            return self._tasks.resolve_task(None, {"split": split, "index": index})

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
            except EnvironmentBugError as error:
                self.set_aside.add(task.id)
                return self._buggy(name, task.id, error)
            finally:
                self.episodes_ended += 1

    def _buggy(self, name: str, task_id: str, error: EnvironmentBugError) -> Trajectory:
        """The invalid episode of a bug in the environment."""
        self._run.warn(f"an episode is left out, and its task set aside: {error}")
        return self._lost(name, task_id, f"{BUG}{error}")

    def _watch_bugs(self, episodes: list[Trajectory]) -> None:
        """Count a task that was played.

        Raises:
            ForgeError: the environment's own code fails too often.
        """
        found = next((text for episode in episodes if (text := episode.error or "").startswith(BUG)), None)
        self._bugs.append(found is not None)
        self._last_bug = found or self._last_bug
        rate, limit = sum(self._bugs) / len(self._bugs), self._config.environment.max_bug_rate
        if len(self._bugs) >= FEWEST and rate > limit:
            raise ForgeError(
                f"the environment's own code failed on {rate:.0%} of the last {len(self._bugs)} tasks, "
                f"the last time: {self._last_bug.removeprefix(BUG)}",
                fix="fix the environment, then --resume; environment.max_bug_rate is the limit",
            )

    def _lost(self, name: str, task_id: str, error: str) -> Trajectory:
        return Trajectory(name, self._config.environment.name, task_id, valid=False, error=error)

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
