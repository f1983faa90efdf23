"""Agents that people already have, with a vLLM server in the place of the model: what a program asks through the
gateway reaches the server, what that sampled reaches the program, and the record has both to the last token."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

import forge_env as fe
from forge_env.cli.main import main
from forge_env.config.evaluation import EndpointOptions
from forge_env.endpoint.http import Connections
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.rollout.episode import run_episode
from forge_env.sandbox import SandboxEngine
from forge_env.trajectory import read_trajectories
from tests.forge_env.gateway import test_coding_agents as coding
from tests.forge_env.gateway import test_real_programs as python
from tests.sandboxes.conftest import require

SOCKET, _, MODEL = os.environ.get("FORGE_ENV_VLLM", "").partition(" ")
"""The server that `benchmarks/conformance.py` starts: its socket, and the model's name."""
PAGE = Path(fe.__file__).parents[1] / "docs/environments/programs.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
built, engine, agents = coding.built, coding.engine, coding.agents
TURNS = 2
"""Requests of an episode: the model knows nothing of these programs, which would ask again and again."""


@pytest.mark.parametrize("name", python.PROGRAMS)
async def test_a_program_asks_a_real_server(name: str) -> None:
    require("local")
    async with fe.open_engine("local", concurrency=1) as engine:
        await played(python.inside(name, engine, max_turns=TURNS))


@pytest.mark.docker
@pytest.mark.asyncio(loop_scope="module")
async def test_a_program_in_node_asks_a_real_server(agents: ModuleType, engine: SandboxEngine) -> None:
    config = agents.Config(agent="qwen", max_turns=TURNS)
    await played(lambda: agents.Agents(config, sandboxes=engine))


def test_pages_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """ "Bring your agent": its script, environment and command, to which only the server's names are told."""
    require("local")
    text = PAGE.read_text()
    for name in ("agent", "writer"):
        (source,) = re.findall(rf"<!-- program: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "writer", raising=False)
    (command,) = re.findall(r"^OPENAI_API_KEY=\S+ forge-env (.* --base-url .*)$", text, re.MULTILINE)
    command = command.replace("NAME", MODEL).replace("https://HOST", "http://localhost")
    assert main([*shlex.split(command), "--uds", SOCKET, "--sandbox", "local", "--out", "real"]) == 0
    assert f"{MODEL} " in capsys.readouterr().out
    (figures,) = json.loads((tmp_path / "real/summary.json").read_text())["environments"].values()
    assert (figures["samples"], figures["missing"], figures["invalid"], figures["bugs"]) == (8, 0, {}, 0)
    episodes = list(read_trajectories(tmp_path / "real/trajectories/eval.jsonl"))
    assert len(episodes) == 8
    assert all(turn.reply.token_ids.size for episode in episodes for turn in episode.turns), "what vLLM sampled"


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
