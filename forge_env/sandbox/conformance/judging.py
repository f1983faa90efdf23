"""Judging code that nobody trusts."""

from __future__ import annotations

from forge_env.sandbox.protocol import Sandbox


class JudgingTests:
    """Calls whose values are compared outside, and tests apart from the code."""

    async def test_calls_return_exact_plain_types(self, sandbox: Sandbox) -> None:
        """Values of plain types arrive equal and of the same type."""
        code = "def same(x): return x"
        expected: list[object] = [
            1,
            -(2**80),
            True,
            None,
            1.5,
            float("inf"),
            "ä\n",
            b"\0",
            [1, [2]],
            (1,),
            {1: {2}},
            {"a": (1, 2)},
        ]
        expected += [frozenset({1}), 1j, {}, set()]
        result = await sandbox.run_calls(f"inf = float('inf')\n{code}", [f"same({value!r})" for value in expected])
        values = [outcome.value for outcome in result.outcomes]
        assert values == expected
        assert [type(value) for value in values] == [type(value) for value in expected]

    async def test_calls_raise(self, sandbox: Sandbox) -> None:
        """An exception is the outcome of one call; a broken definition has no outcomes."""
        result = await sandbox.run_calls("def f(x): return 1 / x", ["f(0)", "exit()", "f(1)", "g()"])
        assert [outcome.error for outcome in result.outcomes] == ["ZeroDivisionError", "SystemExit", None, "NameError"]
        broken = await sandbox.run_calls("def f(:", ["f()"])
        assert broken.outcomes == []
        assert broken.execution.exit_code == 1

    async def test_objects_do_not_travel(self, sandbox: Sandbox) -> None:
        """Only exact plain types: an object that claims to equal everything is an error, not a value."""
        code = (
            "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
            "def f(): return E(7)\ndef g(): return [E(7)]\ndef deep():\n    x = []\n"
            "    for _ in range(5000): x = [x]\n    return x\n"
        )
        result = await sandbox.run_calls(code, ["f()", "g()", "E", "deep()", "1"])
        assert [outcome.error for outcome in result.outcomes] == ["TypeError"] * 4 + [None]

    async def test_leaving_early_gives_no_values(self, sandbox: Sandbox) -> None:
        """A program that exits answers only the calls it got to."""
        for code in ("import os; os._exit(0)", "import sys; sys.exit(0)"):
            result = await sandbox.run_calls(code + "\ndef f(): return 1", ["f()"])
            assert result.outcomes == []
        result = await sandbox.run_calls("import os\ndef f(): return 1\ndef g(): os._exit(0)", ["f()", "g()", "f()"])
        assert [outcome.value for outcome in result.outcomes] == [1]

    async def test_tests_run_apart_from_the_code(self, sandbox: Sandbox) -> None:
        """unittest cases, test functions and plain asserts judge code that lives in another process."""
        code = "class Stack:\n    def __init__(s): s.x = []\n    def push(s, v): s.x.append(v)\n"
        code += "    def pop(s): return s.x.pop()\ndef double(x): return x * 2\ndef fail(): raise KeyError('k')\n"
        cases = (
            "import unittest\nfrom solution import Stack, double\nclass T(unittest.TestCase):\n"
            "    def test_a(self): self.assertEqual(double(4), 8)\n"
            "    def test_b(self):\n        s = Stack(); s.push(3); self.assertEqual(s.pop(), 3)\n"
            "        self.assertRaises(IndexError, s.pop)\n"
        )
        result = await sandbox.run_tests(code, cases)
        assert (result.passed, result.total, result.failures) == (True, 2, []), result
        functions = "def test_a(): assert double(1) == 2\ndef test_b(): assert double(1) == 3\n"
        result = await sandbox.run_tests(code, functions)
        assert (result.passed, result.total, len(result.failures)) == (False, 2, 1), result
        assert (await sandbox.run_tests(code, "assert double('a') == 'aa'")).passed
        assert not (await sandbox.run_tests("x = (", "pass")).passed
        assert not (await sandbox.run_tests("import os\ndef f(): os._exit(0)", "f()\nassert True")).passed
        undecodable = "def f(data): return data.decode()"
        for expected in ("UnicodeDecodeError", "ValueError"):
            checks = f"try: f(bytes([255]))\nexcept {expected}: pass\nelse: assert False"
            assert (await sandbox.run_tests(undecodable, checks)).passed
