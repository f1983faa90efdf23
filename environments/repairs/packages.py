"""Small packages with bugs to plant, visible tests that miss the bugs, and hidden tests that detect them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug that replaces `right` by `wrong` in the file `path`; `report` describes the symptom to the agent."""

    name: str
    path: str
    right: str
    wrong: str
    report: str


@dataclass(frozen=True, slots=True)
class Package:
    """A package with its correct files by path; `visible` and `hidden` are unittest files that import them."""

    name: str
    level: int
    split: str
    files: dict[str, str]
    visible: str
    hidden: str
    bugs: tuple[Bug, ...]

    def with_bug(self, bug: Bug) -> dict[str, str]:
        """The files with a bug planted."""
        return {**self.files, bug.path: self.files[bug.path].replace(bug.right, bug.wrong)}


def _tests(imports: str, *cases: tuple[str, str]) -> str:
    """Source of a unittest file; a case is a name and one line of code."""
    methods = "".join(f"\n    def test_{name}(self):\n        {line}\n" for name, line in cases)
    return f"import unittest\n\n{imports}\n\n\nclass Tests(unittest.TestCase):{methods}"


MONTHS = Package(
    "months",
    1,
    "train",
    {
        "months.py": '''\
def add_months(year, month, count):
    """The year and month `count` months later (earlier where it is negative); months are 1 to 12."""
    months = 12 * year + month - 1 + count
    return months // 12, months % 12 + 1


def days(year, month):
    """How many days a month has."""
    if month == 2:
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        return 29 if leap else 28
    return 30 if month in (4, 6, 9, 11) else 31
'''
    },
    _tests(
        "from months import add_months, days",
        ("later", "self.assertEqual(add_months(2024, 1, 2), (2024, 3))"),
        ("days", "self.assertEqual([days(2023, 2), days(2024, 2), days(2024, 4)], [28, 29, 30])"),
    ),
    _tests(
        "from months import add_months, days",
        ("later", "self.assertEqual(add_months(2024, 1, 2), (2024, 3))"),
        ("december", "self.assertEqual(add_months(2024, 11, 1), (2024, 12))"),
        ("next_year", "self.assertEqual(add_months(2024, 12, 1), (2025, 1))"),
        ("earlier", "self.assertEqual(add_months(2024, 1, -13), (2022, 12))"),
        ("centuries", "self.assertEqual([days(y, 2) for y in (1900, 2000, 2100, 2023)], [28, 29, 28, 28])"),
        (
            "each_month",
            "self.assertEqual([days(2023, m) for m in range(1, 13)], [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])",
        ),
        ("all_days", "self.assertEqual(sum(days(2024, month) for month in range(1, 13)), 366)"),
    ),
    (
        Bug(
            *("december", "months.py", "month - 1 + count\n    return months // 12, months % 12 + 1"),
            "month + count\n    return months // 12, months % 12",
            "add_months(2024, 11, 1) gives month 0 of the next year.",
        ),
        Bug(
            *("century", "months.py", "(year % 100 != 0 or year % 400 == 0)", "year % 100 != 0"),
            "days(2000, 2) says 28, but the year 2000 had a 29th of February.",
        ),
    ),
)

