"""Agents that people already have, with a vLLM server in the place of the model: what a program asks through the
gateway reaches the server, what that sampled reaches the program, and the record has both to the last token."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

import forge_env as fe
from forge_env.config.evaluation import EndpointOptions
from forge_env.endpoint.http import Connections
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.rollout.episode import run_episode
from tests.forge_env.gateway import test_node_program as node
from tests.forge_env.gateway import test_real_programs as python
from tests.sandboxes.conftest import require

SOCKET, _, MODEL = os.environ.get("FORGE_ENV_VLLM", "").partition(" ")
"""The server that `benchmarks/conformance.py` starts: its socket, and the model's name."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
image = node.image
TURNS = 2
"""Requests of an episode: the model knows nothing of these programs, which would ask again and again."""


@pytest.mark.parametrize("name", python.PROGRAMS)
async def test_a_program_asks_a_real_server(name: str) -> None:
    require("local")
    async with fe.open_engine("local", concurrency=1) as engine:
        await played(python.inside(name, engine, max_turns=TURNS))


@pytest.mark.docker
async def test_a_program_in_node_asks_a_real_server(image: str) -> None:
    require("docker")
    async with fe.open_engine("docker", concurrency=1, warm=0) as engine:
        await played(node.inside(image, engine, max_turns=TURNS))


async def played(make: Callable[[], fe.ProgramEnvironment]) -> None:
    """One episode: scored, and every turn recorded as the server played it."""
    options = EndpointOptions(model=MODEL, base_url="http://localhost/v1", uds=SOCKET, max_tokens=16)
    async with EndpointPolicy(options) as policy:
        await policy.check()
        assert policy.exact_tokens, "it is vLLM that answers"
        episode = await run_episode(make, policy, seed=1)
    assert episode.valid, episode.error
    assert episode.terminated or episode.truncation == "turns", episode.final_observation
    assert set(episode.metrics) >= {"right", "turns", "conversations", "exit_code"}, "it was scored"
    assert 1 <= len(episode.turns) <= TURNS
    whole: dict[str, list[int]] = {}
    for turn in episode.turns:
        reply, usage = turn.reply, turn.reply.metadata["usage"]
        assert len(reply.token_ids) == len(reply.logprobs) == usage["completion"] > 0
        assert reply.prompt_length == usage["prompt"]
        prompt = [*whole.get(turn.seat, [])[: reply.continues], *reply.prompt_ids.tolist()]
        asked = await spelled(prompt)
        assert all(message.content.strip() in asked for message in turn.observation), "in the words of the program"
        whole[turn.seat] = [*prompt, *reply.token_ids.tolist()]
        assert turn.message.content.strip() in await spelled(reply.token_ids)
    assert any("Write 42 into answer.txt." in message.content for message in episode.turns[0].observation)
    trained = sum(int(segment.mask.sum()) for segment in episode.segments())
    assert trained == episode.num_sampled_tokens == sum(len(turn.reply.token_ids) for turn in episode.turns)


async def spelled(token_ids: list[int] | NDArray[np.int32]) -> str:
    """What the server says that tokens spell."""
    connections = Connections("http://localhost", uds=SOCKET)
    try:
        body = {"model": MODEL, "tokens": list(map(int, token_ids))}
        return str((await connections.exchange("POST", "detokenize", body, timeout_s=60.0))["prompt"])
    finally:
        await connections.close()
