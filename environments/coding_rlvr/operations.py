"""Operations that programs are composed of: small steps with their English wordings and Python code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from random import Random
from typing import Any

Params = dict[str, Any]

SMALL = range(1, 13)
FACTORS = range(2, 8)
COUNTS = range(1, 5)
LETTERS = "bceghkm"
VARIABLES = {"numbers": "xs", "text": "s", "dictionary": "d", "number": "n", "pair": "x, y"}
"""Type -> the variable or variables that hold its value."""
OPENERS: dict[str, Sequence[str]] = {
    "numbers": ("Given a list of numbers xs", "Take the list of numbers xs", "For the list of numbers xs"),
    "text": ("Given a string s", "Take the text s", "For the string s"),
    "dictionary": ("Given a dictionary d", "Take the dictionary d", "For the dictionary d from letters to numbers"),
    "number": ("Given a number n", "Take the number n", "For the number n"),
    "pair": ("Given two numbers x and y", "Take the numbers x and y", "For the numbers x and y"),
}
"""Type -> wordings that introduce the input."""
COMMON = frozenset(
    """
    keep_above keep_below keep_even keep_odd add_each subtract_each multiply_each square_each
    sort_up backwards first skip total largest smallest count
    reverse upper lower head repeat append prepend length occurrences
    keep_values_above add_values sum_values largest_value entries sorted_keys lookup
    plus minus times square sum_of difference product larger smaller
    x_over_y x_over y_even add_up count_all add_squares multiples above
    """.split()  # noqa: SIM905  a set literal would be much longer
)
"""Operations of levels 1 and 2; all others raise a task's difficulty by two levels."""