ROMAN = Package(
    "roman",
    1,
    "train",
    {
        "roman.py": '''\
VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
PARTS = (
    *((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")),
    *((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")),
)


def to_roman(number):
    """Roman numerals of a number from 1 to 3999."""
    text = ""
    for value, letters in PARTS:
        while number >= value:
            text += letters
            number -= value
    return text


def from_roman(text):
    """The number that roman numerals stand for."""
    total = 0
    for letter, following in zip(text, text[1:] + "I"):
        value = VALUES[letter]
        total += -value if value < VALUES[following] else value
    return total
'''
    },
    _tests(
        "from roman import from_roman, to_roman",
        ("to", "self.assertEqual([to_roman(n) for n in (1, 6, 15)], ['I', 'VI', 'XV'])"),
        ("from", "self.assertEqual([from_roman(t) for t in ('II', 'VII', 'XX')], [2, 7, 20])"),
    ),
    _tests(
        "from roman import from_roman, to_roman",
        ("small", "self.assertEqual([to_roman(n) for n in (1, 4, 9)], ['I', 'IV', 'IX'])"),
        ("large", "self.assertEqual([to_roman(n) for n in (944, 1990)], ['CMXLIV', 'MCMXC'])"),
        ("back", "self.assertEqual([from_roman(t) for t in ('XIV', 'CDXLIV')], [14, 444])"),
        ("all", "self.assertTrue(all(from_roman(to_roman(n)) == n for n in range(1, 4000, 13)))"),
        ("length", "self.assertEqual(max(len(to_roman(n)) for n in range(3800, 4000)), 15)"),
    ),
    (
        Bug("forty", "roman.py", ', (40, "XL")', "", "to_roman(44) is XXXXIV; it should be XLIV."),
        Bug(
            *("subtract", "roman.py", "-value if value < VALUES[following] else value", "value"),
            "from_roman('XIV') is 16; it should be 14.",
        ),
    ),
)

WRAP = Package(
    "wrap",
    1,
    "eval",
    {
        "wrap.py": '''\
def wrap(text, width):
    """Lines of at most `width` characters, words kept whole; a longer word has a line of its own."""
    lines, line = [], ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if len(joined) <= width or not line:
            line = joined
        else:
            lines.append(line)
            line = word
    return lines + [line] if line else lines


def center(line, width):
    """The line in the middle of `width` characters; an odd space goes to the right."""
    space = max(width - len(line), 0)
    left = space // 2
    return " " * left + line + " " * (space - left)
'''
    },
    _tests(
        "from wrap import center, wrap",
        ("wrap", "self.assertEqual(wrap('one two three', 8), ['one two', 'three'])"),
        ("center", "self.assertEqual(center('ab', 6), '  ab  ')"),
    ),
    _tests(
        "from wrap import center, wrap",
        ("wrap", "self.assertEqual(wrap('one two three', 8), ['one two', 'three'])"),
        ("exact", "self.assertEqual(wrap('one two three', 7), ['one two', 'three'])"),
        ("long", "self.assertEqual(wrap('a elephantine b', 4), ['a', 'elephantine', 'b'])"),
        ("long_first", "self.assertEqual(wrap('elephantine a', 4), ['elephantine', 'a'])"),
        ("empty", "self.assertEqual(wrap('  ', 4), [])"),
        ("odd", "self.assertEqual(center('ab', 5), ' ab  ')"),
        ("wide", "self.assertEqual(center('abc', 9), '   abc   ')"),
        ("narrow", "self.assertEqual(center('abc', 2), 'abc')"),
    ),
    (
        Bug(
            *("exact", "wrap.py", "len(joined) <= width", "len(joined) < width"),
            "wrap('one two three', 7) breaks after 'one', although 'one two' has seven characters.",
        ),
        Bug("odd", "wrap.py", "left = space // 2", "left = (space + 1) // 2", "center('ab', 5) leans to the right."),
    ),
)

