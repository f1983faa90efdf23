"""Hands of blackjack, and other games through the same adapter."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.errors import EnvironmentBugError, UsageError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import FunctionPolicy
from forge_env.validation.checks import Validator

ADAPTER = "gymnasium"
LAKE: dict[str, Any] = {
    "env_id": "FrozenLake-v1",
    "env_options": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


class Echo(gymnasium.Env[Any, Any]):
    """Say what you are told: a text space on both sides."""

    observation_space = spaces.Dict({"say": spaces.Text(20), "seen": spaces.MultiDiscrete([3, 3])})
    action_space = spaces.Text(20)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return {"say": "hello", "seen": np.array([1, 2])}, {}

    def step(self, action: str) -> Any:
        if action == "crash":
            raise ZeroDivisionError("no")
        return {"say": "done", "seen": np.array([0, 0])}, float(action == "hello"), True, False, {}


@pytest.fixture(autouse=True)
def games() -> Iterator[None]:
    gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
    gymnasium.register("Digits-v0", "gymnasium.envs.toy_text.taxi:TaxiEnv")
    yield
    gymnasium.registry.pop("Echo-v0", None)
    gymnasium.registry.pop("Digits-v0", None)


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_hands_of_a_level_are_dealt_so(level: int) -> None:
    env, every = fe.make("blackjack", levels=[level]), fe.make("blackjack")
    tasks = [env.task("eval", index) for index in range(20)]
    assert {task.difficulty for task in tasks} == {level}
    assert len({task.data["seed"] for task in tasks}) == len(tasks)
    assert {task.data["seed"] % 2 for task in tasks} == {1}, "none of train's"
    for index, task in enumerate(tasks):
        observation, _ = await env.reset(options={"task": task})
        hand = observation[0].content.partition("Your hand: ")[2]
        total, ace = int(re.match(r"\d+", hand)[0]), "usable ace" in hand
        assert level == (3 if ace else 2 if 12 <= total <= 16 else 1)
        if every.task("eval", index).difficulty == level:
            assert every.task("eval", index) == task
    await env.close()


async def test_a_hand() -> None:
    env = fe.make("blackjack")
    observation, _ = await env.reset(seed=3)
    assert "Your hand: " in observation[0].content
    assert "<action>...</action>: stick, hit." in observation[0].content
    observation, reward, terminated, truncated, _ = await env.step("I would fold")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert observation[0].content.startswith("'I would fold' is not an action.")
    observation, reward, terminated, _, info = await env.step("<action>Stick</action>")
    assert terminated
    assert reward in (-1.0, 0.0, 1.0)
    assert info["metrics"] == {"turns": 2.0, "invalid_actions": 1.0}
    with pytest.raises(UsageError, match="reset"):
        await env.step("hit")
    await env.close()


async def test_a_player_loses_some_and_wins_some() -> None:
    def careful(messages: list[fe.Message], tools: Any) -> str:
        total = int(messages[-1].content.split("Your hand: ")[1].split()[0].rstrip("."))
        return "<action>hit</action>" if total < 17 else "<action>stick</action>"

    rewards = [
        (await run_episode(lambda: fe.make("blackjack"), FunctionPolicy(careful), seed=seed)).reward
        for seed in range(60)
    ]
    assert set(rewards) == {-1.0, 0.0, 1.0}
    assert 10 < sum(reward == 1.0 for reward in rewards) < 45


@pytest.mark.slow
async def test_validation_passes() -> None:
    checks = [check async for check in Validator(lambda: fe.make(ADAPTER, **LAKE), num_tasks=10).run()]
    assert "failed" not in [check.status for check in checks], checks


async def test_another_game_with_named_actions() -> None:
    env = fe.make(ADAPTER, **LAKE)
    await env.reset(seed=0)
    for move in ("down", "down", "right", "right", "down"):
        observation, reward, terminated, *_ = await env.step(move)
        assert (reward, terminated) == (0.0, False)
    assert observation[0].content.splitlines()[-1] == "HF[F]G"
    _, reward, terminated, truncated, _ = await env.step("<action>right</action>")
    assert (reward, terminated, truncated) == (1.0, True, False)
    await env.close()


async def test_numbers_where_actions_have_no_names_and_the_games_own_limit() -> None:
    env = fe.make(ADAPTER, env_id="Digits-v0", env_options={"max_episode_steps": 2})
    observation, _ = await env.reset(seed=1)
    assert "a number from 0 to 5" in observation[0].content
    await env.step("0")
    _, _, terminated, truncated, info = await env.step("<action>1</action>")
    assert (terminated, truncated, info["truncation"]) == (False, True, "limit")
    await env.close()


async def test_text_spaces_and_nested_observations() -> None:
    env = fe.make(ADAPTER, env_id="Echo-v0")
    observation, _ = await env.reset(seed=0)
    assert observation[0].content.endswith("say: hello, seen: [1, 2]")
    assert (await env.step("ei\u00df"))[0][0].content.startswith("That is not a valid text here.")
    assert (await env.step("<action>hello</action>"))[1] == 1.0
    await env.reset(seed=0)
    with pytest.raises(EnvironmentBugError, match="ZeroDivisionError"):
        await env.step("crash")


@given(st.text())
async def test_any_text_is_answered(text: str) -> None:
    env = fe.make("blackjack")
    await env.reset(seed=0)
    observation, reward, *_ = await env.step(text)
    assert observation[0].content
    assert -1.0 <= reward <= 1.0


@pytest.mark.slow
def test_the_adapter_may_be_imported_before_gymnasium() -> None:
    code = "import forge_env.gym.adapter, gymnasium; gymnasium.spec('forge_env/blackjack')"
    subprocess.run([sys.executable, "-c", code], check=True)
