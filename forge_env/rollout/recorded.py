"""Recorded actions, played again in their environment, whose answers are compared with the recorded ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from forge_env.environment.base import Environment, resolve_task
from forge_env.errors import ContextLengthExceeded
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.rollout.episode import episode_seed, run_episode
from forge_env.tasks.splits import number_of_tasks
from forge_env.trajectory import Trajectory
from forge_env.types import Observation, Task, ToolSpec

MOST_TASKS = 100_000
"""Tasks of a split that are searched for a recorded task's id."""
BY_TIME = ("time", "working_time")
"""Limits that a replay doesn't reach at the same moment."""


class RecordedPolicy(Policy):
    """A policy that gives a recorded episode's replies in their order, and then ends the episode."""

    def __init__(self, episode: Trajectory) -> None:
        self._replies = iter([turn.reply for turn in episode.turns])

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a conversation; all of an episode's conversations share the replies."""
        return _Recorded(self._replies)


class _Recorded(PolicySession):
    def __init__(self, replies: Iterator[Reply]) -> None:
        self._replies = replies

    async def reply(self, observation: Observation) -> Reply:
        reply = next(self._replies, None)
        if reply is None:
            raise ContextLengthExceeded("the recorded episode has no further reply")
        return reply

    def fork(self, turns: int, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        return self


@dataclass(slots=True)
class Answers:
    """The answers of an environment to recorded actions, compared with the recorded answers.

    Attributes:
        different: the first difference of each episode that has one.
        skipped: number of episodes that can't be played again, by reason.
    """

    episodes: int = 0
    turns: int = 0
    different: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)


class Tasks:
    """Tasks of a split by their ids.

    Args:
        split: name of the split; None: the training split.
    """

    def __init__(self, env: Environment, split: str | None = None) -> None:
        self._env = env
        self._split = env.splits[0] if split is None else split
        count = number_of_tasks(env, self._split)
        self._count = sys.maxsize if count is None else count
        self._by_id: dict[str, int] = {}
        self._searched = 0

    def find(self, name: str) -> Task | None:
        """The task with this id; None if the first `MOST_TASKS` don't have it. Many ids end in the task's number."""
        number = name.rpartition("-")[2]
        if number.isascii() and number.isdecimal() and len(number) < 10 and int(number) < self._count:
            task = self._task(int(number))
            if task.id == name:
                return task
        while name not in self._by_id and self._searched < min(self._count, MOST_TASKS):
            self._by_id.setdefault(self._task(self._searched).id, self._searched)
            self._searched += 1
        return self._task(self._by_id[name]) if name in self._by_id else None

    def _task(self, index: int) -> Task:
        return resolve_task(self._env, None, {"split": self._split, "index": index})


async def play_again(
    episodes: Iterable[Trajectory], make_env: Callable[[], Environment], seed: int, *, at_once: int = 8
) -> Answers:
    """Play the recorded actions of training episodes again, and compare observations and rewards turn by turn.

    Raises:
        EnvironmentBugError: the environment's code failed.
    """
    answers, tasks = Answers(), Tasks(make_env())
    todo = iter(episodes)

    async def play() -> None:
        for episode in todo:
            task = tasks.find(episode.task_id)
            if why := _unplayable(episode, task):
                answers.skipped[why] = answers.skipped.get(why, 0) + 1
                continue
            again = await run_episode(make_env, RecordedPolicy(episode), task=task, seed=episode_seed(seed, episode.id))
            if not again.valid:
                answers.skipped["lost"] = answers.skipped.get("lost", 0) + 1
                continue
            answers.episodes += 1
            answers.turns += len(episode.turns)
            if (difference := first_difference(episode, again)) is not None:
                answers.different.append(f"{episode.id}, {difference}")

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(play())
    return answers


def _unplayable(episode: Trajectory, task: Task | None) -> str:
    """Why an episode can't be played again, or ""."""
    if task is None:
        return "of a task that can't be found by its id"
    if episode.opponents:
        return "against opponents"
    if episode.truncation in BY_TIME:
        return "ended by a time limit"
    return "ended by an error of the agent" if episode.crashed else ""


def first_difference(recorded: Trajectory, again: Trajectory) -> str | None:
    """Describe the first difference between the answers in two episodes with the same actions; None without one."""
    for number, (old, new) in enumerate(zip_longest(recorded.turns, again.turns), start=1):
        if old is None or new is None:
            return f"turn {number}: the episode {'goes on' if old is None else 'ends before'}"
        if old.observation != new.observation:
            return f"turn {number}: other messages"
        if old.reward != new.reward:
            return f"turn {number}: reward {old.reward:g} -> {new.reward:g}"
    if recorded.final_observation != again.final_observation:
        return "the end: other messages"
    if (recorded.terminated, recorded.truncated) != (again.terminated, again.truncated):
        return "the end: another outcome"
    return None
