"""Rewards and tasks behind actors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forge_env.errors import EnvironmentBugError
from forge_env.rewards import Ensemble, MathReward, ThinkingReward
from trainers.rollout.actors import DatasetActor, RewardActor

pytestmark = [pytest.mark.stack, pytest.mark.slow]


class Short:
    """A reward of somebody's own."""

    def __call__(self, prompt: str, response: str, target: Any) -> float:
        if not prompt:
            raise ZeroDivisionError("nobody can score this")
        return float(len(response) < 40)


def verifier(response: str) -> float:
    return float("4" in response)


async def test_tasks_are_sampled_and_their_answers_scored(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"prompt": "question", "gold": "answer"}
    dataset = await DatasetActor.as_actor(str(tmp_path / "rows.jsonl"), columns=columns)
    functions = [MathReward(), ThinkingReward(), Short(), Ensemble([verifier] * 3)]
    rewards = await RewardActor.as_service(functions)
    try:
        tasks = [await dataset.sample.call_one() for _ in range(6)]
        assert sorted(task.prompt for task in tasks[:3]) == sorted(task.prompt for task in tasks[3:])
        assert {task.prompt: task.gold for task in tasks}["2 + 1?"] == "#### 3"
        best = await rewards.evaluate_response.route("3 + 1?", "<think>so</think>#### 4", "4")
        assert best == pytest.approx((1 + 1 + 1 + 27 / 28) / 4)
        assert await rewards.evaluate_response.route("3 + 1?", "no" * 30, "4") == pytest.approx(1 / 28 / 4)
        with pytest.raises(EnvironmentBugError, match="ZeroDivisionError"):
            await rewards.evaluate_response.route("", "", "4")
    finally:
        await rewards.stop()
        await DatasetActor.shutdown(dataset)
