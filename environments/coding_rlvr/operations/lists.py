"""Operations on a list of numbers `xs`."""

from __future__ import annotations

from environments.coding_rlvr.operations.base import COUNTS, FACTORS, SMALL, Operation


def _keep(name: str, phrases: tuple[str, ...], test: str, slips: tuple[str, ...], **params: range) -> Operation:
    """A filter: which numbers stay."""
    body = "[x for x in xs if {}]"
    return Operation(
        name, "numbers", "numbers", phrases, body.format(test), [body.format(slip) for slip in slips], dict(params)
    )


def _each(name: str, phrases: tuple[str, ...], value: str, slips: tuple[str, ...], **params: range) -> Operation:
    """A map: what becomes of every number."""
    body = "[{} for x in xs]"
    return Operation(
        name, "numbers", "numbers", phrases, body.format(value), [body.format(slip) for slip in slips], dict(params)
    )


def _whole(name: str, phrases: tuple[str, ...], value: str, slips: tuple[str, ...], **params: range) -> Operation:
    """A rearrangement of the list as a whole."""
    return Operation(name, "numbers", "numbers", phrases, value, slips, dict(params))


def _to_number(name: str, phrases: tuple[str, ...], value: str, slips: tuple[str, ...], **params: range) -> Operation:
    return Operation(name, "numbers", "number", phrases, value, slips, dict(params))


KEEP = (
    _keep(
        "keep_above",
        ("keep the numbers greater than {k}", "keep the values above {k}"),
        "x > {k}",
        ("x >= {k}", "x < {k}"),
        k=SMALL,
    ),
    _keep(
        "keep_below",
        ("keep the numbers less than {k}", "keep the values below {k}"),
        "x < {k}",
        ("x <= {k}", "x > {k}"),
        k=SMALL,
    ),
    _keep("keep_even", ("keep the even numbers", "drop the odd values"), "x % 2 == 0", ("x % 2 == 1", "x // 2 == 0")),
    _keep("keep_odd", ("keep the odd numbers", "drop the even values"), "x % 2 == 1", ("x % 2 == 0", "x // 2 == 1")),
    _keep(
        "keep_multiples",
        ("keep the multiples of {k}", "keep the values divisible by {k}"),
        "x % {k} == 0",
        ("x // {k} == 0", "x == {k}"),
        k=FACTORS,
    ),
    _keep(
        "keep_other",
        ("remove every {k}", "keep the values other than {k}"),
        "x != {k}",
        ("x == {k}", "x > {k}"),
        k=SMALL,
    ),
)

EACH = (
    _each(
        "add_each",
        ("add {k} to each number", "increase every value by {k}"),
        "x + {k}",
        ("x - {k}", "x * {k}"),
        k=SMALL,
    ),
    _each(
        "subtract_each",
        ("subtract {k} from each number", "decrease every value by {k}"),
        "x - {k}",
        ("{k} - x", "x + {k}"),
        k=SMALL,
    ),
    _each(
        "multiply_each",
        ("multiply each number by {k}", "scale every value by {k}"),
        "x * {k}",
        ("x ** {k}", "x + {k}"),
        k=FACTORS,
    ),
    _each("square_each", ("square each number", "multiply every value by itself"), "x * x", ("x * 2", "x + x")),
    _each(
        "remainder_each",
        ("take each number modulo {k}", "replace every value by its remainder modulo {k}"),
        "x % {k}",
        ("x // {k}", "x / {k}"),
        k=FACTORS,
    ),
)

WHOLE = (
    _whole(
        "sort_up",
        ("sort them from small to large", "sort them in increasing order"),
        "sorted(xs)",
        ("xs.sort()", "xs[::-1]"),
    ),
    _whole(
        "sort_down",
        ("sort them from large to small", "sort them in decreasing order"),
        "sorted(xs)[::-1]",
        ("sorted(xs)", "xs[::-1]"),
    ),
    _whole(
        "backwards", ("put them in reverse order", "turn the list around"), "xs[::-1]", ("xs.reverse()", "sorted(xs)")
    ),
    _whole(
        "first",
        ("take the first {k} of them", "keep only the first {k}"),
        "xs[:{k}]",
        ("xs[{k}:]", "xs[{k}]"),
        k=COUNTS,
    ),
    _whole(
        "last", ("take the last {k} of them", "keep only the last {k}"), "xs[-{k}:]", ("xs[:{k}]", "xs[-{k}]"), k=COUNTS
    ),
    _whole(
        "skip",
        ("skip the first {k} of them", "leave out the first {k}"),
        "xs[{k}:]",
        ("xs[:{k}]", "xs[:-{k}]"),
        k=COUNTS,
    ),
)

TO_NUMBER = (
    _to_number("total", ("the sum", "the total"), "sum(xs)", ("len(xs)", "max(xs)")),
    _to_number("largest", ("the largest number", "the maximum"), "max(xs)", ("min(xs)", "xs[-1]")),
    _to_number("smallest", ("the smallest number", "the minimum"), "min(xs)", ("max(xs)", "xs[0]")),
    _to_number("count", ("the count of numbers", "how many there are"), "len(xs)", ("sum(xs)", "len(xs) - 1")),
    _to_number(
        "count_of",
        ("how often {k} occurs", "the count of the value {k}"),
        "xs.count({k})",
        ("xs.index({k})", "len(xs)"),
        k=SMALL,
    ),
    _to_number(
        "count_above",
        ("how many are above {k}", "the count of numbers greater than {k}"),
        "len([x for x in xs if x > {k}])",
        ("len([x for x in xs if x < {k}])", "sum([x for x in xs if x > {k}])"),
        k=SMALL,
    ),
    _to_number(
        "spread",
        ("the largest minus the smallest", "the range between minimum and maximum"),
        "max(xs) - min(xs)",
        ("max(xs)", "min(xs) - max(xs)"),
    ),
)

NUMBERS = (*KEEP, *EACH, *WHOLE, *TO_NUMBER)
