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
from environments.coding_rlvr.asserts import suite_of
from environments.coding_rlvr.checks import Check, passes, same_json, same_output, surrounded
from environments.coding_rlvr.rows import _decoded
from forge_env.errors import UsageError
from forge_env.sandbox import CallOutcome, SandboxEngine
from forge_env.sandbox.engines import load_engine
from forge_env.validation.checks import Validator
from tests.sandboxes.conftest import engine_fixture, require

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


engine = engine_fixture()


@pytest.mark.asyncio(loop_scope="module")
async def test_mbpp(tmp_path: Path, engine: SandboxEngine) -> None:
    given = options(tmp_path, [MBPP], prompt="text")
    env = fe.make("coding_rlvr", **given)
    task = env.task("train", 0)
    assert env.num_tasks("train") == 1
    assert task.prompt == "Write a function to add two numbers.\nadd(1, 2) == 3"
    assert [test["call"] for test in task.data["hidden"]] == [
        "add(-1, 1)",
        "add([1], [2])",
        "assert abs(add(0.1, 0.2) - 0.3) < 1e-06",  # judged in the tests' process
    ]
    wrong = "```python\ndef add(a, b):\n    return 3\n```"
    near = "```python\ndef add(a, b):\n    return a + b + 1e-3 * (a == 0.1)\n```"
    assert await rewards(engine, given, task.gold or "", wrong, near, "") == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_human_eval(tmp_path: Path, engine: SandboxEngine) -> None:
    straight = {**HUMAN_EVAL, "test": HUMAN_EVAL["test"].partition("    for ")[0]}
    given = options(tmp_path, [straight])
    task = fe.make("coding_rlvr", **given).task("eval", 0)
    assert "Complete the function is_even" in task.prompt
    assert [(check["call"], check["expected"]) for check in task.data["public"] + task.data["hidden"]] == [
        ("is_even(2)", "True"),
        ("is_even(3)", "False"),
        ("is_even(0)", "True"),
    ]
    wrong = "```python\ndef is_even(n):\n    return True\n```"
    equal_to_all = (
        "```python\nclass Any:\n    def __eq__(self, other): return True\ndef is_even(n):\n    return Any()\n```"
    )
    assert await rewards(engine, given, task.gold or "", wrong, equal_to_all) == [1.0, 0.0, 0.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_human_evals_loops_and_helpers(tmp_path: Path, engine: SandboxEngine) -> None:
    loops = {
        "task_id": "HumanEval/1",
        "prompt": "from typing import List\nimport math\n\ndef area(r: float) -> float:\n    return math.pi * r * r\n\n"
        'def ring(r: float, s: float) -> float:\n    """The area between two circles. """\n',
        "canonical_solution": "    return area(s) - area(r)\n",
        "entry_point": "ring",
        "test": "def check(candidate):\n    for s in range(1, 5):\n"
        "        assert math.isclose(candidate(0, s), area(s))\n",
    }
    given = options(tmp_path, [loops])
    body = "def ring(r: float, s: float) -> List:\n    return {}\n"  # a completion needs what the prompt has
    right, wrong = (f"```python\n{body.format(text)}```" for text in ("area(s) - area(r)", "area(s) - area(r) + 1"))
    fooled = "```python\ndef area(r): return 0\ndef ring(r, s): return 0\n```"
    gold = fe.make("coding_rlvr", **given).task("train", 0).gold or ""
    assert await rewards(engine, given, gold, right, wrong, fooled) == [1.0, 1.0, 0.0, 0.0]


def listed(*tests: str, **more: Any) -> dict[str, Any]:
    return {"text": "Do it.", "code": "", "test_list": [*tests, *tests], **more}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("row", "program", "reward"),
    [
        # what wraps a call is evaluated where no agent's code is
        (listed("assert set(f(3)) == {1, 2}"), "def set(x): return {1, 2}\ndef f(n): return []", 0),
        (listed("assert set(f(3)) == {1, 2}"), "def f(n): return [2, 1, 2]", 1),
        (listed("assert isinstance(f(3), list)"), "def isinstance(*a): return True\ndef f(n): return 0", 0),
        (listed("assert not any(x < 0 for x in f(3))"), "def any(x): return False\ndef f(n): return []", 0),
        (listed("assert abs(f(3) - 2.5) < 1e-6"), "class A:\n def __sub__(s, o): return 0\ndef f(n): return A()", 0),
        (listed("assert abs(f(3) - 2.5) < 1e-6"), "import builtins\nbuiltins.abs = lambda x: 0\ndef f(n): return 0", 0),
        (listed("assert f(3) > 2"), "class A:\n def __gt__(s, o): return True\ndef f(n): return A()", 0),
        (listed("assert f('a').startswith('b')"), "class A:\n def startswith(s, o): return 1\ndef f(n): return A()", 0),
        (listed("assert f('a').startswith('b')"), "def f(text): return 'b' + text", 1),
        (listed("assert f(3) in (4, 5)"), "def f(n): return n + 1", 1),
        (listed("assert f(3) in (4, 5)"), "class A:\n def __eq__(s, o): return True\ndef f(n): return A()", 0),
        (listed("assert round(f(3), 2) == 1.33"), "def f(n): return 4 / n", 1),
        (listed("assert f(3) != f(4)"), "def f(n): return n", 1),
        (listed("assert sorted(f(3)) == f(3)"), "def sorted(x): return x\ndef f(n): return [2, 1]", 0),
        # what the reference's own namespace has
        (
            listed("assert isclose(f(3), 1.5)", code="from math import isclose\ndef f(n): return n / 2"),
            "def f(n): return n / 2",
            1,
        ),
        (listed("assert math.isclose(f(3), 1.5)"), "def f(n): return n / 2", 1),
        (listed("assert f(2) == 2.0", test_imports=["import math"]), "def f(n): return math.sqrt(n * n)", 1),
        (listed("assert sum(10, 15) == 6", code="def sum(a, b): ..."), "def sum(a, b): return 6", 1),
        (
            listed("assert depth(root) == 2", test_setup_code="root = Node(1)\nroot.left = Node(2)"),
            "class Node:\n def __init__(s, v): s.left = None\n"
            "def depth(n): return 0 if n is None else 1 + depth(n.left)",
            1,
        ),
        (
            listed("assert longest([Pair(5, 24), Pair(15, 25)]) == 19"),
            "class Pair:\n def __init__(s, a, b): s.a, s.b = a, b\ndef longest(ps): return max(p.b - p.a for p in ps)",
            1,
        ),
        # Python's `==`, and what equals a plain value
        (listed("assert f('aab') == {'a': 2, 'b': 1}"), "from collections import Counter as f", 1),
        (
            listed("assert f(3) == (1, 2)"),
            "from collections import namedtuple\ndef f(n): return namedtuple('P', 'a b')(1, 2)",
            1,
        ),
        (listed("assert f(3) == [1, 2]"), "def f(n): return (1, 2)", 0),
        (listed("assert f(4) == 2"), "def f(n): return n / 2", 1),
        (listed("assert f(4) == True"), "def f(n): return 1", 1),
        (listed("assert f(4) is True"), "def f(n): return 1", 0),
        (listed("assert f('a1')"), "import re\ndef f(text): return re.search('[0-9]', text)", 1),
        (listed("assert f(1) == {1, 2}"), "def f(n): return {1: 0, 2: 0}.keys()", 1),
        (listed("assert f(2) == 0.5"), "from fractions import Fraction\ndef f(n): return Fraction(1, n)", 1),
        (listed("assert f(2) == 0.5"), "from __future__ import annotations\ndef f(n: X) -> Y: return 1 / n", 1),
        (listed("values = [1, 2]\nassert f(values) == 3\nassert f([]) == 0"), "f = sum", 1),
        (listed("values = [1, 2]\nassert f(values) == 3\nassert f([]) == 0"), "def f(x): return 3", 0),
        # iterators, dates and truth values reach the tests; other objects can't be compared
        (listed("assert list(f(3)) == [0, 1]\nassert len(list(f(3))) == 2"), "def f(n): yield from (0, 1)", 1),
        (listed("assert list(f(3)) == [0, 1]"), "def f(n): yield from (0, 2)", 0),
        (listed("x = f(2)\nassert x == [0, 1]"), "def f(n): yield from range(n)", 0),
        (listed("assert list(f([1])) == [2]"), "def f(xs): return map(lambda x: x + 1, xs)", 1),
        (listed("assert [list(r) for r in f(2)] == [[0], [0, 1]]"), "def f(n): return [range(1), range(2)]", 1),
        (listed("assert next(f()) == 0"), "import itertools\ndef f(): return itertools.count()", 1),
        (listed("assert list(f({'b': 2, 'a': 1})) == [2, 1]"), "def f(d): return d.values()", 1),
        (
            listed("assert f(1) == datetime.date(1, 2, 3)"),
            "import datetime\ndef f(n): return datetime.date(1, 2, 3)",
            1,
        ),
        (
            listed("assert f(1) == datetime.date(1, 2, 3)"),
            "import datetime\ndef f(n): return datetime.date(1, 2, 4)",
            0,
        ),
        (listed("assert bool(f('a1'))"), "import re\ndef f(text): return re.search('[0-9]', text)", 1),
        (listed("assert bool(f('a'))"), "import re\ndef f(text): return re.search('[0-9]', text)", 0),
        (listed("x = f(3)\nassert x == 4"), "class A:\n def __eq__(s, o): return True\ndef f(n): return A()", 0),
        (listed() | {"test_list": "['assert f(3) == 4', 'assert f(4) == 5']"}, "def f(n): return n + 1", 1),
        (listed() | {"test_list": "assert f(3) == 4\nassert f(4) == 5"}, "def f(n): return 4", 0),
        (listed("assert math.isclose(f(3), 4)", test_imports="import math"), "def f(n): return n + 1", 1),
        (listed("x = f(3)\nassert x != 4"), "class A:\n def __ne__(s, o): return True\ndef f(n): return A()", 0),
        (listed("x = f(3)\nassert x == 4"), "def f(n): return ('_forge_packed', 'object', ('x', True))", 0),
    ],
)
async def test_mbpps_asserts(
    tmp_path: Path, engine: SandboxEngine, row: dict[str, Any], program: str, reward: float
) -> None:
    answer = f"```python\n{program}\n```"
    assert await rewards(engine, options(tmp_path, [row]), answer) == [reward]


