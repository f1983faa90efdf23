"""Twins: tests changed so that honest code fails them.

Tests that share a process with the code they judge can't be trusted to report their outcomes, since the code may change
them. So a suite runs several times, each time in a new process and with different tests replaced by twins. Only the
caller knows which tests are real. Code that passes the tests honestly fails their twins; code that cheats to make tests
pass makes twins pass too.

Three kinds of twins, most reliable first:
- the expected value is changed. A literal is replaced: `assert f(1) == 2` by `assert f(1) == 5`. So are the literals
  that a name in the assertion takes from a `parametrize`, a loop over a table, or an assignment. Any other expected
  value is changed when the test runs, by a function that is added to the file: `assert f(1) == g(1)` becomes
  `assert f(1) == changed(g(1))`;
- an assertion is negated: `assert f(1) in table` by `assert not (f(1) in table)`;
- an object or a contained value is changed: the literals of an object that a value is compared with are replaced
  (`assert f(1) == Point(2, 3)` by `Point(4, 7)`), or the value that another must contain (`assert "a" in f(1)`). The
  same kind includes changes of assertions that may not be reached (in a loop). Honest code nearly always fails these
  twins, so they count against the code only if all such twins of a test pass.

A fourth kind is a twin that honest code passes: every comparison with a literal is negated, with another literal,
`assert f(1) == 2` by `assert not (f(1) == 5)`. An object that claims to equal anything fails it.
"""

from __future__ import annotations

import ast
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
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
_CLOSE = {"isclose", "allclose", "array_equal"}
_ASSERT_CLOSE = {"assert_allclose", "assert_array_equal", "assert_almost_equal", "assert_equal"}
"""Functions of math, numpy and numpy.testing that compare their first two arguments."""
_CONTAIN = {"startswith", "endswith"}


_BUILDERS = {
    "bytes", "bytearray", "complex", "date", "datetime", "deque", "defaultdict", "dict", "float", "frozenset", "int",
    "list", "namedtuple", "set", "str", "time", "timedelta", "tuple",
}  # fmt: skip
"""Constructors with lower-case names."""
_VARIANTS = 3
_LARGEST_TOLERANCE = 0.1
"""Absolute and relative; smaller than the distance of the alternatives that `_far` returns."""


_CHANGE = f"_{secrets.token_hex(6)}"
_DEFINITION = f'''

def {_CHANGE}(value, step, far):
    """A value of the same type that honest code does not return; any object if the type is not known."""
    kind, changed = type(value), object()
    try:
        if kind is bool:
            return not value
        if value is None:
            return step
        if isinstance(value, (str, bytes, bytearray)):
            is_text = isinstance(value, str)
            value, letter = (str(value), chr(97 + step % 26)) if is_text else (bytes(value), bytes([97 + step % 26]))
            return 3 * letter if far and 3 * letter != value else value + 3 * letter if step > 0 else 3 * letter + value
        if kind in (list, tuple):
            items = list(value) or [None]
            items[step % len(items)] = {_CHANGE}(items[step % len(items)], step, far)
            return kind(items)
        if kind in (set, frozenset):
            changed = kind([*value, str(step)])
        elif isinstance(value, dict):
            changed = value.copy()
            changed["added", step] = step  # a set may equal any dictionary with its items as keys
        elif hasattr(kind, "resolution"):  # of the type: an object may have every attribute
            changed = value + step * value.resolution
        elif hasattr(kind, "joinpath"):
            changed = value.joinpath(str(step))
        elif isinstance(value, (int, float, complex)) or kind.__module__ in ("decimal", "fractions", "numpy"):
            changed = value + step * (1 + (far or not isinstance(value, int)) * abs(value))
        if str(changed == value) == "True":
            changed = object()
    except Exception:
        changed = object()
    return changed
'''.encode()
"""Added to a file of tests. It needs no other names, since the judged code may have replaced them."""

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