CACHE = Package(
    "cache",
    2,
    "train",
    {
        "cache.py": '''\
class Cache:
    """The newest `size` entries; what was not used for the longest time goes first."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be at least 1")
        self.size = size
        self.entries = {}
        self.hits = 0
        self.misses = 0

    def get(self, key, default=None):
        """The value of a key, which counts as used now."""
        if key not in self.entries:
            self.misses += 1
            return default
        self.hits += 1
        self.entries[key] = self.entries.pop(key)
        return self.entries[key]

    def put(self, key, value):
        """Add or replace an entry."""
        self.entries.pop(key, None)
        self.entries[key] = value
        if len(self.entries) > self.size:
            del self.entries[next(iter(self.entries))]

    def keys(self):
        """All keys, the one that goes first in front."""
        return list(self.entries)
'''
    },
    _tests(
        "from cache import Cache",
        ("put", "c = Cache(2); c.put('a', 1); self.assertEqual(c.get('a'), 1)"),
        ("full", "c = Cache(2); [c.put(k, 0) for k in 'abc']; self.assertEqual(c.keys(), ['b', 'c'])"),
    ),
    _tests(
        "from cache import Cache",
        ("full", "c = Cache(2); [c.put(k, 0) for k in 'abc']; self.assertEqual(c.keys(), ['b', 'c'])"),
        (
            "used",
            "c = Cache(2); c.put('a', 1); c.put('b', 2); c.get('a'); c.put('c', 3); "
            "self.assertEqual(c.keys(), ['a', 'c'])",
        ),
        ("again", "c = Cache(2); c.put('a', 1); c.put('b', 2); c.put('a', 3); self.assertEqual(c.keys(), ['b', 'a'])"),
        ("value", "c = Cache(2); c.put('a', 1); c.put('a', 3); self.assertEqual(c.get('a'), 3)"),
        (
            "counts",
            "c = Cache(1); c.put('a', None); c.get('a'); c.get('b'); self.assertEqual((c.hits, c.misses), (1, 1))",
        ),
        ("default", "self.assertEqual(Cache(1).get('x', 7), 7)"),
        ("size", "self.assertRaises(ValueError, Cache, 0)"),
    ),
    (
        Bug(
            *("used", "cache.py", "        self.entries[key] = self.entries.pop(key)\n", ""),
            "An entry that is read all the time still falls out of the cache.",
        ),
        Bug(
            *("again", "cache.py", "        self.entries.pop(key, None)\n", ""),
            "An entry that has just been written again is the first to fall out of the cache.",
        ),
    ),
)

LEDGER = Package(
    "ledger",
    2,
    "train",
    {
        "ledger.py": '''\
class Ledger:
    """Accounts in whole cents; every transfer is all or nothing."""

    def __init__(self):
        self.balances = {}
        self.history = []

    def open(self, name, cents=0):
        """A new account."""
        if name in self.balances:
            raise ValueError(f"there is already an account {name}")
        self.balances[name] = cents

    def transfer(self, source, target, cents):
        """Move an amount, if the source has it."""
        if cents <= 0:
            raise ValueError("an amount is positive")
        if source not in self.balances or target not in self.balances:
            raise KeyError("no such account")
        if self.balances[source] < cents:
            raise ValueError("not enough money")
        self.balances[source] -= cents
        self.balances[target] += cents
        self.history.append((source, target, cents))

    def undo(self):
        """Take the last transfer back."""
        source, target, cents = self.history.pop()
        self.balances[source] += cents
        self.balances[target] -= cents

    def split(self, source, targets, cents):
        """Share an amount out evenly; the first ones get a cent more where it doesn't divide."""
        share, rest = divmod(cents, len(targets))
        if cents > self.balances[source]:
            raise ValueError("not enough money")
        for number, target in enumerate(targets):
            self.transfer(source, target, share + (1 if number < rest else 0))
'''
    },
    _tests(
        "from ledger import Ledger",
        ("open", "l = Ledger(); l.open('a', 5); self.assertEqual(l.balances, {'a': 5})"),
        (
            "split",
            "l = Ledger(); l.open('a', 9); l.open('b'); l.split('a', ['b'], 4); "
            "self.assertEqual(l.balances, {'a': 5, 'b': 4})",
        ),
    ),
    _tests(
        "from ledger import Ledger",
        (
            "all",
            "l = Ledger(); l.open('a', 5); l.open('b'); l.transfer('a', 'b', 5); "
            "self.assertEqual(l.balances, {'a': 0, 'b': 5})",
        ),
        (
            "undo",
            "l = Ledger(); l.open('a', 5); l.open('b'); l.transfer('a', 'b', 2); l.undo(); "
            "self.assertEqual((l.balances, l.history), ({'a': 5, 'b': 0}, []))",
        ),
        (
            "rest",
            "l = Ledger(); l.open('a', 9); [l.open(x) for x in 'bcd']; l.split('a', ['b', 'c', 'd'], 8); "
            "self.assertEqual(l.balances, {'a': 1, 'b': 3, 'c': 3, 'd': 2})",
        ),
        (
            "even",
            "l = Ledger(); l.open('a', 9); l.open('b'); l.open('c'); l.split('a', ['b', 'c'], 6); "
            "self.assertEqual(l.balances, {'a': 3, 'b': 3, 'c': 3})",
        ),
        (
            "whole",
            "l = Ledger(); l.open('a', 5); l.open('b'); l.split('a', ['b'], 5); "
            "self.assertEqual(l.balances, {'a': 0, 'b': 5})",
        ),
        (
            "cent",
            "l = Ledger(); l.open('a', 5); l.open('b'); l.transfer('a', 'b', 1); "
            "self.assertEqual(l.balances, {'a': 4, 'b': 1})",
        ),
        ("same_name", "l = Ledger(); l.open('a', 5); self.assertRaises(ValueError, l.open, 'a')"),
        (
            "nothing",
            "l = Ledger(); l.open('a', 5); l.open('b'); self.assertRaises(ValueError, l.transfer, 'a', 'b', 0)",
        ),
        (
            "too_much",
            "l = Ledger(); l.open('a', 5); l.open('b'); self.assertRaises(ValueError, l.transfer, 'a', 'b', 6)",
        ),
        ("no_target", "l = Ledger(); l.open('a', 5); self.assertRaises(KeyError, l.transfer, 'a', 'b', 9)"),
        ("no_source", "l = Ledger(); l.open('a', 5); self.assertRaises(KeyError, l.transfer, 'b', 'a', 9)"),
        (
            "nothing_is_split",
            "l = Ledger(); l.open('a', 4); l.open('b'); l.open('c'); "
            "self.assertRaises(ValueError, l.split, 'a', ['b', 'c'], 6); "
            "self.assertEqual(l.balances, {'a': 4, 'b': 0, 'c': 0})",
        ),
    ),
    (
        Bug(
            *("all", "ledger.py", "self.balances[source] < cents", "self.balances[source] <= cents"),
            "All the money of an account can't be sent: 'not enough money'.",
        ),
        Bug(
            *("rest", "ledger.py", "share + (1 if number < rest else 0)", "share + (rest if number == 0 else 0)"),
            "8 cents for three people should be 3, 3 and 2, but are 4, 2 and 2.",
        ),
    ),
)

