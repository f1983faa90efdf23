"""Recorded actions are played again, and the first answer that differs is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import forge_env as fe
from forge_env.policy import Policy
from forge_env.rollout.episode import episode_seed
from forge_env.rollout.recorded import Answers, Tasks, play_again
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.trajectory import Trajectory
from forge_env.types import Message

SEED = 3
HELLO = ReplayPolicy(["hello"] * 2)


class Moody(fe.Environment):
    """Its answer depends on a number that a test changes."""

    mood = 1

    def num_tasks(self, split: str) -> int | None:
        return 3

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"task {'abc'[index]}", prompt="Go.", split=split)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._turns = 0
        return [Message(role="user", content=f"seed {seed}")], {}

    async def step(self, action: Any) -> Any:
        self._turns += 1
        done = self._turns == 2
        return [Message(role="user", content=f"mood {self.mood}")], float(self.mood * done), done, False, {}


async def recorded(make: Callable[[], fe.Environment], policy: Policy, index: int) -> Trajectory:
    name = f"train-{index}-0"
    task = fe.resolve_task(make(), None, {"index": index})
    return await fe.run_episode(make, policy, task=task, seed=episode_seed(SEED, name), trajectory_id=name)


@pytest.mark.parametrize("count", [12, None])
def test_tasks_are_found_by_their_ids(count: int | None) -> None:
    class Named(Moody):
        def num_tasks(self, split: str) -> int | None:
            return count

        def task(self, split: str, index: int) -> fe.Task:
            names = {3: "alike", 4: "alike", 5: "year-2024", 6: "task-6"}
            return fe.Task(id=names.get(index, f"{split} {index}!"), prompt=str(index), split=split)

    tasks = Tasks(Named(), "eval")
    for name, prompt in {"alike": "3", "year-2024": "5", "task-6": "6", "eval 11!": "11"}.items():
        assert (task := tasks.find(name)) is not None
        assert task.prompt == prompt
    assert count is None or tasks.find("another") is None


async def test_a_deterministic_environment_answers_alike() -> None:
    def make() -> fe.Environment:
        return fe.make("calculator")

    episodes = [await recorded(make, GoldPolicy(), index) for index in range(4)]
    answers = await play_again(episodes, make, SEED)
    assert answers == Answers(4, sum(len(episode.turns) for episode in episodes))


async def test_the_first_other_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = [await recorded(Moody, HELLO, index) for index in range(3)]
    assert not (await play_again(episodes, Moody, SEED)).different
    assert (await play_again(episodes[:1], Moody, SEED + 1)).different == ["train-0-0, turn 1: other messages"]
    monkeypatch.setattr(Moody, "mood", 2)
    answers = await play_again(episodes, Moody, SEED, at_once=1)
    assert answers.different == [f"train-{index}-0, turn 2: other messages" for index in range(3)]
    changed = [dataclasses.replace(turn, reward=0.5) for turn in episodes[0].turns]
    monkeypatch.setattr(Moody, "mood", 1)
    answers = await play_again([dataclasses.replace(episodes[0], turns=changed)], Moody, SEED)
    assert answers.different == ["train-0-0, turn 1: reward 0.5 -> 0"]


async def test_what_can_not_be_played_again_is_counted() -> None:
    episode = await recorded(Moody, HELLO, 0)
    others = [
        dataclasses.replace(episode, task_id="task z"),
        dataclasses.replace(episode, opponents={"black": "random"}),
        dataclasses.replace(episode, truncation="time"),
    ]
    answers = await play_again([episode, *others], Moody, SEED)
    assert answers.episodes == 1
    assert answers.skipped == {
        "of a task that can't be found by its id": 1,
        "against opponents": 1,
        "ended by a time limit": 1,
    }
