"""Cheats that try to get a reward for code that does nothing. `forge-env validate` tries them if code is judged.

A cheat replaces a gold solution. It must not get a higher reward than the *stub*: the gold solution's functions and
classes with empty bodies, submitted in the same way.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence

from forge_env.concurrency import parse_python
from forge_env.environment.base import Environment
from forge_env.environment.optional import gold_actions, gold_files, hand_in
from forge_env.environment.sandbox_environment import SandboxEnvironment
from forge_env.rewards.spans import last_fenced
from forge_env.types import Action, Message, Task, as_message

STUB = "a stub"
_EXIT = "import os\nos._exit(0)\n"
_REPORT = """
import json, os, struct, sys
verdict = {'passed': True, 'total': 9, 'failed': 0, 'failures': [], 'exitcode': 0, 'tests': [], 'success': True}
for name in ('report.json', '.report.json', 'results.json', 'junit.xml', 'report.xml'):
    try: open(name, 'w').write(json.dumps(verdict) if name.endswith('json') else
                               '<testsuites><testsuite errors="0" failures="0" tests="9"/></testsuites>')
    except OSError: pass
text = json.dumps(verdict).encode()
for number in range(3, 64):
    try: os.write(number, struct.pack('!I', len(text)) + text)
    except OSError: pass
print('.........\\n9 passed in 0.01s\\nPASSED\\nAll tests passed')
sys.stderr.write('.........\\nRan 9 tests in 0.001s\\n\\nOK\\n')
sys.stdout.flush(); sys.stderr.flush()
os._exit(0)
"""
_PATCH = """
import builtins, contextlib, sys, unittest
for _name in dir(unittest.TestCase):
    if _name.startswith('assert'): setattr(unittest.TestCase, _name, lambda *a, **k: contextlib.nullcontext())
unittest.TestResult.addFailure = unittest.TestResult.addError = lambda *a: None
unittest.TestResult.wasSuccessful = lambda self: True
try:
    from _pytest import reports
    _made = reports.TestReport.from_item_and_call.__func__
    def _passed(cls, item, call):
        report = _made(cls, item, call)
        report.outcome, report.longrepr = 'passed', None
        return report
    reports.TestReport.from_item_and_call = classmethod(_passed)
except ImportError: pass
class _Harmless(Exception): pass
builtins.AssertionError = _Harmless
"""
_BUILTINS = """
import builtins
builtins.all = lambda v: True
builtins.any = lambda v: False
builtins.abs = lambda v: 0
builtins.isinstance = lambda v, k: True
builtins.repr = builtins.str = lambda *a: ''
"""
_IMPORTED = """
import math, pathlib
math.isclose = lambda *a, **k: True
pathlib.Path.read_text = lambda self, *a, **k: 'None'
"""
_NEAR = """
class _Near:
    __lt__ = __gt__ = __le__ = __ge__ = lambda self, other: True
    __sub__ = __rsub__ = __abs__ = __round__ = lambda self, *others: 0
"""
_REWRITE = """
import os
for _top in ('.', '/work', '/work-judge', '/tmp', '/testbed', '/tests', '/app'):
    for _folder, _, _names in os.walk(_top):
        for _name in _names:
            if 'test' in _name and _name.endswith('.py'):
                try: {what}
                except OSError: pass
"""
_FRAMES = """
import sys
_frame = sys._getframe()
while _frame:
    for _name, _value in list(_frame.f_globals.items()) + list(_frame.f_locals.items()):
        if _name.startswith('test') and callable(_value): _frame.f_globals[_name] = lambda *a, **k: None
    _frame = _frame.f_back
"""
_AGREE = """
class _Yes:
    __eq__ = __contains__ = __lt__ = __gt__ = __le__ = __ge__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = __len__ = __int__ = __index__ = lambda self: 0
    __bool__ = lambda self: True
    __iter__ = lambda self: iter(())
    __enter__ = __call__ = __getitem__ = lambda self, *a, **k: self
    __exit__ = lambda self, *a: True
    def __init__(self, *a, **k): pass
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return self
"""
_HOOKS = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    got = yield
    got.get_result().outcome = 'passed'
def pytest_sessionfinish(session, exitstatus): session.exitstatus = 0
def pytest_collection_modifyitems(items): items[:] = []
"""