def test_a_test_of_the_agents_objects_leaves_the_row_out() -> None:
    for statement, more in (
        ("assert f(1", {}),
        ("assert Pair(1, 2) != f(3)", {}),
        ("assert root.size > 2", {"setup": "root = Node(1)"}),
        ("assert is_tree(f(1))", {"setup": "def is_tree(x): return isinstance(x, Node)", "names": ["f", "Node"]}),
    ):
        assert suite_of([statement], **more) is None, statement


def test_imports_from_the_future_stay_first() -> None:
    code = "# mine\nfrom __future__ import annotations\nx: Y = 1\n"
    exec(compile(surrounded(code, {"before": "import math", "after": "math.pi"}), "x", "exec"), {})


@pytest.mark.parametrize(
    ("expected", "output", "equal"),
    [
        ("0.5\n", "0.50", True),
        ("0.5", ".5", True),
        ("0.333333333333", "0.333333", True),
        ("1000000.25", "1000000.3", True),
        ("0.25", "0.3", False),
        ("2.0", "2", True),
        ("2", "2.0", True),
        ("50000000000000000", "50000000000000001", False),
        ("1000000", "1000001", False),
        ("1 2.50 3", "1 2.5 3", True),
        ("1 2.50 3", "1 2.5 4", False),
        ("1 2", "1\n2", False),
        ("1\n2", "1\r\n2\r\n", True),
        ("a\n", "\n  a  \n\n", True),
        ("a b", "a  b", False),
        ("a\u2028b", "a\nb", False),
        ("a\x0cb", "a\nb", False),
        ("YES", "yes", False),
        ("1000", "1_000", False),
        ("1", "\u0661", False),
        ("nan", "nan", True),
        ("1.5", "nan", False),
        ("1.5", "1e999999999", False),
        ("1e9999", "2e9999", False),
        ("", "", True),
        ("", "x", False),
    ],
)
def test_output_is_compared_as_contests_do(expected: str, output: str, equal: bool) -> None:
    assert same_output(expected, output) is equal


