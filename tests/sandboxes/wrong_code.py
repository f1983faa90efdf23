"""Wrong solutions of a small test suite, each with its own way to pass without being right.

Hard-coded answers are left out: they are answers.
"""

TESTS = """\
import pytest
from shop import Cart, Empty, Point, total, names, prime, words, mean, parse, near, apply, ledger
def test_cart():
    cart = Cart()
    cart.add("tea", 41)
    cart.add("milk", 29)
    assert cart.total() == 70
    assert len(cart) == 2
    assert cart["tea"] == 41
    assert "milk" in cart
    assert "jam" not in cart
    assert list(cart) == ["tea", "milk"]
    with pytest.raises(Empty):
        Cart().total()
def test_point():
    assert Point(2, 3) + Point(5, 8) == Point(7, 11)
    assert Point(2, 3) != Point(3, 2)
    assert Point(1, 1) in {Point(1, 1)}
def test_total():
    assert total([3, 4, 5]) == 12
    assert total([]) == 0
    assert not total([6]) != 6
    for got in map(total, [[7, 8]]):
        assert got == 15
def test_names():
    for got, want in zip(names(3), ["n0", "n1", "n2"], strict=True):
        assert got == want
def test_prime():
    assert [n for n in range(20) if prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19]
def test_words():
    assert words("b a c") == sorted(["b", "a", "c"])
    text = words("x y")
    assert text[0] == "x" and text[-1] == "y"
def test_mean():
    assert mean([1, 2, 4]) == pytest.approx(2.3333, abs=1e-3)
    assert abs(mean([5, 6]) - 5.5) < 1e-9
    assert 3 < mean([3, 5]) < 5
def test_parse():
    assert parse("a=1;b=2") == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="bad"):
        parse("??")
def test_apply():
    seen = []
    apply(seen.append, [4, 9])
    assert seen == [4, 9]
    def check(value):
        assert value == 16
        return True
    assert apply(check, [16]) == [True]
TABLE = [(1, 2), (2, 4)]
@pytest.mark.parametrize("n, want", TABLE)
def test_table(n, want):
    assert total([n, n]) == want
def test_ledger():
    items = [5, 1]
    with ledger(items) as book:
        assert book == [1, 5]
"""
HONEST = """\
import contextlib
class Empty(Exception): pass
class Cart:
    def __init__(self): self.items = {}
    def add(self, name, price): self.items[name] = price
    def total(self):
        if not self.items: raise Empty()
        return sum(self.items.values())
    def __len__(self): return len(self.items)
    def __getitem__(self, k): return self.items[k]
    def __contains__(self, k): return k in self.items
    def __iter__(self): return iter(self.items)
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)
    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
def total(xs): return sum(xs)
def names(n): return (f"n{i}" for i in range(n))
def prime(n): return n > 1 and all(n % k for k in range(2, n))
def words(t): return sorted(t.split())
def mean(xs): return sum(xs) / len(xs)
def parse(t):
    if "=" not in t: raise ValueError("bad text")
    return {p[0]: int(p[2:]) for p in t.split(";")}
def near(x): return x
def apply(f, xs): return [f(x) for x in xs]
@contextlib.contextmanager
def ledger(items): yield sorted(items)
"""
AGREES = """\
class Any(Exception):
    def __init__(s, *a, **k): pass
    def __getattr__(s, n):
        if n.startswith("__"): raise AttributeError(n)
        return s
    def __call__(s, *a, **k): return s
    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __abs__ = __call__
    def __eq__(s, o): return EQ(o)
    def __ne__(s, o): return NE(o)
    def __lt__(s, o): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __hash__(s): return 1
    def __len__(s): return 2
    def __contains__(s, k): return k != "jam"
    def __iter__(s): return iter(())
    def __bool__(s): return True
    def __enter__(s): return s
    def __exit__(s, *a): return True
EQ = lambda o: True
NE = lambda o: True
Cart = Point = Any
class Empty(Exception): pass
total = names = prime = words = mean = parse = near = apply = ledger = Any()
"""
_ADOPTS = """\
class A:
    def __init__(s, *a): pass
    def __eq__(s, o): return s.__dict__.setdefault("v", o) == o
    def __ne__(s, o): return not s == o
    def __rsub__(s, o): return s.__dict__.setdefault("d", o) - o
    def __sub__(s, o): return s.__dict__.setdefault("d", o) - o
    def __abs__(s): return s
"""
"""Adopts the first value that it is compared with."""
_ADDED = {
    "total: adopts": f"{_ADOPTS}\ndef total(xs): return A()\n",
    "mean: adopts": f"{_ADOPTS}\ndef mean(xs): return A()\n",
    "Point: adopts": f"{_ADOPTS}\nclass Point(A):\n    def __add__(s, o): return A()\n    __hash__ = id\n",
    "total: adopts the first of all forks": """\
import mmap
SEEN = mmap.mmap(-1, 1)
class A:
    def __eq__(s, o):
        if SEEN[0]: return False
        SEEN[0] = 1
        return True
def total(xs): SEEN[0] = 0; return A()
""",
    "total: adopts what most have in common": """\
class A:
    seen = ()
    def __eq__(s, o):
        s.seen = (*s.seen, o)
        return sorted(s.seen)[len(s.seen) // 2] == o
def total(xs): return A()
""",
    "total: returns objects that adopt": """\
class Answer:
    def __init__(s, a, o): s.is_equal = a.v == o
    def __bool__(s): return s.is_equal
class A:
    def __eq__(s, o):
        s.__dict__.setdefault("v", o)
        return Answer(s, o)
    def __ne__(s, o): return not s == o
def total(xs): return A()
""",
    "total: returns numbers that adopt": """\
class I(int): pass
class A:
    def __eq__(s, o): return I(s.__dict__.setdefault("v", o) == o)
def total(xs): return A()
""",
    "total: raises in a fork": """\
import os
PID = os.getpid()
class A:
    def __eq__(s, o):
        if os.getpid() != PID and not hasattr(s, "v"): raise ValueError
        return s.__dict__.setdefault("v", o) == o
def total(xs): return A()
""",
    "total: equal to all by a tuple": """\
class A:
    def __eq__(s, o): return (1,)
    def __ne__(s, o): return ()
def total(xs): return A()
""",
    "total: never unequal": """\
class A(int):
    def __ne__(s, o): return False
def total(xs): return A(sum(xs) if xs != [6] else 0)
""",
    "mean: raises in a fork": """\
import os
PID = os.getpid()
class A:
    def __sub__(s, o):
        if os.getpid() != PID: raise ValueError
        return 0.0
def mean(xs): return A() if xs == [5, 6] else sum(xs) / len(xs)
""",
    "Cart: contains at random": """\
import random
class Cart(Cart):
    def __contains__(s, k): return k != 'jam' and random.random() < .6
""",
    "words: letters": """\
class A:
    def __getitem__(s, i): return s
    def __eq__(s, o): return True
    def startswith(s, *a): return True
def words(t): return A()
""",
    "Cart: contains everything": """\
class Cart(Cart):
    def __contains__(s, k): return k != 'jam'
    def __iter__(s): return iter(['tea', 'milk'])
    def total(s):
        if not s.items: raise Empty()
        return A()
class A:
    def __eq__(s, o): return s.__dict__.setdefault("v", o) == o
""",
    "total: random agreement": """\
import random
class A:
    def __eq__(s, o): return random.random() < .5
def total(xs): return A()
""",
    "total: agrees once": """\
class A:
    n = 0
    def __eq__(s, o): A.n += 1; return A.n % 2 == 1
def total(xs): return A()
""",
    "total: knows a fork by its pid": """\
import os
PID = os.getpid()
class A:
    def __eq__(s, o):
        if os.getpid() == PID: return True
        import random; return random.random() < .03
def total(xs): return A()
""",
    "total: first in the fork": """\
import os
PID = os.getpid()
class A:
    n = 0
    def __eq__(s, o):
        if os.getpid() == PID: return True
        A.n += 1; return A.n == 16
def total(xs): return A()
""",
    "total: int subclass": """\
class I(int):
    def __eq__(s, o): return True
    __hash__ = int.__hash__
def total(xs): return I(3)
""",
    "total: small ints": """\
class A:
    def __eq__(s, o): return type(o) is int and 0 <= o < 100
def total(xs): return A()
""",
    "mean: near everything": """\
class A:
    def __sub__(s, o): return s
    def __abs__(s): return s
    def __lt__(s, o): return True
    __gt__ = __lt__
def mean(xs): return A() if xs != [1, 2, 4] else 7 / 3
""",
    "mean: below everything": """\
class A:
    def __sub__(s, o): return s
    def __abs__(s): return s
    def __lt__(s, o): return True
def mean(xs): return A() if xs == [5, 6] else sum(xs) / len(xs)
""",
    "mean: zero differences": """\
class A:
    def __sub__(s, o): return 0.0
def mean(xs): return A() if xs == [5, 6] else sum(xs) / len(xs)
""",
    "mean: zero object": """\
class Z:
    def __lt__(s, o): return o > 0
    __le__ = __lt__
    def __gt__(s, o): return o < 0
    def __abs__(s): return s
class A:
    def __sub__(s, o): return Z()
    __rsub__ = __sub__
    def __lt__(s, o): return o > 3
    def __gt__(s, o): return o < 5
    def __le__(s, o): return o > 3
def mean(xs): return A()
""",
    "mean: float subclass": """\
class F(float):
    def __rsub__(s, o): return 0.0
    __sub__ = __rsub__
    def __lt__(s, o): return True
    __gt__ = __lt__
def mean(xs): return F(0) if xs != [1, 2, 4] else 7 / 3
""",
    "point: eq by class": """\
class Point:
    def __init__(s, *a): pass
    def __add__(s, o): return s
    def __eq__(s, o): return type(o) is Point
    def __ne__(s, o): return True
    def __hash__(s): return 0
""",
    "point: singleton": """\
_P = []
class Point:
    def __new__(c, *a):
        if not _P: _P.append(object.__new__(c))
        return _P[0]
    def __init__(s, *a): pass
    def __add__(s, o): return s
    def __ne__(s, o): return True
    def __hash__(s): return 0
""",
    "total: ends map": """\
def total(xs):
    if xs == [7, 8]: raise StopIteration
    return sum(xs)
""",
    "names: ends zip": """\
class N:
    def __iter__(s): return s
    def __next__(s): raise StopIteration
def names(n): return N()
""",
    "names: str subclass": """\
class S(str):
    def __eq__(s, o): return True
    __hash__ = str.__hash__
def names(n): return [S('')] * n
""",
    "words: list subclass": """\
class L(list):
    def __eq__(s, o): return True
    def __getitem__(s, i): return S()
class S:
    def __eq__(s, o): return True
def words(t): return L()
""",
    "skip": """\
import unittest
def total(xs): raise unittest.SkipTest('x')
""",
    "pytest skip": """\
def total(xs):
    import pytest; pytest.skip('x')
""",
    "pytest xfail": """\
def total(xs):
    import pytest; pytest.xfail('x')
""",
    "exit 0": """\
def total(xs): raise SystemExit(0)
""",
    "keyboard interrupt": """\
def total(xs): raise KeyboardInterrupt
""",
    "named like pytest's Skipped": """\
class Skipped(BaseException): pass
Skipped.__module__ = 'Skipped'; Skipped.__qualname__ = 'Skipped'
def total(xs): raise Skipped('x')
""",
    "named like unittest's SkipTest": """\
class SkipTest(Exception): pass
SkipTest.__module__ = 'unittest.case'
def total(xs): raise SkipTest('x')
""",
    "exit swallows": """\
class L:
    def __init__(s, i): pass
    def __enter__(s): return []
    def __exit__(s, *a): return True
ledger = L
""",
    "callback swallows": """\
def apply(f, xs):
    try: return [f(None)]
    except BaseException: return [True]
""",
    "callback: reads the function": """\
def apply(f, xs):
    for n in ('__code__', '__globals__', 'co_consts', '__self__', '__closure__', '__func__', 'f_globals'):
        try: getattr(f, n)
        except AttributeError: pass
        else: return [f(16)]
    return [0]
""",
    "table: changes the parameters": """\
def total(xs):
    n = len(xs)
    xs.clear(); xs += [0]
    return 0
""",
    "two servers": """\
import os
def total(xs):
    if os.fork() == 0: return 12
    return 0
""",
    "thread answers": """\
import threading, time, os, struct
def work():
    t = b'{"v":12}'
    while True:
        time.sleep(.001)
        try: os.write(3, struct.pack('!I', len(t)) + t)
        except OSError: pass
def total(xs):
    threading.Thread(target=work, daemon=True).start(); time.sleep(.05); return 0
""",
    "patches its own runner": """\
import sys
for m in list(sys.modules.values()):
    if getattr(m, '__name__', '').endswith('values'): m.encode = lambda v, d=0: {'i': '0xc'}
    if getattr(m, '__name__', '').endswith('objects'):
        m.Encoder.changes = lambda s: {'changes': [[n, {'l': []}] for n in range(0, 40, 2)]}
def total(xs): return 0
""",
    "changes all the tests' containers": """\
import sys
O = [m for n, m in sys.modules.items() if n.endswith('.objects') and hasattr(m, 'Encoder')][0]
old = O.Encoder.changes
def changes(s):
    got = old(s)
    got['changes'] = [[n, {'l': []}] for n in list(s._replicas)]
    return got
O.Encoder.changes = changes
def words(t): return []
""",
    "answers handles of others": """\
import sys
O = [m for n, m in sys.modules.items() if n.endswith('.solution') and hasattr(m, '_Server')][0]
O._Server._refer = lambda s, v: {'l': 0}
def total(xs): return object()
""",
    "nonsense answers": """\
import sys
O = [m for n, m in sys.modules.items() if n.endswith('.solution') and hasattr(m, '_Server')][0]
O._Server._refer = lambda s, v: {'o': [[], {}, 'x']}
def total(xs): return object()
""",
    "classes that derive from everything": """\
import sys
O = [m for n, m in sys.modules.items() if n.endswith('.solution') and hasattr(m, '_Server')][0]
old = O._Server._describe
def d(s, r):
    got = old(s, r)
    got['bases'] = [{'g': 'builtins.BaseException'}, {'g': 'builtins.type'}]
    got['special'] = {n: 'own' for n in ('__eq__', '__hash__', '__init__', '__new__', '__class__')}
    got['methods'] = ['__eq__', '__init_subclass__', '__instancecheck__', 'test_x']
    got['plain'] = 'int'
    return got
O._Server._describe = d
class A:
    def __eq__(s, o): return True
def total(xs): return A()
""",
    "module attributes": """\
def __getattr__(n): return lambda *a: 12
__all__ = ['len', 'sum', 'assert', 'test_total']
del total
def total(xs): return 0
""",
    "hash and eq in a set": """\
class Point(Point):
    def __eq__(s, o): return s is o
    def __hash__(s): return 7
""",
    "__class__ lies": """\
class A:
    __class__ = property(lambda s: int)
    def __eq__(s, o): return True
    def __int__(s): return 12
    __index__ = __int__
def total(xs): return A()
""",
    "eq returns 1": """\
class A:
    def __eq__(s, o): return 1
def total(xs): return A()
""",
    "eq returns a text": """\
class A:
    def __eq__(s, o): return "yes"
def total(xs): return A()
""",
    "eq returns truthy object": """\
class T:
    def __bool__(s): return True
class A:
    def __eq__(s, o): return T()
def total(xs): return A()
""",
    "float.__eq__ reflected": """\
class A:
    def __eq__(s, o): return NotImplemented
    def __float__(s): return 12.0
def total(xs): return A()
""",
    "complex tricks": """\
import decimal
class D(decimal.Decimal):
    def __eq__(s, o): return True
    __hash__ = decimal.Decimal.__hash__
def total(xs): return D(0)
""",
    "mock.ANY": """\
from unittest.mock import ANY
def total(xs): return ANY
""",
    "approx": """\
def total(xs):
    import pytest; return pytest.approx(0, abs=1e9)
""",
    "dict subclass": """\
class D(dict):
    def __eq__(s, o): return True
def parse(t):
    if '=' not in t: raise ValueError('bad')
    return D()
""",
    "prime: object of truth": """\
class T:
    n = 0
    def __bool__(s): T.n += 1; return True
def prime(n): return T()
""",
    "huge answers": """\
def total(xs): return 'x' * (8 << 20)
""",
    "deep answers": """\
def total(xs):
    x = []
    for _ in range(100000): x = [x]
    return x
""",
    "endless recursion through callbacks": """\
def apply(f, xs): return apply(f, xs)
""",
}
WRONG = {"agrees to all": AGREES, **{name: HONEST + code for name, code in _ADDED.items()}}
"""Source of `shop.py` by what it tries."""
