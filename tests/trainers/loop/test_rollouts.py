"""Rolling out groups: in the recipe's order, which learns from it; a bug in the environment costs its episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.config import RunConfig
from forge_env.errors import ForgeError
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.run import Run, RunFolder
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


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Rollouts]:
    def make(environment: type[fe.Environment] = Levels, limit: float = 0.2, **tasks: Any) -> Rollouts:
        (tmp_path / "run").mkdir(exist_ok=True)
        section = {"name": "levels", "max_bug_rate": limit}
        recipe = {"environment": section, "grpo": {"group_size": 4}, "tasks": tasks, "seed": 3}
        recipe |= {"logging": {"timeline": False}}
        run = Run(RunConfig.model_validate(recipe), RunFolder(tmp_path / "run"))
        return Rollouts(run, environment, Attempts())

    return make


async def levels(played: Rollouts, positions: range) -> Counter[int]:
    groups = [await played.group(position) for position in positions]
    return Counter(group.episodes[0].difficulty for group in groups)


async def test_shuffled_plays_every_task_once_an_epoch(made: Callable[..., Rollouts]) -> None:
    assert await levels(made(), range(30)) == {1: 10, 2: 10, 3: 10}
    in_order = [(await made(order="sequential").group(position)).episodes[0].task_id for position in range(3)]
    assert in_order == ["train-0", "train-1", "train-2"]


async def test_a_curriculum_follows_success_and_goes_on_after_a_resume(made: Callable[..., Rollouts]) -> None:
    first = made(order="curriculum")
    counts = await levels(first, range(60))
    assert counts[2] > counts[1] > 0
    assert counts[2] > counts[3] > 0
    again = made(order="curriculum")
    again.order.load_state_dict(first.order.state_dict(first=60))
    assert isinstance(first.order, Curriculum)
    assert isinstance(again.order, Curriculum)
    assert again.order.shares() == first.order.shares()
    assert [again.order[position] for position in range(60, 70)] == [
        first.order[position] for position in range(60, 70)
    ]


class Ranked(Levels):
    rubric = fe.Rubric(Levels.reward, group=[lambda rewards: [float(rank) for rank in range(len(rewards))]])


async def test_a_group_is_scored_as_a_whole(made: Callable[..., Rollouts]) -> None:
    played = made(Ranked, order="sequential")
    assert [episode.reward for episode in (await played.group(0)).episodes] == [1.0, 2.0, 3.0, 4.0]


def refuse_five(task: fe.Task, answer: str) -> float:
    if task.id == "train-5":
        raise ZeroDivisionError("nobody can score this")
    return float(answer)


class OneBad(Levels):
    """The reward function raises on one task."""

    rubric = fe.Rubric(refuse_five)


class NoFive(Levels):
    """One task can't be made."""

    def task(self, split: str, index: int) -> fe.Task:
        if index == 5:
            raise KeyError("five")
        return super().task(split, index)


class BadTogether(Levels):
    """A group can't be scored as a whole."""

    async def score_group(self, task: fe.Task, trajectories: Any) -> None:
        raise RuntimeError("together")


async def test_a_bug_of_the_environment_costs_its_episode_and_sets_its_task_aside(
    made: Callable[..., Rollouts],
) -> None:
    played = made(OneBad, order="sequential")
    groups = [await played.group(position) for position in range(60)]
    assert [position for position, group in enumerate(groups) if not group.valid] == [5, 35]
    assert "nobody can score this" in str(groups[5].episodes[0].error)
    assert "test_rollouts.py" in str(groups[5].episodes[0].error)  # file and line
    assert "set aside" in str(groups[35].episodes[0].error)
    assert (len(groups[5].episodes), len(groups[35].episodes)) == (4, 1)  # not played again
    assert any("ZeroDivisionError" in text and "train-5" in text for text in played._run.state.warnings)
    assert played.set_aside == {"train-5"}


@pytest.mark.parametrize(("environment", "said"), [(NoFive, "KeyError"), (BadTogether, "together")])
async def test_a_bug_beside_an_episode_costs_its_group(
    environment: type[fe.Environment], said: str, made: Callable[..., Rollouts]
) -> None:
    group = await made(environment, order="sequential").group(5)
    assert not group.valid
    assert said in str(group.episodes[0].error)


async def test_too_many_bugs_end_the_run_with_the_diagnosis(made: Callable[..., Rollouts]) -> None:
    class Bad(Levels):
        rubric = fe.Rubric(lambda task, answer: 1 / 0)

    played = made(Bad, order="sequential")
    for position in range(19):
        await played.group(position)
    with pytest.raises(ForgeError, match=r"failed on 100% of the last 20 tasks.*ZeroDivisionError"):
        await played.group(19)


async def test_held_out_tasks_with_a_bug_are_left_out(made: Callable[..., Rollouts]) -> None:
    played = made(NoFive)
    episodes = await played.evaluate("eval", 30, Attempts())
    assert [episode.valid for episode in episodes].count(False) == 1