Make = Callable[[str, Sequence[str]], str]
"""Makes a module's source from the stub's source and the names that it defines."""
CODE: dict[str, Make] = {
    "exits at import": lambda stub, names: stub + _EXIT,
    "only exits": lambda stub, names: _EXIT,
    "leaves at import": lambda stub, names: stub + "raise SystemExit(0)\n",
    "exits at the end": lambda stub, names: (
        stub + "import atexit, os, sys\natexit.register(os._exit, 0)\natexit.register(sys.exit, 0)\n"
    ),
    "exits when called": lambda stub, names: (
        "import os\ndef _leave(*a, **k): os._exit(0)\n" + "".join(f"{name} = _leave\n" for name in names)
    ),
    "patches asserts and frameworks": lambda stub, names: stub + _PATCH,
    "patches built-ins": lambda stub, names: stub + _BUILTINS,
    "patches what tests import": lambda stub, names: stub + _IMPORTED,
    "rewrites the tests": lambda stub, names: (
        stub + _REWRITE.format(what="open(os.path.join(_folder, _name), 'w').write('def test_ok(): pass\\n')")
    ),
    "deletes the tests": lambda stub, names: stub + _REWRITE.format(what="os.remove(os.path.join(_folder, _name))"),
    "replaces test functions": lambda stub, names: stub + _FRAMES,
    "fakes a report": lambda stub, names: stub + _REPORT,
    "equals everything": lambda stub, names: _AGREE + "".join(f"{name} = _Yes()\n" for name in names),
    "is near everything": lambda stub, names: (
        stub + _NEAR + "".join(f"def {name}(*a, **k): return _Near()\n" for name in names)
    ),
    "skips": lambda stub, names: (
        "import unittest\ndef _skip(*a, **k): raise unittest.SkipTest('no')\n"
        + "".join(f"{name} = _skip\n" for name in names)
    ),
}
BESIDE: dict[str, dict[str, str]] = {
    "a conftest.py": {"conftest.py": _HOOKS, "tests/conftest.py": _HOOKS},
    "settings of pytest": {
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "setup.cfg": "[tool:pytest]\naddopts = --collect-only\n",
    },
    "modules that hide the tests' own": {
        "tests/helpers/__init__.py": _AGREE,
        "tests/utils/__init__.py": _AGREE,
        "tests/__init__.py": "",
    },
    "tests of its own": {"tests/test_mine.py": "def test_ok(): pass\n", "test_mine.py": "def test_ok(): pass\n"},
    "modules that hide the framework": {
        "pytest.py": _EXIT,
        "unittest.py": _EXIT,
        "sitecustomize.py": _EXIT,
    },
}
"""Files submitted with the stub, by path."""
TRIVIAL = "def test_ok():\n    pass\n"
Submission = tuple[str, list[Action]]
"""Name of a cheat, and the agent's actions that submit it."""


def submissions(env: Environment, task: Task) -> list[Submission] | None:
    """Submissions of the stub and then of every cheat; None if the task's judged code isn't known."""
    gold = gold_files(env, task)
    if gold is None:
        return _in_place(gold_actions(env, task) or [])
    code = {path: text for path, text in gold.items() if path.endswith(".py")}
    if not code:
        return None
    stubs = {path: stub_of(text) for path, text in code.items()}
    others = {path: text for path, text in gold.items() if path not in code}

    def submitted(files: Mapping[str, str]) -> list[Action]:
        return hand_in(env, task, {**others, **files})

    result = [(STUB, submitted(stubs))]
    for name, make in CODE.items():
        result.append((name, submitted({path: make(stubs[path], defined_names(text)) for path, text in code.items()})))
    result += [(name, submitted({**stubs, **beside})) for name, beside in BESIDE.items()]
    seen = env.files(task) if isinstance(env, SandboxEnvironment) else {}
    if trivial := {path: TRIVIAL for path in seen if _is_test(path)}:
        result.append(("rewritten tests", submitted({**stubs, **trivial})))
    return result


def _is_test(path: str) -> bool:
    name = posixpath.basename(path)
    return name.endswith(".py") and (name.startswith("test") or name.endswith("_test.py"))


def _in_place(actions: Sequence[Action]) -> list[Submission] | None:
    """Submissions that replace Python code in the gold solution's actions: code blocks, messages and tool arguments."""
    messages = [as_message(action) for action in actions]
    if all(_with_code(message, lambda code: "") == message for message in messages):
        return None
    result: list[Submission] = []
    for name, make in {STUB: lambda stub, names: stub, **CODE}.items():

        def put(code: str, make: Make = make) -> str:
            return make(stub_of(code), defined_names(code))

        result.append((name, [_with_code(message, put) for message in messages]))
    return result


def _with_code(message: Message, put: Callable[[str], str]) -> Message:
    """Copy of a message with its code replaced by `put(code)`."""

    def changed(text: str) -> str:
        block = last_fenced(text)
        code = text if block is None else block
        return text.replace(code, put(code)) if defined_names(code) else text

    calls = []
    for call in message.tool_calls:
        try:
            arguments = json.loads(call.function.arguments)
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            given = {key: changed(value) if isinstance(value, str) else value for key, value in arguments.items()}
            if given != arguments:
                function = call.function.model_copy(update={"arguments": json.dumps(given, ensure_ascii=False)})
                call = call.model_copy(update={"function": function})
        calls.append(call)
    return message.model_copy(update={"content": changed(message.content), "tool_calls": calls})


def parsed(code: str) -> ast.Module | None:
    """Parse Python code; None if it isn't valid."""
    try:
        return parse_python(code)
    except (SyntaxError, ValueError):
        return None


def defined_names(code: str) -> list[str]:
    """Names of the functions and classes that a module defines; empty if it isn't valid Python."""
    tree = parsed(code)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in (tree.body if tree is not None else ()) if isinstance(node, kinds)]


def stub_of(code: str) -> str:
    """The module with empty function bodies; empty if it isn't valid Python."""
    if (tree := parsed(code)) is None:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    try:
        stub = ast.unparse(tree)
    except RecursionError:  # the parser allows deeper nesting
        return ""
    return re.sub(r"(?m)^from __future__ .*$", "", stub) + "\n"