class TestFile:
    """A file of tests. `helpers` are modules among the tests, `single` the names that are read once."""

    __test__ = False

    def __init__(self, source: bytes, tree: ast.Module, helpers: Set[str], single: Set[str]) -> None:
        self.source = source
        self.single = single
        self._tree = tree
        self._plain = helpers | sys.stdlib_module_names | {"pytest", "numpy"}
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr) -> tuple[int, int]:
        """Start and end of an expression, as byte offsets."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    @cached_property
    def constants(self) -> Mapping[str, ast.expr]:
        """Values of the module's variables that are assigned exactly once."""
        return _assigned_once(self._tree, self._tree.body)

    @cached_property
    def functions(self) -> Set[str]:
        """Functions of the module, which may be fixtures."""
        return {node.name for node in self._tree.body if isinstance(node, Function)}

    @cached_property
    def judged(self) -> Set[str]:
        """Names in the module that may refer to judged code, or that depend on such names."""
        names: set[str] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                names |= {
                    (item.asname or item.name).partition(".")[0] for item in node.names if not self._is_plain(item.name)
                }
            elif isinstance(node, ast.ImportFrom) and not self._is_plain(node.module or ""):
                names |= {item.asname or item.name for item in node.names}
        return _depending(self._tree.body, names)

    def _is_plain(self, module: str) -> bool:
        return module.partition(".")[0] in self._plain or module.rpartition(".")[2] in self._plain


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
            used = [node.id for node in _uses(function)]
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


def twins_of(function: Function, file: TestFile, helpers: Comparing) -> list[Twin]:
    """The twins of a test, which isn't marked as an expected failure; none if it may return early."""
    if not all(map(_is_harmless, function.decorator_list)) or _may_leave(function):
        return []
    twins = list(_Finder(function, file, helpers).twins(function.body))
    opposites = [twin.opposite for twin in twins if twin.kind == "literal" and twin.opposite]
    if opposites:
        twins.append(Twin("opposite", tuple(edit for edits in opposites for edit in edits)))
    return twins


def _is_harmless(decorator: ast.expr) -> bool:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return _name(node) in _HARMLESS_MARKS


def _may_leave(function: Function) -> bool:
    return any(
        isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in _without_inner_scopes(function.body)
    )


