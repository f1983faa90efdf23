"""What a step of an environment costs: in process, through a tool, with 1,000 episodes at once; beside gymnasium.

    python -m benchmarks.environment_step [--steps 2000] [--repeats 5] [--json FILE]

The floor is CartPole of gymnasium, stepped by itself in the same run. All figures are microseconds a step, the median
over the repeats; CPU time where it says so, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import gymnasium

import forge_env as fe
from forge_env.types import FunctionCall, Message, ToolCall

AIMS = {"step, no tool": 100.0, "step, one tool": 300.0, "step, one sync tool in a thread": 300.0}


class Talk(fe.ToolEnvironment):
    """Answers every message, and has tools that do nothing."""

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


def make() -> fe.Environment:
    return Talk(fe.ToolEnvironmentConfig(max_turns=10**9, max_tool_calls=10**9))


async def timed(work: Callable[[], Awaitable[Any]], steps: int) -> tuple[float, float]:
    """`(wall, CPU)` microseconds a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    return 1e6 * (time.perf_counter() - wall) / steps, 1e6 * (time.process_time() - cpu) / steps


async def run_steps(episodes: int, steps: int, action: fe.Message | str) -> tuple[float, float]:
    """`steps` steps in all, of that many episodes at once."""
    envs = [make() for _ in range(episodes)]
    await asyncio.gather(*(env.reset(seed=0) for env in envs))
    each = max(1, steps // episodes)

    async def play(env: fe.Environment) -> None:
        for _ in range(each):
            await env.step(action)
            await asyncio.sleep(0)  # as a policy would, so that episodes take turns

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


async def measure(steps: int, repeats: int) -> list[dict[str, Any]]:
    cases: dict[str, Callable[[], Awaitable[tuple[float, float]]]] = {
        "gymnasium CartPole (floor)": lambda: cartpole(steps),
        "step, no tool": lambda: run_steps(1, steps, "hello"),
        "step, one tool": lambda: run_steps(1, steps, tool_message("nothing")),
        "step, one sync tool in a thread": lambda: run_steps(1, steps // 4, tool_message("nothing_sync")),
        "step, no tool, 10 episodes at once": lambda: run_steps(10, steps, "hello"),
        "step, no tool, 100 episodes at once": lambda: run_steps(100, steps, "hello"),
        "step, no tool, 1000 episodes at once": lambda: run_steps(1000, max(steps, 5000), "hello"),
        "step, one tool, 1000 episodes at once": lambda: run_steps(1000, max(steps, 5000), tool_message("nothing")),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(repeats):  # in turns, so that a busy moment hits all of them
        for name, case in cases.items():
            samples[name].append(await case())
    rows = []
    for name, taken in samples.items():
        walls, cpus = zip(*taken, strict=True)
        rows.append(
            {
                "what": name,
                "wall_us": statistics.median(walls),
                "wall_us_min": min(walls),
                "wall_us_max": max(walls),
                "cpu_us": statistics.median(cpus),
                "aim_us": AIMS.get(name),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    args = parser.parse_args()
    rows = asyncio.run(measure(args.steps, args.repeats))
    print(f"{'us a step, median of ' + str(args.repeats):<42}{'wall':>9}{'min':>9}{'max':>9}{'CPU':>9}{'aim':>7}")
    for row in rows:
        aim = "" if row["aim_us"] is None else f"{row['aim_us']:.0f}"
        print(
            f"{row['what']:<42}{row['wall_us']:>9.1f}{row['wall_us_min']:>9.1f}{row['wall_us_max']:>9.1f}"
            f"{row['cpu_us']:>9.1f}{aim:>7}"
        )
    text = json.dumps({"benchmark": "environment_step", "steps": args.steps, "repeats": args.repeats, "rows": rows})
    print(text)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
