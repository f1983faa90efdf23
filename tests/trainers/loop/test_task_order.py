"""The order of tasks that a recipe asks for is the one that the loop plays, and it learns from what happens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import forge_env as fe
from forge_env.config import RunConfig
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.tasks.curriculum import Curriculum

pytest.importorskip("torch", reason="NOT RUN: the training stack is not installed")
from trainers.loop.rollouts import Rollouts


class Levels(fe.SingleTurnEnvironment):
    """Level 1 is always solved, level 3 never, level 2 by every other attempt."""

    def task(self, split: str, index: int) -> fe.Task:
        level = 1 + index % 3
        return fe.Task(id=f"{split}-{index}", split=split, prompt=str(level), difficulty=level)

    def num_tasks(self, split: str) -> int | None:
        return 30

    def reward(self, task: fe.Task, answer: str) -> float:
        return float(answer)


class Attempts(Policy, PolicySession):
    """A policy of that skill."""

    def __init__(self) -> None:
        self.attempts = 0

    def session(self, tools: list[fe.ToolSpec], *, seed: int | None = None) -> Attempts:
        return self

    async def reply(self, observation: list[fe.Message]) -> Reply:
        self.attempts += 1
        answer = {"1": "1", "2": str(self.attempts % 2), "3": "0"}[observation[0].content]
        message = fe.Message(role="assistant", content=answer)
        return Reply(message, prompt_ids=[1], token_ids=[2], logprobs=[-1.0], versions=[0])


def rollouts(**tasks: Any) -> Rollouts:
    recipe = {"environment": {"name": "levels"}, "grpo": {"group_size": 4}, "tasks": tasks, "seed": 3}
    return Rollouts(RunConfig.model_validate(recipe), Levels, Attempts())


async def levels(played: Rollouts, positions: range) -> Counter[int]:
    groups = [await played.group(position) for position in positions]
    return Counter(group.episodes[0].difficulty for group in groups)


async def test_shuffled_plays_every_task_once_an_epoch() -> None:
    assert await levels(rollouts(), range(30)) == {1: 10, 2: 10, 3: 10}
    in_order = [(await rollouts(order="sequential").group(position)).episodes[0].task_id for position in range(3)]
    assert in_order == ["train-0", "train-1", "train-2"]


async def test_a_curriculum_follows_success_and_goes_on_after_a_resume() -> None:
    first = rollouts(order="curriculum")
    counts = await levels(first, range(60))
    assert counts[2] > counts[1] > 0
    assert counts[2] > counts[3] > 0
    again = rollouts(order="curriculum")
    again.order.load_state_dict(first.order.state_dict(first=60))
    assert isinstance(first.order, Curriculum)
    assert isinstance(again.order, Curriculum)
    assert again.order.shares() == first.order.shares()
    assert [again.order[position] for position in range(60, 70)] == [
        first.order[position] for position in range(60, 70)
    ]


class Ranked(Levels):
    rubric = fe.Rubric(Levels.reward, group=[lambda rewards: [float(rank) for rank in range(len(rewards))]])


async def test_a_group_is_scored_as_a_whole() -> None:
    recipe = {"environment": {"name": "levels"}, "grpo": {"group_size": 4}, "tasks": {"order": "sequential"}}
    played = Rollouts(RunConfig.model_validate(recipe), Ranked, Attempts())
    assert [episode.reward for episode in (await played.group(0)).episodes] == [1.0, 2.0, 3.0, 4.0]
