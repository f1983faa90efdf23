"""An agent that is a program, as somebody would ship it, solves the tasks of `coding_rlvr`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import forge_env as fe
from environments.coding_rlvr import CodingRLVR
from environments.coding_rlvr.conversation import SYSTEM_PROMPT, as_answer
from environments.coding_rlvr.program import CodingProgram, CodingProgramConfig
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.sandbox import SandboxEngine
from forge_env.types import call_tool
from tests.sandboxes.conftest import require
from tests.sandboxes.wheels import use_client


@pytest.fixture
async def engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxEngine]:
    require("local")
    use_client(tmp_path, monkeypatch, tmp_path_factory)
    async with fe.open_engine("local", concurrency=1) as engine:
        yield engine


def test_it_tells_the_model_what_coding_rlvr_tells_it() -> None:
    """So that a model that has learned the one can begin with the other."""
    from environments.coding_rlvr import agent  # imports openai

    [tool] = CodingRLVR().tools
    assert (SYSTEM_PROMPT, tool.model_dump()) == (agent.SYSTEM, agent.PYTHON)
    task = CodingProgram(CodingProgramConfig(levels=[2])).task("eval", 3)
    assert task == fe.make("coding_rlvr", levels=[2]).task("eval", 3)


@pytest.mark.slow
async def test_the_program_plays_the_tasks(engine: SandboxEngine) -> None:
    task = CodingProgram().task("train", 0)
    right = task.gold.removeprefix("```python\n").removesuffix("\n```")
    wrong = right.replace("return ", "return 0 and ")

    async def play(*said: fe.Message | str) -> fe.Trajectory:
        return await run_episode(lambda: CodingProgram(sandboxes=engine), ReplayPolicy(said), task=task)

    gold = await run_episode(lambda: CodingProgram(sandboxes=engine), GoldPolicy(), task=task)
    assert (gold.reward, gold.metrics["exit_code"], len(gold.turns)) == (1.0, 0.0, 1)
    tried = await play(call_tool("python", code=wrong), call_tool("python", code=right), "Done")
    assert (tried.reward, tried.metrics["conversations"]) == (1.0, 1.0)
    told = [turn.observation[-1].content for turn in tried.turns[1:]]
    assert told[0].startswith("0/2 passed\n")
    assert "returned 0, expected" in told[0]
    assert told[1] == "2/2 passed"
    for said in ("I can't.", as_answer(wrong), as_answer("import os\nos._exit(0)"), as_answer("def f(")):
        assert (await play(said)).reward == 0.0
    strange = await play(
        call_tool("shell", command="ls"), call_tool("python"), call_tool("python", code="while 1: 0"), ""
    )
    told = [turn.observation[-1].content for turn in strange.turns[1:]]
    assert told[:2] == ['call python with {"code": "..."}'] * 2
    assert told[2].endswith("timed out")