@dataclass(frozen=True)
class Operation:
    """One step from a value of type `takes` to one of type `gives`.

    Args:
        name: unique among all operations.
        takes: type of the input: "numbers", "text", "dictionary", "number" or "pair" (x, y).
        gives: type of the result: one of the above, "letters" (a list of strings), or, only in conditions and loops,
            "truth" or "statement".
        phrases: wordings: verb phrases if the type stays the same ("reverse it"), noun phrases if it changes ("the
            sum"); `{k}` and so on are placeholders for parameters.
        expression: Python over the variable that holds the input (see `VARIABLES`).
        slips: expressions that result from misunderstanding the step; never equivalent to `expression`.
        params: name -> possible values; `{c}` and `{d}` are always different letters.
    """

    name: str
    takes: str
    gives: str
    phrases: Sequence[str]
    expression: str
    slips: Sequence[str]
    params: dict[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def rare(self) -> bool:
        """Whether the operation only occurs in the harder levels."""
        return self.name not in COMMON

    @property
    def is_noun(self) -> bool:
        """Whether the phrases name a value ("the sum") and not an action ("sort it")."""
        return self.takes != self.gives

    @cached_property
    def size(self) -> int:
        """Number of different parameter settings."""
        return prod(len(values) for values in self.params.values())

    def draw(self, rng: Random) -> Params:
        """Draw parameters uniformly; the letters of one operation are all different."""
        chosen: Params = {}
        for name, values in self.params.items():
            chosen[name] = rng.choice([value for value in values if value not in chosen.values()])
        return chosen


def sample_arguments(kind: str, rng: Random) -> tuple[Any, ...]:
    """Arguments for a function whose input has type `kind`, small enough to read at a glance."""
    if kind == "numbers":
        return ([rng.randint(0, 12) for _ in range(rng.randint(2, 5))],)
    if kind == "text":
        return ("".join(rng.choice(LETTERS + LETTERS[:3].upper()) for _ in range(rng.randint(3, 6))),)
    if kind == "dictionary":
        keys = rng.sample(LETTERS, rng.randint(2, 3))
        return ({key: rng.randint(0, 12) for key in keys},)
    if kind == "number":
        return (rng.randint(1, 15),)
    x = rng.randint(0, 12)
    return (x, x if rng.random() < 0.2 else rng.randint(0, 12))


def pointed_arguments(kind: str, params: Sequence[Any], rng: Random) -> tuple[Any, ...]:
    """As `sample_arguments`, but often with values at or next to a program's parameters, and of other lengths."""
    near = [value + step for value in params if isinstance(value, int) for step in (-1, 0, 1)]
    letters = [value for value in params if isinstance(value, str)]
    size = rng.choice([0, 1, 2, 3, 4, 5, 6, *(value for value in near if 0 <= value <= 8)])

    def number() -> int:
        return rng.choice(near) if near and rng.random() < 0.5 else rng.randint(0, 12)

    def letter() -> str:
        return rng.choice(letters) if letters and rng.random() < 0.4 else rng.choice(LETTERS + LETTERS[:3].upper())

    if kind == "numbers":
        return ([number() for _ in range(size)],)
    if kind == "text":
        return ("".join(letter() for _ in range(size)),)
    if kind == "dictionary":
        return ({letter().lower(): number() for _ in range(min(size, 4))},)
    if kind == "number":
        return (rng.choice([number(), rng.randint(0, 40)]),)
    x = number()
    return (x, x if rng.random() < 0.2 else number())


Row = tuple[str, str, str, str] | tuple[str, str, str, str, Sequence[int]]


def _table(takes: str, gives: str, rows: Sequence[Row], *, body: str = "_") -> tuple[Operation, ...]:
    """Build operations on the same types from rows of name, wordings, expression, slips and, if used, values of `k`.

    `;` separates wordings and slips. Expressions and slips replace `_` in `body`.
    """
    made = []
    for name, phrases, expression, slips, *values in rows:
        params: dict[str, Sequence[Any]] = {letter: LETTERS for letter in "cd" if f"{{{letter}}}" in expression}
        if values:
            params["k"] = values[0]
        whole, *wrong = (body.replace("_", part) for part in (expression, *slips.split("; ")))
        made.append(Operation(name, takes, gives, phrases.split("; "), whole, wrong, params))
    return tuple(made)


# fmt: off

# --- steps of a pipeline

NUMBER = _table("number", "number", (
    ("plus", "add {k} to it; increase it by {k}", "n + {k}", "n - {k}; n * {k}", SMALL),
    ("minus", "subtract {k} from it; decrease it by {k}", "n - {k}", "{k} - n; n + {k}", SMALL),
    ("times", "multiply it by {k}; scale it by {k}", "n * {k}", "n ** {k}; n + {k}", FACTORS),
    ("square", "square it; multiply it by itself", "n * n", "n * 2; n + n"),
    ("remainder", "take the remainder when divided by {k}; take it modulo {k}",
     "n % {k}", "n // {k}; n / {k}", FACTORS),
    ("divide", "divide it by {k} and round down; integer divide it by {k}", "n // {k}", "n / {k}; n % {k}", FACTORS),
    ("at_most", "limit it to at most {k}; cap it at {k}", "min(n, {k})", "max(n, {k}); {k}", SMALL),
)) + _table("number", "numbers", (
    ("upto", "the list of numbers from 1 to n; the list 1, 2 and so on up to n",
     "list(range(1, n + 1))", "list(range(n)); list(range(1, n))"),
))

PAIR = _table("pair", "number", (
    ("sum_of", "the sum of x and y; x plus y", "x + y", "x * y; x - y"),
    ("difference", "the difference x minus y; x minus y", "x - y", "y - x; x + y"),
    ("product", "the product of x and y; x times y", "x * y", "x ** y; x + y"),
    ("larger", "the larger of x and y; the maximum of x and y", "max(x, y)", "min(x, y); x > y"),
    ("smaller", "the smaller of x and y; the minimum of x and y", "min(x, y)", "max(x, y); x < y"),
    ("distance", "the distance between x and y; how far x is from y", "abs(x - y)", "x - y; abs(x) - y"),
    ("x_plus", "x plus {k}; {k} more than x", "x + {k}", "x - {k}; x * {k}", SMALL),
    ("y_times", "y times {k}; {k} times y", "y * {k}", "y ** {k}; y + {k}", FACTORS),
))

LIST_TO_NUMBER = _table("numbers", "number", (
    ("total", "the sum; the total", "sum(xs)", "len(xs); max(xs)"),
    ("largest", "the largest number; the maximum", "max(xs)", "min(xs); xs[-1]"),
    ("smallest", "the smallest number; the minimum", "min(xs)", "max(xs); xs[0]"),
    ("count", "the count of numbers; how many there are", "len(xs)", "sum(xs); len(xs) - 1"),
    ("count_of", "how often {k} occurs; the count of the value {k}", "xs.count({k})", "xs.index({k}); len(xs)", SMALL),
    ("count_above", "how many are above {k}; the count of numbers greater than {k}",
     "len([x for x in xs if x > {k}])", "len([x for x in xs if x < {k}]); sum([x for x in xs if x > {k}])", SMALL),
    ("spread", "the largest minus the smallest; the range between minimum and maximum",
     "max(xs) - min(xs)", "max(xs); min(xs) - max(xs)"),
))

NUMBERS = _table("numbers", "numbers", body="[x for x in xs if _]", rows=(
    ("keep_above", "keep the numbers greater than {k}; keep the values above {k}",
     "x > {k}", "x >= {k}; x < {k}", SMALL),
    ("keep_below", "keep the numbers less than {k}; keep the values below {k}", "x < {k}", "x <= {k}; x > {k}", SMALL),
    ("keep_even", "keep the even numbers; drop the odd values", "x % 2 == 0", "x % 2 == 1; x // 2 == 0"),
    ("keep_odd", "keep the odd numbers; drop the even values", "x % 2 == 1", "x % 2 == 0; x // 2 == 1"),
    ("keep_multiples", "keep the multiples of {k}; keep the values divisible by {k}",
     "x % {k} == 0", "x // {k} == 0; x == {k}", FACTORS),
    ("keep_other", "remove every {k}; keep the values other than {k}", "x != {k}", "x == {k}; x > {k}", SMALL),
)) + _table("numbers", "numbers", body="[_ for x in xs]", rows=(
    ("add_each", "add {k} to each number; increase every value by {k}", "x + {k}", "x - {k}; x * {k}", SMALL),
    ("subtract_each", "subtract {k} from each number; decrease every value by {k}",
     "x - {k}", "{k} - x; x + {k}", SMALL),
    ("multiply_each", "multiply each number by {k}; scale every value by {k}", "x * {k}", "x ** {k}; x + {k}", FACTORS),
    ("square_each", "square each number; multiply every value by itself", "x * x", "x * 2; x + x"),
    ("remainder_each", "take each number modulo {k}; replace every value by its remainder modulo {k}",
     "x % {k}", "x // {k}; x / {k}", FACTORS),
)) + _table("numbers", "numbers", (
    ("sort_up", "sort them from small to large; sort them in increasing order", "sorted(xs)", "xs.sort(); xs[::-1]"),
    ("sort_down", "sort them from large to small; sort them in decreasing order",
     "sorted(xs)[::-1]", "sorted(xs); xs[::-1]"),
    ("backwards", "put them in reverse order; turn the list around", "xs[::-1]", "xs.reverse(); sorted(xs)"),
    ("first", "take the first {k} of them; keep only the first {k}", "xs[:{k}]", "xs[{k}:]; xs[{k}]", COUNTS),
    ("last", "take the last {k} of them; keep only the last {k}", "xs[-{k}:]", "xs[:{k}]; xs[-{k}]", COUNTS),
    ("skip", "skip the first {k} of them; leave out the first {k}", "xs[{k}:]", "xs[:{k}]; xs[:-{k}]", COUNTS),
)) + LIST_TO_NUMBER

TEXT_RESULTS = _table("text", "number", (
    ("length", "its length; how long it is", "len(s)", "s.len(); len(s) - 1"),
    ("occurrences", "how often '{c}' occurs; the number of '{c}' in it", "s.count('{c}')", "s.find('{c}'); len('{c}')"),
    ("position", "the first position of '{c}' or -1; where '{c}' first occurs, or -1",
     "s.find('{c}')", "s.count('{c}'); s.index('{c}')"),
)) + _table("text", "letters", (
    ("sorted_letters", "the sorted list of its letters; its characters as a sorted list",
     "sorted(s)", "list(s); s.sort()"),
    ("letters", "the list of its letters; its characters as a list", "list(s)", "sorted(s); [s]"),
)) + _table("text", "dictionary", (
    ("letter_counts", "a dictionary from each letter to its count; how often each letter occurs, as a dictionary",
     "{{c: s.count(c) for c in s}}", "{{c: s.find(c) for c in s}}; s.count()"),
))

TEXTS = _table("text", "text", (
    ("reverse", "reverse it; turn it backwards", "s[::-1]", "s.reverse(); s[:-1]"),
    ("upper", "make it upper case; convert it to capital letters", "s.upper()", "s.title(); s.lower()"),
    ("lower", "make it lower case; convert it to small letters", "s.lower()", "s.title(); s.upper()"),
    ("head", "take the first {k} characters; keep the first {k} letters", "s[:{k}]", "s[{k}:]; s[{k}]", COUNTS),
    ("tail", "take the last {k} characters; keep the last {k} letters", "s[-{k}:]", "s[:{k}]; s[-{k}]", COUNTS),
    ("repeat", "repeat it {k} times; write it {k} times in a row", "s * {k}", "s + {k}; s ** {k}", range(2, 6)),
    ("append", "append '{c}'; add '{c}' at the end", "s + '{c}'", "'{c}' + s; s.append('{c}')"),
    ("prepend", "put '{c}' in front; add '{c}' at the start", "'{c}' + s", "s + '{c}'; s.insert('{c}')"),
    ("replace", "replace '{c}' by '{d}'; change every '{c}' to '{d}'",
     "s.replace('{c}', '{d}')", "s.replace('{d}', '{c}'); s.replace('{c}', '')"),
    ("remove", "remove every '{c}'; delete all '{c}'", "s.replace('{c}', '')", "s.remove('{c}'); s.strip('{c}')"),
)) + TEXT_RESULTS

DICTIONARIES = _table("dictionary", "dictionary", body="{{key: value for key, value in d.items() if _}}", rows=(
    ("keep_values_above", "keep the entries with a value above {k}; keep the items whose value is greater than {k}",
     "value > {k}", "value < {k}; key > {k}", SMALL),
    ("keep_values_below", "keep the entries with a value below {k}; keep the items whose value is less than {k}",
     "value < {k}", "value > {k}; key < {k}", SMALL),
    ("drop_key", "drop the key '{c}'; remove the entry '{c}'", "key != '{c}'", "key == '{c}'; value != '{c}'"),
)) + _table("dictionary", "dictionary", body="{{key: _ for key, value in d.items()}}", rows=(
    ("add_values", "add {k} to each value; increase every value by {k}",
     "value + {k}", "value - {k}; key + {k}", SMALL),
    ("multiply_values", "multiply each value by {k}; scale every value by {k}",
     "value * {k}", "value ** {k}; key * {k}", FACTORS),
)) + _table("dictionary", "number", (
    ("sum_values", "the sum of its values; the total of all values", "sum(d.values())", "sum(d); len(d)"),
    ("largest_value", "its largest value; the maximum of its values", "max(d.values())", "max(d); min(d.values())"),
    ("entries", "the number of entries; how many keys it has", "len(d)", "sum(d); d.len()"),
    ("lookup", "the value of '{c}' or {k} if missing; the value for key '{c}', by default {k}",
     "d.get('{c}', {k})", "d['{c}']; d.get({k}, '{c}')", SMALL),
)) + _table("dictionary", "letters", (
    ("sorted_keys", "its sorted keys; the list of keys in sorted order", "sorted(d)", "list(d); d.sort()"),
)) + _table("dictionary", "numbers", (
    ("sorted_values", "its sorted values; the list of values in sorted order",
     "sorted(d.values())", "sorted(d); d.values()"),
))

DICTIONARY_MAKERS = _table("numbers", "dictionary", (
    ("square_table", "a dictionary from each number to its square; a table of each value and its square",
     "{{x: x * x for x in xs}}", "{{x * x: x for x in xs}}; [x * x for x in xs]"),
    ("count_table", "a dictionary from each number to its count; how often each number occurs, as a dictionary",
     "{{x: xs.count(x) for x in xs}}", "{{x: len(xs) for x in xs}}; xs.count(x)"),
))

# --- pieces of conditions and loops

CONDITIONS = _table("pair", "truth", (
    ("x_over_y", "x is greater than y; x is above y", "x > y", "x < y; x >= y"),
    ("x_over", "x is greater than {k}; x is above {k}", "x > {k}", "x < {k}; y > {k}", SMALL),
    ("y_under", "y is less than {k}; y is below {k}", "y < {k}", "y > {k}; x < {k}", SMALL),
    ("y_even", "y is even; y is divisible by 2", "y % 2 == 0", "y % 2 == 1; y // 2 == 0"),
    ("equal", "x and y are equal; x is the same as y", "x == y", "x != y; x > y"),
)) + _table("number", "truth", (
    ("n_over", "n is greater than {k}; n is above {k}", "n > {k}", "n < {k}; n >= {k}", SMALL),
    ("n_even", "n is even; n is divisible by 2", "n % 2 == 0", "n % 2 == 1; n // 2 == 0"),
)) + _table("numbers", "truth", (
    ("many", "there are more than {k} numbers; xs is longer than {k}",
     "len(xs) > {k}", "len(xs) < {k}; xs > {k}", range(2, 6)),
    ("has", "xs contains {k}; {k} is in xs", "{k} in xs", "{k} not in xs; xs == {k}", SMALL),
)) + _table("text", "truth", (
    ("long", "s is longer than {k}; s has more than {k} letters", "len(s) > {k}", "len(s) < {k}; s > {k}", range(2, 6)),
    ("contains", "s contains '{c}'; '{c}' is in s", "'{c}' in s", "'{c}' not in s; s == '{c}'"),
))

# Over the numbers i from 1 to n.
RANGE_TESTS = _table("index", "truth", (
    ("multiples", "the multiples of {k}; the numbers divisible by {k}",
     "i % {k} == 0", "i // {k} == 0; i % {k} == 1", FACTORS),
    ("above", "the numbers above {k}; the numbers greater than {k}", "i > {k}", "i >= {k}; i < {k}", range(1, 9)),
    ("not_multiples", "the numbers not divisible by {k}; the numbers that are no multiple of {k}",
     "i % {k} != 0", "i % {k} == 0; i != {k}", FACTORS),
))
GATHER = _table("index", "statement", (
    ("add_up", "add up; sum", "t += i", "t = i; t += 1"),
    ("add_squares", "add up the squares of; sum the squares of", "t += i * i", "t += i * 2; t += i"),
    ("count_all", "count; find the count of", "t += 1", "t += i; t = 1"),
    ("add_multiples", "add up {k} times each of; sum {k} times", "t += {k} * i", "t += {k}; t += {k} + i", FACTORS),
))

# Over the numbers x of a list.
EACH_TESTS = _table("item", "truth", (
    ("item_over", "it is above {k}; it is greater than {k}", "x > {k}", "x < {k}; x >= {k}", SMALL),
    ("item_even", "it is even; it is divisible by 2", "x % 2 == 0", "x % 2 == 1; x // 2 == 0"),
    ("item_is", "it equals {k}; it is {k}", "x == {k}", "x != {k}; x > {k}", SMALL),
))
UPDATES = _table("item", "statement", (
    ("add_x", "add it; add the number", "t += x", "t = x; t += 1"),
    ("add_square", "add its square; add the square", "t += x * x", "t += x * 2; t += x"),
    ("take_x", "subtract it; subtract the number", "t -= x", "t += x; t = -x"),
    ("add_k", "add {k}; increase it by {k}", "t += {k}", "t = {k}; t += x", FACTORS),
    ("take_k", "subtract {k}; decrease it by {k}", "t -= {k}", "t += {k}; t -= x", FACTORS),
))

# While n is large. Every step and slip decreases a positive n, so these loops terminate.
SHRINK = _table("while", "statement", (
    ("subtract_until", "subtract {k}; take away {k}", "n = n - {k}", "n = n // {k}; n = n - 1", FACTORS),
    ("divide_until", "divide by {k} rounding down; integer divide by {k}",
     "n = n // {k}", "n = n - {k}; n = n - 1", range(2, 5)),
))
FLOORS = _table("while", "truth", (
    ("floor", "n is below {k}; n is less than {k}", "n >= {k}", "n > {k}; n > 1", range(1, 6)),
))

# Over the pairs i < j of the numbers from 1 to n.
PAIR_TESTS = _table("pairs", "truth", (
    ("pair_sum", "their sum is divisible by {k}; i + j is a multiple of {k}",
     "(i + j) % {k} == 0", "(i + j) // {k} == 0; i + j == {k}", FACTORS),
    ("pair_product", "their product is above {k}; i times j is greater than {k}",
     "i * j > {k}", "i * j < {k}; i + j > {k}", range(3, 25)),
    ("pair_gap", "they differ by {k}; the difference is {k}",
     "j - i == {k}", "i - j == {k}; j + i == {k}", range(1, 6)),
))
# fmt: on

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for table in (
        *(NUMBER, PAIR, NUMBERS, TEXTS, DICTIONARIES, DICTIONARY_MAKERS),
        *(CONDITIONS, RANGE_TESTS, GATHER, EACH_TESTS, UPDATES, SHRINK, FLOORS, PAIR_TESTS),
    )
    for operation in table
}
"""Every operation by name."""