def _without_inner_scopes(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    pending: list[ast.AST] = [*body]
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
    def __init__(self, function: Function, file: TestFile, helpers: Comparing) -> None:
        stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        declared = (node.names for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal))
        self._variables = {node.id for node in stored} - {name for names in declared for name in names}
        self._file = file
        self._span = file.span
        self._source = file.source
        self._helpers = helpers
        self._origins = _Origins(function, file, self._variables)
        parameters = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
        plain = self._origins.parametrized | file.functions - file.judged
        judged = file.judged - self._variables - parameters | parameters - plain
        self._judged = _depending(function.body, judged)
        sides = (side for node in ast.walk(function) for side in self._sides(node))
        compared = {id(side) for side in sides}
        elsewhere = {node.id for node in _uses(function) if id(node) not in compared}
        self._traceable = {side.id for side in ast.walk(function) if isinstance(side, ast.Name)} - elsewhere

    def _sides(self, node: ast.AST) -> Iterator[ast.expr]:
        """Operands of an equality, including arguments of functions that compare them."""
        if isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.Call) and (_assertion(node) or _name(node.func) in _CLOSE | _ASSERT_CLOSE):
            yield from node.args[:2]
        elif isinstance(node, ast.Call) and _name(node.func) == "approx":
            yield from node.args[:1]
        elif isinstance(node, ast.Call):
            yield from self._passed(node)

    def _passed(self, call: ast.Call) -> Iterator[ast.expr]:
        """Arguments of a call that the called helper compares."""
        is_method = isinstance(call.func, ast.Attribute) and _name(call.func.value) != "self"
        if is_method and _root(call.func) in self._judged:
            return
        for name, position in self._helpers.get(_name(call.func), {}).items():
            passed = [item.value for item in call.keywords if item.arg == name]
            yield from passed or call.args[position : position + 1]

    def twins(self, body: Sequence[ast.stmt]) -> Iterator[Twin]:
        """Twins from assertions that are always reached, and that no clean-up follows: a failing twin would skip it."""
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
        elif isinstance(statement, ast.For) and self._origins.is_walked(statement):
            yield from (Twin(twin.kind, twin.edits) for twin in self.twins(statement.body))
        elif isinstance(statement, ast.For | ast.AsyncFor | ast.AsyncWith):
            yield from self._unsure(statement.body)
        elif isinstance(statement, ast.Assert):
            yield from self._assert(statement.test)
        elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            if _name(call.func) in _RAISES and len(call.args) > 1:
                yield from self._raises(call)
            elif _assertion(call):
                yield from self._method(call)
            elif _name(call.func) in _ASSERT_CLOSE:
                yield from self._close(call)
            else:
                yield from self._changed(self._expected(list(self._passed(call))), near=False)

    def _unsure(self, body: Sequence[ast.stmt]) -> Iterator[Twin]:
        """Twins from assertions that may not be reached, or whose failure may be suppressed."""
        for twin in self.twins(body):
            yield Twin("unsure" if twin.kind == "negated" else "inner", twin.edits)

    def _assert(self, test: ast.expr) -> Iterator[Twin]:
        start, end = self._span(test)
        yield from self._values(test, (Edit(start, start, b"not ("), Edit(end, end, b")")))
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            text = self._source[start + len("not") : end]
        else:
            text = b"not (" + self._source[start:end] + b")"
        yield Twin("negated", (Edit(start, end, b"(" + text + b")"),))

    def _values(self, test: ast.expr, negation: tuple[Edit, ...]) -> Iterator[Twin]:
        """Twins of an asserted expression that have another constant."""
        if _is_equality(test):
            yield from self._compared(test.left, test.comparators[0], negation)
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for value in test.values:
                yield from self._values(value, ())
        elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.In):
            yield from self._contained(test, test.left, b") and (")
        elif isinstance(test, ast.Compare) and (difference := _small_difference(test)):
            yield from self._compared(difference.left, difference.right, (), near=True)
        elif isinstance(test, ast.Call) and _name(test.func) in _CLOSE:
            yield from self._close(test)
        elif isinstance(test, ast.Call) and _name(test.func) in _CONTAIN:
            for text in test.args[:1]:
                if isinstance(text, ast.Constant | ast.JoinedStr):
                    yield from self._contained(test, text, b") and (")

    def _close(self, call: ast.Call) -> Iterator[Twin]:
        is_known = _root(call.func) not in self._judged and len(call.args) == 2
        if is_known and not _is_tolerant(call):
            yield from self._compared(call.args[0], call.args[1], (), near=True)

    def _contained(self, whole: ast.expr, part: ast.expr, separator: bytes) -> Iterator[Twin]:
        """A twin that looks for three other values, as a range or a pattern contains some of them."""
        if self._is_judged(part):
            return
        start, end = self._span(whole)
        step = _chance.randrange(10**6, 10**7)
        ways = [self._wrapped(part, sign * step, near=far) for sign, far in ((1, False), (-1, False), (1, True))]
        shifted = [Edit(edit.start - start, edit.end - start, edit.text) for edit, _ in ways]
        texts = [edited(self._source[start:end], [edit]) for edit in shifted]
        yield Twin("inner", (Edit(start, end, b"((" + separator.join(texts) + b"))"), ways[0][1]))

    def _method(self, call: ast.Call) -> Iterator[Twin]:
        name = _name(call.func)
        near = name == "assertAlmostEqual"
        _, end = self._span(call.func)
        negation = (Edit(end - len(name), end, _OPPOSITES[name].encode()),) if name in _OPPOSITES else ()
        if name in _EQUALITIES and len(call.args) >= 2 and not (near and _is_tolerant(call, call.args[2:])):
            yield from self._compared(call.args[0], call.args[1], negation, near=near)
        if name == "assertIn" and len(call.args) >= 2:
            yield from self._contained(call, call.args[0], b"), (")
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
                if len(call.args) == 1 and not _is_tolerant(call):
                    yield from self._changed(call.args, near=True, negation=negation)
            built = [] if approximate else [side for side in (left, right) if _is_built(side)]
            if len(built) == 2 and ast.dump(left) != ast.dump(right):
                built = []  # they are equal though their sources differ, so their literals may not matter
            variants = [list(_literals_in(side)) for side in built for _ in range(_VARIANTS)]
            twins = [twin for literals in variants for twin in self._replaced("inner", literals, near)]
            yield from twins
            if not twins and not approximate:
                yield from self._changed(self._expected([left, right]), near=near, negation=negation)

    def _expected(self, sides: Sequence[ast.expr]) -> Sequence[ast.expr]:
        """The literals among these expressions, or else those that don't depend on judged code, or else all."""
        literals = [side for side in sides if _is_literal(side)]
        return literals or [side for side in sides if not self._is_judged(side)] or sides

    def _is_judged(self, node: ast.expr) -> bool:
        return any(isinstance(part, ast.Name) and part.id in self._judged for part in ast.walk(node))

    def _changed(self, sides: Sequence[ast.expr], *, near: bool, negation: tuple[Edit, ...] = ()) -> Iterator[Twin]:
        """Twins with another expected value, which is one of these expressions."""
        for number, side in enumerate(sides):
            if _is_literal(side):
                yield from self._replaced("literal", [side], near, negation)
            elif traced := self._traced(side, near):
                yield Twin("literal", traced)
            else:
                edits = self._wrapped(side, _chance.randint(2, 9), near)
                yield Twin("literal", edits, () if number else (*edits, *negation) if negation else ())

    def _traced(self, side: ast.expr, near: bool) -> tuple[Edit, ...]:
        """Edits of the literals that a name stands for; empty if it has other uses, which may change the result."""
        if not isinstance(side, ast.Name) or side.id not in self._traceable:
            return ()
        origin = self._origins.of(side)
        if origin is None or not origin.cells or not all(map(_is_literal, origin.cells)):
            return ()
        edits = [edit for twin in self._replaced("literal", origin.cells, near) for edit in twin.edits]
        if len(edits) < len(origin.cells):
            return ()
        if origin.used is None:
            return tuple(edits)
        start, end = self._span(origin.table)
        inside = (Edit(edit.start - start, edit.end - start, edit.text) for edit in edits)
        return (Edit(*self._span(origin.used), b"(" + edited(self._source[start:end], inside) + b")"),)

    def _wrapped(self, side: ast.expr, step: int, near: bool) -> tuple[Edit, Edit]:
        start, end = self._span(side)
        text = b"%s(%s, %d, %d)" % (_CHANGE.encode(), self._source[start:end], step, near)
        size = len(self._source)
        return Edit(start, end, text), Edit(size, size, _DEFINITION)

    def _replaced(
        self, kind: Kind, literals: Sequence[ast.expr], near: bool, negation: tuple[Edit, ...] = ()
    ) -> Iterator[Twin]:
        edits: list[Edit] = []
        for node in literals:
            try:
                value = ast.literal_eval(node)
                if others := _far(value) if near else _alternatives(value):
                    text = repr(_chance.choice(others)).encode("utf-8", "surrogatepass")
                    edits.append(Edit(*self._span(node), b"(" + text + b")"))
            except ValueError:  # an integer of too many digits
                continue
        if edits:
            yield Twin(kind, tuple(edits), (*edits, *negation) if negation else ())


