"""What `Sandbox.run_tests` is asked for: which way the tests are run, what is sent, and the verdict on what comes back.

Nothing here runs inside a sandbox, and nothing of the judged code decides: the way is chosen from the tests alone.
"""

from __future__ import annotations

import ast
import posixpath
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from forge_env.errors import UsageError
from forge_env.sandbox import ExecResult, How, TestsResult
from sandboxes.runner import values
from sandboxes.runner.testing import PYTEST_INI
from sandboxes.runner.wire import Header

MAX_FAILURES = 50
_CONFTEST = "conftest.py"
_LEFT_OUT = {_CONFTEST, PYTEST_INI, ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"}
"""Files of the judged code that could tell pytest what to do."""
_SHARED = {
    "capsys", "capfd", "capsysbinary", "capfdbinary", "caplog", "recwarn", "monkeypatch", "tmp_path", "tmpdir",
    "tmp_path_factory", "tmpdir_factory", "mock", "patch", "Mock", "MagicMock", "AsyncMock", "subprocess", "tempfile",
    "open", "Path", "redirect_stdout", "redirect_stderr", "reload", "sys", "os", "shutil", "inspect", "chdir",
    "assertLogs", "assertWarns", "warns", "gc", "weakref", "pickle",
}  # fmt: skip
"""What tests use that need the judged code in their own process: files, output, patches, variables."""
_RAISES = ("raises", "assertRaises", "assertRaisesRegex", "deprecated_call")


@dataclass(frozen=True)
class Expected:
    """A test that must be told of."""

    may_skip: bool = False
    canary: bool = False
    """It must fail: where it passes, failures are not told of."""


@dataclass
class Suite:
    """Judged files and tests, ready to be sent."""

    judged: dict[str, bytes]
    tests: dict[str, bytes]
    text: str | None
    """The tests, where they are one text without a file."""
    how: How
    pytest: bool
    paths: list[str]
    """Of `tests`, those that are run; the others are what they import."""
    modules: list[str]
    """Top-level names that the judged files offer."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    expected: dict[str, Expected] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    """Modules of others that the tests import: they judge, too."""

    def apart_header(self) -> tuple[Header, bytes]:
        """The request for two processes, beside the judged code, and its tail."""
        tests = b"" if self.text is None else self.text.encode("utf-8", "replace")
        sizes = [[path, len(data)] for path, data in self.tests.items()]
        header = {"code": len(tests), "files": sizes, **self._run(), "judged": self.modules}
        tail = b"".join((tests, *self.tests.values()))
        return {"op": "judge", "kind": "judge", "tests": header}, tail

    def counted_header(self) -> tuple[Header, dict[str, bytes]]:
        """The request for one process, and all its files."""
        told = {"nonce": self.nonce, "tests": list(self.tests), "judged": self.modules, "imports": self.imports}
        return {"kind": "counted", **told, **self._run()}, {**self.judged, **self.tests}

    def _run(self) -> Header:
        return {"pytest": self.pytest, "paths": self.paths}


def suite_of(
    code: str | None,
    tests: str | Mapping[str, bytes],
    files: Mapping[str, bytes],
    how: How | None,
) -> Suite:
    """The suite for these arguments of `run_tests`; paths are checked already. Raises `UsageError`."""
    if isinstance(tests, str):
        if code is None:
            raise UsageError("tests in one text judge code in one text", fix="pass tests={path: text}")
        if how == "counted":
            raise UsageError("tests in one text are run apart", fix="pass files={path: text}, tests={path: text}")
        return Suite({}, {}, tests, "apart", False, [], ["solution"])
    if code is not None:
        files = {"solution.py": code.encode("utf-8", "surrogatepass"), **files}
    trees = {path: _parsed(path, data) for path, data in tests.items() if path.endswith(".py")}
    paths = _to_run(trees)
    judged = _without_settings(files, tests)
    modules = sorted(_modules(judged) - _modules(tests))
    pytest = PYTEST_INI in tests or _needs_pytest(trees)
    if how is None:
        how = "counted" if any(_is_deep(tree, set(modules)) for tree in trees.values()) else "apart"
    if PYTEST_INI in tests:
        paths = [PYTEST_INI, *paths]
    suite = Suite(judged, dict(tests), None, how, pytest, paths, modules)
    if how == "counted":
        own = {*modules, *_modules(tests)}
        suite.imports = sorted(name for name in _imports(trees) if _top(name) not in own)
        _count(suite, trees)
    return suite


def verdict_apart(execution: ExecResult, stream: bytes, judge: Header) -> TestsResult:
    """The verdict of the tests' process; without one, nothing has passed."""
    frames = values.unpack_frames(stream)
    if len(frames) == 1 and isinstance(verdict := frames[0], dict):
        failures = [str(line) for line in verdict["failures"]]
        total, failed = int(verdict["total"]), int(verdict["failed"])
        return TestsResult(not failed and total > 0, total, failures, execution, "apart", failed)
    why = "timed out" if execution.timed_out else str(judge.get("stderr", "")).strip()[-500:]
    return TestsResult(False, 0, [f"the tests came to no verdict: {why}"], execution, "apart", 0)


def verdict_counted(execution: ExecResult, stream: bytes, suite: Suite) -> TestsResult:
    """The verdict on what was told of each test: all that were expected, none that fails, nothing out of order."""
    outcomes: dict[str, str] = {}
    failures: list[str] = []
    ran: list[str] = []
    canaries = {test for test, expected in suite.expected.items() if expected.canary}
    problem = _told(stream, suite, outcomes, ran, failures)
    if problem is None:
        problem = next((f"{test} was not run" for test in suite.expected if test not in outcomes), None)
    if problem is None and any(outcomes[test] != "failed" for test in canaries):
        problem = "failures were not told of: a test that can't pass did"
    if problem is None and not execution.ok:
        problem = "the program did not end by itself"
    total = sum(test.partition("[")[0] not in canaries for test in ran)
    if problem is not None:
        why = "timed out" if execution.timed_out else execution.stderr.strip()[-500:]
        line = f"no verdict: {problem}{why and f' ({why})'}"
        return TestsResult(False, total, [line, *failures[:MAX_FAILURES]], execution, "counted", total)
    passed = not failures and total > 0
    return TestsResult(passed, total, failures[:MAX_FAILURES], execution, "counted", len(failures))


def _told(stream: bytes, suite: Suite, outcomes: dict[str, str], ran: list[str], failures: list[str]) -> str | None:
    """Follow what was told: outcomes by test (the parameters' worst), tests that ran, failures; or what is wrong."""
    running: set[str] = set()
    finished = 0
    for frame in values.unpack_frames(stream):
        if not (isinstance(frame, list) and len(frame) == 4 and all(isinstance(item, str) for item in frame)):
            return "something else was written where results are told"
        nonce, test, outcome, message = frame
        if nonce != suite.nonce:
            return "results were told by somebody else"
        if outcome == "end":
            if message:
                return f"what judges was changed: {message}"
            return None if test == str(finished) and not running else "results are missing"
        if outcome == "started":
            running.add(test)
            continue
        finished += 1
        running.discard(test)
        name = test.partition("[")[0]
        if outcomes.get(name) != "failed":
            outcomes[name] = outcome
        expected = suite.expected.get(name)
        if outcome != "skipped":
            ran.append(test)
        if outcome == "failed" and not (expected and expected.canary):
            failures.append(f"{test}: {message}")
        elif outcome == "skipped" and expected and not expected.may_skip:
            failures.append(f"{test}: it was skipped: {message}")
    return "the tests were left before their end"


# --- reading the tests


def _parsed(path: str, data: bytes) -> ast.Module:
    try:
        return ast.parse(data, path)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the tests in {path} are not Python: {error}", fix="correct them") from error


def _to_run(trees: Mapping[str, ast.Module]) -> list[str]:
    """The files that hold tests: named so, or all but conftest.py where none is."""
    named = [path for path in trees if _is_named(posixpath.basename(path))]
    found = named or [path for path in trees if posixpath.basename(path) not in (_CONFTEST, "__init__.py")]
    if not found:
        raise UsageError("there are no tests", fix="pass tests={'test_it.py': text}")
    if not any(_can_fail(trees[path]) for path in found):
        fix = "call functions test_..., or derive classes from unittest.TestCase"
        raise UsageError(f"there is no test in {', '.join(sorted(found))}", fix=fix)
    return sorted(found)


def _can_fail(tree: ast.Module) -> bool:
    """Whether a file has tests, or statements of its own, beside imports, names and functions of other names."""
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
    """The judged files without what pytest would obey, and without what is in the way of the tests.

    A folder, an extension or compiled code is found before a module of that name.
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


def _modules(files: Mapping[str, bytes]) -> set[str]:
    """Top-level names of the Python files, below `src/` too."""
    found = set()
    for path in files:
        parts = path.split("/")
        if parts[0] == "src" and "src/__init__.py" not in files:
            parts = parts[1:]
        if path.endswith(".py") and parts:
            found.add(parts[0].removesuffix(".py"))
    return found - set(sys.stdlib_module_names)


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


def _is_deep(tree: ast.Module, modules: set[str]) -> bool:
    """Whether tests need the judged code in their own process, as far as their text tells."""
    judged: set[str] = set()
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in modules:
            names = [item.name for item in node.names]
            if any(name == "*" or _is_class(name) for name in names):
                return True  # a class: its objects are compared, or it is caught or derived from
            judged |= {item.asname or item.name for item in node.names}
        elif isinstance(node, ast.Import):
            judged |= {
                item.asname or item.name.partition(".")[0]
                for item in node.names
                if item.name.partition(".")[0] in modules
            }
    inside_raises = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any(_called(item.context_expr) in _RAISES for item in node.items)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _SHARED:
            return True
        if isinstance(node, ast.arg) and node.arg in _SHARED:
            return True
        if isinstance(node, ast.Attribute) and (node.attr in _SHARED or _is_deep_use(node, judged)):
            return True
        if isinstance(node, ast.Expr) and _is_judged(node.value, judged) and id(node) not in inside_raises:
            return True  # called for what it changes
        if isinstance(node, ast.Call) and _is_judged(node, judged):
            given = [*node.args, *(item.value for item in node.keywords)]
            if any(
                isinstance(item, ast.Lambda) or (isinstance(item, ast.Name) and item.id in functions) for item in given
            ):
                return True
    return False


def _is_deep_use(node: ast.Attribute, judged: set[str]) -> bool:
    root = _root(node)
    if root not in judged:
        return False
    return isinstance(node.ctx, ast.Store | ast.Del) or _is_class(node.attr)


def _is_class(name: str) -> bool:
    """By the usual spelling: `LIMIT` is a constant, `Vector` and `V` are classes."""
    return name[0].isupper() and (len(name) == 1 or not name.isupper())


def _is_judged(node: ast.expr, judged: set[str]) -> bool:
    return isinstance(node, ast.Call) and _root(node.func) in judged


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else _root(node.func)


def _imports(trees: Mapping[str, ast.Module]) -> set[str]:
    """Names of the modules that tests import and leave as they are."""
    found: set[str] = set()
    patched: set[str] = set()
    for tree in trees.values():
        bound: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {item.name for item in node.names}
                bound |= {item.asname or _top(item.name): _top(item.name) for item in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _root(node) in bound:
                patched.add(bound[_root(node)])
    return {name for name in found if _top(name) not in patched}


def _top(name: str) -> str:
    return name.partition(".")[0]


# --- tests and judged code in one process: what must be told of


def _count(suite: Suite, trees: Mapping[str, ast.Module]) -> None:
    """Note every test that must be told of, and add tests that must fail."""
    for number, path in enumerate(path for path in suite.paths if path != PYTEST_INI):
        suite.expected.update(_tests_in(path, trees[path], suite.pytest))
        blocks, names = _canaries(path, trees[path], suite, few=number > 0)
        suite.tests[path] = _scattered(suite.tests[path], trees[path], blocks)
        suite.expected.update(dict.fromkeys(names, Expected(canary=True)))


def _scattered(data: bytes, tree: ast.Module, blocks: Sequence[str]) -> bytes:
    """The file with `blocks` between its statements, after its imports."""
    last = max((n for n, item in enumerate(tree.body) if isinstance(item, ast.Import | ast.ImportFrom)), default=-1)
    ends = [item.end_lineno or 0 for item in tree.body]
    places = [n for n in range(max(last, 0), len(ends) - 1) if tree.body[n + 1].lineno > ends[n]]
    lines = data.splitlines()
    cuts = [ends[n] for n in places] + [len(lines)]
    at: dict[int, list[bytes]] = {}
    for block in blocks:
        at.setdefault(secrets.choice(cuts), []).append(b"\n\n" + block.encode() + b"\n")
    done = 0
    parts: list[bytes] = []
    for cut, added in sorted(at.items()):
        parts += [*lines[done:cut], *added]
        done = cut
    return b"\n".join([*parts, *lines[done:], b""])


def _tests_in(path: str, tree: ast.Module, pytest: bool) -> Iterator[tuple[str, Expected]]:
    """Those that are surely collected."""
    whole = any(_may_skip(item) for item in tree.body if isinstance(item, ast.Assign | ast.Expr | ast.Raise))
    for item in tree.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test"):
            yield f"{path}::{item.name}", Expected(whole or _may_skip(item))
        elif isinstance(item, ast.ClassDef) and (_is_case(item) or (pytest and _is_test_class(item))):
            for member in item.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test"):
                    skips = whole or _class_may_skip(item) or _may_skip(member)
                    yield f"{path}::{item.name}::{member.name}", Expected(skips)


def _is_test_class(item: ast.ClassDef) -> bool:
    names = {member.name for member in item.body if isinstance(member, ast.FunctionDef)}
    assigned = {ast.unparse(member) for member in item.body if isinstance(member, ast.Assign)}
    return item.name.startswith("Test") and "__init__" not in names and "__test__ = False" not in assigned


_SKIPS = {"skip", "skipif", "skipIf", "skipUnless", "skipTest", "SkipTest", "importorskip", "xfail", "expectedFailure"}


def _class_may_skip(item: ast.ClassDef) -> bool:
    """Whether all its tests may: by a decorator, or by what prepares them."""
    others = [member for member in item.body if not getattr(member, "name", "").startswith("test")]
    return any(map(_may_skip, [*item.decorator_list, *others]))


def _may_skip(item: ast.AST) -> bool:
    """Whether it asks to be skipped, or is expected to fail."""
    names = (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in ast.walk(item))
    return any(name in _SKIPS for name in names if isinstance(name, str))


_PLAIN = (
    "assert {a} == {b}",
    "value = [{a}, {b}]\n    assert all(item == {a} for item in value)",
    "assert isinstance('{a}', int)",
    "assert len([{a}]) == {b}",
    "assert not any([{a}])",
    "assert sorted([{a}, {a} - 1]) == [{a}, {a} - 1]",
    "raise ValueError({a})",
)
_CASES = (
    "self.assertEqual({a}, {b})",
    "self.assertTrue({a} == {b})",
    "self.assertIn({a}, [{b}])",
    "with self.assertRaises(ValueError):\n            int('{a}')",
    "self.fail('{a}')",
)
_PYTEST = ("import pytest\n    with pytest.raises(ValueError):\n        int('{a}')",
           "import pytest\n    assert {a} == pytest.approx({b})")  # fmt: skip


_WORDS = ("again", "empty", "large", "limits", "nested", "none", "order", "single", "twice", "values", "zero")


def _canaries(path: str, tree: ast.Module, suite: Suite, *, few: bool) -> tuple[list[str], list[str]]:
    """Tests that fail unless somebody hides failures, and their names. They look like any other test.

    `few`: two of them, since each takes pytest two milliseconds, and another file has all.
    """
    chance = secrets.SystemRandom()
    taken = set(suite.expected) | {getattr(item, "name", "") for item in tree.body}
    names = [item.name for item in ast.walk(tree) if isinstance(item, ast.FunctionDef | ast.ClassDef)]
    words = sorted(
        {word.lower() for name in names for word in name.split("_") if word.isalpha()} - {"test"} | {*_WORDS}
    )
    judged = _names_of_judged(tree, set(suite.modules))

    def new_name(parent: str) -> str:
        while True:
            name = "_".join(["test", *chance.sample(words, 2)])
            if name not in taken and f"{parent}::{name}" not in suite.expected:
                taken.add(name)
                return name

    def function(body: str, indent: str, argument: str, name: str) -> str:
        mention = f"subject = {chance.choice(judged)}\n    {indent}" if judged else ""
        return f"{indent}def {name}({argument}):\n    {indent}{mention}{_filled(body)}\n"

    blocks: list[str] = []
    told: list[str] = []
    bodies = [*_PLAIN, *(_PYTEST if suite.pytest else ())]
    for body in chance.sample(bodies, 2) if few else bodies:
        name = new_name(path)
        blocks.append(function(body, "", "", name))
        told.append(f"{path}::{name}")
    if not few:
        case = next(
            name
            for name in ("".join(map(str.title, [*chance.sample(words, 2), "Test"])) for _ in range(1000))
            if name not in taken
        )
        block = f"import unittest\n\n\nclass {case}(unittest.TestCase):\n"
        for body in _CASES:
            name = new_name(f"{path}::{case}")
            block += function(body, "    ", "self", name) + "\n"
            told.append(f"{path}::{case}::{name}")
        blocks.append(block)
    return blocks, told


def _names_of_judged(tree: ast.Module, modules: set[str]) -> list[str]:
    """What the tests call the judged code's modules, functions and classes."""
    found: set[str] = set()
    for item in tree.body:
        if isinstance(item, ast.ImportFrom) and _top(item.module or "") in modules:
            found |= {name.asname or name.name for name in item.names}
        elif isinstance(item, ast.Import):
            found |= {name.asname or _top(name.name) for name in item.names if _top(name.name) in modules}
    return sorted(found - {"*"})


def _filled(body: str) -> str:
    number = 1000 + secrets.randbelow(9000)
    return body.format(a=number, b=number + 1 + secrets.randbelow(9))
