"""Rows in the style of MBPP, HumanEval and LiveCodeBench: what is made of them, and how they are judged."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from environments.coding_rlvr.rows import _decoded, checks_of
from forge_env.errors import UsageError
from forge_env.sandbox import SandboxEngine
from forge_env.sandbox.engines import load_engine
from forge_env.validation.checks import Validator
from tests.environments.coding_rlvr.fake_engine import FakeEngine
from tests.sandboxes.conftest import require

ROWS = Path(__file__).parent / "rows"
MBPP = {
    "task_id": 1,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert abs(add(0.1, 0.2) - 0.3) < 1e-6",
                  "assert add([1], [2])==[1, 2]"],
}  # fmt: skip
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def is_even(n: int) -> bool:\n    """Whether n is even."""\n',
    "canonical_solution": "    return n % 2 == 0\n",
    "entry_point": "is_even",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == True\n    assert not candidate(3)\n"
    "    assert candidate(0)\n    for i in range(9):\n        assert candidate(2 * i)\n",
}
PROGRAM = {
    "question_content": "Read two numbers and print their sum.",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": json.dumps([{"input": "5 6", "output": "11", "testtype": "stdin"}] * 2),
    "metadata": "{}",
}
METHOD = {
    "question_content": "Twice a list.",
    "starter_code": "class Solution:\n    def twice(self, items): ...",
    "public_test_cases": json.dumps([{"input": "[1]", "output": "[1, 1]", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": "[2, 3]", "output": "[2, 3, 2, 3]", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "twice"}),
}


def options(tmp_path: Path, rows: list[dict[str, Any]], **columns: str) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    splits = {"train": "rows.jsonl", "eval": "rows.jsonl"}
    return {"dataset": {"path": str(path), "splits": splits, "columns": columns}}


async def rewards(engine: SandboxEngine, given: dict[str, Any], *answers: str) -> list[float]:
    env = fe.make("coding_rlvr", sandboxes=engine, wall_s=30.0, **given)
    found = []
    for answer in answers:
        await env.reset(seed=0)
        found.append((await env.step(answer))[1])
    await env.close()
    return found


async def test_mbpp(tmp_path: Path) -> None:
    given = options(tmp_path, [MBPP], prompt="text")
    env = fe.make("coding_rlvr", **given)
    task = env.task("train", 0)
    assert env.num_tasks("train") == 1
    assert task.prompt == "Write a function to add two numbers.\nadd(1, 2) == 3"
    assert [test["call"] for test in task.data["hidden"]] == [
        "add(-1, 1)",
        "add([1], [2])",
    ]  # the others can't be split
    wrong = "```python\ndef add(a, b):\n    return 3\n```"
    assert await rewards(FakeEngine(), given, task.gold or "", wrong, "") == [1.0, 0.0, 0.0]


async def test_human_eval(tmp_path: Path) -> None:
    given = options(tmp_path, [HUMAN_EVAL])
    task = fe.make("coding_rlvr", **given).task("eval", 0)
    assert "Complete the function is_even" in task.prompt
    assert task.data["hidden"] == [
        {"call": "is_even(3)", "expected": "False"},
        {"call": "is_even(0)", "expected": "True"},
    ]
    wrong = "```python\ndef is_even(n):\n    return True\n```"
    equal_to_all = (
        "```python\nclass Any:\n    def __eq__(self, other): return True\ndef is_even(n):\n    return Any()\n```"
    )
    assert await rewards(FakeEngine(), given, task.gold or "", wrong, equal_to_all) == [1.0, 0.0, 0.0]


async def test_live_code_bench_methods(tmp_path: Path) -> None:
    given = options(tmp_path, [METHOD], prompt="question_content")
    right = "```python\nclass Solution:\n    def twice(self, items):\n        return items * 2\n```"
    assert await rewards(FakeEngine(), given, right, right.replace("* 2", "* 1")) == [1.0, 0.0]


async def test_live_code_bench_programs_run_in_a_sandbox(tmp_path: Path) -> None:
    require("local")
    given = options(tmp_path, [PROGRAM], prompt="question_content")
    right = "```python\nprint(sum(map(int, input().split())), ' ')\n```"
    wrong = "```python\nprint(3)\n```"
    crash = "```python\nprint(11)\nraise SystemExit(1)\n```"
    async with load_engine("local")(concurrency=1, warm=1) as engine:
        assert await rewards(engine, given, right, wrong, crash) == [1.0, 0.0, 0.0]


@pytest.mark.slow  # validation lets some programs run into their limit
@pytest.mark.parametrize("style", ["mbpp", "humaneval", "livecodebench"])
async def test_every_style_is_sound(style: str) -> None:
    require("local")
    given = {"path": str(ROWS / f"{style}.jsonl"), "eval_fraction": 0.0}
    async with load_engine("local")(concurrency=2, warm=1) as engine:

        def make() -> fe.Environment:
            return fe.make("coding_rlvr", sandboxes=engine, wall_s=10.0, dataset=given)  # no rows are held out

        checks = [check async for check in Validator(make, num_tasks=3).run()]
        assert "failed" not in [check.status for check in checks], checks
        played = {check.name: check.detail for check in checks}["gold solutions score full marks"]
        count = make().num_tasks("train")
        assert played == f"{count} of {count}"


def test_packed_cases_are_read_and_nothing_is_run() -> None:
    cases = [{"input": "1", "output": "2"}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()
    assert _decoded(packed, []) == cases
    assert _decoded("", []) == _decoded(None, []) == []
    evil = base64.b64encode(zlib.compress(pickle.dumps(os.getcwd))).decode()
    for wrong in (evil, "no json", base64.b64encode(b"no zlib").decode(), packed[:-8]):
        with pytest.raises(UsageError, match="can't be read"):
            _decoded(wrong, [])


def test_what_can_be_judged_outside() -> None:
    for source, checks in {
        "assert f(1) == 2": [("f(1)", "2")],
        "assert 2 == f(1)": [("f(1)", "2")],
        "assert f(1) is None": [("f(1)", "None")],
        "assert not f([1])": [("f([1])", "False")],
        "assert set(f(1)) == {1, 2}": [("set(f(1))", "{1, 2}")],
        "assert f(1) == g(2)": [],
        "assert f(1) > 0": [],
        "assert f(1": [],
    }.items():
        assert [(check["call"], check["expected"]) for check in checks_of(source)] == checks, source


def test_rows_that_are_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no known style"):
        fe.make("coding_rlvr", **options(tmp_path, [{"prompt": "x", "answer": "y"}])).task("train", 0)
    unusable = {**MBPP, "test_list": ["assert add(1, 2) > 0"]}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UsageError, match="no usable row"):
        fe.make("coding_rlvr", **options(other, [unusable], prompt="text")).task("train", 0)