SPANS = Package(
    "spans",
    2,
    "eval",
    {
        "spans.py": '''\
class Spans:
    """A set of whole numbers, kept as spans `(first, last)` in order, that neither overlap nor touch."""

    def __init__(self):
        self.spans = []

    def add(self, first, last):
        """Add the numbers from `first` to `last`, both included."""
        kept = []
        for start, end in self.spans:
            if end + 1 < first or last + 1 < start:
                kept.append((start, end))
            else:
                first, last = min(first, start), max(last, end)
        self.spans = sorted([*kept, (first, last)])

    def remove(self, first, last):
        """Take the numbers from `first` to `last` out."""
        kept = []
        for start, end in self.spans:
            if start < first:
                kept.append((start, min(end, first - 1)))
            if end > last:
                kept.append((max(start, last + 1), end))
        self.spans = kept

    def __len__(self):
        return sum(end - start + 1 for start, end in self.spans)
'''
    },
    _tests(
        "from spans import Spans",
        ("add", "s = Spans(); s.add(1, 4); s.add(3, 6); self.assertEqual(s.spans, [(1, 6)])"),
        ("apart", "s = Spans(); s.add(7, 9); s.add(1, 2); self.assertEqual(len(s), 5)"),
    ),
    _tests(
        "from spans import Spans",
        ("overlap", "s = Spans(); s.add(1, 4); s.add(3, 6); self.assertEqual(s.spans, [(1, 6)])"),
        ("touch", "s = Spans(); s.add(1, 2); s.add(3, 4); self.assertEqual(s.spans, [(1, 4)])"),
        ("touch_before", "s = Spans(); s.add(3, 4); s.add(1, 2); self.assertEqual(s.spans, [(1, 4)])"),
        ("near", "s = Spans(); s.add(1, 2); s.add(4, 5); self.assertEqual(s.spans, [(1, 2), (4, 5)])"),
        ("near_before", "s = Spans(); s.add(4, 5); s.add(1, 2); self.assertEqual(s.spans, [(1, 2), (4, 5)])"),
        ("to_the_end", "s = Spans(); s.add(1, 9); s.remove(4, 9); self.assertEqual(s.spans, [(1, 3)])"),
        ("bridge", "s = Spans(); s.add(1, 2); s.add(6, 7); s.add(2, 6); self.assertEqual(s.spans, [(1, 7)])"),
        ("inside", "s = Spans(); s.add(1, 9); s.remove(4, 5); self.assertEqual(s.spans, [(1, 3), (6, 9)])"),
        ("edge", "s = Spans(); s.add(1, 9); s.remove(1, 3); s.remove(9, 12); self.assertEqual(s.spans, [(4, 8)])"),
        ("all", "s = Spans(); s.add(3, 5); s.remove(1, 9); self.assertEqual(len(s), 0)"),
        ("beside", "s = Spans(); s.add(1, 2); s.add(8, 9); s.remove(4, 5); self.assertEqual(len(s), 4)"),
    ),
    (
        Bug(
            *("touch", "spans.py", "end + 1 < first or last + 1 < start", "end < first or last < start"),
            "After add(1, 2) and add(3, 4) there are two spans instead of one.",
        ),
        Bug(
            *("inside", "spans.py", "            if end > last:", "            elif end > last:"),
            "Taking numbers out of the middle of a span loses its second half.",
        ),
    ),
)

