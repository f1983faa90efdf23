"""A seat played by a model behind an endpoint: it sees its own side only, and its tokens are nobody's to count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.endpoint.errors import EndpointError
from forge_env.trajectory import read_trajectories
from forge_env.types import Message
from tests.forge_env.endpoint.server import Server, completion

PLANTS = ("oak", "ivy", "fern")


class Wishes(fe.Environment):
    """A user wants a plant, and is asked for it."""

    api_version = 1
    seats = ("user", "agent")

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="Ask.", data={"plant": PLANTS[index % 3]})

    def num_tasks(self, split: str) -> int:
        return 6

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.plant, self.said = fe.resolve_task(self, seed, options).data["plant"], 0
        return [Message(role="user", content=f"Play a customer who wants one {self.plant}.")], {"seat": "user"}

    async def step(self, action: Any) -> Any:
        self.said += 1
        if self.said == 1:
            return [Message(role="user", content=action.content)], 0.0, False, False, {"seat": "agent"}
        right = float(action.content == self.plant)
        return [], right, True, False, {"rewards": {"user": right}}


def plays_the_user(request: dict[str, Any], n: int) -> dict[str, Any]:
    (told,) = [message["content"] for message in request["messages"]]
    return completion(f"I would like one {told.split()[-1]}")


def sells(messages: list[Message], tools: Any) -> str:
    assert len(messages) == 1  # nothing of what the user was told
    return messages[0].content.split()[-1].rstrip(".")


async def test_a_simulated_user_is_a_model_behind_an_endpoint(tmp_path: Path) -> None:
    async with Server(plays_the_user) as server:
        user = {"model": "qwen3-8b", "base_url": server.url, "temperature": 0.5}
        result = await fe.evaluate_async(Wishes, sells, out=tmp_path / "out", opponents={"user": user})
        asked = server.requests
    item = result.summary.environments["Wishes"]
    assert (item.samples, item.score.value) == (6, 1.0)
    assert len(asked) == 6
    assert {(request["model"], request["temperature"]) for request in asked} == {("qwen3-8b", 0.5)}
    for played in read_trajectories(tmp_path / "out" / "trajectories" / "eval.jsonl"):
        assert played.opponents == {"user": "qwen3-8b"}
        assert played.info["usage"]["requests"] == 1  # the agent's


async def test_an_opponent_that_does_not_answer_is_named_before_anything_is_played(tmp_path: Path) -> None:
    user = {"model": "m", "base_url": "http://127.0.0.1:9/v1"}
    with pytest.raises(EndpointError, match="127"):
        await fe.evaluate_async(Wishes, sells, out=tmp_path / "out", opponents={"user": user})
