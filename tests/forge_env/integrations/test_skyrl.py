"""Environments in the real skyrl_gym."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

skyrl_gym = pytest.importorskip("skyrl_gym")

import forge_env as fe  # noqa: E402
from forge_env.integrations.skyrl import register, rows  # noqa: E402
from forge_env.types import as_message  # noqa: E402
from tests.forge_env.integrations.gold import written  # noqa: E402


@pytest.fixture
def made() -> Iterator[Any]:
    """Environments as SkyRL's generator makes them, from rows of the dataset."""
    names = ("calculator", "wordle")
    for name in names:
        register(name)

    def make(name: str, index: int, max_turns: int = 8) -> Any:
        row = rows(name, index + 1)[index]
        prompt, env_class = row.pop("prompt"), row.pop("env_class")
        env = skyrl_gym.make(env_class, env_config={}, extras={**row, "max_turns": max_turns})
        return env, env.init(prompt)[0]

    yield make
    for name in names:
        skyrl_gym.envs.deregister(name)


def test_tools_are_called_in_text(made: Any) -> None:
    ours = fe.make("calculator")
    assert isinstance(ours, fe.ToolEnvironment)
    task = ours.task("train", 2)
    env, chat = made("calculator", 2)
    assert [message["role"] for message in chat] == ["system", "user"]
    assert '"calculate"' in chat[0]["content"]
    *calls, last = [written(as_message(action)) for action in ours.gold_actions(task)]
    for call in calls:
        output = env.step(call)
        assert (output["reward"], output["done"]) == (0.0, False)
        assert output["observations"][0]["content"].startswith("<tool_response>")
    output = env.step(last)
    assert (output["observations"], output["reward"], output["done"]) == ([], 1.0, True)
    assert env.get_metrics()["answered"] == 1.0
    env.close()


def test_skyrls_limit_of_turns_scores_what_there_is(made: Any) -> None:
    env, _ = made("wordle", 0, max_turns=2)
    assert not env.step("no guess")["done"]
    output = env.step("no guess")
    assert (output["reward"], output["done"], output["observations"]) == (0.0, True, [])
    env.close()


def test_an_abandoned_episode_is_closed(made: Any) -> None:
    env, _ = made("wordle", 0)
    env.close()
    env.close()
    assert env.get_metrics() == {}
