"""Runs test files: unittest cases, `test_*` functions and plain asserts, or pytest.

Each test's start and end are reported under the name that pytest gives it (`tests/test_a.py::Case::test_b`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import io
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

MAX_MESSAGE = 2000
PYTEST_INI = "pytest.ini"
"""pytest settings of the tests, if they have any. Settings of the judged code are never read."""


class Recorder:
    """Receives the start and end of every test."""

    __slots__ = ()

    def start(self, test: str) -> None:
        """Called when a test starts."""

    def finish(self, test: str, outcome: str, message: str = "") -> None:
        """Called when a test has ended with `passed`, `failed` or `skipped`."""
        raise NotImplementedError


def text_of(error: BaseException) -> str:
    """The message of an exception, shortened; empty if it can't be formatted."""
    try:
        return str(error)[:MAX_MESSAGE]
    except BaseException:  # noqa: BLE001  a hostile __str__
        return ""


def source_roots(folder: str) -> list[str]:
    """Folders to search for a repository's packages."""
    src = os.path.join(folder, "src")
    return [folder, src] if os.path.isdir(src) and not os.path.exists(os.path.join(src, "__init__.py")) else [folder]


# --- without pytest


def run_files(sources: Mapping[str, bytes], recorder: Recorder) -> None:
    """Run test files that do not need pytest."""
    for path, source in sources.items():
        name = _module_name(path)
        spec = importlib.util.spec_from_file_location(name, os.path.abspath(path))
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        run_source(path, source, module.__dict__, recorder)


def _module_name(path: str) -> str:
    """Full module name of a test file, without `src/` unless that is a package."""
    root = os.path.join("src", "")
    inside = path.startswith(root) and not os.path.exists(os.path.join(root, "__init__.py"))
    return path[len(root) if inside else 0 : -3].replace("/", ".")


def run_source(path: str, source: str | bytes, namespace: dict[str, Any], recorder: Recorder) -> None:
    """Execute one test file in `namespace` and run the tests it defines. Plain asserts count as one test."""
    try:
        exec(compile(source, path, "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001  a broken solution or test file is a verdict too
        recorder.finish(path, "failed", f"{type(error).__name__}: {text_of(error)}")
        return
    has_tests = _run_cases(path, namespace, recorder)
    for name, function in list(namespace.items()):
        if name.startswith("test") and isinstance(function, types.FunctionType):
            has_tests = True
            _run_function(f"{path}::{name}", function, recorder)
    if not has_tests:
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
    """Forwards unittest's reports to a recorder."""

    def __init__(self, path: str, recorder: Recorder) -> None:
        super().__init__()
        self._path = path
        self._recorder = recorder
        self._running = ""
        self._outcome = ("passed", "")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        method = getattr(test, test._testMethodName)
        if not inspect.iscoroutinefunction(method):
            setattr(test, test._testMethodName, _uninterrupted(method))
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
        else:  # set-up or tear-down of a class or module
            self._recorder.finish(f"{self._path}::{test}", "failed", message)


def _uninterrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a KeyboardInterrupt from a test fail that test, instead of ending all tests."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except KeyboardInterrupt as error:
            raise RuntimeError("the test raised KeyboardInterrupt") from error

    return call


# --- with pytest

_WITHOUT = (
    "cacheprovider", "faulthandler", "pastebin", "setuponly", "setupplan", "stepwise", "tracemalloc",
    "unraisableexception",  # it collects garbage five times at the end
)  # fmt: skip


def load_pytest() -> None:
    """Import pytest and all modules that a run of it imports."""
    from _pytest.config import default_plugins

    for name in default_plugins:
        if name not in _WITHOUT:
            importlib.import_module(f"_pytest.{name}")


def run_pytest(paths: Sequence[str], recorder: Recorder, roots: Sequence[str]) -> None:
    """Run test files with pytest in the current folder; `roots` are appended to the module search path."""
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
    """Forwards pytest's reports to a recorder."""

    __slots__ = ("_outcomes", "_recorder", "_roots")

    def __init__(self, recorder: Recorder, roots: Sequence[str]) -> None:
        self._recorder = recorder
        self._roots = roots
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_load_initial_conftests(self) -> Iterator[None]:
        sys.path += self._roots  # not earlier, so that pytest finds no plug-ins there
        yield

    pytest_load_initial_conftests.pytest_impl = {"hookwrapper": True, "tryfirst": True}  # type: ignore[attr-defined]

    def pytest_itemcollected(self, item: Any) -> None:
        # Formatting a traceback takes a millisecond, and only the message is used.
        if type(item).__module__ == "_pytest.python":
            item.repr_failure = _described

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> None:
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            pyfuncitem.obj = _uninterrupted(pyfuncitem.obj)

    pytest_pyfunc_call.pytest_impl = {"tryfirst": True}  # type: ignore[attr-defined]

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
