"""Measure the cost of an environment step: in process, through a tool, and with 1,000 concurrent episodes.

The tools do nothing, so a time is the cost of the step itself. With 1,000 concurrent episodes, it is the cost of one
step of one episode. Each step extends its episode's history, which Python's garbage collector scans: with the collector
off, a step costs the same with 1,000 episodes as with one. Published for OpenEnv: 300 us a step over its WebSocket,
1,390 us with MCP.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import gymnasium

import forge_env as fe
from benchmarks.frame import main, spread, table, take_turns
from forge_env.types import FunctionCall, Message, ToolCall

MANY = 1000
AIMS = {"step, no tool": 100, "step, one tool": 300, "step, one sync tool": 300}


class Talk(fe.ToolEnvironment):
    """Environment that answers every message and has tools that do nothing."""

    rubric = fe.Rubric([lambda: 0.0])

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="Talk.")

    def is_final(self, message: Message) -> bool:
        return False

    async def respond(self, message: Message) -> list[Message]:
        return [Message(role="user", content="Go on.")]

    @fe.tool
    async def nothing(self, a: int, text: str = "") -> str:
        """Do nothing."""
        return text

    @fe.tool
    def nothing_sync(self, a: int) -> str:
        """Do nothing in a thread."""
        return ""


def tool_message(name: str) -> Message:
    call = ToolCall(id="c", function=FunctionCall(name=name, arguments='{"a": 1}'))
    return Message(role="assistant", tool_calls=[call])


async def timed(work: Awaitable[Any], steps: int) -> tuple[float, float]:
    """Return `(wall, CPU)` microseconds per step."""
    wall, cpu = time.perf_counter(), time.process_time()
    await work
    return 1e6 * (time.perf_counter() - wall) / steps, 1e6 * (time.process_time() - cpu) / steps


async def run_steps(episodes: int, steps: int, action: fe.Message | str) -> tuple[float, float]:
    """Time about `steps` steps in total, spread over `episodes` concurrent episodes."""
    config = fe.ToolEnvironmentConfig(max_turns=10**9, max_tool_calls=10**9)
    envs = [Talk(config) for _ in range(episodes)]
    await asyncio.gather(*(env.reset(seed=0) for env in envs))
    each = max(1, steps // episodes)

    async def play(env: fe.Environment) -> None:
        for _ in range(each):
            await env.step(action)
            await asyncio.sleep(0)  # yields like a policy, so that episodes interleave

    measured = await timed(asyncio.gather(*map(play, envs)), each * episodes)
    for env in envs:
        await env.close()
    return measured


async def cartpole(steps: int) -> tuple[float, float]:
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset(seed=0)

    async def work() -> None:
        for number in range(steps):
            _, _, ended, *_ = env.step(number % 2)
            if ended:
                env.reset()

    return await timed(work(), steps)


async def measure(args: argparse.Namespace) -> list[str]:
    ways: dict[str, Callable[[], Awaitable[tuple[float, float]]]] = {
        "gymnasium CartPole (floor)": partial(cartpole, args.steps)
    }
    actions = {
        "step, no tool": "hello",
        "step, one tool": tool_message("nothing"),
        "step, one sync tool": tool_message("nothing_sync"),
    }
    for episodes, suffix in ((1, ""), (MANY, f", {MANY} episodes at once")):
        for name, action in actions.items():
            ways[name + suffix] = partial(run_steps, episodes, max(args.steps, 5 * episodes), action)
    taken = await take_turns(ways, args.repeats)
    rows = [[name, *map(spread, zip(*each, strict=True)), AIMS.get(name, "")] for name, each in taken.items()]
    return table(["microseconds a step", "wall", "CPU", "aim (wall)"], rows)


if __name__ == "__main__":
    main("A step of an environment", measure, steps=2000, repeats=9)
