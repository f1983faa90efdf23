"""Against the real verifiers: an environment package written for it is played as ours."""

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
from forge_env.types import FunctionCall, Message, ToolCall

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ADAPTER = "verifiers"
OTHER = {"model": "another", "client": {"base_url": "http://127.0.0.1:9/v1"}}
PACKAGE = '''
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    with_tools: bool = False


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [SumTools(config.tools)] if config.with_tools else []

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(self.data.answer))

    @vf.metric
    async def turns_taken(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 3
    task: SumTaskConfig = SumTaskConfig()


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.num_tasks):
            data = SumData(name=f"sum-{i}", prompt=f"What is {i} + 40?", answer=i + 40)
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    SumTools.run()
'''

ENDLESS = '''
import itertools, os
import verifiers.v1 as vf
from vf_sum import SumConfig, SumData, SumTask

READ = []


class Clock(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def process(self) -> int:
        """The process that answers."""
        return os.getpid()


class EndlessConfig(SumConfig):
    clock: vf.ToolsetConfig = vf.ToolsetConfig()


class EndlessTaskset(vf.Taskset[SumTask, EndlessConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config):
        return [Clock(config.clock)]

    def load(self):
        for i in itertools.count():
            READ.append(i)
            yield SumTask(SumData(name=f"sum-{i}", prompt=f"What is {i} + 40?", answer=i + 40), self.config.task)


__all__ = ["EndlessTaskset"]

if __name__ == "__main__":
    Clock.run()
'''
SEATS = """
import verifiers.v1 as vf
from vf_sum import SumTaskset as Sums


class SeatsConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    SECOND


class Seats(vf.Env[SeatsConfig]):
    async def run(self, task, agents):
        await agents.player.run(task)


class SeatsTaskset(Sums):
    pass


__all__ = ["SeatsTaskset", "Seats"]
"""
MODULES = {
    "vf_sum": PACKAGE,
    "vf_endless": ENDLESS,
    "vf_alone": SEATS.replace("SECOND", ""),
    "vf_pair": SEATS.replace("SECOND", "helper: vf.AgentConfig = vf.AgentConfig()"),
    "vf_old": "def load_environment():\n    ...\n",
    "vf_older": "import verifiers as vf\n\nclass Own(vf.MultiTurnEnv): ...\n\ndef load_environment():\n    ...\n",
}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield
    load.cache_clear()
    for name in MODULES:
        sys.modules.pop(name, None)


async def test_an_episode_is_played_and_scored_by_verifiers() -> None:
    env = fe.make(ADAPTER, taskset="vf-sum", options={"num_tasks": 5, "task": {"with_tools": True}})
    assert env.num_tasks("train") == 5
    observation, info = await env.reset(seed=2)
    assert (observation[-1].role, observation[-1].content) == ("user", "What is 2 + 40?")
    assert info["task_id"] == "sum-2"
    [tool] = [tool for tool in env.tools if "add" in tool.name]
    call = ToolCall(id="c1", function=FunctionCall(name=tool.name, arguments='{"a": 2, "b": 40}'))
    observation, reward, terminated, *_ = await env.step(Message(role="assistant", tool_calls=[call]))
    assert (observation[-1].role, observation[-1].tool_call_id) == ("tool", "c1")
    assert "42" in observation[-1].content
    assert (reward, terminated) == (0.0, False)
    observation, reward, terminated, truncated, info = await env.step("42")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["metrics"]["right"], info["metrics"]["turns_taken"]) == (1.0, 2.0)
    await env.close()


async def test_the_platform_plays_it() -> None:
    def solve(messages: list[Message], tools: Any) -> str:
        return str(int(messages[-1].content.split()[2]) + 40)

    make = lambda: fe.make(ADAPTER, taskset="vf-sum")  # noqa: E731
    assert (await run_episode(make, FunctionPolicy(solve), seed=1)).reward == 1.0
    trajectory = await run_episode(make, ReplayPolicy(["no idea"]), seed=1)
    assert (trajectory.reward, trajectory.valid, trajectory.terminated) == (0.0, True, True)


async def test_tasks_are_read_as_far_as_they_are_asked_for_and_servers_are_shared() -> None:
    environments = [fe.make(ADAPTER, taskset="vf-endless") for _ in range(2)]
    import vf_endless

    assert vf_endless.READ == []
    answers = set()
    for index, env in enumerate(environments):
        observation, _ = await env.reset(seed=index)
        assert observation[-1].content == f"What is {index} + 40?"
        [tool] = [tool for tool in env.tools if "process" in tool.name]
        observation, *_ = await env.step(fe.call_tool(tool.name))
        answers.add(observation[-1].content)
        await env.close()
    assert len(answers) == 1  # one server for both
    assert list(range(101)) == vf_endless.READ  # once, up to where it shows that there are more than a hundred
    assert environments[0].num_tasks("train") is None
    assert fe.make(ADAPTER, taskset="vf-endless", num_tasks=7).num_tasks("train") == 7


async def test_the_seat_may_have_any_name() -> None:
    for options in ({"taskset": "vf-alone"}, {"taskset": "vf-pair", "seat": "player", "others": {"helper": OTHER}}):
        env = fe.make(ADAPTER, **options)
        await env.reset(seed=1)
        assert (await env.step("41"))[1] == 1.0
        await env.close()
    with pytest.raises(UsageError, match=r"has the seats player, helper.*seat=NAME"):
        fe.make(ADAPTER, taskset="vf-pair")
    with pytest.raises(UsageError, match=r"no model plays the seat 'helper'.*others="):
        fe.make(ADAPTER, taskset="vf-pair", seat="player")


def test_what_can_not_be_loaded_is_said() -> None:
    for old in ("vf-old", "vf-older"):  # the second can't even be imported
        with pytest.raises(UsageError, match=rf"'{old}' needs verifiers 0.2 or older, but 0.4"):
            fe.make(ADAPTER, taskset=old)
    with pytest.raises(UsageError, match="nothing_there"):
        fe.make(ADAPTER, taskset="nothing_there")
    with pytest.raises(UsageError, match="runs code that the model writes"):
        fe.make(ADAPTER, taskset="vf-sum", harness="bash")
