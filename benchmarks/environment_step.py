"""Measure the cost of an environment step: in process, through a tool, between seats, with 1,000 concurrent episodes.

    python -m benchmarks environment_step [--steps 2000] [--repeats 9] [--record]

The floor is gymnasium's CartPole, stepped directly in the same run.
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
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.types import FunctionCall, Message, ToolCall

MANY = 1000
AIMS = {"step, no tool": 100, "step, one tool": 300, "step, one sync tool": 300}
ABOUT = (
    "Median (smallest to largest) of the repeats, taken in turns. Tools do nothing, so this is what a step costs "
    "beside them; with several episodes, what one step of one of them costs. Each step adds to its episode's history, "
    "which Python's garbage collector looks through: without it a step at 1,000 episodes costs what it costs at one. "
    "Published for OpenEnv: 300 us a step over its WebSocket, 1,390 us with an MCP tool."
)


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


class Rally(fe.Environment):
    """Episode of `turns` turns with a reward of 1 for the last; turns alternate between `seats`, if there are any."""

    turns = 40
    seats: tuple[str, ...] = ()

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="Play.")

    def _next(self) -> tuple[list[Message], dict[str, Any]]:
        info = {"seat": self.seats[self.played % 2]} if self.seats else {}
        return [Message(role="user", content="Go on.")], info

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.played = 0
        return self._next()

    async def step(self, action: Any) -> Any:
        self.played += 1
        observation, info = self._next()
        if self.played < self.turns:
            return observation, 0.0, False, False, info
        return observation, 1.0, True, False, info | ({"rewards": {self.seats[0]: -1.0}} if self.seats else {})


class SeatedRally(Rally):
    """The same episode between two seats."""

    seats = ("one", "other")


async def run_turns(environment: type[Rally], steps: int) -> tuple[float, float]:
    """Time whole episodes with about `steps` turns in total."""
    policy, task = ReplayPolicy(["hello"] * Rally.turns), environment().task("train", 0)
    episodes = max(1, steps // Rally.turns)

    async def work() -> None:
        for _ in range(episodes):
            await fe.run_episode(environment, policy, task=task)

    return await timed(work, episodes * Rally.turns)


def tool_message(name: str) -> Message:
    call = ToolCall(id="c", function=FunctionCall(name=name, arguments='{"a": 1}'))
    return Message(role="assistant", tool_calls=[call])


def make() -> fe.Environment:
    return Talk(fe.ToolEnvironmentConfig(max_turns=10**9, max_tool_calls=10**9))


async def timed(work: Callable[[], Awaitable[Any]], steps: int) -> tuple[float, float]:
    """Return `(wall, CPU)` microseconds per step."""
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    return 1e6 * (time.perf_counter() - wall) / steps, 1e6 * (time.process_time() - cpu) / steps


async def run_steps(episodes: int, steps: int, action: fe.Message | str) -> tuple[float, float]:
    """Time about `steps` steps in total, spread over `episodes` concurrent episodes."""
    envs = [make() for _ in range(episodes)]
    await asyncio.gather(*(env.reset(seed=0) for env in envs))
    each = max(1, steps // episodes)

    async def play(env: fe.Environment) -> None:
        for _ in range(each):
            await env.step(action)
            await asyncio.sleep(0)  # yields like a policy, so that episodes interleave

    async def work() -> None:
        await asyncio.gather(*(play(env) for env in envs))

    measured = await timed(work, each * episodes)
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

    measured = await timed(work, steps)
    env.close()
    return measured


def cases(steps: int) -> dict[str, Callable[[], Awaitable[tuple[float, float]]]]:
    """Return the measured cases by name."""
    actions = {
        "no tool": "hello",
        "one tool": tool_message("nothing"),
        "one sync tool": tool_message("nothing_sync"),
    }
    result: dict[str, Callable[[], Awaitable[tuple[float, float]]]] = {
        "gymnasium CartPole (floor)": lambda: cartpole(steps),
        **{f"step, {name}": partial(run_steps, 1, steps, action) for name, action in actions.items()},
        "turn of an episode, one agent": lambda: run_turns(Rally, steps),
        "turn of an episode, two seats": lambda: run_turns(SeatedRally, steps),
    }
    for name, action in actions.items():
        result[f"step, {name}, {MANY} episodes at once"] = partial(run_steps, MANY, max(steps, 5 * MANY), action)
    return result


async def measure(args: argparse.Namespace) -> list[str]:
    taken = await take_turns(cases(args.steps), args.repeats)
    rows = [[name, *map(spread, zip(*each, strict=True)), AIMS.get(name, "")] for name, each in taken.items()]
    return [*table(["microseconds a step", "wall", "CPU", "aim (wall)"], rows), "", ABOUT]


if __name__ == "__main__":
    main("A step of an environment", measure, steps=2000, repeats=9)
