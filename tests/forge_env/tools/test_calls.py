"""Tool calls that timed out while their thread goes on: what they can't reach any more."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import gymnasium
import pytest

import forge_env as fe
import forge_env.gym  # registers with gymnasium
from environments.mixture import Mixture
from forge_env import registry
from forge_env.config.serving import ServeLimits
from forge_env.errors import InfrastructureError
from forge_env.serve.sessions import Session
from forge_env.tools.calls import measured_calls


class Slow(fe.ToolEnvironment):
    """A tool that is held up until its gate opens."""

    rubric = fe.Rubric(fe.rewards.ExactMatch())
    gate: threading.Event
    refused: threading.Event

    def __init__(self, config: Any = None, **context: Any) -> None:
        super().__init__(config, **context)
        type(self).gate, type(self).refused = threading.Event(), threading.Event()
        self.inside = 0

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="hi", gold="stolen")

    @fe.tool(timeout_s=0.01)
    def slow(self, then: str = "submit") -> None:
        """Be slow."""
        gate, refused = self.gate, self.refused
        self.inside += 1
        try:
            gate.wait(60)
        finally:
            self.inside -= 1
        try:
            self.submit("stolen")
        except fe.ToolError:
            refused.set()
            raise

    @fe.tool
    def peek(self) -> str:
        """Look."""
        return f"inside {self.inside}"

    @fe.tool(timeout_s=0.01)
    async def delegate(self) -> None:
        """Have a thread of its own do it."""
        await asyncio.to_thread(self.slow)

    @fe.tool
    async def later(self) -> None:
        """Submit a little later, in time."""
        self.background = asyncio.create_task(self._later())

    async def _later(self) -> None:
        self.submit("stolen")


async def timed_out(env: Slow, name: str = "slow") -> None:
    observation, _, terminated, truncated, _ = await env.step(fe.call_tool(name))
    assert "timed out" in observation[0].content
    assert (terminated, truncated) == (False, False)


def within(env: Slow, timeout_s: float) -> None:
    """From now on a tool call of `env` has this long. [s]"""
    env.config = env.config.model_copy(update={"tool_timeout_s": timeout_s})


@pytest.mark.parametrize("tool", ["slow", "delegate"])
async def test_a_call_that_timed_out_submits_nothing_any_more(tool: str) -> None:
    env = Slow()
    await env.reset(seed=0)
    await timed_out(env, tool)
    env.gate.set()
    assert await asyncio.to_thread(env.refused.wait, 60)
    assert env.answer == ""
    observation, _, terminated, _, _ = await env.step(fe.call_tool("peek"))
    assert (observation[0].content, terminated) == ("inside 0", False)


async def test_no_plain_function_runs_beside_it() -> None:
    env = Slow()
    await env.reset(seed=0)
    await timed_out(env)
    within(env, 0.01)
    seconds: list[float] = []
    with measured_calls(seconds):
        observation = (await env.step(fe.call_tool("peek")))[0]
    within(env, 60)
    assert seconds[0] > 0  # the wait for the call before
    assert "can't run: a call that timed out is still running" in observation[0].content
    env.gate.set()
    assert await asyncio.to_thread(env.refused.wait, 60)
    assert (await env.step(fe.call_tool("peek")))[0][0].content == "inside 0"


async def test_the_next_episode_waits_for_it_or_is_refused() -> None:
    env = Slow(Slow.config_class(tool_timeout_s=0.01))
    await env.reset(seed=0)
    await timed_out(env)
    assert not env.reusable
    with pytest.raises(InfrastructureError, match="is still running"):
        await env.reset(seed=1)
    within(env, 60)
    resetting = asyncio.create_task(env.reset(seed=1))
    env.gate.set()
    await resetting
    assert (env.answer, env.inside, env.reusable) == ("", 0, True)


async def test_what_a_call_started_may_submit_in_its_own_episode_only() -> None:
    env = Slow()
    await env.reset(seed=0)
    await env.step(fe.call_tool("later"))
    await env.background
    assert env.answer == "stolen"
    await env.reset(seed=1)
    await env.step(fe.call_tool("later"))
    background = env.background
    await env.reset(seed=2)
    with pytest.raises(fe.ToolError, match="has ended"):
        await background
    assert env.answer == ""


def test_gymnasium_goes_on_with_a_fresh_object() -> None:
    fe.register("test_slow", Slow)
    try:
        env: Any = gymnasium.make("forge_env/test_slow").unwrapped
        env.reset(seed=0)
        first = env.environment
        gate = first.gate
        assert "timed out" in env.step(fe.call_tool("slow"))[0][0].content
        env.reset(seed=1)
        assert env.environment is not first
        assert env.step(fe.call_tool("peek"))[0][0].content == "inside 0"
        gate.set()
        env.close()
    finally:
        registry.unregister("test_slow")
        gymnasium.registry.pop("forge_env/test_slow", None)


async def test_the_server_goes_on_with_a_fresh_object() -> None:
    session = Session(Slow, ServeLimits(), Counter())
    await session.reset({"seed": 0})
    first = session.env
    gate = Slow.gate
    await session.step({"type": "call_tool", "tool_name": "slow", "arguments": {}})
    await session.reset({"seed": 1})
    assert session.env is not first
    gate.set()
    await session.env.close()


async def test_a_mixture_knows_it_of_its_components() -> None:
    fe.register("test_slow", Slow)
    try:
        env: Any = fe.make("mixture", environments={"test_slow": {}})
        assert isinstance(env, Mixture)
        await env.reset(seed=0)
        assert env.reusable
        await env.step(fe.call_tool("slow"))
        assert not env.reusable
        Slow.gate.set()
    finally:
        registry.unregister("test_slow")
