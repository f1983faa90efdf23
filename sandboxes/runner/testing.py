"""Running test files: unittest cases, `test_*` functions and plain asserts, or pytest; each test is told of as it
starts and ends, under the name that pytest gives it (`tests/test_a.py::Case::test_b`).
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import operator
import os
import random
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

MAX_MESSAGE = 2000
PYTEST_INI = "pytest.ini"
"""The tests' own settings for pytest, if they have some; those of the judged code are never read."""


class Recorder:
    """Hears of every test."""

    __slots__ = ()

    def start(self, test: str) -> None:
        """A test begins."""

    def finish(self, test: str, outcome: str, message: str = "") -> None:
        """A test has ended: `passed`, `failed` or `skipped`."""
        raise NotImplementedError


def text_of(error: BaseException) -> str:
    """The message of an exception, shortened; none where it can't be told."""
    try:
        return str(error)[:MAX_MESSAGE]
    except BaseException:  # noqa: BLE001  a hostile __str__
        return ""


def source_roots(folder: str) -> list[str]:
    """Where the packages of a repository are looked for."""
    src = os.path.join(folder, "src")
    return [folder, src] if os.path.isdir(src) and not os.path.exists(os.path.join(src, "__init__.py")) else [folder]


# --- without pytest


def run_files(sources: Mapping[str, bytes], recorder: Recorder, watch: Watch | None = None) -> None:
    """Run test files that need no pytest."""
    for path, source in sources.items():
        name = path[:-3].replace("/", ".")
        module = types.ModuleType(name)
        module.__file__ = path
        sys.modules[name] = module
        run_source(path, source, module.__dict__, recorder, watch)


def run_source(
    path: str, source: str | bytes, namespace: dict[str, Any], recorder: Recorder, watch: Watch | None = None
) -> None:
    """Execute one file of tests in `namespace` and run what it defines; plain asserts count as one test."""
    try:
        tree = ast.parse(source, path)
        if watch is not None:
            watch.rewrite(tree)
        exec(compile(tree, path, "exec"), namespace)
    except BaseException as error:  # noqa: BLE001  a broken solution or test file is a verdict too
        recorder.finish(path, "failed", f"{type(error).__name__}: {text_of(error)}")
        return
    found = _run_cases(path, namespace, recorder)
    for name, function in list(namespace.items()):
        if name.startswith("test") and isinstance(function, types.FunctionType):
            found = True
            _run_function(f"{path}::{name}", function, recorder)
    if not found:
        recorder.finish(path, "passed")


def _run_function(test: str, function: Callable[[], None], recorder: Recorder) -> None:
    recorder.start(test)
    try:
        function()
    except unittest.SkipTest as skip:
        recorder.finish(test, "skipped", text_of(skip))
    except BaseException as error:  # noqa: BLE001  any exception fails the test
        recorder.finish(test, "failed", f"{type(error).__name__}: {text_of(error)}")
    else:
        recorder.finish(test, "passed")


def _run_cases(path: str, namespace: Mapping[str, Any], recorder: Recorder) -> bool:
    cases = [value for value in namespace.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases)
    if not suite.countTestCases():
        return False
    result = _CaseResult(path, recorder)
    suite.run(result)
    return True


class _CaseResult(unittest.TestResult):
    """What unittest tells of, passed on."""

    def __init__(self, path: str, recorder: Recorder) -> None:
        super().__init__()
        self._path = path
        self._recorder = recorder
        self._running = ""
        self._outcome = ("passed", "")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._running = f"{self._path}::{type(test).__qualname__}::{test._testMethodName}"
        self._outcome = ("passed", "")
        self._recorder.start(self._running)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        running, self._running = self._running, ""
        self._recorder.finish(running, *self._outcome)

    def addFailure(self, test: Any, err: Any) -> None:
        self._failed(test, f"{err[0].__name__}: {text_of(err[1])}")

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._failed(subtest, f"{subtest._subDescription()} {err[0].__name__}: {text_of(err[1])}")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._failed(test, "unexpected success")

    def addSkip(self, test: Any, reason: str) -> None:
        if self._outcome[0] == "passed":
            self._outcome = ("skipped", reason)

    def _failed(self, test: Any, message: str) -> None:
        if self._running:
            self._outcome = ("failed", message)
        else:  # what prepares a class or module
            self._recorder.finish(f"{self._path}::{test}", "failed", message)


# --- with pytest

_WITHOUT = (
    "cacheprovider", "doctest", "faulthandler", "junitxml", "pastebin", "setuponly", "setupplan", "stepwise",
    "tracemalloc",
    "unraisableexception",  # it collects garbage five times at the end
)  # fmt: skip


