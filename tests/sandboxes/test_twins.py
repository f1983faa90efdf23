"""Twins of tests whose expected values are not in the assertion: honest code fails each, and agreeing objects pass."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest

from sandboxes import twins
from sandboxes.suite import suite_of
from sandboxes.twins import edited

HONEST = "def f(x): return {'n': [x * x], 't': str(x), 'v': x * x, 's': {x}, 'r': x / 3}\n"
TESTS = {
    "parametrize": "@pytest.mark.parametrize('n, want', [(1, 1), (3, 9)])\n"
    "def test(n, want): assert f(n)['v'] == want\n",
    "param": "@pytest.mark.parametrize(['want', 'n'], [pytest.param(1, 1, id='a'), (9, 3)])\n"
    "def test(n, want): assert want == f(n)['v']\n",
    "stacked": "@pytest.mark.parametrize('n', [3])\n@pytest.mark.parametrize('want', [9])\n"
    "def test(n, want): assert f(n)['v'] == want\n",
    "named table": "ROWS = ((1, [1]), (3, [9]))\n@pytest.mark.parametrize('n, want', ROWS)\n"
    "def test(n, want): assert f(n)['n'] == want, want\n",
    "input and output": "@pytest.mark.parametrize('n', ['a', 'b'])\ndef test(n): assert g(n) == n\n",
    "table in a loop": "ROWS = [(1, 1), (3, 9)]\ndef test():\n    for n, want in ROWS: assert f(n)['v'] == want\n"
    "def other(): return ROWS\n",
    "zip": "def test():\n    for n, want in zip([1, 2], ['1', '2']): assert f(n)['t'] == want\n",
    "enumerate": "def test():\n    for n, (_, want) in enumerate([('a', 0), ('b', 1)]): assert f(n)['v'] == want\n",
    "items": "ROWS = {2: 4, 3: 9}\ndef test():\n    for n, want in ROWS.items(): assert f(n)['v'] == want\n",
    "variable": "def test():\n    want = [4]\n    got = [f(2)['v']]\n    assert got == want\n",
    "constant": "WANT = 'two'\ndef test(): assert g('two') == WANT\ndef other(): return WANT\n",
    "reference": "def ref(x): return x * x\ndef test():\n    for i in range(4): assert f(i)['v'] == ref(i)\n",
    "json": "import json\ndef test(): assert g({'a': None}) == json.loads('{\"a\": null}')\n",
    "bool": "def test(): assert g(True) == bool(1)\n",
    "set": "def test(): assert f(3)['s'] == set(range(3, 4))\n",
    "empty": "def test(): assert g([]) == list(())\n",
    "bytes": "def test(): assert g(b'') == b''.join([])\n",
    "date": "import datetime\ndef test():\n    day = datetime.date(2024, 2, 29)\n"
    "    assert g(datetime.date(2024, 2, 29)) == day\n",
    "infinite": "import math\ndef test(): assert g(math.inf) == math.inf\n",
    "helper": "def check(a, b):\n    assert a == b, (a, b)\ndef test(): check(f(3)['v'], 9)\n",
    "helper and reference": "def check(a, b):\n    if a != b: raise AssertionError(a)\n"
    "def test(): check(f(3)['v'], 3 * 3)\n",
    "both judged": "def test(): assert g(3) == g(3)\n",
    "and": "def test(): assert f(3)['v'] == 3 * 3 and f(2)['v'] == 2 * 2\n",
    "close": "import math\ndef test(): assert math.isclose(f(1)['r'], 1 / 3, rel_tol=1e-3)\n",
    "difference": "def test(): assert abs(f(1)['r'] - 1 / 3) < 1e-6\n",
    "approx": "def test(): assert f(1)['r'] == pytest.approx(1 / 3)\n",
    "approx of a parameter": "@pytest.mark.parametrize('want', [0.33333])\n"
    "def test(want): assert f(1)['r'] == pytest.approx(want, abs=1e-3)\n",
    "unittest": "class TestIt(unittest.TestCase):\n    def test(self):\n        for n, want in [(1, 1), (3, 9)]:\n"
    "            with self.subTest(n=n, want=want): self.assertEqual(f(n)['v'], want)\n",
    "fixture": "@pytest.fixture\ndef case(): return 3, 9\ndef test(case=(3, 9)):\n    n, want = case\n"
    "    assert f(n)['v'] == want\n",
    "contained number": "def test(): assert 5 in range(g(1), 9)\n",
    "member": "class TestIt(unittest.TestCase):\n    def test(self): self.assertIn(5, g([5]))\n",
    "contains": "def test(): assert 'a' in g('xay')\n",
    "starts": "def test(): assert g('xay').startswith('xa')\n",
}
_HEADER = "import pytest, unittest\nfrom judged import f, g\n"


def _calls(module: dict[str, Any]) -> Iterator[Callable[[], object]]:
    """The calls that pytest would make."""
    if "TestIt" in module:
        yield from (case.debug for case in unittest.defaultTestLoader.loadTestsFromTestCase(module["TestIt"]))  # type: ignore[union-attr]
        return
    columns = []
    for mark in getattr(module["test"], "pytestmark", ()):
        names, rows = mark.args
        split = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        whole = [getattr(row, "values", row) if len(split) > 1 or hasattr(row, "values") else (row,) for row in rows]
        columns.append([dict(zip(split, row, strict=True)) for row in whole])
    for parts in product(*columns):
        arguments = {name: value for part in parts for name, value in part.items()}
        yield lambda arguments=arguments: module["test"](**arguments)  # type: ignore[misc]


def _outcomes(source: bytes, monkeypatch: pytest.MonkeyPatch, code: str) -> list[bool]:
    judged = types.ModuleType("judged")
    exec(code, judged.__dict__)
    monkeypatch.setitem(sys.modules, "judged", judged)
    module: dict[str, Any] = {"__name__": "test_it"}
    exec(compile(source, "test_it.py", "exec"), module)
    outcomes = []
    for call in _calls(module):
        try:
            call()
        except Exception:  # noqa: BLE001  any exception fails a test
            outcomes.append(False)
        else:
            outcomes.append(True)
    return outcomes


@pytest.mark.parametrize("name", TESTS)
def test_another_constant_is_expected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (_HEADER + TESTS[name]).encode()
    honest = HONEST + "def g(x): return x\n"
    suite = suite_of(None, {"test_it.py": source}, {"judged.py": b""}, "counted")
    (expected,) = suite.expected.values()
    constant = [twin for twin in expected.twins if twin.kind in ("literal", "inner")]
    opposite = [twin for twin in expected.twins if twin.kind == "opposite"]
    assert constant
    assert all(_outcomes(source, monkeypatch, honest))
    for twin in constant:
        changed = edited(source, dict.fromkeys(twin.edits))
        assert not any(_outcomes(changed, monkeypatch, honest)), changed
    for twin in opposite:
        changed = edited(source, dict.fromkeys(twin.edits))
        assert all(_outcomes(changed, monkeypatch, honest)), changed


AGREES = """\
class Any:
    __getitem__ = __sub__ = __abs__ = __add__ = __rsub__ = lambda s, *a: s
    __eq__ = __lt__ = __le__ = __contains__ = startswith = lambda s, o: True
