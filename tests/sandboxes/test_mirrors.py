"""Honest code loses nothing: mirrors do what the objects do that they stand for, and twins of right tests fail."""

from __future__ import annotations

import ast
import collections
import datetime
import decimal
import fractions
import pathlib
import re
import subprocess
import sys
import unittest.mock
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from forge_env.sandbox import Limits, Sandbox, SandboxSpec, open_engine
from sandboxes.runner.decoys import alternatives
from sandboxes.runner.objects import Encoder
from sandboxes.suite import suite_of
from sandboxes.twins import Function, TestFile, comparing, edited, twins_of

from .conftest import require
from .wheels import use_wheels

LIMITS = Limits(wall_s=20, memory_mb=1024)

# --- a package and its tests, which plain pytest passes

PACKAGE = {
    "shop/__init__.py": "from shop.core import *\nfrom shop import core\n__version__ = '1.2'\n",
    "shop/core.py": '''
import abc, asyncio, collections, collections.abc, contextlib, concurrent.futures
import dataclasses, datetime, decimal, enum, functools
import itertools, json, sys
from itertools import count

class Empty(Exception): pass
class Coded(ValueError):
    def __init__(self, code): super().__init__(f"code {code}"); self.code = code
class Stack:
    """A stack."""
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise Empty("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, x): return x in self.items
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, v): self.items[i] = v
    def __eq__(self, o): return isinstance(o, Stack) and self.items == o.items
    def __repr__(self): return f"Stack({self.items})"
    @classmethod
    def of(cls, *a): return cls(a)
    @property
    def top(self): return self.items[-1]
class Sub(Stack): pass
@dataclasses.dataclass(frozen=True, order=True)
class Point:
    x: int
    y: int = 0
    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return Point(self.x * k, self.y * k)
    __rmul__ = __mul__
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Size(enum.IntEnum):
    S = 1
    L = 3
Pair = collections.namedtuple("Pair", "a b")
class Temp(float):
    def f(self): return self * 9 / 5 + 32
class Bag(list):
    def total(self): return sum(self)
class Settings(dict):
    def on(self): return sorted(key for key in self if self[key])
class Recent(collections.OrderedDict): pass
class Table(collections.abc.Mapping):
    def __init__(self, pairs): self._pairs = dict(pairs)
    def __getitem__(self, key): return self._pairs[key]
    def __iter__(self): return iter(self._pairs)
    def __len__(self): return len(self._pairs)
class Span:
    def __init__(self, days): self.days = days
    def __eq__(self, o): return self.days == (o.days if isinstance(o, (Span, datetime.timedelta)) else o)
class Price:
    def __init__(self, n): self.n = n
    def __cmp__(self, o): return self.n - o
    def __lt__(self, o): return self.n < o
    def __gt__(self, o): return self.n > o
class Items:
    def __init__(self, items): self.items = items
    def __eq__(self, o): return list(self.items) == list(o)
class Interned:
    made = {}
    def __new__(cls, name): return cls.made.setdefault(name.strip(), super().__new__(cls))
class Folded(str):
    def __eq__(self, o): return self.lower() == o.lower()
    __hash__ = str.__hash__
class East(datetime.tzinfo):
    def utcoffset(self, when): return datetime.timedelta(hours=2)
    def dst(self, when): return datetime.timedelta(0)
    def tzname(self, when): return "East"
EAST = East()
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
class Square(Shape):
    def __init__(self, a): self.a = a
    def area(self): return self.a ** 2
class Ctx:
    log = []
    def __enter__(self): self.log.append("in"); return self
    def __exit__(self, *a): self.log.append("out"); return a[0] is KeyError
class Registry:
    def __init__(self): self.known = {}
    def add(self, callback, name): self.known[callback] = name
    def name(self, callback): return self.known[callback]
def sort_in_place(xs): xs.sort()
def fill(grid): grid[0][0] = 9
def ident(x): return x
def named(**names): return names
class Named:
    def __init__(self, name, **others): self.name, self.others = name, others
    def __call__(self, **others): return others
    def given(self, **others): return others
def visit(thing): thing.seen = thing.name; return thing._secret
def give(f): return f(name=1, self=2, operation=3)
def gen(n): yield from range(n)
def each(f, xs): return [f(x) for x in xs]
def tally(words, counts):
    counts.update(words)
def rotate(queue): queue.rotate(1)
def remember(order, key): order[key] = True; order.move_to_end(key, last=False)
def group(pairs):
    out = collections.defaultdict(list)
    for key, item in pairs: out[key].append(item)
    return out
def keys_of(mapping): return sorted(mapping) if isinstance(mapping, collections.abc.Mapping) else None
def convert(text, kind): return kind(text)
def later(when): return when + datetime.timedelta(hours=1)
@functools.lru_cache
def fib(n):
    """A number of Fibonacci."""
    return n if n < 2 else fib(n-1) + fib(n-2)
async def slow(x):
    await asyncio.sleep(0)
    return x + 1
def say(t): print("hello", t); print("bye", t, file=sys.stderr)
def fail(c): raise Coded(c)
def parse(t): return json.loads(t)
def retry(times):
    def deco(f):
        @functools.wraps(f)
        def inner(*a):
            for _ in range(times):
                try: return f(*a)
                except ValueError: pass
            raise RuntimeError("gave up")
        return inner
    return deco
class Mark:
    def __init__(self, n): self.n = n
class Key:
    def __init__(self, n): self.n = n
    def __hash__(self): return hash(self.n)
    def __eq__(self, o): return self.n == o.n
MARKS = {1: Mark(1), 2: Mark(2)}
KEYS = {Key(1): "a", Key(2): "b"}
COUNT = 0
def bump():
    global COUNT
    COUNT += 1
def make(): return [Point(1, 2), Point(3, 4)]
class Job:
    def __init__(self, name, target=None): self.name, self.target = name, target
    def rename(self, name, operation="set"): self.name = name; return self
    def __call__(self, name): return name
def hire(name, **named): return Job(name, **named)
async def ticks(n):
    for i in range(n): yield i
def load(path): return open(path)
def tagged(f): f.tag = "T"; return f
def attributes(thing): return sorted(vars(thing))
def parallel(f, xs):
    with concurrent.futures.ThreadPoolExecutor(4) as pool: return list(pool.map(f, xs))
def in_order(xs): xs.sort(); return xs
def marked(grid): grid[0][0] = 7; return grid
class Box:
    def __init__(self, xs): self.xs = xs
    def in_order(self): self.xs.sort(); return self.xs
class Chain:
    def __init__(self, *points): self.points = list(points)
    def __eq__(self, o): return self.points == list(o)
class Observer:
    def __init__(self): self.subs = []
    def on(self, f): self.subs.append(f); return f
    def fire(self, *a):
        for s in self.subs: s(*a)
''',
}
TESTS = """
import asyncio, collections, collections.abc, copy, datetime, decimal, fractions, json
import pytest
import shop
from shop import *
from shop import core
from shop.core import Stack as S

def test_objects():
    s = Stack()
    s.push(1); s.push(2)
    assert len(s) == 2 and s.pop() == 2 and s.pop() == 1 and not s
    with pytest.raises(Empty, match="empty"): s.pop()
    s = Stack([1, 2, 3])
    assert list(s) == [1, 2, 3] and 2 in s and s[0] == 1 and s[1:] == [2, 3] and repr(s) == "Stack([1, 2, 3])"
    s[0] = 5
    s.items.append(7)
    assert s.items == [5, 2, 3, 7] and s.top == 7 and Stack.limit == 3 and Stack.of(1, 2) == Stack([1, 2])
    assert Stack([1]) != Stack([2]) and Stack([1]) in [Stack([2]), Stack([1])] and Stack([1]) != [1]
    assert hasattr(s, "push") and not hasattr(s, "nothing") and Stack.__doc__ == "A stack."
    assert copy.deepcopy(s) == s
def test_truth():
    job = Job("a")
    assert job and bool(job) is True and [*filter(None, [job, None])] == [job] and (None or job) is job
    with pytest.raises(TypeError): len(job)
def test_names_of_arguments():
    assert Job(name="a", target=1).target == 1 and hire(name="b", target=2).name == "b"
    assert Job("a").rename(name="c", operation="x").name == "c" and Job("a")(name="d") == "d"
    assert Pair(1, 2)._replace(a=3) == (3, 2)
def test_classes():
    s = Sub([1])
    assert isinstance(s, Stack) and issubclass(Sub, Stack) and type(s) is Sub and not isinstance(Stack(), Sub)
    assert type(s).__name__ == "Sub" and S is Stack and core.Stack is Stack and Square(3).area() == 9
    with pytest.raises(TypeError): Shape()
    assert Shape and Color.RED and Square(1) and (Color.BLUE or None) is Color.BLUE
    with pytest.raises(AttributeError): s.nothing
    assert Point(1, 2) + Point(3, 4) == Point(4, 6) and 2 * Point(1, 2) == Point(2, 4) and Point(1) < Point(2)
    assert len({Point(1), Point(1)}) == 1 and repr(Point(1, 2)) == "Point(x=1, y=2)"
    assert make() == [Point(1, 2), Point(3, 4)]
    assert Color(2) is Color.BLUE and [c.name for c in Color] == ["RED", "BLUE"] == list(Color.__members__)
    assert Size.L == 3 and isinstance(Size.S, int) and sum([Size.S, Size.L]) == 4
    match Point(1, 2):
        case Point(1, y): assert y == 2
        case _: raise AssertionError
def test_builtin_types():
    p = Pair(1, 2)
    assert p == (1, 2) and isinstance(p, tuple) and p._asdict() == {"a": 1, "b": 2} and Temp(100.0).f() == 212
    b = Bag([1, 2])
    b.append(3)
    assert b == [1, 2, 3] and b.total() == 6 and isinstance(b, list) and sorted(b, reverse=True) == [3, 2, 1]
    assert [0, *b] == [0, 1, 2, 3] and json.dumps(b) == "[1, 2, 3]" and b.index(2) == 1 and [1, 2, 3] == b
    c = Settings(a=1, b=0)
    c["c"] = 5
    assert isinstance(c, dict) and c == {"a": 1, "b": 0, "c": 5} and c.on() == ["a", "c"] and c.get("x") is None
    assert {**c} == dict(c) == {"a": 1, "b": 0, "c": 5} and json.dumps(c, sort_keys=True) == '{"a": 1, "b": 0, "c": 5}'
    assert isinstance(Recent(), collections.OrderedDict)
    t = Table([("a", 1)])
    assert isinstance(t, collections.abc.Mapping) and t == {"a": 1} and dict(t) == {"a": 1} and t.get("b") is None
def test_containers_of_the_library():
    counts, order = collections.Counter("a"), collections.OrderedDict(a=1)
    queue = collections.deque([1, 2, 3], maxlen=3)
    tally("ab", counts)
    rotate(queue)
    remember(order, "z")
    assert counts == {"a": 2, "b": 1} and queue == collections.deque([3, 1, 2]) and list(order) == ["z", "a"]
    groups = group([("a", 1), ("b", 2), ("a", 3)])
    assert groups == {"a": [1, 3], "b": [2]} and groups["new"] == [] and type(groups) is collections.defaultdict
    assert next(count(5)) == 5 and keys_of(collections.defaultdict(int, b=1)) == ["b"] and keys_of(Table({1: 2})) == [1]
def test_values_of_the_library():
    assert Price(100) > 5 and Price(3) < 1000 and not Price(3) > 5 and Price(3).__cmp__(3) == 0
    assert Span(1) == datetime.timedelta(1) and Span(1) != datetime.timedelta(2)
    assert Items([1, 2]) == {1: 2, 2: 3}.keys()
    assert Interned("a ") == Interned("a") is Interned("a") and Interned("a") != Interned("b")
    assert Folded("Ab") == "aB" and convert("1.5", decimal.Decimal) == decimal.Decimal("1.5")
    assert Chain(Point(1), Point(2)) == [Point(1), Point(2)] and Chain(Point(1)) != [Point(2)]
    zone = datetime.timezone(datetime.timedelta(hours=3), "X")
    when = later(datetime.datetime(2024, 1, 1, tzinfo=zone))
    assert when == datetime.datetime(2024, 1, 1, 1, tzinfo=zone) and when.tzname() == "X"
    there = later(datetime.datetime(2024, 1, 1, 12, tzinfo=EAST))
    assert there.utcoffset() == datetime.timedelta(hours=2) and there.tzinfo is EAST
    assert there == datetime.datetime(2024, 1, 1, 11, tzinfo=datetime.timezone.utc)
def test_changes():
    xs, grid = [3, 1, 2], [[0, 0], [0, 0]]
    row = grid[0]
    sort_in_place(xs)
    fill(grid)
    assert xs == [1, 2, 3] and row == [9, 0] and ident(grid)[0] is row
    assert core.COUNT == 0
    bump()
    core.COUNT += 5
    bump()
    assert core.COUNT == 7 and shop.__version__ == "1.2"
    for _ in range(2):
        assert sorted(core.MARKS) == [1, 2] and core.MARKS[2].n == 2 and len(core.KEYS) == 2
        assert core.KEYS[Key(1)] == "a"
def test_changed_arguments_that_are_returned():
    xs = [3, 1, 2]
    assert in_order(xs) == sorted(xs) and in_order([2, 1]) == [1, 2] and marked([[0, 0]]) == [[7, 0]]
    box = Box([3, 1])
    assert box.in_order() == [1, 3] and box.xs == [1, 3]
def test_functions_of_the_tests():
    seen = []
    observer = Observer()
    observer.on(seen.append)
    @observer.on
    def twice(x): seen.append(x * 2)
    observer.fire(4)
    assert seen == [4, 8] and each(lambda x: x * 2, [1, 2]) == [2, 4] and each(str, [1]) == ["1"]
    assert list(gen(3)) == [0, 1, 2] and fib(10) == 55 and fib.cache_info().misses == 11
    assert fib.__doc__ == "A number of Fibonacci." and fib.__name__ == "fib"
    calls = []
    @retry(3)
    def flaky(x):
        calls.append(x)
        if len(calls) < 3: raise ValueError("no")
        return "ok"
    assert flaky(1) == "ok" and calls == [1, 1, 1] and flaky.__name__ == "flaky"
    @tagged
    @retry(1)
    def kept():
        "A text."
    @tagged
    def own(): return 1
    assert (kept.__doc__, kept.tag, own.tag, own()) == ("A text.", "T", "T", 1)
    assert parallel(lambda x: x * 2, [1, 2, 3]) == [2, 4, 6]
    odd = {"operation": 2, "target": 3, "cls": 4, "request": 5, "function": 6, "arguments": 7}
    assert named(**odd, name=1, self=7) == {**odd, "name": 1, "self": 7} and Named(name="n", **odd).others == odd
    assert Named("n")(**odd) == odd == Named("n").given(**odd) and give(lambda **k: k)["self"] == 2
    class Thing:
        name, _secret = "n", 5
        def __eq__(self, o): return self is o
    thing = Thing()
    thing.own = 1
    assert attributes(thing) == ["own"]
    assert visit(thing) == 5 and thing.seen == "n" and ident(thing) is thing and [ident(thing)] == [thing]
    registry = Registry()
    registry.add(twice, "two")
    assert registry.name(twice) == "two"
def test_errors():
    with pytest.raises(Coded) as e: fail(7)
    assert e.value.code == 7 and str(e.value) == "code 7" and isinstance(e.value, ValueError)
    with pytest.raises(json.JSONDecodeError): parse("{")
    class Stop(Exception): pass
    def stop(x): raise Stop(x, "now")
    with pytest.raises(Stop) as s: each(stop, [5])
    assert s.value.args == (5, "now") and repr(Coded(2)) == "Coded('code 2')" and str(Coded(3)) == "code 3"
    with pytest.raises(FileNotFoundError, match="/no/file") as missing: load("/no/file")
    assert missing.value.filename == "/no/file" and missing.value.errno == 2
    with Ctx() as c: assert c.log == ["in"]
    with Ctx(): raise KeyError("x")
    with pytest.raises(ValueError):
        with Ctx(): raise ValueError
def test_output(capsys):
    say("you")
    assert capsys.readouterr() == ("hello you\\n", "bye you\\n")
def test_async():
    assert asyncio.run(slow(1)) == 2
    async def collected(): return [i async for i in ticks(3)]
    assert asyncio.run(collected()) == [0, 1, 2]
@pytest.mark.parametrize("n, want", [(1, 1), (2, 4)])
def test_params(n, want): assert Square(n).area() == want
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandbox]:
    require("local")
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_wheels(tmp_path_factory.mktemp("wheels"), monkeypatch)
        async with (
            open_engine("local", concurrency=1, warm=0) as engine,
            engine.session(SandboxSpec(packages=("pytest",))) as sandbox,
        ):
            yield sandbox


@pytest.mark.asyncio(loop_scope="module")
async def test_mirrors_are_like_what_they_stand_for(sandbox: Sandbox) -> None:
    result = await sandbox.run_tests(files=PACKAGE, tests={"test_shop.py": TESTS}, limits=LIMITS)
    assert result.failures == []
    assert (result.passed, result.how, result.total) == (True, "apart", 15)


@pytest.mark.slow
def test_plain_pytest_passes_these_tests(tmp_path: Path) -> None:
    for path, text in {**PACKAGE, "test_shop.py": TESTS}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "test_shop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


LAYOUTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "conftest.py imports the package": (
        {"src/pkg/__init__.py": "def f(): return 1\n"},
        {
            "tests/conftest.py": "import pytest, pkg\n@pytest.fixture\ndef one(): return pkg.f()\n",
            "tests/test_it.py": "import os\ndef test_one(one): assert one == 1\n",
        },
    ),
    "a program, a closed pipe, data that is not Python": (
        {"pkg.py": "import subprocess as s, sys\ndef f(): return s.check_output([sys.executable, '-c', 'print(3)'])\n"},
        {
            "tests/data/bad.py": "def (:\n",
            "tests/test_it.py": (
                "import pytest, socket, pkg\n"
                "def test_program(): assert pkg.f() == b'3\\n'\n"
                "def test_pipe():\n    a, b = socket.socketpair()\n    b.close()\n"
                "    with pytest.raises(BrokenPipeError):\n        for _ in range(9): a.sendall(b'x' * 99999)\n"
            ),
        },
    ),
    "modules of unittest are as Python makes them": (
        {"pkg.py": "def f(): return 1\n"},
        {"test_it.py": "import sys, unittest, pkg\nclass T(unittest.TestCase):\n"
                       "    def test_spec(self): self.assertEqual(__spec__.name, 'test_it')\n"
               "    def test_flags(self):\n        def f(x: int): pass\n"
               "        self.assertEqual(f.__annotations__, {'x': int})\n"},
    ),
    "names that are not those of their functions": (
        {"pkg.py": "def f(x): return x\n"},
        {
            "test_other.py": "def test_real(): assert True\n",
            "test_it.py": (
                "import os, pytest, pkg\nfrom test_other import test_real\n"
                "@pytest.fixture(params=[1, 2])\ndef test_case(request): return request.param\n"
                "def test_uses(test_case): assert pkg.f(test_case) in (1, 2)\n"
                "def test_twice(): assert pkg.f(1) == 2\n"
                "def test_twice(): assert pkg.f(1) == 1\n"
                "class TestBase:\n    def test_same(self): assert pkg.f(3) == 3\n"
                "class TestMore(TestBase): pass\n"
                "def test_calls(): TestBase().test_helper()\n"
                "TestBase.test_helper = lambda self: None\n"
            ),
        },
    ),
    "state that a test restores": (
        {"pkg.py": "base = 10\ndef f(x): return x % base\n"},
        {"test_it.py": "import os, pkg\ndef test_small():\n    old, pkg.base = pkg.base, 3\n    assert pkg.f(5) == 2\n"
                       "    pkg.base = old\ndef test_large(): assert pkg.f(12) == 2\n"},
    ),
    "skips of fixtures, and expected failures": (
        {"pkg.py": "def f(x): return x\n"},
        {"test_it.py": (
            "import os, pytest, pkg\nold = pytest.mark.xfail(reason='old')\n"
            "@pytest.fixture\ndef net(): pytest.skip('no network')\n"
            "def test_net(net): assert pkg.f(1) == 1\n"
            "@old\ndef test_old(): assert pkg.f(1) == 2\n"
            "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=old)])\ndef test_some(x): assert pkg.f(x) == 1\n"
            "@pytest.mark.parametrize('n', [0, 1])\ndef test_loop(n):\n    for x in range(n): assert pkg.f(x) == x\n"
            "@pytest.mark.skipif(os.sep != '/', reason='posix')\ndef test_sep(): assert pkg.f('/') == os.sep == '/'\n"
        )},
    ),
}  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", LAYOUTS)
async def test_honest_code_beside_its_tests(sandbox: Sandbox, name: str) -> None:
    files, tests = LAYOUTS[name]
    result = await sandbox.run_tests(files=files, tests=tests, how="counted", limits=LIMITS)
    assert result.passed, result.failures


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["lib", "etc", "work", "tmp"])
async def test_no_folder_of_the_system_hides_a_judged_module(sandbox: Sandbox, name: str) -> None:
    tests = {"test_it.py": f"from {name} import f\ndef test_f(): assert f(1) == 1\n"}
    result = await sandbox.run_tests(files={f"{name}.py": "def f(x): return x\n"}, tests=tests, limits=LIMITS)
    assert result.failures == []
    assert result.how == "apart"


@pytest.mark.asyncio(loop_scope="module")
async def test_programs_run_as_an_interpreter_runs_them(sandbox: Sandbox) -> None:
    code = (
        "import signal, subprocess, sys\ndef f(x: int): pass\nprint(f.__annotations__)\n"
        "print(subprocess.check_output([sys.executable, '-c', 'print(3)']), signal.getsignal(signal.SIGPIPE).name)"
    )
    assert (await sandbox.run_python(code)).stdout == "{'x': <class 'int'>}\nb'3\\n' SIG_IGN\n"


# --- the choice


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("apart", "import pkg\ndef test(): assert pkg.f(1) == 1\n"),
        ("apart", "from pkg import *\ndef test(capsys): assert pkg.f(lambda x: x) == Vector(1)\n"),
        ("apart", "import pkg\ndef test():\n    pkg.LIMIT = 3\n    xs = [2, 1]\n    assert pkg.f(xs) == xs == [1]\n"),
        ("apart", "import os, sys, pkg\nsys.path.append(os.path.dirname(__file__))\ndef test(): assert pkg.f\n"),
        ("apart", "import sys, unittest, pkg\nif sys.version_info > (3,):\n    def test(): assert pkg.f()\n"),
        ("apart", "import sys, pkg\ndef test(): assert pkg.f()\nif __name__ == '__main__':\n    sys.exit(test())\n"),
        ("apart", "from pkg import fields, patch\ndef test(): assert fields(patch) == 1\n"),
        ("apart", "import pkg\ndef test():\n    fields = pkg.form.fields\n    assert fields.open() == 1\n"),
        ("apart", "import pkg\nclass Item:\n    pass\ndef test(): assert pkg.f(Item()) == 1\n"),
        ("apart", "import pkg\nclass Stop(ValueError):\n    pass\ndef test(): assert pkg.f(1) == 1\n"),
        ("apart", "import asyncio, pkg\ndef test(): assert asyncio.run(pkg.f()) == 1\n"),
        ("counted", "import pkg\ndef test(): assert pkg.error().__cause__ is None\n"),
        ("counted", "import pkg\ndef test(): assert isinstance(pkg.error(), ExceptionGroup)\n"),
        ("counted", "import sys, pkg\ndef test(): assert sys.modules['pkg'].x == 1\n"),
        ("counted", "import unittest.mock as m, pkg\ndef test():\n    with m.patch('pkg.x'): assert pkg.f()\n"),
        ("counted", "import pkg\ndef test(): assert pkg.load(__file__)\n"),
        ("counted", "import pkg\ndef test(tmp_path): assert pkg.f(tmp_path) == 1\n"),
        ("counted", "import pkg\ndef test(): assert pkg.f.__dict__ == {}\n"),
        ("counted", "import yaml, pkg\ndef test(): assert yaml.dump(pkg.f()) == ''\n"),
        ("counted", "import asyncio, pkg\nasync def main(): await asyncio.gather(pkg.f())\ndef test(): run(main())\n"),
        ("counted", "import pkg\nclass Mine(pkg.Base):\n    pass\ndef test(): assert Mine().f() == 1\n"),
        ("counted", "import pkg\nclass Mine(dict):\n    pass\ndef test(): assert pkg.f(Mine()) == 1\n"),
        ("counted", "import enum, pkg\nclass E(enum.Enum):\n    A = 1\ndef test(): assert pkg.f(E.A) == 1\n"),
        ("counted", "import pkg\nclass Item:\n    pass\ndef test(): assert pkg.register(Item) == 1\n"),
        ("counted", "import pkg\nclass Item:\n    pass\ndef test(): assert pkg.f({Item: 1}) == 1\n"),
        ("counted", "import pkg\n@pkg.define\nclass Item:\n    pass\ndef test(): assert Item(1) == 1\n"),
    ],
)  # fmt: skip
def test_the_way_follows_from_what_the_tests_use(how: str, text: str) -> None:
    files = {"pkg.py": b"", "test_it.py": b""}
    assert suite_of(None, {"test_it.py": text.encode()}, files, None).how == how


def test_only_files_that_are_imported_count() -> None:
    files = {"pkg.py": b""}
    tests = {"tests/test_it.py": b"import pkg\nfrom tests import one\ndef test(): assert pkg.f() == 1\n"}
    tests |= {"tests/__init__.py": b"", "tests/one.py": b"from .two import X\n", "tests/two.py": b"X = 1\n"}
    deep = b"import os\nX = os.listdir()\n"
    assert suite_of(None, {**tests, "tests/three.py": deep}, files, None).how == "apart"
    assert suite_of(None, {**tests, "tests/two.py": deep}, files, None).how == "counted"
    assert suite_of(None, {**tests, "conftest.py": deep}, files, None).how == "counted"


def test_relative_imports_are_judged_or_of_the_tests() -> None:
    files = {"pkg/__init__.py": b"", "pkg/core.py": b"", "pkg/tests/__init__.py": b""}
    derived = b"from %s import Base\nclass Mine(Base):\n    pass\ndef test(): assert Mine() == 1\n"
    for module, how in ((b"..core", "counted"), (b".helpers", "apart")):
        tests = {"pkg/tests/test_it.py": derived % module, "pkg/tests/helpers.py": b"class Base: pass\n"}
        assert suite_of(None, tests, files, None).how == how


# --- twins


def twins(text: str) -> list[tuple[str, str]]:
    """Kind and text of each twin of the function `test`."""
    source = text.encode()
    tree = ast.parse(source)
    (test,) = (node for node in tree.body if isinstance(node, Function) and node.name == "test")
    file = TestFile(source, tree, helpers=set(), single=set())
    vars(file)["judged"] = {"f", "Version", "decode", "encode", "Point", "pkg"}  # imported, if there were imports
    return [(twin.kind, edited(source, twin.edits).decode()) for twin in twins_of(test, file, comparing(tree))]


def outcome(text: str, **names: Any) -> str:
    namespace = dict(names)
    exec(compile(text, "twin.py", "exec"), namespace)
    try:
        namespace["test"](*([namespace["case"]] if "case" in namespace else []))
    except Exception as error:  # noqa: BLE001  a failed test
        return type(error).__name__
    return "passed"


RIGHT = [
    "def test(): assert f(1) == 1",
    "def test(): assert 1 == f(1)",
    "def test(): assert (f(1)) == (1)",
    "def test(): assert f('a') == ('a'\n    'b')[0]",
    "def test(): assert not (f(0) in [1])",
    "def test(): assert not not (f(1))",
    "def test():\n    assert f([1]) == [1], 'é'; assert f('é') == 'é'",
    "def test(): assert f(1.5) == approx(1.5)",
    "def test(): assert f([1e9]) == approx([1e9])",
    "def test(): assert f(Point(1, 2)) == Point(1, 2)",
    "def test(): assert f([Point(1, 0)]) == [Point(1, 0)]",
    "def test():\n    for x in [1, 2]:\n        assert f(x) == x",
    "def test():\n    with raises(ValueError): int('x')",
    "def check(value, wanted):\n    assert value == wanted\ndef test(): check(f(2), 2)",
    "def check(wanted, *, by=f):\n    assert by(3) == wanted\ndef test(): check(wanted=3)",
    "def test(case):\n    case.assertEqual(f(1), 1)",
    "def test(self):\n    self.assertEqual(f(1), 1)\n    self.assertTrue(f(1))\n    self.assertIn(f(1), [1])",
    "def test(self):\n    self.assertAlmostEqual(f(0), 0.001, 2)\n    self.assertRaises(ValueError, int, 'x')",
    "def test(self):\n    with self.subTest(x=1):\n        self.assertEqual(f(0), 0)",
    "def test(): assert f((1, 0, 1)) == (1, 0, 1)",
    "def test(): assert f(call('a')) == (('a',), {})",
]


class Point(collections.namedtuple("Point", "x y")):
    pass


@pytest.mark.parametrize("text", RIGHT)
def test_honest_code_fails_twins_and_passes_opposites(text: str) -> None:
    names: dict[str, Any] = {"f": lambda value: value, "approx": pytest.approx, "raises": pytest.raises, "Point": Point}
    names["call"] = unittest.mock.call
    if "self" in text:
        names["case"] = unittest.TestCase()
    elif "case" in text:
        text = text.replace("case", "self")
        names["case"] = unittest.TestCase()
    assert outcome(text, **names) == "passed"
    assert twins(text)
    for kind, twin in twins(text) * 3:
        assert (outcome(twin, **names) == "passed") == (kind == "opposite"), (kind, twin)


@pytest.mark.parametrize(
    "text",
    [
        "def test(): assert f(1) == f('a', 3)",
        "def test(): assert Version('1.0') == Version('1.0.0')",
        "def check(text):\n    assert decode(encode(text)) == text\ndef test(): check('abc')",
        "def check(text, strict):\n    if strict:\n        assert f(text) == text\ndef test(): check('abc', True)",
        "def test(): assert f(1) == approx(1, abs=5)",
    ],
)
def test_literals_that_may_not_matter_are_left_alone(text: str) -> None:
    literals = collections.Counter(re.findall(r"'[^']*'|\b\d+\b", text))
    for _, changed in twins(text):
        own = changed.partition("\ndef _")[0]  # without the function that changes values
        assert literals <= collections.Counter(re.findall(r"'[^']*'|\b\d+\b", own))


@pytest.mark.parametrize(
    "text",
    [
        "def test():\n    assert f(1) == 1\n    pkg.state = old",
        "def test():\n    assert f(1) == 1\n    teardown()",
        "def test():\n    global x\n    assert f(1) == 1\n    x = 2",
        "def test():\n    if f(1): return\n    assert f(1) == 1",
        "@expand([1, 2])\ndef test(): assert f(1) == 1",
        "def test():\n    with raises(KeyboardInterrupt): f(1)",
        "def test(): assert f(0x" + "f" * 5000 + ") and f(1) == 0x" + "f" * 5000,
    ],
)
def test_there_are_no_twins_that_honest_code_may_not_survive(text: str) -> None:
    assert {kind for kind, _ in twins(text)} <= {"negated"} if "0x" in text else twins(text) == []


LIBRARY = [
    decimal.Decimal("1.5"),
    fractions.Fraction(1, 2),
    datetime.timedelta(1),
    datetime.date.max,
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
    datetime.datetime(2024, 1, 1, fold=1, tzinfo=datetime.UTC),
    datetime.time(1, 2),
    uuid.UUID(int=7),
    pathlib.PurePosixPath("a/b"),
    range(1, 5, 2),
    collections.OrderedDict(b=1, a=2),
    collections.Counter("aab"),
    collections.defaultdict(list, a=[1]),
    collections.deque([1, 2], maxlen=3),
]


def unexpected(value: Any) -> Any:
    raise AssertionError(value)


@pytest.mark.parametrize("value", LIBRARY, ids=lambda value: type(value).__name__)
def test_values_of_the_library_cross_and_have_alternatives(value: Any) -> None:
    def refer(value: Any) -> Any:
        return {"g": "builtins.list"} if value is list else unexpected(value)

    here, there = Encoder(0, refer, unexpected), Encoder(1, unexpected, lambda data: list)
    (sent,) = here.encode_all(value)
    arrived = there.decode(sent)
    assert (type(arrived), arrived) == (type(value), value)
    assert getattr(arrived, "fold", 0) == getattr(value, "fold", 0)
    if isinstance(value, dict):
        assert list(arrived) == list(value)
    others = alternatives(value, 3)
    assert others
    assert all(type(other) is type(value) and other != value for other in others)


containers = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(containers, containers)
def test_containers_stay_in_step(first: Any, second: Any) -> None:
    here, there = Encoder(0, unexpected, unexpected), Encoder(1, unexpected, unexpected)
    outer: list[Any] = [first]
    (sent,) = here.encode_all(outer)
    arrived = there.decode(sent)
    assert arrived == outer
    outer.append(second)
    there.apply(here.changes())
    assert arrived == outer
    arrived.insert(0, [second, first])
    here.apply(there.changes())
    assert arrived == outer
    assert here.changes() == {}
    assert there.changes() == {}
