"""The requests of `Sandbox.run_tests`, and the verdict on their results.

Nothing here runs inside a sandbox. Whether tests run apart or counted depends on their source alone, so the judged code
can't influence it.
"""

from __future__ import annotations

import ast
import builtins
import posixpath
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeGuard

from forge_env.errors import UsageError
from forge_env.sandbox import ExecResult, How, Outcome, TestsResult
from sandboxes.runner import values
from sandboxes.runner.programs import RUN_FOLDER
from sandboxes.runner.testing import PYTEST_INI
from sandboxes.runner.wire import Header
from sandboxes.twins import Comparing, Edit, Function, Kind, TestFile, Twin, comparing, edited, twins_of

MAX_FAILURES = 50
_CONFTEST = "conftest.py"
_LEFT_OUT = {_CONFTEST, PYTEST_INI, ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"}
"""Configuration of pytest, left out of the judged code."""
_SHARED_FIXTURES = {
    "capfd", "capfdbinary", "capsysbinary", "caplog", "recwarn", "monkeypatch", "tmp_path", "tmpdir", "mocker",
    "tmp_path_factory", "tmpdir_factory", "pytester", "freezer",
}  # fmt: skip
_SHARED_NAMES = {
    "mock", "patch", "Mock", "MagicMock", "AsyncMock", "subprocess", "tempfile", "open", "Path", "sys", "os", "shutil",
    "inspect", "gc", "pickle", "weakref", "threading", "Thread", "ThreadPoolExecutor", "multiprocessing", "dataclasses",
    "dataclass", "asdict", "astuple", "fields", "vars", "dir", "id", "signal", "given", "asyncio", "codecs",
    "contextvars", "locale", "logging", "socket", "warnings", "__file__", "BaseExceptionGroup", "ExceptionGroup",
    "KeyboardInterrupt",
}  # fmt: skip
_SHARED_ATTRIBUTES = {
    "assertLogs", "assertWarns", "assertWarnsRegex", "warns", "deprecated_call", "reload", "chdir", "seed", "patch",
    "getcontext", "localcontext", "setcontext", "FunctionType", "MethodType", "ModuleType", "GeneratorType",
    "CoroutineType", "get_type_hints", "__annotations__", "__bases__", "__closure__", "__code__", "__defaults__",
    "__dict__", "__globals__", "__module__", "__mro__", "__slots__", "__subclasses__", "__cause__", "__context__",
    "__suppress_context__", "__notes__", "__traceback__",
}  # fmt: skip
"""Fixtures, names and attributes that need the judged code in the same process: files, patches, variables, threads."""
_HARMLESS = {
    "asyncio.get_event_loop", "asyncio.new_event_loop", "asyncio.run", "asyncio.set_event_loop", "asyncio.sleep",
    "os.linesep", "os.name", "os.path", "os.pathsep", "os.sep", "sys.byteorder", "sys.float_info", "sys.hash_info",
    "sys.hexversion", "sys.implementation", "sys.int_info", "sys.maxsize", "sys.maxunicode", "sys.platform",
    "sys.version", "sys.version_info",
}  # fmt: skip
"""Attributes of these modules that are the same in every process."""
_PLAIN_MODULES = {*sys.stdlib_module_names, "pytest", "numpy", "solution"}
_STARTS = {
    "sys.path.append", "sys.path.extend", "sys.path.insert", "unittest.main", "pytest.main", "os.environ.get",
    "os.getenv",
}  # fmt: skip
"""Calls that let a test file run as a program, or that choose tests."""
_MOST_RUNS = 6
_WANTED_BITS = 6
"""Runs are added, up to `_MOST_RUNS`, until guessing passes with a probability of at most 2 to the minus this power."""
_BESIDE = "the tests ran in the judged code's process, where it can change their outcome"


@dataclass
class Expected:
    """A test that must be reported, and its twins."""

    may_skip: bool = False
    twins: list[Twin] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One run of the tests in the judged code's process: files with some tests replaced by twins."""

    tests: dict[str, bytes]
    twins: dict[str, Twin]
    """Twins by the name of the test that they replace."""


@dataclass
class Suite:
    """Judged files and tests, ready to be sent."""

    judged: dict[str, bytes]
    tests: dict[str, bytes]
    text: str | None
    """The tests, if they are a single text, not files."""
    how: How
    pytest: bool
    paths: list[str]
    """Test files to run; they import the other files of `tests`."""
    modules: list[str]
    """Full names of the judged modules."""
    around: list[str] = field(default_factory=list)
    """Judged packages that have test files inside."""
    sync: bool = True
    """Whether tests inspect containers after passing them to the judged code."""
    expected: dict[str, Expected] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def apart_header(self) -> tuple[Header, bytes]:
        """The header and tail of a request for two processes, without the judged code."""
        tests = b"" if self.text is None else self.text.encode("utf-8", "replace")
        sizes = [[path, len(data)] for path, data in self.tests.items()]
        judged: Header = {"judged": self.modules, "around": self.around, "sync": self.sync}
        header = {"code": len(tests), "files": sizes, **self._run(), **judged}
        tail = b"".join((tests, *self.tests.values()))
        return {"op": "judge", "kind": "judge", "tests": header}, tail

    def beside_header(self, run: Run) -> tuple[Header, dict[str, bytes]]:
        """The header of a request for one process, and all its files."""
        folder = RUN_FOLDER + secrets.token_hex(8)
        return {"kind": "counted", "folder": folder, **self._run()}, {**self.judged, **run.tests}

    def _run(self) -> Header:
        return {"pytest": self.pytest, "paths": self.paths}


def suite_of(
    code: str | None,
    tests: str | Mapping[str, bytes],
    files: Mapping[str, bytes],
    how: How | None,
) -> Suite:
    """The suite for these arguments of `run_tests`, whose paths are already validated. Raises `UsageError`."""
    if isinstance(tests, str):
        if code is None:
            raise UsageError("tests in one text need code in one text", fix="pass tests={path: text}")
        if how == "counted":
            raise UsageError("tests in one text can only run apart", fix="pass files={path: text}, tests={path: text}")
        return Suite({}, {}, tests, "apart", False, [], ["solution"], sync=_looks_again(_quietly_parsed(tests)))
    if code is not None:
        files = {"solution.py": code.encode("utf-8", "surrogatepass"), **files}
    trees = _parsed(tests)
    paths = _to_run(trees)
    judged = _without_settings(files, tests)
    modules, around = _modules(judged, tests)
    pytest = PYTEST_INI in tests or _needs_pytest(trees)
    if how is None:
        how = "counted" if _are_deep(trees, paths, modules) else "apart"
    if PYTEST_INI in tests:
        paths = [PYTEST_INI, *paths]
    sync = any(map(_looks_again, trees.values()))
    suite = Suite(judged, dict(tests), None, how, pytest, paths, modules, around, sync)
    if how == "counted":
        _plan_runs(suite, trees)
    return suite


def verdict_apart(execution: ExecResult, stream: bytes, judge_stderr: str) -> TestsResult:
    """The verdict of the tests' process; if there is none, the tests failed."""
    frames = values.unpack_frames(stream)
    if len(frames) == 1 and isinstance(verdict := frames[0], dict):
        failures = [str(line) for line in verdict["failures"]]
        if failures and execution.timed_out:  # the judged process may end a moment before the tests' process
            failures.insert(0, "the judged code timed out")
        doubts = [str(line) for line in verdict["doubts"]]
        total, failed = int(verdict["total"]), int(verdict["failed"])
        by_test = {str(test): worst(None, outcome) for test, outcome in verdict["outcomes"]}
        return TestsResult(not failed and total > 0, total, failures, execution, "apart", failed, doubts, by_test)
    why = "timed out" if execution.timed_out else judge_stderr.strip()[-500:]
    return TestsResult(False, 0, [f"the tests ended without a verdict: {why}"], execution, "apart", 0)


_OUTCOMES: tuple[Outcome, ...] = ("passed", "skipped", "failed")


def worst(before: Outcome | None, outcome: str) -> Outcome:
    """The worse of two outcomes of one test; an unknown outcome counts as failed."""
    now = _OUTCOMES[_OUTCOMES.index(outcome)] if outcome in _OUTCOMES else "failed"
    return max(before or now, now, key=_OUTCOMES.index)


@dataclass
class _Outcomes:
    """The outcomes that one run in the judged code's process reported."""

    by_test: dict[str, set[str]] = field(default_factory=dict)
    """Outcomes of a test with all its parameter sets, by its name without parameters."""
    refuted: set[str] = field(default_factory=set)
    """Tests whose own assertion failed."""
    reported: list[tuple[str, str, str]] = field(default_factory=list)
    """Test with parameters, outcome, message."""
    problem: str | None = "the tests ended early"


def verdict_beside(executions: Sequence[tuple[ExecResult, bytes]], suite: Suite) -> TestsResult:
    """The verdict on the runs of a suite: every real test must pass, and every twin fail."""
    all_outcomes = [_outcomes(stream, execution) for execution, stream in executions]
    total, failures = 0, []
    by_test: dict[str, Outcome] = {}
    problem = None
    for run, outcomes in zip(suite.runs, all_outcomes, strict=True):
        problem = problem or outcomes.problem or _left_out(suite, outcomes)
        for test, outcome, message in outcomes.reported:
            name = test.partition("[")[0]
            first = run is suite.runs[0] or bool(suite.runs[0].twins.get(name))
            if name in run.twins or (not first and outcome != "failed"):
                continue
            if name not in suite.expected and _function(name) in {_function(twin) for twin in run.twins}:
                continue  # a class of the tests inherits the twin, or another file imports it
            by_test[test] = worst(by_test.get(test), outcome)
            expected = suite.expected.get(name)
            total += first and outcome != "skipped"
            if outcome == "failed" or (outcome == "skipped" and expected and not expected.may_skip):
                why = message if outcome == "failed" else f"it was skipped: {message}"
                failures.append(f"{test}: {why}")
    execution = executions[-1][0]
    problem = problem or _passing_twin(suite, all_outcomes)
    if problem is not None:
        why = "timed out" if execution.timed_out else execution.stderr.strip()[-500:] or "".join(failures[:1])
        line = f"no verdict: {problem}{why and f' ({why})'}"
        return TestsResult(False, total, [line, *failures[:MAX_FAILURES]], execution, "counted", total, [_BESIDE])
    doubts = [_BESIDE]
    tests = {*suite.expected, *(name for outcomes in all_outcomes for name in outcomes.by_test)}
    if bare := len(tests) - sum(bool(expected.twins) for expected in suite.expected.values()):
        doubts.append(f"{bare} of {len(tests)} tests have no twin, so a forged outcome would not be noticed")
    constant = sum(bool(_kinds(expected) & {"literal", "inner"}) for expected in suite.expected.values())
    if loose := len(tests) - constant:
        line = f"{loose} of {len(tests)} tests have no twin with another constant"
        doubts.append(f"{line}, so an object that agrees with anything would not be noticed")
    passed = not failures and total > 0
    failures = list(dict.fromkeys(failures))
    return TestsResult(
        passed, total, failures[:MAX_FAILURES], execution, "counted", min(len(failures), total), doubts, by_test
    )


def _function(name: str) -> str:
    return name.rpartition("::")[2]


def _outcomes(stream: bytes, execution: ExecResult) -> _Outcomes:
    outcomes = _Outcomes()
    for frame in values.unpack_frames(stream):
        if not (isinstance(frame, list) and len(frame) == 3 and all(isinstance(item, str) for item in frame)):
            outcomes.problem = "something other than outcomes was written to their channel"
            return outcomes
        test, outcome, message = frame
        if outcome == "end":
            complete = message == str(len(outcomes.reported)) and execution.ok
            outcomes.problem = None if complete else "outcomes are missing, or the program did not exit normally"
            return outcomes
        outcomes.reported.append((test, outcome, message))
        name = test.partition("[")[0]
        outcomes.by_test.setdefault(name, set()).add(outcome)
        if outcome == "failed" and message.startswith("AssertionError"):
            outcomes.refuted.add(name)
    return outcomes


def _left_out(suite: Suite, outcomes: _Outcomes) -> str | None:
    return next((f"{test} was not run" for test in suite.expected if test not in outcomes.by_test), None)


def _passing_twin(suite: Suite, all_outcomes: Sequence[_Outcomes]) -> str | None:
    """The problem if a test passed and one of its twins did too. Wrong code may pass a twin, but not both."""
    for name in suite.expected:
        by_kind: dict[Kind | None, list[bool]] = {}
        for run, outcomes in zip(suite.runs, all_outcomes, strict=True):
            kind = run.twins[name].kind if name in run.twins else None
            if kind == "opposite":  # comparing a value with another constant may raise
                holds = name not in outcomes.refuted
            else:
                fails = kind in (None, "inner", "unsure") and "failed" in outcomes.by_test[name]  # for some parameters
                holds = "passed" in outcomes.by_test[name] and not fails
            by_kind.setdefault(kind, []).append(holds)
        passed, opposite = by_kind.pop(None, []), by_kind.pop("opposite", [])
        unsure = [reports for kind in ("inner", "unsure") if (reports := by_kind.pop(kind, []))]
        if all(passed) and (any(map(any, by_kind.values())) or any(map(all, unsure))):
            return f"{name} also passed with changed constants, with which honest code fails"
        if all(passed) and not all(opposite):
            return f"values that {name} compares also equal other constants"
    return None


# --- reading the tests


def _parsed(tests: Mapping[str, bytes]) -> dict[str, ast.Module]:
    """The Python files among the tests. A `.py` file that can't be parsed may be data, unless it is named as tests."""
    trees: dict[str, ast.Module] = {}
    for path, data in tests.items():
        if path.endswith(".py"):
            try:
                trees[path] = ast.parse(data, path)
            except (SyntaxError, ValueError) as error:
                if _is_named(posixpath.basename(path)) or len(tests) == 1:
                    raise UsageError(f"the tests in {path} are not Python: {error}", fix="correct them") from error
    return trees


def _to_run(trees: Mapping[str, ast.Module]) -> list[str]:
    """The files that contain tests: those with a test name, or if there are none, all but conftest.py."""
    named = [path for path in trees if _is_named(posixpath.basename(path))]
    paths = named or [path for path in trees if posixpath.basename(path) not in (_CONFTEST, "__init__.py")]
    if not paths:
        raise UsageError("there are no tests", fix="pass tests={'test_it.py': text}")
    if not any(_can_fail(trees[path]) for path in paths):
        fix = "name functions test_..., or derive classes from unittest.TestCase"
        raise UsageError(f"there is no test in {', '.join(sorted(paths))}", fix=fix)
    return sorted(paths)


def _can_fail(tree: ast.Module) -> bool:
    """Whether a file has tests, or statements other than imports, assignments and definitions."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.Import) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        else:
            return True
        if any(name.startswith("test") or name == "*" or name[:1].isupper() for name in names):
            return True
    return False


def _is_named(name: str) -> bool:
    return name.startswith("test_") or name.endswith("_test.py") or name == "tests.py"


def _without_settings(files: Mapping[str, bytes], tests: Mapping[str, bytes]) -> dict[str, bytes]:
    """The judged files without configuration of pytest, and without files that would shadow the tests.

    Python finds a folder, an extension or compiled code before a module of that name.
    """
    folders = {posixpath.dirname(path) for path in tests}
    above = {parent for folder in folders for parent in _and_parents(folder)}
    modules = {path.removesuffix(".py") for path in tests if path.endswith(".py")}
    return {
        path: data
        for path, data in files.items()
        if posixpath.basename(path) not in _LEFT_OUT
        and "__pycache__" not in path.split("/")
        and path not in tests
        and f"{posixpath.dirname(path)}/{posixpath.basename(path).partition('.')[0]}".lstrip("/") not in modules
        and modules.isdisjoint(_and_parents(posixpath.dirname(path)))
        and path not in above
        and not any(parent in tests for parent in _and_parents(posixpath.dirname(path)))
    }


def _and_parents(folder: str) -> Iterator[str]:
    while folder:
        yield folder
        folder = posixpath.dirname(folder)


def _modules(judged: Mapping[str, bytes], tests: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Full names of the judged modules, none in a folder of tests, and of the judged packages with test files."""
    names = _names(judged)
    of_tests = {name for path in tests if path.endswith(".py") for name in _names({path: b""})}
    around = {name for name in names & of_tests if name.rpartition(".")[2] not in ("test", "tests")}
    around = {name for name in around if all(part not in ("test", "tests") for part in name.split("."))}
    judged_names = {name for name in names - (of_tests - around) if _top(name) not in sys.stdlib_module_names}
    tops = {_top(name) for name in of_tests - around} - {_top(name) for name in around}
    return sorted(name for name in judged_names if _top(name) not in tops), sorted(around & judged_names)


def _names(files: Mapping[str, bytes]) -> set[str]:
    """Full names of modules and packages, including those in `src/`."""
    names: set[str] = set()
    for path in files:
        parts = path.split("/")
        if parts[0] == "src" and "src/__init__.py" not in files:
            parts = parts[1:]
        if path.endswith(".py") and parts:
            parts[-1] = parts[-1].removesuffix(".py")
            whole = parts[:-1] if parts[-1] == "__init__" else parts
            names |= {".".join(whole[:count]) for count in range(1, len(whole) + 1)}
    return names


def _needs_pytest(trees: Mapping[str, ast.Module]) -> bool:
    for path, tree in trees.items():
        if posixpath.basename(path) == _CONFTEST:
            return True
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and any(item.name.partition(".")[0] == "pytest" for item in node.names):
                return True
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pytest":
                return True
        for item in tree.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test"):
                if item.args.args or isinstance(item, ast.AsyncFunctionDef):
                    return True
            elif isinstance(item, ast.ClassDef) and item.name.startswith("Test") and not _is_case(item):
                return True
    return False


def _is_case(item: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("TestCase") for base in item.bases)


def _are_deep(trees: Mapping[str, ast.Module], paths: Iterable[str], modules: Sequence[str]) -> bool:
    """Whether tests need the judged code in their own process, judging by their source."""
    helpers = {part.removesuffix(".py") for path in trees for part in path.split("/")}
    return any(_Reader(path, trees[path], set(modules), helpers).is_deep() for path in _reached(trees, paths))


def _reached(trees: Mapping[str, ast.Module], paths: Iterable[str]) -> set[str]:
    """The test files that are run, conftest.py, and the helpers that these import, judging by names."""
    reached: set[str] = set()
    pending = {*(path for path in paths if path in trees), *(p for p in trees if posixpath.basename(p) == _CONFTEST)}
    while pending:
        reached.add(path := pending.pop())
        names: set[str] = set()
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None) or "", *(item.name for item in node.names)]
                names |= {part for module in modules for part in module.split(".")}
        for other in trees.keys() - reached:
            folder, name = posixpath.split(other.removesuffix(".py"))
            if (posixpath.basename(folder) if name == "__init__" else name) in names:
                pending.add(other)
    return reached