def f(*a): return Any()
g = f
import math
math.isclose = lambda *a, **k: True
"""


@pytest.mark.parametrize("name", sorted(TESTS.keys() - {"contained number"}))
def test_an_object_that_agrees_with_anything_passes_a_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (_HEADER + TESTS[name]).encode()
    suite = suite_of(None, {"test_it.py": source}, {"judged.py": b""}, "counted")
    (expected,) = suite.expected.values()
    monkeypatch.setattr("math.isclose", mock.DEFAULT)  # restored after the judged code replaced it
    constant = [twin for twin in expected.twins if twin.kind in ("literal", "inner")]
    edits = [dict.fromkeys(twin.edits) for twin in constant]
    assert any(all(_outcomes(edited(source, changed), monkeypatch, AGREES)) for changed in edits)


def test_an_object_with_every_attribute_is_changed_to_another() -> None:
    """sqlparse's token types are tuples that make an attribute when it is read."""

    class Token(tuple[str, ...]):
        def __getattr__(self, name: str) -> Token:
            return Token((*self, name))

    namespace: dict[str, Any] = {}
    exec(twins._DEFINITION, namespace)
    assert type(namespace[twins._CHANGE](Token(("Comment",)), 5, False)) is object


def test_the_added_function_is_not_seen_by_other_runs() -> None:
    source = (_HEADER + TESTS["reference"]).encode()
    suite = suite_of(None, {"test_it.py": source}, {"judged.py": b""}, "counted")
    for run in suite.runs:
        assert (twins._CHANGE.encode() in run.tests["test_it.py"]) == any(
            twins._CHANGE.encode() in edit.text for twin in run.twins.values() for edit in twin.edits
        )


@pytest.mark.parametrize(
    ("constant", "code"),
    [
        ("{1: 'a'}", "class It(set):\n    def __eq__(self, other): return set(self) == set(other)\nit = It([1])\n"),
        (
            "{'major': 1, 'build': None, 'label': 'a'}",
            "class It:\n    def __eq__(self, other): return other.get('major') == 1\nit = It()\n",
        ),
    ],
)
def test_objects_that_ignore_keys_or_values_of_a_dictionary(
    constant: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"from judged import it\ndef test():\n    assert it == {constant}\n".encode()
    for _ in range(10):
        (expected,) = suite_of(None, {"test_it.py": source}, {"judged.py": b""}, "counted").expected.values()
        for twin in expected.twins:
            changed = edited(source, dict.fromkeys(twin.edits))
            assert _outcomes(changed, monkeypatch, code) == [twin.kind == "opposite"], changed
