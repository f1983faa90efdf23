"""Checks of a program: a call with its expected value, a program's output, or assert statements.

The agent's code runs in a sandbox and returns plain data, which is never compared in the same process: literals are
compared here, and statements run in the tests' process of `Sandbox.run_tests`, which calls the agent's functions over a
channel.
"""

from __future__ import annotations

import ast
import json
import math
import re
from ast import literal_eval
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal, NotRequired, TypedDict

from forge_env.concurrency import parse_python
from forge_env.sandbox import CallOutcome, CallsResult, ExecResult, Judging, Limits, Sandbox

TOLERANCE = 1e-6
"""Tolerated absolute or relative error of real numbers, as usual in programming contests."""
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_FUTURE = re.compile(r"^from __future__ import [^(\n#;]+$", re.MULTILINE)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)


class Check(TypedDict):
    """One check of a program."""

    call: str
    """The call, as Python source that may be shown to the agent; statements if `compare` is "asserts"."""
    expected: str
    """The expected value as a Python literal; JSON if `compare` is "json" or "wrapped", output if it is "output"."""
    compare: NotRequired[Literal["same", "equal", "close", "truth", "json", "wrapped", "output", "asserts"]]
    """`same` (the default) distinguishes 1, 1.0 and True, `equal` is Python's `==`, `close` also takes real numbers
    within `TOLERANCE`, `truth` is Python's `bool`; `json` takes tuples for lists and real numbers within `TOLERANCE`,
    `wrapped` also the only item of an expected list; `output` compares lines; `asserts` runs `test`."""
    run: NotRequired[str]
    """The expression to evaluate, if it isn't `call`."""
    stdin: NotRequired[str]
    """The program's input, if `compare` is "output"."""
    test: NotRequired[str]
    """The test file that asserts; it imports the module `solution`."""
    reserved: NotRequired[list[str]]
    """Built-ins that `test` uses and the agent's code must not define: in the data set's own checker, which runs tests
    in the code's namespace, they would replace those of the tests."""


class Setup(TypedDict):
    """Source that surrounds the agent's code in the agent's process."""

    before: str
    after: str


async def run_checks(
    sandbox: Sandbox, code: str, checks: Sequence[Check], limits: Limits, setup: Setup | None = None
) -> CallsResult:
    """Run a program for every check, calls before asserts; outcomes are in order, and fewer if the program ended early.

    The sandbox is unused before. Checks of output can't be mixed with others.
    """
    program = code
    if setup is not None:
        code = surrounded(code, setup)
    if checks and "stdin" in checks[0]:
        return await _run_programs(sandbox, code, checks, limits)
    calls = [check for check in checks if "test" not in check]
    asserts = [check for check in checks if "test" in check]
    judge = Judging.of(sandbox)
    result = CallsResult([], ExecResult(exit_code=0))
    if calls or not asserts:
        result = await judge.run_calls(code, [check.get("run", check["call"]) for check in calls], limits=limits)
    if not asserts or len(result.outcomes) < len(calls):
        return result
    reserved = {name for check in asserts for name in check.get("reserved", [])}
    if taken := sorted(reserved & _defined(program)):
        message = f"the tests use {taken[0]!r}, which your code defines: give it another name"
        outcome = CallOutcome(error="NameError", message=message)
        return CallsResult([*result.outcomes, *[outcome] * len(asserts)], result.execution)
    tests = {f"test_row_{number}.py": check["test"] for number, check in enumerate(asserts)}
    judged = await judge.run_tests(code, tests, how="apart", limits=limits)
    outcome = CallOutcome(value=True)
    if not judged.passed:
        line = judged.failures[0] if judged.failures else "AssertionError: no test ran"
        error, _, message = line.removeprefix("test_row_0.py: ").partition(": ")  # only for the report
        outcome = CallOutcome(error=error, message=message)
    printed = result.execution.stdout + judged.execution.stdout
    return CallsResult([*result.outcomes, *[outcome] * len(asserts)], replace(judged.execution, stdout=printed))


async def _run_programs(sandbox: Sandbox, code: str, checks: Sequence[Check], limits: Limits) -> CallsResult:
    outcomes: list[CallOutcome] = []
    result = ExecResult(exit_code=0)
    for check in checks:
        room = limits.output_bytes + 2 * len(check["expected"].encode("utf-8", "surrogatepass"))
        result = await sandbox.run_python(code, stdin=check["stdin"], limits=replace(limits, output_bytes=room))
        if not result.ok:
            break
        outcomes.append(CallOutcome(value=result.stdout))
    return CallsResult(outcomes, replace(result, stdout=""))  # output is compared, not shown


