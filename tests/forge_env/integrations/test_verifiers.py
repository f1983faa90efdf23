"""Environments as tasksets of the real verifiers, which our adapter of tasksets plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.v1")

import forge_env as fe
from forge_env import registry
from forge_env.cli.main import main
from forge_env.errors import UsageError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.trajectory import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAME = "forge-env-verifiers"


async def played(environment: str, index: int, answers: list[Any], **options: Any) -> Trajectory:
    """An episode of an environment through verifiers: its task, its harness, its interception server, its reward."""

    def make() -> fe.Environment:
        return fe.make(
            "verifiers",
            taskset=NAME,
            harness=NAME,
            options={"environment": environment, "sandboxes": "local", **options},
        )

    return await run_episode(make, ReplayPolicy(answers), seed=index)


async def test_an_environment_is_played_and_scored() -> None:
    env = fe.make("calculator")
    task = env.task("train", 2)
    gold = env.gold_actions(task)
    trajectory = await played("calculator", 2, gold)
    assert (trajectory.task_id, trajectory.reward, trajectory.valid) == (task.id, 1.0, True)
    assert trajectory.metrics["answered"] == 1.0
    [first, *_] = trajectory.turns
    assert [message.role for message in first.observation] == ["system", "user"]
    assert trajectory.turns[1].observation[0].role == "tool"
    assert (await played("calculator", 2, ["#### -1"])).reward == 0.0


async def test_options_and_split_reach_the_environment() -> None:
    task = fe.make("wordle").task("eval", 1)
    trajectory = await played("wordle", 1, ["no guess"] * 9, options={"max_turns": 2}, split="eval")
    assert (trajectory.task_id, len(trajectory.turns), trajectory.reward) == (task.id, 2, 0.0)


async def test_a_limit_of_verifiers_truncates_and_scores() -> None:
    env = fe.make("verifiers", taskset=NAME, harness=NAME, options={"environment": "wordle"}, max_turns=1)
    await env.reset(seed=0)
    *_, reward, terminated, truncated, info = await env.step("no guess")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["metrics"]["turns"] == 1.0
    await env.close()


def test_the_tasks_are_the_environments() -> None:
    env = fe.make("verifiers", taskset=NAME, harness=NAME, options={"environment": "calculator"})
    assert env.num_tasks("train") is None
    assert env.task("train", 3).prompt == fe.make("calculator").task("train", 3).prompt


def test_an_environment_has_to_be_named() -> None:
    with pytest.raises(UsageError, match="has no environment"):
        fe.make("verifiers", taskset=NAME, harness=NAME)


async def test_a_new_package_is_a_taskset_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["new", "marbles", "--verifiers", "--dir", str(tmp_path)]) == 0
    monkeypatch.syspath_prepend(tmp_path / "marbles" / "src")
    registry.register("marbles", "marbles:Marbles")
    try:
        ours = fe.make("marbles")
        gold = ours.gold_actions(ours.task("train", 1))
        trajectory = await run_episode(
            lambda: fe.make("verifiers", taskset="marbles-vf", harness="marbles-vf"), ReplayPolicy(gold), seed=1
        )
        assert (trajectory.task_id, trajectory.reward) == (ours.task("train", 1).id, 1.0)
    finally:
        registry.unregister("marbles")
