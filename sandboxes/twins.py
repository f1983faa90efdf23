"""Twins: tests changed so that honest code fails them.

Tests that share a process with the code they judge can't be trusted to report: the code may change any outcome. So a
suite is run several times, each time in a new process and with other tests replaced by twins, which only the caller can
tell from the real ones. Code that passes the tests honestly fails their twins. Code that makes tests pass, by whatever
means, makes twins pass too.

Three kinds of twins, by how surely honest code fails them:
- a literal that is compared with a value is replaced: `assert f(1) == 2` by `assert f(1) == 5`;
- an assertion is negated: `assert f(1) in table` by `assert not (f(1) in table)`;
- a literal inside a call in a comparison is replaced (`assert f(1) == Point(2, 3)` by `Point(2, 7)`), or an assertion
  is changed that may not be reached (in a loop). Honest code nearly always fails these; they count against the code
  only if all of a test's pass.

And one that honest code passes: every comparison with a literal is replaced by its opposite with another one,
`assert f(1) == 2` by `assert not (f(1) == 5)`. An object that claims to equal anything fails it.
"""

from __future__ import annotations

import ast
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sandboxes.runner.decoys import alternatives

Kind = Literal["literal", "negated", "inner", "unsure", "opposite"]
_chance = secrets.SystemRandom()
_LEAVES = {"skip", "skipTest", "SkipTest", "importorskip", "xfail", "skipif", "skipIf", "skipUnless", "expectedFailure"}
_HARMLESS_MARKS = {"parametrize", "usefixtures", "asyncio", "slow", "unit"}
_OPPOSITES = {
    "assertTrue": "assertFalse", "assertEqual": "assertNotEqual", "assertIn": "assertNotIn", "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone", "assertIsInstance": "assertNotIsInstance", "assertGreater": "assertLessEqual",
    "assertLess": "assertGreaterEqual", "assertAlmostEqual": "assertNotAlmostEqual", "assertRegex": "assertNotRegex",
}  # fmt: skip
_OPPOSITES |= {opposite: name for name, opposite in _OPPOSITES.items()}
_EQUALITIES = {"assertEqual", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual",
               "assertMultiLineEqual", "assertSequenceEqual", "assertAlmostEqual"}  # fmt: skip
_APPROXIMATE = {"assertAlmostEqual", "approx"}
_CHECKS = re.compile("_?(check|expect|verify|compare|ensure|equal|same|assert_)").match
"""Of functions of the tests that compare."""
_RAISES = {"raises", "assertRaises", "assertRaisesRegex"}


@dataclass(frozen=True)
class Edit:
    """A replacement of source text, by offsets of its bytes."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Twin:
    """One way to change a test."""

    kind: Kind
    edits: tuple[Edit, ...]
    opposite: tuple[Edit, ...] = ()
    """Of a literal that is replaced: the edits that negate the comparison as well."""


def edited(source: bytes, edits: Iterable[Edit]) -> bytes:
    """The source with the edits made; they don't overlap."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


def twins_of(function: ast.FunctionDef | ast.AsyncFunctionDef, source: bytes) -> list[Twin]:
    """The twins of a test that surely runs to its end; none for one that may skip, return early or expect to fail."""
    if not all(map(_is_harmless, function.decorator_list)) or _may_leave(function):
        return []
    twins = list(_Finder(source).twins(function.body))
    opposites = [twin.opposite for twin in twins if twin.kind == "literal" and twin.opposite]
    if opposites:
        twins.append(Twin("opposite", tuple(edit for edits in opposites for edit in edits)))
    return twins


def _is_harmless(decorator: ast.expr) -> bool:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(node, ast.Attribute) and node.attr in _HARMLESS_MARKS


