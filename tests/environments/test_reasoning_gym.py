"""Every dataset of reasoning_gym: its own answers score full marks by its own scorer."""

from __future__ import annotations

import pytest

import forge_env as fe

WHY = "NOT RUN: reasoning_gym is not installed (`make conformance` makes an environment for it)"
DATASETS = pytest.importorskip("reasoning_gym.factory", reason=WHY).DATASETS
pytestmark = pytest.mark.slow
TASKS = 3
NO_ANSWERS = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
WITHOUT = {
    **{name: f"{name} has no answers of its own" for name in NO_ANSWERS},
    "composite": "composite is made of datasets that its options name",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=WITHOUT[name])) if name in WITHOUT else name
        for name in sorted(DATASETS)
    ],
)
async def test_its_own_answers_score_full_marks(name: str) -> None:
    env = fe.make("reasoning_gym", dataset=name)
    rewards = []
    for index in range(TASKS):
        task = env.task("train", index)
        await env.reset(options={"task": task})
        rewards.append((await env.step(task.gold or "no answer"))[1])
    assert rewards == [1.0] * TASKS


@pytest.mark.parametrize("answer", ["", "nan", "1e999", "None", "[[1]]", '{"a": 1}', "[" * 3000])
@pytest.mark.parametrize("name", ["boxnet", "coin_flip", "game_of_life", "prime_factorization"])
async def test_an_answer_that_its_scorer_cannot_read_scores_nothing(name: str, answer: str) -> None:
    env = fe.make("reasoning_gym", dataset=name)
    await env.reset(options={"task": env.task("train", 0)})
    assert (await env.step(f"<answer>{answer}</answer>"))[1] < 1