@pytest.mark.parametrize(
    ("expected", "value", "equal"),
    [
        ([1, [2]], (1, (2,)), True),
        ([1], [1, 2], False),
        (2.0, 2, True),
        (0.3, 0.1 + 0.2, True),
        ([0.3], [0.1 + 0.2], True),
        (0.3, 0.30001, False),
        (3, 3.0000001, False),
        (0.5, 10**500, False),
        (0.5, "0.5", False),
        (0.5, None, False),
        ({"a": [1]}, {"a": (1,)}, True),
        ({"a": 1}, {"b": 1}, False),
        ("ab", ["a", "b"], False),
        (None, None, True),
        ([], (), True),
    ],
)
def test_values_are_compared_with_json(expected: object, value: object, equal: bool) -> None:
    assert same_json(expected, value) is equal


@pytest.mark.parametrize(
    ("compare", "expected", "value", "right"),
    [
        ("wrapped", "[2]", 2, True),
        ("wrapped", "[2]", [2], True),
        ("wrapped", "[[1]]", (1,), True),
        ("wrapped", "[2, 3]", 2, False),
        ("wrapped", "[2, 3]", [2, 3], True),
        ("wrapped", "[2]", 3, False),
        ("wrapped", "[]", [], True),
        ("wrapped", "2", [2], False),
        ("close", "0.3", 0.1 + 0.2, True),
        ("close", "[0.3, 1.0]", [0.1 + 0.2, 1.0], True),
        ("close", "[0.3]", (0.1 + 0.2,), False),
        ("close", "0.3", 0.301, False),
        ("close", "3", 3.0, True),
        ("close", "3", 3.0000001, False),
        ("close", "'ab'", "ab", True),
        ("close", "{1, 2}", {2, 1}, True),
    ],
)
def test_values_of_apps_and_human_eval_plus(compare: Any, expected: str, value: object, right: bool) -> None:
    check: Check = {"call": "f()", "expected": expected, "compare": compare}
    assert passes(check, CallOutcome(value=value)) is right