def surrounded(code: str, setup: Setup) -> str:
    """The program with its set-up; imports from `__future__` remain the first statements."""
    future = _FUTURE.findall(code)
    return "\n".join([*future, setup["before"], _FUTURE.sub("", code), setup["after"]])


def _defined(code: str) -> set[str]:
    """Names that a program binds at its top level, except by imports."""
    try:
        body = parse_python(code).body
    except (SyntaxError, ValueError):
        return set()  # code that can't be parsed fails its checks anyway
    return {name for item in body if not isinstance(item, ast.Import | ast.ImportFrom) for name in bound_by(item)}


def bound_by(item: ast.stmt) -> Iterator[str]:
    """Names that a statement binds, except those local to functions."""
    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield item.name
        return
    for node in ast.walk(item):
        if isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def passes(check: Check, outcome: CallOutcome | None) -> bool:
    """Whether the check was reached and its result is the expected one."""
    if outcome is None or outcome.error is not None:
        return False
    value, compare = outcome.value, check.get("compare", "same")
    if compare == "asserts":
        return value is True
    if compare == "output":
        return isinstance(value, str) and same_output(check["expected"], value)
    if compare in ("json", "wrapped"):
        wanted = json.loads(check["expected"])
        only = wanted[0] if compare == "wrapped" and isinstance(wanted, list) and len(wanted) == 1 else wanted
        return same_json(wanted, value) or same_json(only, value)
    expected = literal_eval(check["expected"])
    if compare == "close":
        return bool(expected == value) or _close(expected, value)
    return bool(expected == value) if compare == "equal" else same(expected, value)


def same(left: Any, right: Any) -> bool:
    """Equality that distinguishes True from 1 and 1 from 1.0, also inside containers."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    return bool(left == right)


def _close(expected: Any, value: Any) -> bool:
    """Whether two real numbers, or lists or tuples of them, differ by `TOLERANCE` at most."""
    if isinstance(expected, list | tuple):
        return type(expected) is type(value) and len(expected) == len(value) and all(map(_close, expected, value))
    numbers = isinstance(expected, float) and isinstance(value, float)
    return numbers and math.isclose(expected, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_json(expected: Any, value: Any) -> bool:
    """Whether a value equals JSON data: tuples are lists, and real numbers may differ by `TOLERANCE`."""
    if isinstance(expected, list):
        return isinstance(value, list | tuple) and len(expected) == len(value) and all(map(same_json, expected, value))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or expected.keys() != value.keys():
            return False
        return all(same_json(item, value[key]) for key, item in expected.items())
    if isinstance(expected, float) and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return math.isclose(expected, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        except OverflowError:  # an integer beyond the range of floats
            return False
    return bool(expected == value)


def same_output(expected: str, output: str) -> bool:
    """Whether a program's output is the expected one, line by line.

    White space around lines and around the text is ignored. Numbers may be written differently, and real numbers may
    differ by `TOLERANCE`; expected integers must be exact.
    """
    wanted, lines = _lines(expected), _lines(output)
    return len(wanted) == len(lines) and all(map(_same_line, wanted, lines))


def _lines(text: str) -> list[str]:
    """Lines end with a line feed only; other Unicode separators are text."""
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(expected: str, line: str) -> bool:
    if expected == line:
        return True
    wanted, words = expected.split(), line.split()
    return len(wanted) == len(words) and all(map(_same_number, wanted, words))


def _same_number(expected: str, word: str) -> bool:
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(word)):
        return False
    wanted, number = Decimal(expected), Decimal(word)
    if wanted == number or _INTEGER.fullmatch(expected):
        return wanted == number
    return abs(wanted - number) <= Decimal(str(TOLERANCE)) * max(Decimal(1), abs(wanted))


# --- source that runs in the agent's process, or in the tests' process

PLAIN = '''
def _forge_plain(value, depth=0):
    """Convert values that equal plain ones: subclasses, views of keys, exact fractions."""
    import collections.abc, numbers
    if value is None or type(value) in (bool, int, float, str, bytes, complex) or depth > 60:
        return value
    if isinstance(value, dict):
        return {_forge_plain(k, depth + 1): _forge_plain(v, depth + 1) for k, v in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind([_forge_plain(item, depth + 1) for item in value])
    if isinstance(value, collections.abc.Set):
        return {_forge_plain(item, depth + 1) for item in value}
    for kind in (int, float, str, bytes, complex):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, numbers.Number):
        for kind in (int, float):
            if kind(value) == value:
                return kind(value)
    return value
'''
"""Source for the agent's process. The agent's code may change it, but could return any value anyway."""
LONGEST_ITERATOR = 10_000
"""Maximum number of items of an iterator that tests can read."""
PACKED = f'''
def _forge_packed(value, depth=0):
    """Plain data for what a function returned; what is not plain becomes a tuple that the tests' process unpacks."""
    import collections.abc, datetime, itertools
    if depth > 60:
        return value
    inner = lambda items: [_forge_packed(item, depth + 1) for item in items]
    mark = lambda name, *parts: ("_forge_packed", name, parts)
    if isinstance(value, dict):
        return dict(zip(inner(value.keys()), inner(value.values())))
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(inner(value))
    kind, empty = type(value), {{}}
    if kind is range:
        return mark("range", value.start, value.stop, value.step)
    for name in ("keys", "values", "items"):
        if kind is type(getattr(empty, name)()):
            return mark(name, *inner(value))
    if isinstance(value, collections.abc.Iterator):
        items = inner(itertools.islice(value, {LONGEST_ITERATOR} + 1))
        return mark("iterator", len(items) > {LONGEST_ITERATOR}, *items[:{LONGEST_ITERATOR}])
    if kind in (datetime.date, datetime.datetime, datetime.time):
        return mark(kind.__name__, value.isoformat())
    if kind is datetime.timedelta:
        return mark("timedelta", value.days, value.seconds, value.microseconds)
    plain = _forge_plain(value)
    if plain is None or type(plain) in (bool, int, float, str, bytes, bytearray, complex, set):
        return plain
    return mark("object", f"{{kind.__module__}}.{{kind.__qualname__}}", bool(value))