SHOP = Package(
    "shop",
    3,
    "train",
    {
        "shop/__init__.py": "from shop.receipt import receipt\n\n__all__ = ['receipt']\n",
        "shop/prices.py": '''\
PRICES = {"apple": 30, "bread": 250, "cheese": 700, "tea": 410}


def price(item, count):
    """Price in cents; from ten pieces on, a tenth less, rounded down."""
    cents = PRICES[item] * count
    return cents * 9 // 10 if count >= 10 else cents
''',
        "shop/basket.py": '''\
def parse(text):
    """Counts by item from lines such as `2 apple`; an item may have several lines."""
    counts = {}
    for line in text.splitlines():
        if line.strip():
            count, item = line.split()
            counts[item] = counts.get(item, 0) + int(count)
    return counts
''',
        "shop/receipt.py": '''\
from shop.basket import parse
from shop.prices import price


def euros(cents):
    """Such as 12.05."""
    return f"{cents // 100}.{cents % 100:02}"


def receipt(text):
    """A line for each item, then the total."""
    costs = {item: price(item, count) for item, count in parse(text).items()}
    lines = [f"{item} {euros(cents)}" for item, cents in sorted(costs.items())]
    return [*lines, f"total {euros(sum(costs.values()))}"]
''',
    },
    _tests(
        "from shop import receipt",
        ("one", "self.assertEqual(receipt('1 bread'), ['bread 2.50', 'total 2.50'])"),
        ("two", "self.assertEqual(receipt('1 tea\\n1 bread'), ['bread 2.50', 'tea 4.10', 'total 6.60'])"),
    ),
    _tests(
        "from shop import receipt",
        ("two", "self.assertEqual(receipt('1 tea\\n1 bread'), ['bread 2.50', 'tea 4.10', 'total 6.60'])"),
        ("twice", "self.assertEqual(receipt('1 tea\\n\\n2 tea'), ['tea 12.30', 'total 12.30'])"),
        ("ten", "self.assertEqual(receipt('10 apple'), ['apple 2.70', 'total 2.70'])"),
        ("nine", "self.assertEqual(receipt('9 apple'), ['apple 2.70', 'total 2.70'])"),
        ("eleven", "self.assertEqual(receipt('11 apple'), ['apple 2.97', 'total 2.97'])"),
        ("nothing", "self.assertEqual(receipt(''), ['total 0.00'])"),
        ("cheese", "self.assertEqual(receipt('1 cheese'), ['cheese 7.00', 'total 7.00'])"),
    ),
    (
        Bug(
            *("twice", "shop/basket.py", "counts.get(item, 0) + int(count)", "int(count)"),
            "receipt('1 tea\\n2 tea') charges two teas instead of three.",
        ),
        Bug(
            *("ten", "shop/prices.py", "count >= 10", "count > 10"),
            "receipt('10 apple') says 3.00; ten apples should be a tenth cheaper.",
        ),
    ),
)