def _contexts(statement: ast.With) -> set[str]:
    """Names of the functions whose context managers are entered; "" for other expressions."""
    return {_name(getattr(item.context_expr, "func", item.context_expr)) for item in statement.items}


# --- names


def _uses(function: Function) -> Iterator[ast.Name]:
    """Names whose values a function reads, except for messages."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Assert):
            pending.append(node.test)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node
        elif not isinstance(node, ast.Raise) and not (isinstance(node, ast.Call) and _name(node.func) == "subTest"):
            pending += ast.iter_child_nodes(node)


def _assigned_once(scope: ast.AST, body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Values of the variables that have exactly one assignment in a scope."""
    counts = Counter(
        node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )
    values: dict[str, ast.expr] = {}
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and counts[targets[0].id] == 1:
            assert isinstance(statement, ast.Assign)
            values[targets[0].id] = statement.value
    return values


def _depending(body: Sequence[ast.stmt], names: Set[str]) -> Set[str]:
    """These names, and the variables and functions whose definition mentions one of them."""
    definitions: list[tuple[set[str], set[str]]] = []
    for node in _without_inner_scopes(body):
        if isinstance(node, Function | ast.ClassDef):
            definitions.append(({node.name}, _names_in([node])))
        elif isinstance(node, ast.Assign):
            definitions.append((_names_in(node.targets), _names_in([node.value])))
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
            definitions.append((_names_in([node.target]), _names_in([node.value])))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            definitions += [(_names_in([target]), _names_in([value])) for target, value in _walked_in_parallel(node)]
        elif isinstance(node, ast.withitem) and node.optional_vars:
            definitions.append((_names_in([node.optional_vars]), _names_in([node.context_expr])))
    size, names = -1, set(names)
    while len(names) > size:
        size = len(names)
        for targets, mentioned in definitions:
            if mentioned & names:
                names |= targets
    return names