'''
"""Source for the agent's process, for tests. Forged marks only become data, iterators or incomparable objects."""
METHOD = '''
def _forge_method(name):
    """The method of `Solution`, or the function if there is no such class."""
    return getattr(Solution(), name) if "Solution" in globals() else globals()[name]
'''
ONLY_PLAIN = '''
import datetime as _forge_datetime
import operator as _forge_operator
import solution as _forge_solution

def _forge_unpacked(name, parts):
    if name == "range":
        return range(*parts)
    if name == "iterator":
        return _forge_iterator(*parts)
    if name in ("keys", "items"):
        return getattr(dict.fromkeys(parts) if name == "keys" else dict(parts), name)()
    if name == "values":
        return dict(enumerate(parts)).values()
    if name in ("date", "datetime", "time"):
        return getattr(_forge_datetime, name).fromisoformat(*parts)
    return _forge_datetime.timedelta(*parts) if name == "timedelta" else _forge_object(*parts)

def _forge_iterator(is_cut, *items):
    yield from items
    if is_cut:
        raise RuntimeError(f"the judged code returned an iterator of more than {len(items)} items")

def _forge_object(kind, truth):
    """An object that only has a truth value."""
    def refuse(*_, **__):
        raise TypeError(f"the judged code returned a {kind}, which is not plain data: only its truth is known")
    names = "eq ne lt le gt ge hash str repr len iter next contains getitem getattr call add sub abs round int float"
    methods = {f"__{name}__": refuse for name in names.split()}
    return type("object", (), {**methods, "__bool__": lambda self: bool(truth)})()

def _forge_checked(value):
    """The value, unpacked, if all of it is plain data: an object of the judged code could equal anything."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        items = list(value)
        if kind is tuple and len(items) == 3 and type(items[0]) is str and items[0] == "_forge_packed":
            return _forge_unpacked(_forge_checked(items[1]), [_forge_checked(item) for item in items[2]])
        checked = [_forge_checked(item) for item in items]
        return value if all(map(_forge_operator.is_, items, checked)) else kind(checked)
    if kind is dict:
        pairs = [pair for item in value.items() for pair in item]
        checked = [_forge_checked(item) for item in pairs]
        if not all(map(_forge_operator.is_, pairs, checked)):
            return dict(zip(checked[::2], checked[1::2]))
    elif value is not None and kind not in (bool, int, float, str, bytes, bytearray, complex):
        raise TypeError(f"the judged code returned a {kind.__name__}, which is not plain data")
    return value

def _forge_function(name):
    function = getattr(_forge_solution, "_forge_call_" + name)
    return lambda *args, **kwargs: _forge_checked(function(*args, **kwargs))
'''
"""Source for the tests' process."""


def callable_source(names: Sequence[str]) -> str:
    """Source for the agent's process: wrappers of its functions that return plain values, for tests to import."""
    calls = (f"def _forge_call_{name}(*args, **kw): return _forge_packed({name}(*args, **kw))\n" for name in names)
    return "".join([PACKED, *calls])


def test_source(names: Sequence[str], setup: str, statements: str) -> str:
    """A test file: trusted `setup`, and statements that call the functions `names`, which must return plain data."""
    bound = [f"{name} = _forge_function({name!r})" for name in names]
    return "\n".join([ONLY_PLAIN, *bound, setup, statements, ""])
