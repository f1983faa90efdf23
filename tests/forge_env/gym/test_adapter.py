"""Environments of gymnasium, played in words: what is shown, what is taken, and what can't be played."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from random import Random
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import forge_env as fe
from forge_env.cli.main import main
from forge_env.errors import UsageError
from forge_env.gym.adapter import GymnasiumEnvironment, as_answer, read_action, sampled, unpainted
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import RandomPolicy
from forge_env.validation.checks import Check, Validator

NAME = "ForgeEnvTests/Grid-v0"


class Mission(spaces.Space[str]):
    """As MiniGrid's: a space of its own kind, of texts."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "get to the green square"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class Grid(gymnasium.Env[Any, Any]):
    """As MiniGrid's environments: a picture in numbers, a mission, and an enumeration of actions."""

    class Moves(IntEnum):
        left = 0
        right = 1
        forward = 2

    actions = Moves

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(3)
        picture = spaces.Box(0, 255, (7, 7, 3), np.uint8)
        self.observation_space = spaces.Dict({"direction": spaces.Discrete(4), "image": picture, "mission": Mission()})

    def _see(self) -> dict[str, Any]:
        return {"direction": 1, "image": np.ones((7, 7, 3), np.uint8), "mission": "get to the green square"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._see(), float(action == Grid.Moves.forward), action == Grid.Moves.forward, False, {}


@pytest.fixture(autouse=True)
def grid() -> Iterator[None]:
    gymnasium.register(NAME, entry_point=lambda: Grid())
    yield
    del gymnasium.registry[NAME]


async def play(env_id: str, *answers: str, **options: Any) -> tuple[str, list[str], float]:
    """What is shown first, what answers get, and the rewards together."""
    env = fe.make("gymnasium", env_id=env_id, **options)
    try:
        messages, _ = await env.reset(seed=3)
        said, total = [], 0.0
        for answer in answers:
            told, reward, terminated, truncated, _ = await env.step(answer)
            said.append(told[0].content)
            total += reward
            if terminated or truncated:
                break
        return messages[0].content, said, total
    finally:
        await env.close()


async def test_the_agent_sees_what_a_terminal_would_show_and_calls_actions_by_their_names() -> None:
    first, said, _ = await play("FrozenLake-v1", "right", "<action>down</action>", env_options={"is_slippery": False})
    assert "Answer with <action>...</action>: left, down, right, up." in first
    assert first.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert said[0].endswith("S[F]FF\nFHFH\nFFFH\nHFFG")
    assert "SFFF\nF[H]FH" in said[1]

    first, said, reward = await play("Taxi-v4", "pickup")
    assert "south, north, east, west, pickup, dropoff" in first
    assert ":magenta}" in first
    assert ":blue}" in first
    assert reward == -10

    first, said, _ = await play("CliffWalking-v1", "up")
    assert first.endswith("x  C  C  C  C  C  C  C  C  C  C  T")
    assert "x  o  o" in said[0]


async def test_few_numbers_are_shown_and_taken() -> None:
    first, said, reward = await play("CartPole-v1", "left", "1", "right", max_reward=500.0)
    assert first.count(",") >= 3
    assert "'1' is not an action." in said[1]
    assert reward == 2

    first, said, _ = await play("Pendulum-v1", "0.5", "[1.25]", "3", "1 2", "much")
    assert "a number from -2 to 2" in first
    assert not said[0].startswith("'")
    assert not said[1].startswith("'")
    assert [text.partition(" is not an action")[0] for text in said[2:]] == ["'3'", "'1 2'", "'much'"]


async def test_a_game_like_those_of_minigrid() -> None:
    first, _, reward = await play(NAME, "left", "forward")
    assert "left, right, forward" in first
    assert "mission: get to the green square" in first
    assert "direction: 1" in first
    assert reward == 1


async def test_values_can_be_asked_for_and_a_best_score_named() -> None:
    first, _, _ = await play("FrozenLake-v1", show="values", actions=["west", "south", "east", "north"])
    assert first.endswith("\n0")
    assert "west, south, east, north" in first
    env = fe.make("gymnasium", env_id="CartPole-v1", max_reward=500.0)
    assert env.max_reward == 500
    for env_id, options, highest in (
        ("FrozenLake-v1", {}, 1),
        ("CartPole-v1", {}, 500),  # its reward_threshold is 475
        ("CartPole-v0", {}, 200),
        ("CartPole-v1", {"sutton_barto_reward": True}, None),
        ("Pendulum-v1", {}, None),
        (NAME, {}, None),
    ):
        assert fe.make("gymnasium", env_id=env_id, env_options=options).max_reward == highest
    await env.close()


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("CartPole-v1", {"show": "text"}, "can't be rendered as text"),
        ("FrozenLake-v1", {"actions": ["left"]}, "`actions` has 1 words"),
        ("NoSuchGame-v1", {}, "gymnasium can't make 'NoSuchGame-v1'"),
        ("no_such_module:Game-v1", {}, "install the package that has the module 'no_such_module'"),
        ("FrozenLake-v1", {"env_options": {"is_slipery": False}}, "unexpected keyword argument"),
    ],
)
async def test_what_can_not_be_played_is_said(env_id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        await play(env_id, **options)


async def test_large_spaces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["forge_env.gym.adapter"], "MOST_NUMBERS", 100)
    with pytest.raises(UsageError, match="can't be shown as text") as refused:
        await play(NAME)
    assert "ObservationWrapper" in (refused.value.fix or "")
    monkeypatch.setattr(sys.modules["forge_env.gym.adapter"], "MOST_TO_GIVE", 0)
    with pytest.raises(UsageError, match="can't be written as text"):
        await play("Pendulum-v1")


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CartPole-v1", "Pendulum-v1", NAME])
async def test_the_random_policy_plays_legal_actions(env_id: str) -> None:
    def make() -> fe.Environment:
        return fe.make("gymnasium", env_id=env_id, max_turns=20)

    played = [await run_episode(make, RandomPolicy(), seed=seed) for seed in (1, 1, 2)]
    assert [item.metrics["invalid_actions"] for item in played] == [0, 0, 0]
    said = [[turn.message.content for turn in item.turns] for item in played]
    assert said[0] == said[1]
    mixed = await run_episode(make, RandomPolicy(legal=False), seed=1)
    assert mixed.metrics["invalid_actions"] > 0


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=5),
        spaces.Text(8),
        spaces.Box(-2, 2, (3,)),
        spaces.Box(-np.inf, np.inf, (2, 2)),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(3),
    ],
    ids=str,
)
def test_a_drawn_action_is_read_as_itself(space: spaces.Space[Any]) -> None:
    for seed in range(20):
        action = sampled(space, Random(seed))
        read, problem = read_action(f"<action>{as_answer(action, space, [])}</action>", space, [])
        assert problem == ""
        assert np.array_equal(read, action)
    assert as_answer(1, spaces.Discrete(2), ["left", "right"]) == "right"


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
def test_a_number_of_an_action_is_finite(number: str) -> None:
    _, problem = read_action(f"<action>{number}</action>", spaces.Box(-np.inf, np.inf, (1,)), [])
    assert problem


