"""Pieces of conditions and loops: tests (they give "truth") and statements (they give "statement")."""

from __future__ import annotations

from collections.abc import Sequence

from environments.coding_rlvr.operations.base import FACTORS, LETTERS, SMALL, Operation


def _test(
    takes: str, name: str, phrases: tuple[str, ...], value: str, slips: tuple[str, ...], **params: Sequence[object]
) -> Operation:
    return Operation(name, takes, "truth", phrases, value, slips, dict(params))


def _do(
    takes: str, name: str, phrases: tuple[str, ...], code: str, slips: tuple[str, ...], **params: Sequence[object]
) -> Operation:
    return Operation(name, takes, "statement", phrases, code, slips, dict(params))


LENGTHS = range(2, 6)

CONDITIONS = (
    _test("pair", "x_over_y", ("x is greater than y", "x is above y"), "x > y", ("x < y", "x >= y")),
    _test("pair", "x_over", ("x is greater than {k}", "x is above {k}"), "x > {k}", ("x < {k}", "y > {k}"), k=SMALL),
    _test("pair", "y_under", ("y is less than {k}", "y is below {k}"), "y < {k}", ("y > {k}", "x < {k}"), k=SMALL),
    _test("pair", "y_even", ("y is even", "y is divisible by 2"), "y % 2 == 0", ("y % 2 == 1", "y // 2 == 0")),
    _test("pair", "equal", ("x and y are equal", "x is the same as y"), "x == y", ("x != y", "x > y")),
    _test("number", "n_over", ("n is greater than {k}", "n is above {k}"), "n > {k}", ("n < {k}", "n >= {k}"), k=SMALL),
    _test("number", "n_even", ("n is even", "n is divisible by 2"), "n % 2 == 0", ("n % 2 == 1", "n // 2 == 0")),
    _test(
        "numbers",
        "many",
        ("there are more than {k} numbers", "xs is longer than {k}"),
        "len(xs) > {k}",
        ("len(xs) < {k}", "xs > {k}"),
        k=LENGTHS,
    ),
    _test("numbers", "has", ("xs contains {k}", "{k} is in xs"), "{k} in xs", ("{k} not in xs", "xs == {k}"), k=SMALL),
    _test(
        "text",
        "long",
        ("s is longer than {k}", "s has more than {k} letters"),
        "len(s) > {k}",
        ("len(s) < {k}", "s > {k}"),
        k=LENGTHS,
    ),
    _test(
        "text",
        "contains",
        ("s contains '{c}'", "'{c}' is in s"),
        "'{c}' in s",
        ("'{c}' not in s", "s == '{c}'"),
        c=LETTERS,
    ),
)

# Over the numbers i from 1 to n.
RANGE_TESTS = (
    _test(
        "index",
        "multiples",
        ("the multiples of {k}", "the numbers divisible by {k}"),
        "i % {k} == 0",
        ("i // {k} == 0", "i % {k} == 1"),
        k=FACTORS,
    ),
    _test(
        "index",
        "above",
        ("the numbers above {k}", "the numbers greater than {k}"),
        "i > {k}",
        ("i >= {k}", "i < {k}"),
        k=range(1, 9),
    ),
    _test(
        "index",
        "not_multiples",
        ("the numbers not divisible by {k}", "the numbers that are no multiple of {k}"),
        "i % {k} != 0",
        ("i % {k} == 0", "i != {k}"),
        k=FACTORS,
    ),
)
GATHER = (
    _do("index", "add_up", ("add up", "sum"), "t += i", ("t = i", "t += 1")),
    _do(
        "index", "add_squares", ("add up the squares of", "sum the squares of"), "t += i * i", ("t += i * 2", "t += i")
    ),
    _do("index", "count_all", ("count", "find the count of"), "t += 1", ("t += i", "t = 1")),
    _do(
        "index",
        "add_multiples",
        ("add up {k} times each of", "sum {k} times"),
        "t += {k} * i",
        ("t += {k}", "t += {k} + i"),
        k=FACTORS,
    ),
)

# Over the numbers x of a list.
EACH_TESTS = (
    _test(
        "item", "item_over", ("it is above {k}", "it is greater than {k}"), "x > {k}", ("x < {k}", "x >= {k}"), k=SMALL
    ),
    _test("item", "item_even", ("it is even", "it is divisible by 2"), "x % 2 == 0", ("x % 2 == 1", "x // 2 == 0")),
    _test("item", "item_is", ("it equals {k}", "it is {k}"), "x == {k}", ("x != {k}", "x > {k}"), k=SMALL),
)
UPDATES = (
    _do("item", "add_x", ("add it", "add the number"), "t += x", ("t = x", "t += 1")),
    _do("item", "add_square", ("add its square", "add the square"), "t += x * x", ("t += x * 2", "t += x")),
    _do("item", "take_x", ("subtract it", "subtract the number"), "t -= x", ("t += x", "t = -x")),
    _do("item", "add_k", ("add {k}", "increase it by {k}"), "t += {k}", ("t = {k}", "t += x"), k=FACTORS),
    _do("item", "take_k", ("subtract {k}", "decrease it by {k}"), "t -= {k}", ("t += {k}", "t -= x"), k=FACTORS),
)

# While n is large. Every step and slip shrinks a positive n, so that these loops end.
SHRINK = (
    _do(
        "while",
        "subtract_until",
        ("subtract {k}", "take away {k}"),
        "n = n - {k}",
        ("n = n // {k}", "n = n - 1"),
        k=FACTORS,
    ),
    _do(
        "while",
        "divide_until",
        ("divide by {k} rounding down", "integer divide by {k}"),
        "n = n // {k}",
        ("n = n - {k}", "n = n - 1"),
        k=range(2, 5),
    ),
)
FLOORS = (
    _test("while", "floor", ("n is below {k}", "n is less than {k}"), "n >= {k}", ("n > {k}", "n > 1"), k=range(1, 6)),
)

# Over the pairs i < j of the numbers from 1 to n.
PAIR_TESTS = (
    _test(
        "pairs",
        "pair_sum",
        ("their sum is divisible by {k}", "i + j is a multiple of {k}"),
        "(i + j) % {k} == 0",
        ("(i + j) // {k} == 0", "i + j == {k}"),
        k=FACTORS,
    ),
    _test(
        "pairs",
        "pair_product",
        ("their product is above {k}", "i times j is greater than {k}"),
        "i * j > {k}",
        ("i * j < {k}", "i + j > {k}"),
        k=range(3, 25),
    ),
    _test(
        "pairs",
        "pair_gap",
        ("they differ by {k}", "the difference is {k}"),
        "j - i == {k}",
        ("i - j == {k}", "j + i == {k}"),
        k=range(1, 6),
    ),
)
