"""PettingZoo's interface, both ways: its games as environments, and environments with seats as its games."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo.test import api_test

import forge_env as fe
from environments.nim.game import perfect_move, read_state, said
from forge_env.errors import UsageError
from forge_env.gym.adapter import GymnasiumEnvironment
from forge_env.gym.aec_twin import env as twin
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import FunctionPolicy, ReplayPolicy
from forge_env.validation.checks import Validator

HERE = f"{__name__}:Race"


class Race(AECEnv):
    """Whoever says the highest number first wins; a number can't be said twice, and one more step may be asked for."""

    metadata = {"name": "race", "is_parallelizable": False, "render_modes": []}

    def __init__(self, top: int = 3, masked: str = "observation", large: bool = False) -> None:
        super().__init__()
        self.top, self.masked = top, masked
        self.possible_agents = ["player_0", "player_1"]
        mask = spaces.Box(0, 1, (top,), np.int8)
        seen = spaces.Box(0, 1, (1000 if large else top,), np.int8)
        whole = spaces.Dict({"observation": seen, "action_mask": mask}) if masked == "observation" else seen
        self.observation_spaces = dict.fromkeys(self.possible_agents, whole)
        self.action_spaces = {agent: spaces.Discrete(top, start=1) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.left = np.ones(self.top, np.int8)
        self.agents = self.possible_agents[:]
        self.agent_selection = self.agents[(seed or 0) // 2 % 2]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._infos()

    def _infos(self) -> None:
        self.infos = {agent: {"action_mask": self.left} if self.masked == "info" else {} for agent in self.agents}

    def observe(self, agent: str) -> Any:
        seen = 1 - self.left
        return {"observation": seen, "action_mask": self.left} if self.masked == "observation" else seen

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        other = next(name for name in self.agents if name != agent)
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.left = self.left.copy()
        self.left[int(action) - 1] = 0
        if action == self.top:
            self.rewards = {agent: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        elif self.left.sum() == 1:
            self.truncations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = other
        self._infos()
        self._deads_step_first()

    def close(self) -> None:
        """Nothing to release."""


def make(**options: Any) -> fe.Environment:
    return fe.make("pettingzoo", env_id=HERE, **options)


@pytest.mark.filterwarnings("ignore")
def test_the_game_of_these_tests_is_one() -> None:
    api_test(Race(), num_cycles=20)


@pytest.mark.parametrize("masked", ["observation", "info"])
async def test_a_game_has_a_seat_for_each_agent(masked: str) -> None:
    env = make(env_options={"masked": masked})
    assert env.seats == ("player_0", "player_1")
    task = env.task("train", 0)
    says = iter(["hm", "<action>1</action>", "1", "2", "3"])
    policy = FunctionPolicy(lambda messages, tools: next(says))
    played = await run_episode(lambda: make(env_options={"masked": masked, "top": 4}), policy, task=task)
    assert [turn.seat for turn in played.turns] == ["player_0", "player_0", "player_1", "player_1", "player_0"]
    first, again, second, refused, _ = [turn.observation[0].content for turn in played.turns]
    assert first.startswith("Play ")
    assert first.endswith("You are player_0.\n[0, 0, 0, 0]\nAnswer with <action>...</action>: 1, 2, 3, 4.")
    assert again.startswith("'hm' is not an action.")
    assert "You are player_1.\n[1, 0, 0, 0]\n" in second
    assert refused.startswith("'1' is not possible now.")
    assert refused.endswith(": 2, 3, 4.")
    assert played.truncation == "limit"  # one number is left
    assert (played.metrics["turns"], played.metrics["invalid_actions"]) == (5.0, 2.0)


async def test_rewards_reach_every_seat_and_names_are_understood() -> None:
    env = make(actions=["low", "mid", "top"], instructions="Race.")
    played = await run_episode(lambda: env, ReplayPolicy(["low", "top"]), task=env.task("train", 1))
    assert [turn.seat for turn in played.turns] == ["player_1", "player_0", "player_0"]  # "low" is gone: asked again
    assert played.rewards == {"player_0": 1.0, "player_1": -1.0}
    assert played.terminated
    assert played.reward == sum(played.rewards.values()) / 2 == 0.0
    against = await run_episode(
        lambda: make(), ReplayPolicy(["3"]), task=env.task("train", 0), opponents={"player_1": ReplayPolicy(["1"])}
    )
    assert (against.reward, against.rewards["player_1"]) == (1.0, -1.0)


@pytest.mark.slow
async def test_it_is_sound() -> None:
    checks = [check async for check in Validator(make, num_tasks=3).run()]
    assert [check for check in checks if check.status == "failed"] == []


async def test_a_seat_that_never_moves_ends() -> None:
    played = await run_episode(lambda: make(max_turns=4), ReplayPolicy(["x"] * 9), seed=0)
    assert (played.truncation, len(played.turns)) == ("turns", 4)


@pytest.mark.parametrize(
    ("env_id", "options", "said"),
    [
        ("nowhere_at_all", {}, "can't make 'nowhere_at_all'"),
        (HERE, {"env_options": {"speed": 3}}, "can't make"),
        (HERE, {"env_options": {"large": True}}, "which can't be shown as text"),
        (HERE, {"actions": ["one"]}, "`actions` has 1 words"),
        ("builtins:dict", {}, "returned a dict"),
    ],
)
def test_what_cannot_be_played_is_refused(env_id: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fe.make("pettingzoo", env_id=env_id, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [("nim", {}), ("nim", {"max_turns": 1}), ("wordle", {}), ("nim", {"render_mode": "ansi"})],
)
def test_pettingzoos_own_test_passes_on_environments(name: str, options: dict[str, Any]) -> None:
    game = twin(name, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that messages are not arrays
        api_test(game, num_cycles=30)
    game.close()


def test_an_environment_is_played_as_a_game() -> None:
    game = twin("nim", levels=[2], render_mode="ansi")
    game.reset(seed=3)
    shown: dict[str, list[str]] = {agent: [] for agent in game.possible_agents}
    earned = dict.fromkeys(shown, 0.0)
    order = []
    for agent in game.agent_iter():
        observation, reward, terminated, truncated, _ = game.last()
        earned[agent] += reward
        if terminated or truncated:
            game.step(None)
            continue
        order.append(agent)
        shown[agent] += [message.content for message in observation["messages"]]
        game.step(said(perfect_move(*read_state(shown[agent]))))
    assert earned == {"first": 1.0, "second": 0.0}
    assert order == [("first", "second")[number % 2] for number in range(len(order))]
    text = game.render()
    assert text.count("[assistant]") == len(order)
    game.close()


def test_an_environment_without_seats_has_one_agent() -> None:
    game = twin("wordle")
    game.reset(seed=1)
    assert game.agents == ["agent"]
    game.step("<guess>crane</guess>")
    assert "crane" in game.last()[0]["messages"][0].content
    game.close()


def test_the_page_plays_one_of_ours_and_makes_those_of_others() -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments" / "interop.md").read_text()
    (ours,) = re.findall(r"```python\n(from forge_env\.gym\.aec_twin.*?)```", page, re.DOTALL)
    shown: dict[str, list[str]] = {"first": [], "second": []}

    def policy(agent: str, messages: Any) -> str:
        shown[agent] += [message.content for message in messages]
        return said(perfect_move(*read_state(shown[agent])))

    exec(ours, {"policy": policy})
    assert all(shown.values()), "both have played"
    made = re.findall(r"^fe\.make\((.*?)\)  # ", page, re.MULTILINE)
    (game,) = [call for call in made if call.startswith('"gymnasium"')]
    assert isinstance(eval(f"fe.make({game})"), GymnasiumEnvironment)
    assert {call.split('"')[1] for call in made} <= {entry.name for entry in fe.list_environments()}
