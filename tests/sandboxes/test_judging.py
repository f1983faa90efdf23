"""`run_tests` of many files: both ways, with unittest and pytest, and what cheats earn."""

from __future__ import annotations

import importlib.util
import marshal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from forge_env.errors import UsageError
from forge_env.sandbox import ExecResult, How, Limits, Sandbox, SandboxEngine, SandboxSpec, open_engine
from sandboxes.runner import values
from sandboxes.suite import verdict_apart

from .conftest import ENGINES, require
from .wheels import use_wheels

SPEC = SandboxSpec(packages=("pytest",))
LIMITS = Limits(wall_s=10, memory_mb=1024)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxEngine]:
    require(request.param)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_wheels(tmp_path_factory.mktemp("wheels"), monkeypatch)
        async with open_engine(request.param, concurrency=2, warm=0) as engine:
            yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(engine: SandboxEngine) -> AsyncIterator[Sandbox]:
    async with engine.session(SPEC) as sandbox:
        yield sandbox


pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n",
    "src/bank/__init__.py": "from bank.ledger import Ledger, Overdrawn, balance\n",
    "src/bank/ledger.py": (
        "class Overdrawn(Exception):\n    pass\n\n\n"
        "class Ledger:\n    def __init__(self, items=()):\n        self.items = list(items)\n"
        "    def __eq__(self, other):\n        return self.items == other.items\n"
        "    def take(self, amount):\n"
        "        if amount > sum(self.items):\n            raise Overdrawn(amount)\n"
        "        self.items.append(-amount)\n\n\n"
        "def balance(items):\n    return sum(items)\n"
    ),
}
STUBS = {
    **RIGHT,
    "src/bank/ledger.py": (
        "class Overdrawn(Exception):\n    pass\n\n\n"
        "class Ledger:\n    def __init__(self, items=()):\n        pass\n"
        "    def take(self, amount):\n        pass\n\n\n"
        "def balance(items):\n    return None\n"
    ),
}
CALLS = {
    "unittest": {
        "tests/test_bank.py": (
            "import unittest\nfrom bank import balance\n\n\n"
            "class BankTest(unittest.TestCase):\n"
            "    def test_sum(self):\n        self.assertEqual(balance([1, 2]), 3)\n"
            "    def test_empty(self):\n        self.assertEqual(balance([]), 0)\n"
        )
    },
    "pytest": {
        "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
        "tests/test_bank.py": (
            "import pytest\nfrom bank.ledger import balance\n\n\n"
            "def test_sum(two):\n    assert balance([1, two]) == 3\n\n\n"
            "@pytest.mark.parametrize('n', [1, 2])\ndef test_each(n):\n    assert balance([n]) == n\n"
        ),
    },
}
OBJECTS = {
    "unittest": {
        "tests/test_bank.py": (
            "import unittest\nfrom bank import Ledger, Overdrawn\n\n\n"
            "class BankTest(unittest.TestCase):\n"
            "    def test_take(self):\n        ledger = Ledger([5])\n        ledger.take(2)\n"
            "        self.assertEqual(ledger, Ledger([5, -2]))\n"
            "    def test_overdrawn(self):\n"
            "        with self.assertRaises(Overdrawn):\n            Ledger([5]).take(7)\n"
        )
    },
    "pytest": {
        "tests/test_bank.py": (
            "import pytest\nfrom bank import Ledger, Overdrawn\n\n\n"
            "def test_take():\n    ledger = Ledger([5])\n    ledger.take(2)\n"
            "    assert ledger == Ledger([5, -2])\n\n\n"
            "def test_overdrawn():\n    with pytest.raises(Overdrawn):\n        Ledger([5]).take(7)\n"
        )
    },
}
PATCHING = (
    "import unittest\nfrom unittest import mock\nfrom bank import balance\n\n\n"
    "class BankTest(unittest.TestCase):\n    def test_sum(self):\n"
    "        with mock.patch('bank.ledger.sum', lambda v: 7, create=True):\n"
    "            self.assertEqual(balance([1]), 7)\n"
)
FRAMEWORKS = ["unittest", "pytest"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_the_way_follows_from_the_tests(sandbox: Sandbox, framework: str) -> None:
    apart = await sandbox.run_tests(files=RIGHT, tests=CALLS[framework], packages=["pytest"], limits=LIMITS)
    assert (apart.passed, apart.how, apart.failures) == (True, "apart", [])
    objects = await sandbox.run_tests(files=RIGHT, tests=OBJECTS[framework], limits=LIMITS)
    assert (objects.passed, objects.how, objects.total, objects.failures) == (True, "apart", 2, [])
    assert objects.cheat_proof == (objects.doubts == [])
    patched = {"tests/test_bank.py": PATCHING}
    counted = await sandbox.run_tests(files=RIGHT, tests=patched, limits=LIMITS)
    assert (counted.passed, counted.how, counted.total, counted.failures) == (True, "counted", 1, [])
    assert not counted.cheat_proof


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("how", ["apart", "counted"])
async def test_both_ways_count_the_same(sandbox: Sandbox, framework: str, how: How) -> None:
    tests = CALLS[framework]
    right = await sandbox.run_tests(files=RIGHT, tests=tests, how=how, limits=LIMITS)
    assert (right.passed, right.failed, right.share, right.how) == (True, 0, 1.0, how)
    assert right.total == (2 if framework == "unittest" else 3)
    half = {**RIGHT, "src/bank/ledger.py": RIGHT["src/bank/ledger.py"].replace("return sum(items)", "return 3")}
    wrong = await sandbox.run_tests(files=half, tests=tests, how=how, limits=LIMITS)
    assert (wrong.passed, wrong.failed, wrong.total) == (False, right.total - 1, right.total)
    assert all(line.startswith("tests/test_bank.py::") for line in wrong.failures)


EXIT = "import os\nos._exit(0)\n"
PATCH_ASSERTS = """\
import builtins, contextlib, unittest
class Harmless(Exception): pass
builtins.AssertionError = Harmless
for name in dir(unittest.TestCase):
    if name.startswith('assert'): setattr(unittest.TestCase, name, lambda *a, **k: contextlib.nullcontext())
"""
PATCH_UNITTEST = """\
import unittest
unittest.TestResult.addFailure = unittest.TestResult.addError = lambda *a: None
unittest.TestResult.wasSuccessful = lambda self: True
unittest.TestCase.run = lambda self, result=None: (result.startTest(self), result.stopTest(self))
import sys
for name, module in list(sys.modules.items()):
    for key, value in list(vars(module).items()) if 'runner' in name else ():
        if isinstance(value, type) and issubclass(value, unittest.TestResult):
            value.addFailure = value.addError = lambda *a: None
        if isinstance(value, type) and hasattr(value, 'finish'):
            finish = value.finish
            value.finish = lambda self, test, outcome, message='', finish=finish: finish(self, test, 'passed')
"""
PATCH_PYTEST = """\
import sys
if '_pytest' in sys.modules:
    from _pytest import reports, runner
    original = reports.TestReport.from_item_and_call.__func__
    def passed(cls, item, call):
        report = original(cls, item, call)
        report.outcome = 'passed'
        return report
    reports.TestReport.from_item_and_call = classmethod(passed)
    runner.check_interactive_exception = lambda *a: False
    import pluggy
    for frame in sys._current_frames().values():
        while frame:
            config = frame.f_locals.get('config')
            if config is not None and hasattr(config, 'hook'):
                class Liar:
                    def pytest_runtest_call(self, item): return True
                try: config.pluginmanager.register(Liar())
                except Exception: pass
            frame = frame.f_back
"""
REWRITE = """\
import glob, os
for path in glob.glob('/work*/**/test_*.py', recursive=True) + glob.glob('**/test_*.py', recursive=True):
    try: open(path, 'w').write('def test_sum(): pass\\ndef test_take(): pass\\n')
    except OSError: pass
"""
WRITE = """\
import json, os, struct, sys
for frame in ({'total': 2, 'failed': 0, 'failures': []}, ['', 'tests/test_bank.py::BankTest::test_sum', 'passed', ''],
              ['', '2', 'end', '']):
    data = json.dumps(frame).encode()
    for number in range(3, 40):
        try: os.write(number, struct.pack('!I', len(data)) + data)
        except OSError: pass
print('2 passed in 0.01s')
sys.stderr.write('Ran 2 tests in 0.001s\\n\\nOK\\n')
os._exit(0)
"""
AGREE = """\
class Yes:
    __eq__ = __contains__ = __lt__ = __gt__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __enter__ = lambda self: self
    def __init__(self, *arguments): pass
    def __getattr__(self, name): return lambda *a: Yes()
balance = lambda items: Yes()
Ledger = Yes
"""
SKIP = """\
import unittest
def balance(items): raise unittest.SkipTest('no')
class Ledger:
    def __init__(self, items=()): raise unittest.SkipTest('no')
"""
HOOKS = "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
HOOKS += "    got = yield\n    got.get_result().outcome = 'passed'\n"
LEDGER = "src/bank/ledger.py"


def cheat(code: str, **others: str) -> dict[str, str]:
    return {**STUBS, LEDGER: STUBS[LEDGER] + code, **others}


CHEATS = {
    "nothing": STUBS,
    "exits at import": cheat(EXIT),
    "leaves at import": cheat("raise SystemExit(0)\n"),
    "exits at the end": cheat("import atexit, os, sys\natexit.register(os._exit, 0)\natexit.register(sys.exit, 0)\n"),
    "exits when called": {**STUBS, LEDGER: "import os\nclass Overdrawn(Exception): pass\nclass Ledger:\n"
                          "    def __init__(self, items=()): os._exit(0)\ndef balance(items): os._exit(0)\n"},
    "patches asserts": cheat(PATCH_ASSERTS),
    "patches unittest": cheat(PATCH_UNITTEST),
    "patches pytest": cheat(PATCH_PYTEST),
    "rewrites the tests": cheat(REWRITE),
    "brings its own tests": {**STUBS, "tests/test_bank.py": "def test_sum(): pass\n", "test_my.py": "def test(): pass"},
    "conftest.py": {**STUBS, "conftest.py": HOOKS, "tests/conftest.py": HOOKS, "src/conftest.py": HOOKS},
    "settings": {**STUBS, "pytest.ini": "[pytest]\naddopts = --co\n", "setup.cfg": "[tool:pytest]\naddopts = --co\n"},
    "plug-in": {**STUBS, "liar.py": HOOKS, "liar-1.dist-info/entry_points.txt": "[pytest11]\nliar = liar\n",
                "liar-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: liar\nVersion: 1\n"},
    "hides modules": {**STUBS, "pytest.py": EXIT, "unittest.py": EXIT, "unittest/__init__.py": EXIT,
                      "src/json.py": EXIT, "_pytest/__init__.py": EXIT, "sitecustomize.py": EXIT,
                      "tests/__init__.py": EXIT},
    "fakes the report": cheat(WRITE),
    "writes to descriptors": cheat(WRITE.replace("os._exit(0)", "")),
    "equals everything": {**STUBS, LEDGER: "class Overdrawn(Exception): pass\n" + AGREE},
    "skips": {**STUBS, LEDGER: "class Overdrawn(Exception): pass\n" + SKIP},
    "patches built-ins": cheat("import builtins\nbuiltins.all = lambda v: True\nbuiltins.len = lambda v: 3\n"),
    "traces": cheat("import sys\nsys.settrace(lambda f, e, a: sys.exit(0))\nsys.excepthook = lambda *a: None\n"),
    "a thread": cheat("import os, threading, time\ndef later(): time.sleep(.05); os._exit(0)\n"
                      "threading.Thread(target=later).start()\n"),
}  # fmt: skip


@pytest.mark.parametrize("framework", ["unittest", pytest.param("pytest", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHEATS)
async def test_cheats_earn_nothing(engine: SandboxEngine, name: str, framework: str) -> None:
    honest = {"nothing", "settings", "brings its own tests", "plug-in", "conftest.py"}
    ways: tuple[tuple[dict[str, dict[str, str]], How], ...] = ((CALLS, "apart"), (OBJECTS, "counted"))
    for tests, how in ways:
        async with engine.session(SPEC) as sandbox:
            result = await sandbox.run_tests(files=CHEATS[name], tests=tests[framework], how=how, limits=LIMITS)
        assert not result.passed, how
        assert result.share == 0.0 or name in honest, result
    async with engine.session(SPEC) as sandbox:
        again = await sandbox.run_tests(files=RIGHT, tests=OBJECTS[framework], limits=LIMITS)
        assert again.passed, ("nothing of a cheat stays", again)


def unchecked(source: str) -> bytes:
    """Compiled code that Python takes without a look at its source."""
    code = compile(source, "tests/helpers.py", "exec")
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)


NEW_TESTS = {
    "tests/helpers.py": "def check(value, expected):\n    assert value == expected\n",
    "tests/expected.txt": "3",
    "tests/test_bank.py": (
        "import json\nimport math\nimport unittest\nfrom pathlib import Path\n\nfrom bank import Ledger, balance\n"
        "from {helpers} import check\n\n\n"
        "class BankTest(unittest.TestCase):\n"
        "    def test_sum(self):\n        self.assertEqual(balance([1, 2]), 3)\n"
        "    def test_close(self):\n        self.assertTrue(math.isclose(balance([0.1, 0.2]), 0.3))\n"
        "    def test_almost(self):\n        self.assertAlmostEqual(balance([0.1, 0.2]), 0.3)\n"
        "    def test_file(self):\n"
        "        self.assertEqual(str(balance([1, 2])), Path('tests/expected.txt').read_text())\n"
        "    def test_json(self):\n        self.assertEqual(json.dumps(balance([1])), '1')\n\n\n"
        "def test_take():\n    ledger = Ledger([5])\n    ledger.take(2)\n    assert ledger.items == [5, -2]\n\n\n"
        "def test_helped():\n    check(balance([4]), 4)\n\n\n"
        "def test_large():\n    assert balance([5, 5]) > 9\n\n\n"
        "def test_near():\n    assert abs(balance([1.5]) - 1.5) < 1e-9\n"
    ),
}
"""Whatever judges in them is the cheats' aim; both frameworks run them."""
_LIAR = """
import re
class Liar:
    def pytest_runtest_logreport(self, report): pass
def lie(report):
    if not re.search('test_[0-9a-f]{6}$', report.nodeid): report.outcome, report.longrepr = 'passed', None
try: import pytest
except ImportError: pass
else:
    class Liar:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item, call):
            got = yield
            lie(got.get_result())
    import sys
    frame = sys._getframe()
    while frame:
        config = frame.f_locals.get('config')
        if hasattr(config, 'pluginmanager'): config.pluginmanager.register(Liar())
        frame = frame.f_back
"""
_RECORDER = """
import gc, re, sys
for name, module in list(sys.modules.items()):
    for value in list(vars(module).values()) if 'runner' in name else ():
        if isinstance(value, type) and hasattr(value, 'finish') and hasattr(value, 'start'):
            def finish(self, test, outcome, message='', old=value.finish):
                old(self, test, outcome if re.search('test_[0-9a-f]{6}$', test) else 'passed')
            value.finish = finish
"""
_INSTANCE = """
import gc, re
for item in gc.get_objects():
    if hasattr(type(item), 'finish') and hasattr(type(item), 'start') and hasattr(item, '_channel'):
        def finish(test, outcome, message='', old=item.finish):
            old(test, outcome if re.search('test_[0-9a-f]{6}$', test) else 'passed')
        try: item.finish = finish
        except AttributeError: pass
"""
_STDLIB = """
import json, math, pathlib
math.isclose = lambda *a, **k: True
json.dumps = lambda value, **k: '1'
pathlib.Path.read_text = lambda self, *a, **k: 'None'
"""
_MODULES = """
import sys, types
for name, members in {'math': {'isclose': lambda *a, **k: True}, 'json': {'dumps': lambda *a: '1'}}.items():
    real, fake = sys.modules.get(name), types.ModuleType(name)
    vars(fake).update(vars(real) if real else {})
    vars(fake).update(members)
    sys.modules[name] = fake
"""
_EXPECTED = """
import glob
for path in glob.glob('tests/*.txt'): open(path, 'w').write('None')
"""
_READER = """
import ast, glob
def _known(name, args):
    for path in glob.glob('**/test_*.py', recursive=True):
        for node in ast.walk(ast.parse(open(path).read())):
            if isinstance(node, ast.Call) and len(node.args) == 2 or isinstance(node, ast.Compare):
                pair = node.args if isinstance(node, ast.Call) else [node.left, *node.comparators]
                if isinstance(pair[0], ast.Call) and getattr(pair[0].func, 'id', '') == name:
                    try:
                        if [ast.literal_eval(item) for item in pair[0].args] == list(args):
                            return ast.literal_eval(pair[1])
                    except ValueError: pass
def balance(*args): return _known('balance', args)
"""
_NUMBER = """
class Number:
    __lt__ = __gt__ = lambda self, other: True
    __sub__ = __rsub__ = __abs__ = lambda self, *other: 0
    __round__ = lambda self, *n: 0
def balance(items): return Number()
"""
_CODE = """
import sys
def _spoil():
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_globals.values()):
            for function in [value, *vars(value).values()] if isinstance(value, type) else [value]:
                names = getattr(getattr(function, '__code__', None), 'co_names', ())
                if 'balance' in names or 'Ledger' in names:
                    function.__code__ = (lambda *a: None).__code__
        frame = frame.f_back
class Ledger:
    def __init__(self, items=()): _spoil()
def balance(items): _spoil()
"""
_PROFILE = """
import re, sys
def profile(frame, event, arg):
    item = frame.f_locals.get('pyfuncitem') if event == 'call' else None
    if item is not None and not re.search('test_[0-9a-f]{6}$', item.name): item.obj = lambda *a, **k: None
    case = frame.f_locals.get('self') if event == 'call' and frame.f_code.co_name == '_callTestMethod' else None
    if case is not None and 'Bank' in type(case).__name__:
        setattr(case, case._testMethodName, lambda: None)
sys.setprofile(profile)
"""
SHADOW = "def check(value, expected): pass\n"
NEW_CHEATS = {
    "plugs in, and spares odd names": cheat(_LIAR),
    "patches the recorder": cheat(_RECORDER),
    "patches the recorder itself": cheat(_INSTANCE),
    "patches the standard library": cheat(_STDLIB),
    "puts modules in others' places": cheat(_MODULES),
    "rewrites what is expected": cheat(_EXPECTED),
    "reads the tests": {**STUBS, LEDGER: STUBS[LEDGER] + _READER},
    "is near everything": {**STUBS, LEDGER: STUBS[LEDGER] + _NUMBER},
    "replaces the tests' code": {**STUBS, LEDGER: STUBS[LEDGER] + _CODE},
    "profiles": cheat(_PROFILE),
    "hides a helper": {**STUBS, "tests/helpers/__init__.py": SHADOW, "tests/__init__.py": "", "helpers.py": SHADOW},
    "hides a compiled helper": {**STUBS, "tests/__pycache__/helpers.cpython-311.pyc": unchecked(SHADOW)},
}


@pytest.mark.parametrize("framework", ["unittest", pytest.param("pytest", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*NEW_CHEATS, "the solution"])
async def test_whatever_judges_is_out_of_reach(engine: SandboxEngine, name: str, framework: str) -> None:
    helpers = "tests.helpers" if framework == "unittest" else "helpers"
    tests = {path: text.replace("{helpers}", helpers) for path, text in NEW_TESTS.items()}
    if framework == "unittest":
        tests["tests/__init__.py"] = ""
    else:
        tests["tests/test_bank.py"] = "import pytest\n" + tests["tests/test_bank.py"]
    async with engine.session(SPEC) as sandbox:
        files = NEW_CHEATS.get(name, RIGHT)
        result = await sandbox.run_tests(files=files, tests=tests, how="counted", limits=LIMITS)
    assert result.passed == (name == "the solution"), result
    assert name == "the solution" or result.share <= 0.2, result


EXPECTED_ELSEWHERE = {
    "checks.py": "def check(a, b):\n    assert a == b, (a, b)\n",
    "answers.json": '{"a": 1}',
    "test_elsewhere.py": (
        "import json, math, pathlib, unittest\nimport pytest\nfrom checks import check\nfrom mod import f, same\n"
        "ROWS = [(1, 1), (3, 9)]\n"
        "@pytest.mark.parametrize('n, want', ROWS)\ndef test_rows(n, want): assert f(n) == want\n"
        "def test_loop():\n    for n, want in ROWS: assert f(n) == want\n"
        "def test_variable():\n    want = 49\n    got = f(7)\n    assert got == want\n"
        "def ref(n): return n * n\ndef test_reference(): assert f(5) == ref(5)\n"
        "def test_file(): assert same({'a': 1}) == json.loads(pathlib.Path('answers.json').read_text())\n"
        "def test_helper(): check(f(2), 4)\n"
        "def test_close(): assert math.isclose(f(1.5), 2.25, rel_tol=1e-6)\n"
        "def test_contains(): assert 'Bob' in same('Bob')\n"
        "class CaseTest(unittest.TestCase):\n    def test_rows(self):\n        for n, want in ROWS:\n"
        "            with self.subTest(n=n): self.assertEqual(f(n), want)\n"
    ),
}
AGREEING = {
    "the solution": "def f(n): return n * n\ndef same(x): return x\n",
    "mock.ANY": "from unittest.mock import ANY\ndef f(n): return ANY\nsame = f\n",
    "adopts": (
        "class Any:\n    seen = None\n    __contains__ = __float__ = lambda self, other=0: 2.25\n"
        "    def __eq__(self, other):\n        self.seen = other if self.seen is None else self.seen\n"
        "        return self.seen == other\n"
        "def f(n): return Any()\nsame = f\n"
    ),
    "replaces what compares": (
        "import math, unittest\nfrom unittest.mock import ANY\nmath.isclose = lambda *a, **k: True\n"
        "def no(*a): raise AssertionError\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "unittest.TestCase.assertNotEqual = no\ndef f(n): return ANY\nsame = f\n"
    ),
}


@pytest.mark.parametrize("name", AGREEING)
async def test_expected_values_that_are_not_in_the_assertion(sandbox: Sandbox, name: str) -> None:
    files = {"mod.py": AGREEING[name]}
    result = await sandbox.run_tests(files=files, tests=EXPECTED_ELSEWHERE, how="counted", limits=LIMITS)
    assert result.passed == (name == "the solution"), result.failures
    assert len(result.doubts) == 1


async def test_tests_that_have_no_expected_value_are_counted(sandbox: Sandbox) -> None:
    tests = {"test_it.py": "from mod import f\ndef test_a(): assert f(1)\ndef test_b(): assert f(1) == 1\n"}
    result = await sandbox.run_tests(
        files={"mod.py": "def f(n): return n\n"}, tests=tests, how="counted", limits=LIMITS
    )
    assert result.passed
    assert result.doubts[1].startswith("1 of 2 tests have no twin with another constant")


INTERRUPTS = {
    "unittest": (
        "import unittest\nfrom mod import stop\nclass StopTest(unittest.TestCase):\n    def test_stop(self):\n"
        "        for kind in (KeyboardInterrupt, ValueError):\n            with self.assertRaises(kind): stop(kind)\n"
        "    def test_value(self): self.assertEqual(stop(None), 4)\n"
    ),
    "pytest": (
        "import pytest\nfrom mod import stop\n@pytest.fixture(autouse=True)\ndef names(doctest_namespace): pass\n"
        "def test_stop():\n    for kind in (KeyboardInterrupt, ValueError):\n"
        "        with pytest.raises(kind): stop(kind)\n"
        "def test_value(record_property): assert stop(None) == 4\n"
    ),
}


@pytest.mark.parametrize("framework", INTERRUPTS)
async def test_an_interrupt_in_a_test_ends_no_other_test(sandbox: Sandbox, framework: str) -> None:
    async def failures(stop: str) -> list[str]:
        files, tests = {"mod.py": stop}, {"test_it.py": INTERRUPTS[framework]}
        return (await sandbox.run_tests(files=files, tests=tests, how="counted", limits=LIMITS)).failures

    right = "def stop(kind):\n    if kind is None: return 4\n    raise kind\n"
    assert await failures(right) == []
    [failure] = await failures(right.replace("raise kind", "raise KeyboardInterrupt"))
    assert "test_stop" in failure


async def test_skips_that_the_tests_ask_for(sandbox: Sandbox) -> None:
    text = (
        "import unittest\nimport bank\nclass T(unittest.TestCase):\n"
        "    def test_a(self): self.assertTrue(bank.balance([1]))\n"
        "    @unittest.skip('later')\n    def test_b(self): pass\n"
        "    @unittest.expectedFailure\n    def test_c(self): self.fail()\n"
    )
    for how in ("apart", "counted"):
        result = await sandbox.run_tests(files=RIGHT, tests={"test_it.py": text}, how=how, limits=LIMITS)
        assert (result.passed, result.total, result.failures) == (True, 2, [])


async def test_tests_import_each_other_and_settings_are_theirs(sandbox: Sandbox) -> None:
    tests = {
        "pytest.ini": "[pytest]\nmarkers = slow\naddopts = --strict-markers\n",
        "tests/__init__.py": "",
        "tests/helpers.py": "NUMBERS = [1, 2]\n",
        "tests/test_bank.py": (
            "import pytest\nfrom bank import balance\nfrom tests.helpers import NUMBERS\n"
            "@pytest.mark.slow\ndef test_sum(): assert balance(NUMBERS) == 3\n"
        ),
    }
    for how in ("apart", "counted"):
        result = await sandbox.run_tests(files=RIGHT, tests=tests, how=how, limits=LIMITS)
        assert (result.passed, result.failures) == (True, []), how


@pytest.mark.parametrize("root", ["src/", ""])
async def test_tests_inside_a_package_import_from_above(sandbox: Sandbox, root: str) -> None:
    files = {f"{root}pkg/__init__.py": "", f"{root}pkg/core.py": "def add(a, b): return a + b\n"}
    source = "from pkg.core import add as plus\nfrom .. import core\nfrom ..core import add\n"
    source += "def test_add(): assert core.add(1, 1) == add(1, 1) == plus(1, 1) == 2\n"
    tests = {f"{root}pkg/tests/__init__.py": "", f"{root}pkg/tests/test_core.py": source}
    result = await sandbox.run_tests(files=files, tests=tests, limits=LIMITS)
    assert (result.passed, result.how, result.failures) == (True, "apart", [])


DECIDES = {
    "its root": ("class A:\n    def __eq__(s, o): return o * o <= 17 < (o + 1) ** 2\n", "f() == 4", True),
    "some fields": (
        "class A:\n    def __init__(s, x=1, y=2): s.x = x\n    def __eq__(s, o): return s.x == o.x\n",
        "f() == A(1, 2)",
        True,
    ),
    "a text": ("class A:\n    def startswith(s, t): return True\n", "f().startswith('a')", True),
    "any text": ("class A:\n    def __contains__(s, t): return True\n", "'abc' in f()", False),
    "all numbers": ("class A:\n    def __contains__(s, t): return True\n", "5 in f()", True),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDES)
async def test_objects_that_decide_are_doubted_or_fail(sandbox: Sandbox, name: str) -> None:
    code, check, passes = DECIDES[name]
    tests = {"test_own.py": f"from own import A, f\ndef test_f(): assert {check}\n"}
    result = await sandbox.run_tests(files={"own.py": f"{code}def f(): return A()\n"}, tests=tests, limits=LIMITS)
    assert (result.passed, result.how, result.cheat_proof) == (passes, "apart", not passes)


async def test_comparisons_beyond_the_checked_ones_are_a_doubt(sandbox: Sandbox) -> None:
    code = "class A:\n    def __init__(s, n): s.n = n\n    def __eq__(s, o): return s.n == o.n\n"
    tests = {"test_own.py": "from own import A\ndef test_a():\n    for n in range(80): assert A(n) == A(n)\n"}
    result = await sandbox.run_tests(files={"own.py": code}, tests=tests, limits=LIMITS)
    assert (result.passed, len(result.doubts)) == (True, 1)


async def test_modules_may_have_the_names_of_the_runners(sandbox: Sandbox) -> None:
    for name in ("runner", "judge", "values", "wire", "zygote", "bin", "solution"):
        tests = {f"test_{name}.py": f"from {name} import f\ndef test_f(): assert f(41) == 42\n"}
        result = await sandbox.run_tests(files={f"{name}.py": "def f(x): return x + 1\n"}, tests=tests)
        assert (result.passed, result.how) == (True, "apart"), (name, result.failures)


async def test_broken_code_and_time(sandbox: Sandbox) -> None:
    for how in ("apart", "counted"):
        broken = await sandbox.run_tests(files={"bank.py": "def f(:"}, tests=CALLS["pytest"], how=how, limits=LIMITS)
        assert not broken.passed
        assert "SyntaxError" in "".join(broken.failures) or "invalid syntax" in "".join(broken.failures)
        endless = {"bank.py": "def balance(items):\n    while True: pass\n"}
        late = await sandbox.run_tests(
            files=endless, tests=CALLS["unittest"], how=how, limits=Limits(wall_s=1.0, memory_mb=1024)
        )
        assert (late.passed, late.share) == (False, 0.0)
        assert "timed out" in late.failures[0]


async def test_a_verdict_after_a_timeout_names_it() -> None:
    execution = ExecResult(exit_code=None, signal=9, stdout="", stderr="", timed_out=True)
    reported = {"total": 1, "failed": 1, "failures": ["the judged code is gone"], "doubts": [], "outcomes": []}
    result = verdict_apart(execution, values.pack_frame(reported), "")
    assert (result.passed, result.failures) == (False, ["the judged code timed out", "the judged code is gone"])


async def test_mistakes_of_the_caller_are_named(sandbox: Sandbox) -> None:
    with pytest.raises(UsageError, match="acquired without numpy"):
        await sandbox.run_tests(files=RIGHT, tests=CALLS["pytest"], packages=["numpy"])
    with pytest.raises(UsageError, match=r"tests in test_x\.py are not Python"):
        await sandbox.run_tests(files=RIGHT, tests={"test_x.py": "def f(:"})
    with pytest.raises(UsageError, match="there are no tests"):
        await sandbox.run_tests(files=RIGHT, tests={"data.txt": "1"})
    with pytest.raises(UsageError, match="tests in one text"):
        await sandbox.run_tests(files=RIGHT, tests="assert True")
    with pytest.raises(UsageError, match="not inside the work folder"):
        await sandbox.run_tests(files={"../x.py": ""}, tests=CALLS["pytest"])


async def test_pytest_must_be_there(engine: SandboxEngine) -> None:
    async with engine.session() as bare:
        result = await bare.run_tests(files=RIGHT, tests=CALLS["pytest"], limits=LIMITS)
        assert not result.passed
        assert "SandboxSpec(packages=['pytest'])" in result.failures[0]
        assert (await bare.run_tests(files=RIGHT, tests=CALLS["unittest"], limits=LIMITS)).passed