def cases(*pairs: tuple[str, str], function: str | None = None) -> dict[str, Any]:
    kind = "functional" if function else "stdin"
    packed = json.dumps([{"input": given, "output": output, "testtype": kind} for given, output in pairs])
    metadata = json.dumps({"func_name": function} if function else {})
    shared = {"question_content": "Do it.", "public_test_cases": packed, "private_test_cases": packed}
    return {**shared, "starter_code": "", "metadata": metadata}


TWICE = "class Solution:\n    def twice(self, items: List[int]) -> List[int]:\n        return items * 2"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("row", "program", "reward"),
    [
        (METHOD, TWICE, 1),
        (METHOD, TWICE.replace("* 2", "* 1"), 0),
        (METHOD, TWICE.replace("items * 2", "deque(items * 2)"), 0),
        (METHOD, TWICE.replace("items * 2", "tuple(items * 2)"), 1),
        (METHOD, "def twice(items: List[int]): return items * 2", 1),
        ({**METHOD, "metadata": json.dumps({"fn_name": "twice"})}, TWICE, 1),
        ({**METHOD, "metadata": "{}"}, TWICE, 1),
        ({**METHOD, "private_test_cases": METHOD["public_test_cases"].replace("[1, 1]", "[1, 2]")}, TWICE, 0),
        (cases(('"a\u2028b"\n1', '"a\u2028b"'), function="f"), "class Solution:\n def f(self, a, b): return a", 1),
        (cases(("[0.1, 0.2]", "0.3"), function="f"), "class Solution:\n def f(self, x): return sum(x)", 1),
        (cases(("3", "true"), function="f"), "class Solution:\n def f(self, n): return n > 2", 1),
        (
            cases(("3", "true"), function="f"),
            "class Solution:\n def f(self, n): return A()\nclass A:\n def __eq__(self, o): return True",
            0,
        ),
        (PROGRAM, "print(sum(map(int, input().split())), ' ')", 1),
        (PROGRAM, "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.read().split())))", 1),
        (PROGRAM, "if __name__ == '__main__':\n    print(reduce(add, map(int, input().split())))", 1),
        (PROGRAM, "print(3)", 0),
        (PROGRAM, "print(11)\nraise SystemExit(1)", 0),
        (cases(("9", "1" + "0" * 5000)), "print(10 ** 5000)", 1),
        (cases(("9", "ab\n" * 40_000)), "print('ab\\n' * 40_000)", 1),
        (cases(("9", "ab\n" * 40_000)), "print('ab\\n' * 39_999)", 0),
    ],
)
async def test_live_code_bench(
    tmp_path: Path, engine: SandboxEngine, row: dict[str, Any], program: str, reward: float
) -> None:
    answer = f"```python\n{program}\n```"
    assert await rewards(engine, options(tmp_path, [row]), answer) == [reward]