CALC = Package(
    "calc",
    3,
    "eval",
    {
        "calc/__init__.py": "from calc.evaluate import evaluate\n\n__all__ = ['evaluate']\n",
        "calc/tokens.py": '''\
import re


def tokens(text):
    """Numbers, operators and parentheses, in order."""
    found = re.findall(r"\\d+|[-+*/()]", text)
    if "".join(found) != re.sub(r"\\s", "", text):
        raise ValueError("this can't be calculated")
    return found
''',
        "calc/parser.py": '''\
def parse(tokens):
    """A tree of `(operator, left, right)` and numbers; * and / bind tighter, equal ones go from left to right."""
    rest = list(tokens)

    def operand():
        token = rest.pop(0)
        if token == "(":
            inner = chain(0)
            rest.pop(0)
            return inner
        if token == "-":
            return ("-", 0, operand())
        return int(token)

    def chain(level):
        operators = ("+-", "*/")[level]
        following = operand if level == 1 else lambda: chain(1)
        tree = following()
        while rest and rest[0] in operators:
            tree = (rest.pop(0), tree, following())
        return tree

    return chain(0)
''',
        "calc/evaluate.py": '''\
from calc.parser import parse
from calc.tokens import tokens


def evaluate(text):
    """The value of an expression of whole numbers; / rounds down."""
    return value(parse(tokens(text)))


def value(tree):
    """The value of a parsed expression."""
    if isinstance(tree, int):
        return tree
    operator, left, right = tree[0], value(tree[1]), value(tree[2])
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left // right
''',
    },
    _tests(
        "from calc import evaluate",
        ("add", "self.assertEqual(evaluate('1 + 2 * 3'), 7)"),
        ("parentheses", "self.assertEqual(evaluate('(1 + 2) * 3'), 9)"),
    ),
    _tests(
        "from calc import evaluate",
        ("add", "self.assertEqual(evaluate('1 + 2 * 3'), 7)"),
        ("left", "self.assertEqual([evaluate(t) for t in ('9 - 3 - 2', '8 / 2 * 4', '7 - 2 + 1')], [4, 16, 6])"),
        ("digits", "self.assertEqual([evaluate(t) for t in ('12 + 30', '100')], [42, 100])"),
        ("minus", "self.assertEqual([evaluate(t) for t in ('-3 + 5', '2 * -4', '-(2 + 3)')], [2, -8, -5])"),
        ("nested", "self.assertEqual(evaluate('2 * (3 + (4 - 1) * 2)'), 18)"),
        ("unknown", "self.assertRaises(ValueError, evaluate, '1 ? 2')"),
    ),
    (
        Bug(
            *("left", "calc/parser.py", "tree = (rest.pop(0), tree, following())"),
            "tree = (rest.pop(0), tree, chain(level))",
            "evaluate('9 - 3 - 2') is 8; it should be 4.",
        ),
        Bug(
            *("digits", "calc/tokens.py", r'r"\d+|', r'r"\d|'),
            "evaluate('12 + 30') fails or is wrong; with small numbers it works.",
        ),
    ),
)

PACKAGES = (MONTHS, ROMAN, WRAP, CACHE, LEDGER, SPANS, SHOP, CALC)


def chosen(split: str, levels: Sequence[int]) -> list[tuple[Package, Bug]]:
    """All bugs, with their packages, of a split and one of these levels."""
    return [(p, bug) for p in PACKAGES if p.split == split and p.level in levels for bug in p.bugs]
