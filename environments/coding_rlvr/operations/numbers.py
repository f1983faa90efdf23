"""Operations on one number `n` and on two numbers `a` and `b`, and tests of them."""

from __future__ import annotations

from environments.coding_rlvr.operations.base import FACTORS, SMALL, Operation

NUMBER = (
    Operation(
        "plus",
        "number",
        "number",
        ("add {k} to it", "increase it by {k}"),
        "n + {k}",
        ("n - {k}", "n * {k}"),
        {"k": SMALL},
    ),
    Operation(
        "minus",
        "number",
        "number",
        ("subtract {k} from it", "decrease it by {k}"),
        "n - {k}",
        ("{k} - n", "n + {k}"),
        {"k": SMALL},
    ),
    Operation(
        "times",
        "number",
        "number",
        ("multiply it by {k}", "scale it by {k}"),
        "n * {k}",
        ("n ** {k}", "n + {k}"),
        {"k": FACTORS},
    ),
    Operation("square", "number", "number", ("square it", "multiply it by itself"), "n * n", ("n * 2", "n + n")),
    Operation(
        "remainder",
        "number",
        "number",
        ("take the remainder when divided by {k}", "take it modulo {k}"),
        "n % {k}",
        ("n // {k}", "n / {k}"),
        {"k": FACTORS},
    ),
    Operation(
        "divide",
        "number",
        "number",
        ("divide it by {k} and round down", "integer divide it by {k}"),
        "n // {k}",
        ("n / {k}", "n % {k}"),
        {"k": FACTORS},
    ),
    Operation(
        "at_most",
        "number",
        "number",
        ("limit it to at most {k}", "cap it at {k}"),
        "min(n, {k})",
        ("max(n, {k})", "{k}"),
        {"k": SMALL},
    ),
    Operation(
        "upto",
        "number",
        "numbers",
        ("the list of numbers from 1 to n", "the list 1, 2 and so on up to n"),
        "list(range(1, n + 1))",
        ("list(range(n))", "list(range(1, n))"),
    ),
)

PAIR = (
    Operation("sum_of", "pair", "number", ("the sum of a and b", "a plus b"), "a + b", ("a * b", "a - b")),
    Operation("difference", "pair", "number", ("the difference a minus b", "a minus b"), "a - b", ("b - a", "a + b")),
    Operation("product", "pair", "number", ("the product of a and b", "a times b"), "a * b", ("a ** b", "a + b")),
    Operation(
        "larger",
        "pair",
        "number",
        ("the larger of a and b", "the maximum of a and b"),
        "max(a, b)",
        ("min(a, b)", "a > b"),
    ),
    Operation(
        "smaller",
        "pair",
        "number",
        ("the smaller of a and b", "the minimum of a and b"),
        "min(a, b)",
        ("max(a, b)", "a < b"),
    ),
    Operation(
        "distance",
        "pair",
        "number",
        ("the distance between a and b", "how far a is from b"),
        "abs(a - b)",
        ("a - b", "abs(a) - b"),
    ),
    Operation(
        "a_plus", "pair", "number", ("a plus {k}", "{k} more than a"), "a + {k}", ("a - {k}", "a * {k}"), {"k": SMALL}
    ),
    Operation(
        "b_times", "pair", "number", ("b times {k}", "{k} times b"), "b * {k}", ("b ** {k}", "b + {k}"), {"k": FACTORS}
    ),
)