class _Reader:
    """Decides whether a test file needs the judged code in its process.

    `modules` are full names of the judged modules, `helpers` parts of the names of the tests' modules.
    """

    def __init__(self, path: str, tree: ast.Module, modules: Set[str], helpers: Set[str]) -> None:
        self._package = [part for part in path.split("/")[:-1] if part != "src"]
        self._nodes = list(_without_harmless(tree))
        self._known = _PLAIN_MODULES | {_top(name) for name in modules} | helpers
        judged, imported = set(), set()
        for node in self._nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for module, name in self._imported(node):
                    if module in modules:
                        judged.add(name)
                    elif _top(module) in helpers:
                        imported.add(name)
        self._judged, self._helpers = judged, imported - judged
        self._has_numpy = any(
            _top(module) == "numpy"
            for node in self._nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module, _ in self._imported(node)
        )
        stored = (node.id for node in self._nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        arguments = (node.arg for node in self._nodes if isinstance(node, ast.arg))
        self._bound = {*judged, *stored, *arguments}
        self._classes = {node.name for node in self._nodes if isinstance(node, ast.ClassDef)}
        self._simple = {id(name) for node in self._nodes for name in _simple_uses(node)}

    def is_deep(self) -> bool:
        """Whether the file needs the judged code in its process."""
        return any(map(self._needs, self._nodes))

    def _needs(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            # The judged code may have registered its classes with an installed package.
            return not {_top(module) for module, _ in self._imported(node)} <= self._known
        if isinstance(node, ast.ClassDef):
            return self._is_of_both(node)
        if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call) and self._has_numpy:
            # Arrays cross as copies, but a call with an unused result may be meant to modify one in place.
            return _root(call.func) in self._judged and any(isinstance(item, ast.Name) for item in call.args)
        if isinstance(node, ast.Attribute):
            is_theirs = node.attr[0] != "_" and _root(node) in self._judged
            return node.attr in _SHARED_ATTRIBUTES and not is_theirs
        if isinstance(node, ast.arg):
            return node.arg in _SHARED_FIXTURES
        if isinstance(node, ast.Name) and node.id in self._classes:
            return id(node) not in self._simple
        return isinstance(node, ast.Name) and node.id in _SHARED_NAMES - self._bound

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
        """The modules that an import names, and the names that it binds."""
        if isinstance(node, ast.Import):
            yield from ((item.name, item.asname or _top(item.name)) for item in node.names)
        else:
            above = self._package[: len(self._package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from ((module, item.asname or item.name) for item in node.names)

    def _is_of_both(self, node: ast.ClassDef) -> bool:
        """Whether a class depends on the judged code (bases, decorators), or may derive from a built-in type."""
        bases = {_root(base) for base in node.bases} - self._classes - self._helpers - _PLAIN_BASES
        if bases & self._judged or any(not _is_error(base) for base in bases):
            return True
        return bool(node.keywords) or any(_root(decorator) in self._judged for decorator in node.decorator_list)


def _simple_uses(node: ast.AST) -> Sequence[ast.AST | None]:
    """Parts of a node in which a class of the tests may occur without exposing more than its objects to judged code."""
    if isinstance(node, ast.Call):
        is_check = _is_assertion(node) or _dotted(node.func) == "pytest.raises"
        return [node.func, *(node.args if is_check or _name_of(node.func) in ("isinstance", "super") else ())]
    if isinstance(node, ast.ClassDef):
        return node.bases
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Attribute):
        return [node.value]
    return [getattr(node, name, None) for name in ("exc", "type", "annotation", "returns")]


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


_PLAIN_BASES = {"object", "unittest", "TestCase", "IsolatedAsyncioTestCase"}


def _is_error(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, Exception)


def _without_harmless(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, except uses of modules that don't depend on the process."""
    if isinstance(node, ast.Attribute) and _dotted(node) in _HARMLESS:
        return
    if isinstance(node, ast.Call) and _dotted(node.func) in _STARTS:
        return
    if isinstance(node, ast.Subscript) and _dotted(node.value) and ast.unparse(node) == "sys.modules[__name__]":
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__"):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _without_harmless(child)


def _dotted(node: ast.expr) -> str:
    """`a.b.c`, or "" for an expression that isn't a dotted name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else ""


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _quietly_parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])  # the tests' process will report it


def _looks_again(tree: ast.Module) -> bool:
    """Whether a test passes a variable to a call, and compares that variable with a literal.

    Only then do changes to the variable cross from calls that return a value: otherwise judged code could empty a
    list, return [] and pass `assert f(items) == sorted(items)`.
    """
    passed = {
        argument.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and not _is_assertion(node)
        for argument in (*node.args, *(item.value for item in node.keywords))
        if isinstance(argument, ast.Name)
    }
    for node in ast.walk(tree):
        sides: Sequence[ast.expr] = ()
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
        elif isinstance(node, ast.Call) and _is_assertion(node):
            sides = node.args[:2]
        if any(isinstance(side, ast.Name) and side.id in passed for side in sides) and any(map(_is_display, sides)):
            return True
    return False


def _is_assertion(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert")


def _is_display(node: ast.expr) -> bool:
    return isinstance(node, ast.List | ast.Dict | ast.Set | ast.Constant)


def _top(name: str) -> str:
    return name.partition(".")[0]


# --- tests and judged code in one process: several runs with twins


def _plan_runs(suite: Suite, trees: Mapping[str, ast.Module]) -> None:
    """Set the expected tests, and choose for each the run in which it is real."""
    sources: dict[str, str] = {}
    helpers: Comparing = {name: places for tree in trees.values() for name, places in comparing(tree).items()}
    called = _mentioned(trees.values())
    failing, skipping = _marks(trees, _EXPECTED_FAILURES), _marks(trees, _EXPECTED_FAILURES | _SKIPS)
    modules = {posixpath.basename(path).removesuffix(".py") for path in trees}
    single = _used_once(trees.values())
    for path in [path for path in suite.paths if path in trees]:
        file = TestFile(suite.tests[path], trees[path], modules, single)
        for name, function, names in _tests_in(path, trees[path], suite.pytest):
            is_single = not names & failing and function.name not in called
            twins = twins_of(function, file, helpers) if is_single else []
            may_skip = bool(names & skipping)
            suite.expected[name] = Expected(may_skip, twins)
            sources[name] = path
    changeable = [name for name, expected in suite.expected.items() if expected.twins]
    unsure = any("literal" not in _kinds(suite.expected[name]) for name in changeable)
    count = next(
        (n for n in range(3 if unsure else 2, _MOST_RUNS) if n ** len(changeable) >= 2**_WANTED_BITS), _MOST_RUNS
    )
    chosen: list[dict[str, Twin]] = [{} for _ in range(count if changeable else 1)]
    chance = secrets.SystemRandom()
    for name in changeable:
        real = chance.randrange(count)
        ordered = _in_turn(suite.expected[name].twins, count - 1)
        for number, twin in zip((n for n in range(count) if n != real), ordered, strict=True):
            chosen[number][name] = twin
    for by_name in chosen:
        edits: dict[str, list[Edit]] = {}
        for name, twin in by_name.items():
            edits.setdefault(sources[name], []).extend(twin.edits)
        changed = {path: edited(suite.tests[path], dict.fromkeys(edits[path])) for path in edits}
        suite.runs.append(Run({**suite.tests, **changed}, by_name))


def _used_once(trees: Iterable[ast.Module]) -> set[str]:
    """Names that are read once in all test files, and that no file imports."""
    counts: Counter[str] = Counter()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            counts[node.id] += 1
        elif isinstance(node, ast.Attribute):
            counts[node.attr] += 1
        elif isinstance(node, ast.alias):
            counts[node.name] += 2
    return {name for name, count in counts.items() if count == 1}


def _kinds(expected: Expected) -> set[str]:
    return {twin.kind for twin in expected.twins}


def _in_turn(twins: Sequence[Twin], count: int) -> list[Twin]:
    """`count` twins in random order, from the most reliable kinds available, alternating between kinds."""
    chance = secrets.SystemRandom()
    kinds = ("literal", "opposite") if any(twin.kind == "literal" for twin in twins) else ("negated", "unsure", "inner")
    pools = [pool for kind in kinds if (pool := [twin for twin in twins if twin.kind == kind])]
    first = chance.randrange(len(pools))
    chosen = [chance.choice(pools[(first + number) % len(pools)]) for number in range(count)]
    return chance.sample(chosen, count)


def _tests_in(path: str, tree: ast.Module, pytest: bool) -> Iterator[tuple[str, Function, set[str]]]:
    """Tests that are certain to be collected: name, function, and the names that the test and its scope mention."""
    whole = {
        _EVERYWHERE,
        *_mentioned(item for item in tree.body if isinstance(item, ast.Assign | ast.Expr | ast.Raise)),
    }
    once = _bound_once(tree)
    for item in tree.body:
        if _is_test(item) and item.name in once:
            yield f"{path}::{item.name}", item, whole | _mentioned([item])
        elif isinstance(item, ast.ClassDef) and (_is_case(item) or (pytest and _is_test_class(item))):
            if item.name not in once or not all(map(_keeps_name, item.decorator_list)):
                continue
            others = (member for member in item.body if not getattr(member, "name", "").startswith("test"))
            around = whole | _mentioned([*item.decorator_list, *others])
            once_here = _bound_once(item)
            for member in item.body:
                if _is_test(member) and member.name in once_here:
                    yield f"{path}::{item.name}::{member.name}", member, around | _mentioned([member])


def _bound_once(scope: ast.Module | ast.ClassDef) -> set[str]:
    """Names with a single binding in a module or class, which no later definition replaces."""
    counts: Counter[str] = Counter()
    pending: list[ast.AST] = [*scope.body]
    while pending:
        node = pending.pop()
        if isinstance(node, Function | ast.ClassDef):
            counts[node.name] += 1
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            counts[node.id] += 1
        elif isinstance(node, ast.alias):
            counts[node.asname or _top(node.name)] += 1
        pending += ast.iter_child_nodes(node)
    return {name for name, count in counts.items() if count == 1}


def _is_test(item: ast.stmt) -> TypeGuard[Function]:
    """Whether a statement is a test that is reported under its function's name."""
    if not isinstance(item, Function) or not item.name.startswith("test"):
        return False
    return all(map(_keeps_name, item.decorator_list))


_DECORATORS = {
    "mark", "skip", "skipIf", "skipUnless", "expectedFailure", "patch", "object", "dict", "staticmethod", "classmethod",
    "given", "settings", "example", "seed", "freeze_time", "filterwarnings", "wraps", "asyncio",
}  # fmt: skip
"""Decorators that keep one test under its name. Others may make several of it (`parameterized.expand`), or none."""


def _keeps_name(decorator: ast.expr) -> bool:
    dotted = _dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).split(".")
    return dotted[-1] in _DECORATORS or "mark" in dotted


def _is_test_class(item: ast.ClassDef) -> bool:
    names = {member.name for member in item.body if isinstance(member, ast.FunctionDef)}
    assigned = {ast.unparse(member) for member in item.body if isinstance(member, ast.Assign)}
    return item.name.startswith("Test") and "__init__" not in names and "__test__ = False" not in assigned


_SKIPS = {"skip", "skipif", "skipIf", "skipUnless", "skipTest", "SkipTest", "importorskip"}
_EXPECTED_FAILURES = {"xfail", "expectedFailure"}
_EVERYWHERE = "\0everywhere"


def _marks(trees: Mapping[str, ast.Module], names: Set[str]) -> Set[str]:
    """These names, and names of fixtures, helpers and variables that use them; `_EVERYWHERE` if all tests use them."""
    users: set[str] = set()
    for path, tree in trees.items():
        for item in ast.walk(tree):
            if isinstance(item, Function) and not item.name.startswith("test") and _mentioned([item]) & names:
                is_hook = item.name.startswith("pytest_") and posixpath.basename(path) == _CONFTEST
                is_everywhere = is_hook or any("autouse" in ast.unparse(decorator) for decorator in item.decorator_list)
                users.add(_EVERYWHERE if is_everywhere else item.name)
            elif isinstance(item, ast.Assign) and _mentioned([item.value]) & names:
                users |= {target.id for target in item.targets if isinstance(target, ast.Name)}
    return names | users


def _mentioned(items: Iterable[ast.AST]) -> set[str]:
    """Names of variables, attributes and parameters."""
    nodes = [node for item in items for node in ast.walk(item)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}
