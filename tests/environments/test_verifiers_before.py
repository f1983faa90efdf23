"""Against verifiers before 0.3, whose packages have `load_environment`: one is played as ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from environments.verifiers.packages import load
from forge_env.errors import UsageError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import FunctionPolicy, ReplayPolicy
from forge_env.types import Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PACKAGE = '''
import verifiers as vf
from datasets import Dataset


def load_environment(num_tasks=3):
    rows = [{"question": f"What is {i} + 40?", "answer": str(i + 40)} for i in range(num_tasks)]

    def right(completion, answer):
        return float(bool(completion) and completion[-1]["content"].strip() == answer)

    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=rubric, tools=[add], max_turns=4)
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "vf_before.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    load.cache_clear()
    sys.modules.pop("vf_before", None)


def make() -> fe.Environment:
    return fe.make("verifiers", taskset="vf-before", options={"num_tasks": 5})


async def test_a_package_with_load_environment_plays_with_its_tools() -> None:
    def solve(messages: list[Message], tools: Any) -> Any:
        if messages[-1].role == "tool":
            return messages[-1].content
        return fe.call_tool(tools[0].name, a=int(messages[-1].content.split()[2]), b=40)

    assert make().num_tasks("train") == 5
    played = await run_episode(make, FunctionPolicy(solve), seed=2)
    assert (played.error, played.reward, len(played.turns), played.metrics["right"]) == (None, 1.0, 2, 1.0)


@pytest.mark.parametrize("said", ["no idea", ""])
async def test_what_the_agent_does_wrong_is_no_loss(said: str) -> None:
    played = await run_episode(make, ReplayPolicy([said]), seed=1)
    assert (played.error, played.reward, played.terminated) == (None, 0.0, True)


def test_tasksets_need_a_later_release() -> None:
    with pytest.raises(UsageError, match=r"tasksets need verifiers 0.4, but 0.2"):
        fe.make("verifiers", taskset="gsm8k-v1")