def _walked_in_parallel(loop: ast.For | ast.AsyncFor | ast.comprehension) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pairs of a loop's target and the expression that it iterates over; `for a, b in zip(c, d)` has two."""
    rows, target = loop.iter, loop.target
    if isinstance(rows, ast.Call) and _name(rows.func) == "zip" and isinstance(target, ast.Tuple):
        yield from zip(target.elts, rows.args, strict=False)
    else:
        yield target, rows


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


@dataclass(frozen=True)
class _Origin:
    """The expressions that a name stands for.

    Attributes:
        cells: one expression for each row of a table.
        table: the table.
        used: the name of the table if other tests read it too; a twin replaces this name by a changed copy.
    """

    cells: Sequence[ast.expr]
    table: ast.expr
    used: ast.expr | None


class _Origins:
    """Resolves names in a test to expressions: columns of tables, and variables that are assigned once."""

    def __init__(self, function: Function, file: TestFile, variables: Set[str]) -> None:
        self._constants = {name: value for name, value in file.constants.items() if name not in variables}
        self._local = _assigned_once(function, function.body)
        self._single = file.single
        self._parameters = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
        self._columns: dict[str, tuple[ast.expr, tuple[int, ...]]] = {}
        self.parametrized: set[str] = set()
        counts = Counter(
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        for loop in ast.walk(function):
            if isinstance(loop, ast.For):
                for name, path in _paths(loop.target):
                    if counts[name] == 1:
                        self._columns[name] = (loop.iter, path)
        for decorator in function.decorator_list:
            self._read(decorator)

    def _read(self, decorator: ast.expr) -> None:
        if not isinstance(decorator, ast.Call) or _name(decorator.func) != "parametrize" or len(decorator.args) != 2:
            return
        names, table = decorator.args
        if any(item.arg == "indirect" for item in decorator.keywords) or not _is_literal(names):
            return
        value = ast.literal_eval(names)
        is_text = isinstance(value, str)
        split = [name.strip() for name in value.split(",") if name.strip()] if is_text else list(value)
        self.parametrized |= set(split)
        for number, name in enumerate(split):
            self._columns[name] = (table, (number,) if len(split) > 1 or not is_text else ())

    def of(self, node: ast.Name) -> _Origin | None:
        """The expressions that a compared name stands for, or None if they are unknown."""
        if node.id in self._columns:
            return self._cells(*self._columns[node.id])
        if node.id in self._local:
            return _Origin([self._local[node.id]], self._local[node.id], None)
        if node.id in self._constants and node.id not in self._parameters:
            table, used = self._resolved(node)
            return _Origin([table], table, used)
        return None

    def is_walked(self, loop: ast.For) -> bool:
        """Whether the body of a loop is certain to be executed to its end."""
        leaves = any(isinstance(node, ast.Break | ast.Continue) for node in ast.walk(loop))
        return not leaves and self._is_filled(loop.iter)

    def _is_filled(self, rows: ast.expr) -> bool:
        rows, _ = self._resolved(rows)
        if isinstance(rows, ast.Call):
            if isinstance(rows.func, ast.Attribute) and rows.func.attr in ("items", "values", "keys"):
                return self._is_filled(rows.func.value)
            if _name(rows.func) == "range":
                return all(map(_is_literal, rows.args)) and bool(range(*map(ast.literal_eval, rows.args)))
            is_strict = any(item.arg == "strict" and _is_true(item.value) for item in rows.keywords)
            some = any if is_strict else all  # with strict=True, honest code makes all iterables equally long
            return _name(rows.func) in ("enumerate", "zip") and some(map(self._is_filled, rows.args))
        if isinstance(rows, ast.Dict):
            return bool(rows.keys) and None not in rows.keys
        items = rows.elts if isinstance(rows, ast.List | ast.Tuple | ast.Set) else []
        return any(not isinstance(item, ast.Starred) for item in items)

    def _resolved(self, node: ast.expr) -> tuple[ast.expr, ast.expr | None]:
        """The table that an expression stands for, and the table's name if other tests read it too."""
        if isinstance(node, ast.Name) and node.id not in self._parameters:
            for values in (self._local, self._constants):
                if node.id in values:
                    return values[node.id], None if node.id in self._single else node
        return node, None

    def _cells(self, rows: ast.expr, path: tuple[int, ...]) -> _Origin | None:
        """One column of the rows that a loop iterates over."""
        if isinstance(rows, ast.Call) and path:
            if _name(rows.func) == "enumerate":
                return self._cells(rows.args[0], path[1:]) if path[0] == 1 and rows.args else None
            if _name(rows.func) == "zip":
                return self._cells(rows.args[path[0]], path[1:]) if path[0] < len(rows.args) else None
            if isinstance(rows.func, ast.Attribute) and rows.func.attr == "items":
                table, used = self._resolved(rows.func.value)
                is_plain = isinstance(table, ast.Dict) and None not in table.keys and path[0] == 1
                values = table.values if is_plain and isinstance(table, ast.Dict) else []
                return _origin(values, path[1:], table, used)
        table, used = self._resolved(rows)
        elements = table.elts if isinstance(table, ast.List | ast.Tuple) else []
        return _origin(elements, path, table, used)


def _origin(rows: Sequence[ast.expr], path: tuple[int, ...], table: ast.expr, used: ast.expr | None) -> _Origin | None:
    cells: list[ast.expr] = []
    for row in rows:
        cell: ast.expr | None = row
        if isinstance(row, ast.Call) and _name(row.func) == "param":
            cell = row if path else (row.args[0] if row.args else None)
        for index in path:
            items: Sequence[ast.expr] = ()
            if isinstance(cell, ast.Tuple | ast.List):
                items = cell.elts
            elif isinstance(cell, ast.Call) and _name(cell.func) == "param":
                items = cell.args
            is_plain = index < len(items) and not any(isinstance(item, ast.Starred) for item in items)
            cell = items[index] if is_plain else None
        if cell is None:
            return None
        cells.append(cell)
    return _Origin(cells, table, used)


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _paths(target: ast.expr, path: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names in a loop's target, with their positions in a row."""
    if isinstance(target, ast.Name):
        yield target.id, path
    elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(item, ast.Starred) for item in target.elts):
        for number, item in enumerate(target.elts):
            yield from _paths(item, (*path, number))


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


def _alternatives(value: Any) -> list[Any]:
    """Other values; sequences of the same length if possible: then each item is compared.

    Every value of a dictionary changes, since an object may ignore some when it compares itself with a dictionary, and
    a key, since a set may equal any dictionary with its items as keys.
    """
    others = alternatives(value, 6)
    if isinstance(value, list | tuple):
        others = [other for other in others if len(other) == len(value)] or others
    if isinstance(value, dict):
        others = [{key: _changed(item, value.get(key)) for key, item in other.items()} for other in others]
    return others


def _changed(item: Any, original: Any) -> Any:
    return (alternatives(item, 1) or [item])[0] if item == original else item


def _far(value: Any) -> list[Any]:
    """Values that are clearly different from a number or from a sequence of numbers."""
    if type(value) in (int, float):
        return [value + step * (1 + abs(value)) for step in (2, 3, 4)]
    if isinstance(value, list | tuple) and value:
        items = [_far(item) for item in value]
        return [type(value)(map(_chance.choice, items))] if all(items) else []
    return []


def _small_difference(test: ast.Compare) -> ast.BinOp | None:
    """`a - b` of `abs(a - b) < 1e-6`."""
    if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Lt | ast.LtE) or not isinstance(test.left, ast.Call):
        return None
    bound = ast.literal_eval(test.comparators[0]) if _is_literal(test.comparators[0]) else None
    if _name(test.left.func) != "abs" or len(test.left.args) != 1 or not isinstance(bound, int | float):
        return None
    difference = test.left.args[0]
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        return None
    return difference if bound <= _LARGEST_TOLERANCE else None


def _is_tolerant(call: ast.Call, more: Sequence[ast.expr] = ()) -> bool:
    """Whether a comparison of numbers has a tolerance that is large or not a literal."""
    for name, node in [("places", item) for item in more] + [(item.arg, item.value) for item in call.keywords]:
        value = ast.literal_eval(node) if _is_literal(node) else None
        if name in ("msg", "nan_ok"):
            continue
        if not isinstance(value, int | float) or value < 0 or (name != "places" and value > _LARGEST_TOLERANCE):
            return True
    return False