def _may_leave(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Try):
            return True
        if _name(node) in _LEAVES:
            return True
    return False


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def twins(self, body: Sequence[ast.stmt]) -> Iterator[Twin]:
        """Twins by the assertions that are reached in any case."""
        for statement in body:
            if isinstance(statement, ast.With):
                contexts = [item.context_expr for item in statement.items]
                names = {_name(context.func) if isinstance(context, ast.Call) else "" for context in contexts}
                if names & _RAISES:
                    yield from self._raises(statement)
                elif names <= {"subTest"}:
                    yield from self.twins(statement.body)
                else:
                    yield from self._unsure(statement.body)
            elif isinstance(statement, ast.For | ast.AsyncFor):
                for literal in _literals_in_calls(statement.iter):
                    yield from self._replaced("inner", literal, True)
                yield from self._unsure(statement.body)
            elif isinstance(statement, ast.AsyncWith):
                yield from self._unsure(statement.body)
            elif isinstance(statement, ast.Assert):
                yield from self._assert(statement.test)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                yield from self._method(statement.value)
                if _CHECKS(_name(statement.value.func)):
                    for literal in filter(_is_literal, statement.value.args):
                        yield from self._replaced("inner", literal, True)

    def _unsure(self, body: Sequence[ast.stmt]) -> Iterator[Twin]:
        """Twins by assertions that may not be reached, or whose failure may not get out."""
        for twin in self.twins(body):
            yield Twin("unsure" if twin.kind == "negated" else "inner", twin.edits)

    def _assert(self, test: ast.expr) -> Iterator[Twin]:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            start, end = self._span(test)
            around = (Edit(start, start, b"not ("), Edit(end, end, b")"))
            yield from self._compared(test.left, test.comparators[0], around)
        start, end = self._span(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            start, _ = self._span(test.operand)
            text = b"(" + self._source[start:end] + b")"
            yield Twin("negated", (Edit(self._span(test)[0], end, text),))
        else:
            yield Twin("negated", (Edit(start, end, b"not (" + self._source[start:end] + b")"),))

    def _method(self, call: ast.Call) -> Iterator[Twin]:
        name = _name(call.func)
        of_self = isinstance(call.func, ast.Attribute) and _name(call.func.value) == "self"
        if not (of_self and name.startswith("assert")):
            return
        _, end = self._span(call.func)
        negation = (Edit(end - len(name), end, _OPPOSITES[name].encode()),) if name in _OPPOSITES else ()
        if name in _EQUALITIES and len(call.args) >= 2:
            yield from self._compared(call.args[0], call.args[1], negation, approximate=name in _APPROXIMATE)
        if negation:
            yield Twin("negated", negation)

    def _raises(self, statement: ast.With) -> Iterator[Twin]:
        for item in statement.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _name(call.func) in _RAISES and call.args:
                yield Twin("literal", (Edit(*self._span(call.args[0]), b"UnicodeTranslateError"),))
                return

    def _compared(
        self, left: ast.expr, right: ast.expr, negation: tuple[Edit, ...], *, approximate: bool = False
    ) -> Iterator[Twin]:
        sides = [side for side in (left, right) if _is_literal(side)]
        if len(sides) == 1:
            yield from self._replaced("literal", sides[0], approximate, negation)
        elif not sides:
            for side in (left, right):
                about = side.args[:1] if isinstance(side, ast.Call) and _name(side.func) in _APPROXIMATE else []
                if about and _is_literal(about[0]):
                    yield from self._replaced("literal", about[0], True, negation)
                    return
            for side in (right, left):
                for inner in _literals_in_calls(side):
                    yield from self._replaced("inner", inner, True)

    def _replaced(
        self, kind: Kind, node: ast.expr, approximate: bool, negation: tuple[Edit, ...] = ()
    ) -> Iterator[Twin]:
        value = ast.literal_eval(node)
        if approximate and type(value) in (int, float):
            others = [value + step * (1 + abs(value)) for step in (1, 2, 3)]
        else:
            others = alternatives(value, 4)
        if others:
            text = repr(_chance.choice(others)).encode("utf-8", "surrogatepass")
            edit = Edit(*self._span(node), b"(" + text + b")")
            yield Twin(kind, (edit,), (edit, *negation) if negation else ())


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _literals_in_calls(node: ast.expr) -> Iterator[ast.expr]:
    """The outermost literals among the arguments of calls."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            for argument in (*child.args, *(item.value for item in child.keywords)):
                if _is_literal(argument):
                    yield argument