def load_pytest() -> None:
    """Import pytest with everything that a run of it imports."""
    from _pytest.config import default_plugins

    for name in default_plugins:
        if name not in _WITHOUT:
            importlib.import_module(f"_pytest.{name}")
    _noted_ahead.update(fingerprint())


def run_pytest(paths: Sequence[str], recorder: Recorder, roots: Sequence[str]) -> None:
    """Run test files with pytest, in the current folder; `roots` are searched for modules after all others."""
    try:
        import pytest
    except ImportError as error:
        recorder.finish("pytest", "failed", f"{error}: acquire the sandbox with SandboxSpec(packages=['pytest'])")
        return
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    settings = PYTEST_INI if os.path.isfile(PYTEST_INI) and PYTEST_INI in paths else os.devnull
    options = ["-c", settings, "--rootdir", os.getcwd(), "-qq", "--tb=native", "--no-summary"]
    options += ["--maxfail=0", *(word for name in _WITHOUT for word in ("-p", f"no:{name}"))]
    with redirect_stdout(io.StringIO()):
        files = [path for path in paths if path != PYTEST_INI]
        status = int(pytest.main([*options, *files], plugins=[_PytestPlugin(recorder, roots)]))
    if status not in (0, 1):
        recorder.finish("pytest", "failed", f"it ended with status {status}")


