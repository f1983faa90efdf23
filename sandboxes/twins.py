"""Twins: tests changed so that honest code fails them.

Tests that share a process with the code they judge can't be trusted to report their outcomes, since the code may change
them. So a suite runs several times, each time in a new process and with different tests replaced by twins. Only the
caller knows which tests are real. Code that passes the tests honestly fails their twins; code that cheats to make tests
pass makes twins pass too.

Three kinds of twins, most reliable first:
- a literal that is compared with a value is replaced: `assert f(1) == 2` by `assert f(1) == 5`;
- an assertion is negated: `assert f(1) in table` by `assert not (f(1) in table)`;
- the literals of an object that a value is compared with are replaced (`assert f(1) == Point(2, 3)` by `Point(4, 7)`),
  or an assertion that may not be reached (in a loop) is changed. Honest code nearly always fails these, so they count
  against the code only if all such twins of a test pass.

A fourth kind is a twin that honest code passes: every comparison with a literal is negated, with another literal,
`assert f(1) == 2` by `assert not (f(1) == 5)`. An object that claims to equal anything fails it.
"""

from __future__ import annotations

import ast
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from sandboxes.runner.decoys import alternatives

Function = ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal["literal", "negated", "inner", "unsure", "opposite"]
_chance = secrets.SystemRandom()
_HARMLESS_MARKS = {
    "parametrize", "usefixtures", "asyncio", "slow", "unit", "skip", "skipif", "skipIf", "skipUnless", "staticmethod",
}  # fmt: skip
"""Decorators that don't stop a test before its end, except by skipping it."""
_OPPOSITES = {
    "assertTrue": "assertFalse", "assertEqual": "assertNotEqual", "assertIn": "assertNotIn", "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone", "assertIsInstance": "assertNotIsInstance", "assertGreater": "assertLessEqual",
    "assertLess": "assertGreaterEqual", "assertAlmostEqual": "assertNotAlmostEqual", "assertRegex": "assertNotRegex",
}  # fmt: skip
_OPPOSITES |= {opposite: name for name, opposite in _OPPOSITES.items()}
_EQUALITIES = {"assertEqual", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual",
               "assertMultiLineEqual", "assertSequenceEqual", "assertAlmostEqual"}  # fmt: skip
_RAISES = {"raises", "assertRaises", "assertRaisesRegex"}


_BUILDERS = {
    "bytes", "bytearray", "complex", "date", "datetime", "deque", "defaultdict", "dict", "float", "frozenset", "int",
    "list", "namedtuple", "set", "str", "time", "timedelta", "tuple",
}  # fmt: skip
"""Constructors with lower-case names."""
_VARIANTS = 3
_LARGEST_TOLERANCE = 0.1
"""Absolute and relative; smaller than the distance of the alternatives that `_far` returns."""


Comparing = Mapping[str, Mapping[str, int]]
"""By function name: the parameters that the function compares, with their positions."""


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
    """For a replaced literal: the edits, with those that negate the comparison."""


def edited(source: bytes, edits: Iterable[Edit]) -> bytes:
    """The source after applying the edits, which don't overlap."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


def comparing(tree: ast.Module) -> Comparing:
    """Functions and methods of a test file that unconditionally assert that a parameter equals something."""
    compared: dict[str, dict[str, int]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = [argument.arg for argument in function.args.args if argument.arg != "self"]
            used = [node.id for node in ast.walk(function) if isinstance(node, ast.Name)]
            sides = [side.id for pair in _equated(function) for side in pair if isinstance(side, ast.Name)]
            positions = {name: names.index(name) for name in names if name in sides and used.count(name) == 1}
            compared[function.name] = positions if function.name not in compared else {}  # not if ambiguous
    return compared


def _equated(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pairs of expressions that a function without a return asserts to be equal, at its top level."""
    for statement in () if _may_leave(function) else function.body:
        if isinstance(statement, ast.Assert) and _is_equality(statement.test):
            yield statement.test.left, statement.test.comparators[0]
        if isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Raise):
            test = statement.test
            if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.NotEq):
                yield test.left, test.comparators[0]
        call = _assertion(statement.value) if isinstance(statement, ast.Expr) else None
        if call and len(call.args) >= 2 and _name(call.func) in _EQUALITIES - {"assertAlmostEqual"}:
            yield call.args[0], call.args[1]


