"""The gymnasium twin, held to gymnasium's own checkers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import forge_env as fe
import forge_env.gym  # registers with gymnasium
from forge_env import registry
from tests.forge_env.environment.test_tool_environment import call, calls
from tests.forge_env.rollout.test_episode import Golden


class Once(fe.SingleTurnEnvironment):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt=f"Say {index}", split=split)

    async def reward(self, task: fe.Task, answer: str) -> float:
        return float(answer == task.prompt[4:])


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    fe.register("test_tools", Golden)
    fe.register("test_once", Once)
    yield
    for name in ("test_tools", "test_once"):
        registry.unregister(name)
        gymnasium.registry.pop(f"forge_env/{name}", None)


BUNDLED = [e.name for e in fe.list_environments() if e.source.startswith("forge-env ") and not e.needs]


@pytest.mark.parametrize("name", ["test_tools", "test_once", *BUNDLED])
def test_gymnasiums_checker_is_content(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(f"forge_env/{name}")
        check_env(env.unwrapped)
        env.close()


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_environments_play_through_gymnasium_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env: Any = gymnasium.make(f"forge_env/{name}", render_mode="ansi")  # with gymnasium's passive checker
        observation, info = env.reset(seed=3)
        assert (observation in env.observation_space, info["task_id"] != "") == (True, True)
        while True:
            action = env.action_space.sample()
            observation, _, terminated, truncated, info = env.step(action)
            assert observation in env.observation_space
            if terminated or truncated:
                break
        assert "[user]" in env.render()
        env.close()
        envs: Any = gymnasium.make_vec(f"forge_env/{name}", num_envs=2)
        observations, _ = envs.reset(seed=3)
        assert observations in envs.observation_space
        for _ in range(3):
            observations, rewards, *_ = envs.step(envs.action_space.sample())
            assert observations in envs.observation_space
        assert rewards.shape == (2,)
        envs.close()


@pytest.mark.slow
def test_gymnasium_imports_us_by_itself() -> None:
    code = "import gymnasium; gymnasium.make('forge_env.gym:forge_env/gsm8k').reset(seed=1)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_episode_through_gymnasium() -> None:
    env: Any = gymnasium.make("forge_env/test_tools", max_turns=3, render_mode="ansi")
    observation, info = env.reset(seed=3)
    assert observation == (fe.Message(role="user", content="3 + 1 = ?"),)
    assert observation in env.observation_space
    assert info["task_id"] == "train-3"
    observation, reward, terminated, truncated, info = env.step(calls(call("add", {"a": 3})))
    assert ([m.content for m in observation], reward, terminated, truncated) == (["4"], 0.0, False, False)
    observation, reward, terminated, truncated, info = env.step("4")
    assert (observation, reward, terminated, truncated, info["metrics"]["turns"]) == ((), 1.0, True, False, 2.0)
    assert env.render() == '[user] 3 + 1 = ?\n[assistant] add({"a": 3})\n[tool] 4\n[assistant] 4'
    env.reset(options={"split": "eval", "index": 7})
    assert env.unwrapped.environment.current_task.id == "eval-7"
    env.close()
    env.close()


async def test_it_works_inside_a_running_loop() -> None:
    env = gymnasium.make("forge_env/test_once")
    env.reset(seed=1)
    assert env.step("1")[1] == 1.0
    env.close()
    assert asyncio.get_running_loop().is_running()


def test_a_vector_of_environments_steps_together_and_resets_itself() -> None:
    envs: Any = gymnasium.make_vec("forge_env/test_tools", num_envs=3)
    observations, info = envs.reset(seed=[5, 1, 2])
    assert [o[0].content for o in observations] == ["5 + 1 = ?", "1 + 1 = ?", "2 + 1 = ?"]
    assert observations in envs.observation_space
    assert list(info["task_id"]) == ["train-5", "train-1", "train-2"]
    actions = ("6", calls(call("add", {"a": 1})), "9")
    observations, rewards, terminated, truncated, info = envs.step(actions)
    assert (rewards.tolist(), terminated.tolist(), truncated.any()) == ([1, 0, 0], [True, False, True], False)
    assert info["metrics"]["correct"].tolist() == [1, 0, 0]
    observations, rewards, terminated, *_ = envs.step(("ignored", "2", "ignored"))
    assert (rewards.tolist(), terminated.tolist()) == ([0, 1, 0], [False, True, False])
    assert [len(observation) for observation in observations] == [1, 0, 1]
    envs.reset(options={"reset_mask": np.array([False, True, False])})
    envs.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gymnasiums_own_vectors_work(mode: str) -> None:
    options = {"shared_memory": False, "context": "fork"} if mode == "async" else {}
    envs: Any = gymnasium.make_vec("forge_env/test_once", 2, vectorization_mode=mode, vector_kwargs=options)
    observations, _ = envs.reset(seed=4)
    assert [observation[0].content for observation in observations] == ["Say 4", "Say 5"]
    assert envs.step(("4", "4"))[1].tolist() == [1, 0]
    envs.close()


def test_spaces_sample_what_they_contain_and_survive_json() -> None:
    env = gymnasium.make("forge_env/test_once")
    for space in (env.observation_space, env.action_space):
        space.seed(1)
        samples = [space.sample() for _ in range(5)]
        assert all(sample in space for sample in samples)
        assert 7 not in space
        assert space.from_jsonable(space.to_jsonable(samples)) == samples
    env.close()


@pytest.mark.slow
def test_importing_forge_env_gym_registers_the_environments_and_importing_forge_env_installs_no_import_hook() -> None:
    code = (
        "import sys, gymnasium\n"
        "finders = list(sys.meta_path)\n"
        "import forge_env\n"
        "print(sys.meta_path == finders, 'forge_env/coding_rlvr' in gymnasium.registry)\n"
        "import forge_env.gym\n"
        "print('forge_env/coding_rlvr' in gymnasium.registry)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True"]
