"""Measure the cost of isolation: rollouts per second with each sandbox engine and with a plain child process.

Whole episodes of coding_rlvr, four at once on two cores: task, prompt, the correct answer, hidden tests, reward. The
unsafe engine starts a Python process for each judgement, as is common without a sandbox. Nothing protects the machine
or the answers from the program. Aim: at least 100 %. The rate of verifiers with Docker is 56 % of its rate without.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import forge_env as fe
from benchmarks.frame import main, ratio, spread, table, take_turns
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy
from forge_env.sandbox import (
    CallOutcome,
    CallsResult,
    Judging,
    SandboxEngine,
    available_engines,
    open_engine,
)
from tests.forge_env.sandbox.plain import PlainEngine, PlainSandbox

ENVIRONMENT = "coding_rlvr"
CONCURRENCY = 2 * len(os.sched_getaffinity(0))
UNSAFE = "subprocess, no isolation"
HARNESS = (
    "import json, sys\ncode, calls = json.load(sys.stdin)\nspace = {'__name__': 'solution'}\nexec(code, space)\n"
    "answers = []\nfor call in calls:\n    try:\n        answers.append(['value', repr(eval(call, space))])\n"
    "    except Exception as error:\n        answers.append(['error', type(error).__name__])\n"
    "print(json.dumps(answers))\n"
)


class UnsafeSandbox(PlainSandbox, Judging):
    """Sandbox without isolation: a child process for each call, with the user's permissions."""

    async def run_calls(self, code: str, calls: Sequence[str], **_: Any) -> CallsResult:
        harness = [sys.executable, "-I", "-c", HARNESS]
        result = await self.exec(harness, stdin=json.dumps([code, list(calls)]))
        answers = json.loads(result.stdout) if result.ok else []
        outcomes = [
            CallOutcome(value=ast.literal_eval(text)) if kind == "value" else CallOutcome(error=text)
            for kind, text in answers
        ]
        return CallsResult(outcomes, result)


async def rollouts_per_s(engine: SandboxEngine, episodes: int) -> float:
    """Return episodes per second with `CONCURRENCY` at once; every episode must get full reward."""
    numbers = iter(range(episodes))

    async def player() -> None:
        for number in numbers:
            env = fe.make(ENVIRONMENT, sandboxes=engine)
            task = env.task("eval", number)
            played = await run_episode(lambda env=env: env, GoldPolicy(), task=task, seed=number)  # type: ignore[misc]
            assert played.valid, played
            assert played.reward == 1.0, played

    start = time.perf_counter()
    await asyncio.gather(*(player() for _ in range(CONCURRENCY)))
    return episodes / (time.perf_counter() - start)


async def measure(args: argparse.Namespace) -> list[str]:
    async def rate(name: str) -> float:
        unsafe = PlainEngine(UnsafeSandbox(Path.cwd()))
        engine = unsafe if name == UNSAFE else open_engine(name, concurrency=CONCURRENCY, warm=CONCURRENCY)
        async with engine:
            await rollouts_per_s(engine, CONCURRENCY)
            return await rollouts_per_s(engine, args.episodes)

    names = [*(name for name, reason in available_engines().items() if reason is None), UNSAFE]
    rates = await take_turns({name: partial(rate, name) for name in names}, args.rounds)
    rows = [[name, spread(each), f"{100 * ratio(each, rates[UNSAFE]):.0f} %"] for name, each in rates.items()]
    return table(["code runs in", "rollouts a second", "of the unsafe one"], rows)


if __name__ == "__main__":
    main("What safety costs", measure, rounds=5, episodes=60)