def twins_of(function: Function, source: bytes, helpers: Comparing) -> list[Twin]:
    """The twins of a test; none if it may return early.

    Args:
        function: the test, which isn't marked as an expected failure.
        source: text of its file.
        helpers: functions that compare their parameters.
    """
    if not all(map(_is_harmless, function.decorator_list)) or _may_leave(function):
        return []
    twins = list(_Finder(function, source, helpers).twins(function.body))
    opposites = [twin.opposite for twin in twins if twin.kind == "literal" and twin.opposite]
    if opposites:
        twins.append(Twin("opposite", tuple(edit for edits in opposites for edit in edits)))
    return twins


def _is_harmless(decorator: ast.expr) -> bool:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return _name(node) in _HARMLESS_MARKS


def _may_leave(function: Function) -> bool:
    return any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in _without_inner_scopes(function))


def _without_inner_scopes(function: Function) -> Iterator[ast.AST]:
    pending: list[ast.AST] = [*function.body]
    while pending:
        yield (node := pending.pop())
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return _name(node)


def _is_equality(test: ast.expr) -> TypeGuard[ast.Compare]:
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)


def _assertion(node: ast.expr) -> ast.Call | None:
    """The node, if it calls an assertion method of unittest."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _name(node.func.value) == "self":
        return node if node.func.attr.startswith("assert") else None
    return None


class _Finder:
    def __init__(self, function: Function, source: bytes, helpers: Comparing) -> None:
        stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        declared = (node.names for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal))
        self._variables = {node.id for node in stored} - {name for names in declared for name in names}
        self._source = source
        self._helpers = helpers
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def twins(self, body: Sequence[ast.stmt]) -> Iterator[Twin]:
        """Twins from assertions that are always reached, and after which nothing affects other tests.

        A failing twin skips the statements after it, such as a clean-up.
        """
        restoring = [index for index, statement in enumerate(body) if not self._is_local(statement)]
        for index, statement in enumerate(body):
            if index >= max(restoring, default=0):
                yield from self._of(statement)

    def _is_local(self, statement: ast.stmt) -> bool:
        """Whether skipping a statement affects nothing outside the test, judging by its source."""
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            return all(
                isinstance(target, ast.Tuple) or getattr(target, "id", "") in self._variables for target in targets
            )
        if isinstance(statement, ast.With) and _contexts(statement) & _RAISES:
            return True
        if isinstance(statement, ast.With | ast.AsyncWith | ast.For | ast.AsyncFor | ast.While | ast.If):
            return all(map(self._is_local, [*statement.body, *getattr(statement, "orelse", ())]))
        if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            return bool(_assertion(call)) or _name(call.func) in self._helpers or _root(call.func) in self._variables
        return isinstance(statement, Function | ast.ClassDef | ast.Assert | ast.Import | ast.ImportFrom | ast.Pass)

    def _of(self, statement: ast.stmt) -> Iterator[Twin]:
        if isinstance(statement, ast.With):
            contexts = _contexts(statement)
            if contexts & _RAISES:
                for item in statement.items:
                    yield from self._raises(item.context_expr)
            elif contexts == {"subTest"}:
                yield from self.twins(statement.body)
            else:
                yield from self._unsure(statement.body)
        elif isinstance(statement, ast.For | ast.AsyncFor | ast.AsyncWith):
            yield from self._unsure(statement.body)
        elif isinstance(statement, ast.Assert):
            yield from self._assert(statement.test)
        elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            if _name(call.func) in _RAISES and len(call.args) > 1:
                yield from self._raises(call)
            elif _assertion(call):
                yield from self._method(call)
            for name, position in self._helpers.get(_name(call.func), {}).items():
                passed = [item.value for item in call.keywords if item.arg == name]
                for literal in filter(_is_literal, passed or call.args[position : position + 1]):
                    yield from self._replaced("literal", [literal], False)

    def _unsure(self, body: Sequence[ast.stmt]) -> Iterator[Twin]:
        """Twins from assertions that may not be reached, or whose failure may be suppressed."""
        for twin in self.twins(body):
            yield Twin("unsure" if twin.kind == "negated" else "inner", twin.edits)

    def _assert(self, test: ast.expr) -> Iterator[Twin]:
        start, end = self._span(test)
        if _is_equality(test):
            around = (Edit(start, start, b"not ("), Edit(end, end, b")"))
            yield from self._compared(test.left, test.comparators[0], around)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            text = self._source[start + len("not") : end]
        else:
            text = b"not (" + self._source[start:end] + b")"
        yield Twin("negated", (Edit(start, end, b"(" + text + b")"),))

    def _method(self, call: ast.Call) -> Iterator[Twin]:
        name = _name(call.func)
        near = name == "assertAlmostEqual"
        _, end = self._span(call.func)
        negation = (Edit(end - len(name), end, _OPPOSITES[name].encode()),) if name in _OPPOSITES else ()
        if name in _EQUALITIES and len(call.args) >= 2 and not (near and _is_tolerant(call, call.args[2:])):
            yield from self._compared(call.args[0], call.args[1], negation, near=near)
        if negation:
            yield Twin("negated", negation)

    def _raises(self, call: ast.expr) -> Iterator[Twin]:
        """A twin that expects another exception; none if the original, uncaught, would end the whole run."""
        if isinstance(call, ast.Call) and _name(call.func) in _RAISES and call.args:
            start, end = self._span(call.args[0])
            if not any(name in self._source[start:end] for name in (b"Interrupt", b"BaseException", b"xit")):
                yield Twin("literal", (Edit(start, end, b"UnicodeTranslateError"),))

    def _compared(
        self, left: ast.expr, right: ast.expr, negation: tuple[Edit, ...], *, near: bool = False
    ) -> Iterator[Twin]:
        literals = [side for side in (left, right) if _is_literal(side)]
        if len(literals) == 1:
            yield from self._replaced("literal", literals, near, negation)
        elif not literals:
            calls = [side for side in (left, right) if isinstance(side, ast.Call)]
            approximate = [call for call in calls if _name(call.func) == "approx"]
            for call in approximate:
                if len(call.args) == 1 and _is_literal(call.args[0]) and not _is_tolerant(call):
                    yield from self._replaced("literal", call.args, True, negation)
            built = [] if approximate else [side for side in (left, right) if _is_built(side)]
            if len(built) == 2 and ast.dump(left) != ast.dump(right):
                return  # they are equal though their sources differ, so their literals may not matter
            for side in built:
                for _ in range(_VARIANTS):
                    yield from self._replaced("inner", list(_literals_in(side)), near)

    def _replaced(
        self, kind: Kind, literals: Sequence[ast.expr], near: bool, negation: tuple[Edit, ...] = ()
    ) -> Iterator[Twin]:
        edits: list[Edit] = []
        for node in literals:
            try:
                value = ast.literal_eval(node)
                if others := _far(value) if near else alternatives(value, 2):
                    text = repr(_chance.choice(others)).encode("utf-8", "surrogatepass")
                    edits.append(Edit(*self._span(node), b"(" + text + b")"))
            except ValueError:  # an integer of too many digits
                continue
        if edits:
            yield Twin(kind, tuple(edits), (*edits, *negation) if negation else ())


def _contexts(statement: ast.With) -> set[str]:
    """Names of the functions whose context managers are entered; "" for other expressions."""
    return {_name(getattr(item.context_expr, "func", item.context_expr)) for item in statement.items}


# --- literals


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_built(node: ast.expr) -> bool:
    """Whether an expression creates an object: a call of a class, or a list, tuple, set or dict display."""
    if isinstance(node, ast.Call):
        name = _name(node.func)
        return name in _BUILDERS or name.lstrip("_")[:1].isupper()
    return isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict)


def _literals_in(node: ast.expr) -> Iterator[ast.expr]:
    """The outermost literals of an expression that creates an object."""
    if _is_literal(node):
        yield node
    elif _is_built(node):
        for child in ast.iter_child_nodes(node):
            value = child.value if isinstance(child, ast.keyword) else child
            if isinstance(value, ast.expr) and value is not getattr(node, "func", None):
                yield from _literals_in(value)


def _far(value: Any) -> list[Any]:
    """Values that are clearly different from a number or from a sequence of numbers."""
    if type(value) in (int, float):
        return [value + step * (1 + abs(value)) for step in (2, 3, 4)]
    if isinstance(value, list | tuple) and value:
        items = [_far(item) for item in value]
        return [type(value)(map(_chance.choice, items))] if all(items) else []
    return []


def _is_tolerant(call: ast.Call, more: Sequence[ast.expr] = ()) -> bool:
    """Whether a comparison of numbers has a tolerance that is large or not a literal."""
    for name, node in [("places", item) for item in more] + [(item.arg, item.value) for item in call.keywords]:
        value = ast.literal_eval(node) if _is_literal(node) else None
        if name in ("msg", "nan_ok"):
            continue
        if not isinstance(value, int | float) or value < 0 or (name != "places" and value > _LARGEST_TOLERANCE):
            return True
    return False