async def test_a_game_that_no_valid_move_was_made_in_is_not_called_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> fe.Environment:
        return fe.make("gymnasium", env_id=NAME, max_turns=5)

    async def moves() -> Check:
        found = [check async for check in Validator(make, num_tasks=2).run()]
        return next(check for check in found if check.name == "valid actions are accepted")

    assert (await moves()).status == "ok"
    monkeypatch.setattr(GymnasiumEnvironment, "random_action", lambda env, rng: None)
    assert (await moves()).status == "open"


def test_unknown_highest_reward_solves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "the maximum reward is unknown, so no task counts as solved"
    command = ["eval", "gymnasium", "--model", "random", "-n", "2", "--env_id", NAME]
    assert main([*command, "--out", str(tmp_path / "unknown")]) == 0
    assert why in " ".join(capsys.readouterr().out.split())
    (figures,) = json.loads((tmp_path / "unknown" / "summary.json").read_text())["environments"].values()
    assert (figures["success_threshold"], figures["pass_at"]) == (None, {})
    assert figures["score"]["value"] == 1
    assert main([*command, "--max_reward", "2", "--out", str(tmp_path / "known")]) == 0
    assert why not in " ".join(capsys.readouterr().out.split())
    (figures,) = json.loads((tmp_path / "known" / "summary.json").read_text())["environments"].values()
    assert figures["pass_at"]["1"]["value"] == 0
    assert main(["show", str(tmp_path / "unknown")]) == 0


async def test_stick_and_hit_are_words() -> None:
    first, _, _ = await play("Blackjack-v1", "stick")
    assert "Answer with <action>...</action>: stick, hit." in first


def test_colours_become_signs() -> None:
    assert unpainted("a\x1b[41mS\x1b[0mb \x1b[34;1mR\x1b[0m \x1b[1mx\x1b[0m") == "a[S]b {R:blue} x"
    assert unpainted("\x1b[35m\x1b[43mY\x1b[0m\x1b[0m: |\x1b[34;1mB\x1b[0m \x1b[46mx") == "[{Y:magenta}]: |{B:blue} [x]"