class _PytestPlugin:
    """Passes on what pytest tells of each test."""

    __slots__ = ("_outcomes", "_recorder", "_roots")

    def __init__(self, recorder: Recorder, roots: Sequence[str]) -> None:
        self._recorder = recorder
        self._roots = roots
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_configure(self) -> None:
        sys.path += self._roots  # only now: no plug-in is looked for in there

    def pytest_itemcollected(self, item: Any) -> None:
        if type(item).__module__ == "_pytest.python":  # a traceback that nobody reads costs a millisecond
            item.repr_failure = _described

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcomes[nodeid] = ("passed", "")
        self._recorder.start(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self._outcomes[report.nodeid][0] != "failed" and report.outcome != "passed":
            self._outcomes[report.nodeid] = (report.outcome, _last_line(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._recorder.finish(nodeid, *self._outcomes.pop(nodeid))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._recorder.finish(report.nodeid or "collection", "failed", _last_line(report))


def _described(failure: Any) -> str:
    message = text_of(failure.value).strip().partition("\n")[0]
    return f"{failure.typename}: {message}" if message else str(failure.typename)


def _last_line(report: Any) -> str:
    lines = str(report.longrepr).strip().splitlines()
    return lines[-1][:MAX_MESSAGE] if lines else ""


# --- tests and judged code in one process


_ASSERTION = re.compile(r"assert(?!Raises|Warns|Logs)\w+").fullmatch


def _is_assertion(node: ast.expr) -> bool:
    """Whether it is `self.assert...`, of what compares."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and _ASSERTION(node.attr) is not None
    )


_WATCHED = (ast.Eq, ast.NotEq, ast.In, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class Watch:
    """Comparisons of tests that share a process with the judged code: what claims to equal anything is refused.

    Both sides of comparisons and differences, and the arguments of `assert...` methods, are shown to values that
    nothing honest equals, is both above and below, or is equally far from.
    """

    _NAME = "_watched"

    def __init__(self) -> None:
        number = random.getrandbits(61) | 1 << 61
        self._strangers = (number, number / 3, f"{number:x}", (number,), object())
        self._plain = (type(None), bool, int, float, str, bytes, complex)

        setattr(builtins, self._NAME, self.look)

    def reach_pytest(self, noted: dict[str, Noted], sources: dict[str, bytes]) -> None:
        """Rewrite what pytest rewrites, too; `noted` is told. `sources`: what is read in place of a file, by path."""
        try:
            from _pytest.assertion import rewrite
        except ImportError:  # told of when it is needed
            return
        original = rewrite.rewrite_asserts

        def rewrite_asserts(tree: ast.Module, source: bytes, path: str, *others: Any) -> None:
            if path in sources:
                source = sources.pop(path)
                tree.body = ast.parse(source, path).body
            self.rewrite(tree)
            original(tree, source, path, *others)

        rewrite.rewrite_asserts = rewrite_asserts  # type: ignore[assignment]
        noted[f"{rewrite.__name__}.rewrite_asserts"] = Noted(vars(rewrite), "rewrite_asserts")

    def rewrite(self, tree: ast.Module) -> None:
        """Put a call of `look` around whatever is compared."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and any(isinstance(op, _WATCHED) for op in node.ops):
                node.left = self._around(node.left)
                node.comparators = [self._around(item) for item in node.comparators]
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                node.left, node.right = self._around(node.left), self._around(node.right)
            elif isinstance(node, ast.Call) and _is_assertion(node.func):
                node.args = [self._around(item) for item in node.args]
        ast.fix_missing_locations(tree)

    def _around(self, node: ast.expr) -> ast.expr:
        if isinstance(node, (ast.Constant, ast.Starred)):
            return node
        call = ast.Call(ast.copy_location(ast.Name(self._NAME, ast.Load()), node), [node], [])
        return ast.copy_location(call, node)

    def look(self, value: Any, depth: int = 3) -> Any:
        """`value`, unless it or something in it equals what nothing equals."""
        for item in self._parts(value, depth):
            if getattr(type(item), "__module__", "") != "unittest.mock" and self._agrees(item):
                raise AssertionError(f"a {type(item).__name__} that claims to equal anything")
        return value

    def _agrees(self, item: Any) -> bool:
        """Whether a stranger could take its place."""
        number, other = self._strangers[:2]
        claims: tuple[Callable[[], bool], ...] = (
            *(partial(operator.eq, item, stranger) for stranger in self._strangers),
            lambda: (item < number) is True and (item > number) is True,
            lambda: (abs(item - number) < 1) is True and (abs(item - other) < 1) is True,
            lambda: (abs(number - item) < 1) is True and (abs(other - item) < 1) is True,
        )
        for claim in claims:
            try:
                if claim() is True:
                    return True
            except Exception:  # noqa: BLE001  an honest class need not know how to compare itself with a number
                continue
        return False

    def _parts(self, value: Any, depth: int) -> Iterator[Any]:
        kind = type(value)
        if kind in self._plain:
            return
        if kind in (list, tuple, set, frozenset, dict):
            if depth:
                parts = list(value.values()) + list(value) if kind is dict else list(value)
                for part in parts[:1000]:
                    yield from self._parts(part, depth - 1)
        else:
            yield value


_noted_ahead: dict[str, Noted] = {}
"""The fingerprint that was taken when pytest was loaded, for every child."""
_JUDGES = ("builtins", "unittest", "_pytest", "pytest", "pluggy", __name__.partition(".")[0])
_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)


class Noted:
    """One thing that judging is made of, and where it is."""

    __slots__ = ("_code", "_defaults", "_function", "_key", "_space", "_value")

    def __init__(self, space: Mapping[str, object], key: str) -> None:
        self._space, self._key = space, key
        self._value = inner = space[key]
        if isinstance(inner, (staticmethod, classmethod)):
            inner = inner.__func__
        elif isinstance(inner, property):
            inner = inner.fget
        self._function = inner if isinstance(inner, types.FunctionType) else _nothing
        self._code, self._defaults = self._function.__code__, self._function.__defaults__

    def is_same(self) -> bool:
        """Whether it is there still, with the same code."""
        function = self._function
        return (
            self._space.get(self._key) is self._value
            and function.__code__ is self._code
            and function.__defaults__ is self._defaults
        )


def _nothing() -> None:
    """In place of what has no code."""


def fingerprint() -> dict[str, Noted]:
    """What judging is made of: functions and classes of the built-ins, unittest, pytest and this runner.

    Of what was loaded ahead it is known already, and then handed out once.
    """
    found = dict(_noted_ahead)
    _noted_ahead.clear()
    if found:
        return found
    for name in list(sys.modules):
        if name.partition(".")[0] in _JUDGES:
            found.update(_noted(name))
    return found


def noted_imports(names: Iterable[str]) -> dict[str, Noted]:
    """The same of modules that tests import, before any judged code can be found."""
    found: dict[str, Noted] = {}
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001  the tests will say so
            continue
        if name in sys.modules:
            found.update(_noted(name))
    return found


def _noted(name: str) -> dict[str, Noted]:
    space = vars(sys.modules[name])
    found = {name: Noted(sys.modules, name)}
    for key, value in list(space.items()):
        if isinstance(value, _CALLED):
            found[f"{name}.{key}"] = Noted(space, key)
        if isinstance(value, type) and value.__module__ == name != "builtins":
            for member, item in list(vars(value).items()):
                if callable(item) or isinstance(item, (property, staticmethod, classmethod)):
                    found[f"{name}.{key}.{member}"] = Noted(vars(value), member)
    return found


def changes(before: Mapping[str, Noted]) -> list[str]:
    """The names of what is not as it was."""
    return [name for name, noted in before.items() if not noted.is_same()]