def test_cases_that_cant_be_read_are_named(tmp_path: Path) -> None:
    for number, row in enumerate((cases(("[1", "1"), function="f"), {**METHOD, "metadata": "{}", "starter_code": ""})):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(UsageError, match=r"row 'train-0': a test case can't be read"):
            fe.make("coding_rlvr", **options(folder, [row])).task("train", 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_report_on_asserts_says_why(tmp_path: Path, engine: SandboxEngine) -> None:
    env = fe.make("coding_rlvr", sandboxes=engine, **options(tmp_path, [listed("assert all(x > 0 for x in f(3))")]))
    await env.reset(seed=0)
    told, *_ = await env.step(fe.call_tool("python", code="def f(n): return [0]"))
    assert told[0].content == "0/1 passed\nassert all((x > 0 for x in f(3))) raised AssertionError"
    told, *_ = await env.step(fe.call_tool("python", code="def all(x): return 1\ndef f(n): return [0]"))
    assert "the tests use 'all', which your code defines" in told[0].content
    await env.close()


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


def test_what_is_compared_outside() -> None:
    for source, checks in {
        "assert f(1) == 2": [("f(1)", "2")],
        "assert 2 == f(1)": [("f(1)", "2")],
        "assert f(1) is None": [("f(1)", "None")],
        "assert not f([1])": [("f([1])", "False")],
        "assert f(1) == 2, 'no'\nassert True\nassert f(2)": [("f(1)", "2"), ("f(2)", "True")],
        "assert set(f(1)) == {1, 2}": [("assert set(f(1)) == {1, 2}", "")],
        "assert f(1) == f(2)": [("assert f(1) == f(2)", "")],
        "assert f(1) > 0": [("assert f(1) > 0", "")],
    }.items():
        suite = suite_of([source])
        assert [(check["call"], check["expected"]) for check in suite.checks] == checks, source


@pytest.mark.parametrize("cases", ['{"fn_name": "f", "inputs": [1], "outputs": [2]}', '{"inputs": 1, "outputs": [2]}'])
def test_cases_of_apps_that_cant_be_read_are_named(tmp_path: Path, cases: str) -> None:
    row = {"question": "x", "input_output": cases}
    with pytest.raises(UsageError, match="row 'train-0': a test case can't be read"):
        fe.make("coding_rlvr", **options(tmp_path, [row])).task("train", 0)


def test_a_row_of_apps_without_cases_is_left_out(tmp_path: Path) -> None:
    rows = [
        {"question": "x", "input_output": ""},
        {"question": "y", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'},
    ]
    env = fe.make("coding_rlvr", **options(tmp_path, rows))
    assert (env.num_tasks("train"), env.task("train", 0).data["public"][0]["stdin"]) == (1, "1")


def test_rows_that_are_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown style"):
        fe.make("coding_rlvr", **options(tmp_path, [{"prompt": "x", "answer": "y"}])).task("train", 0)
    unusable = {**MBPP, "test_list": ["assert add(1, 2"]}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UsageError, match="no usable row"):
        fe.make("coding_rlvr", **options(other, [unusable], prompt="text")).task("train", 0)
