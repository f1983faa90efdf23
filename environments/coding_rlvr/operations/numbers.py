"""Operations on one number `n` and on two numbers `x` and `y`, and tests of them."""

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
    Operation("sum_of", "pair", "number", ("the sum of x and y", "x plus y"), "x + y", ("x * y", "x - y")),
    Operation("difference", "pair", "number", ("the difference x minus y", "x minus y"), "x - y", ("y - x", "x + y")),
    Operation("product", "pair", "number", ("the product of x and y", "x times y"), "x * y", ("x ** y", "x + y")),
    Operation(
        "larger",
        "pair",
        "number",
        ("the larger of x and y", "the maximum of x and y"),
        "max(x, y)",
        ("min(x, y)", "x > y"),
    ),
    Operation(
        "smaller",
        "pair",
        "number",
        ("the smaller of x and y", "the minimum of x and y"),
        "min(x, y)",
        ("max(x, y)", "x < y"),
    ),
    Operation(
        "distance",
        "pair",
        "number",
        ("the distance between x and y", "how far x is from y"),
        "abs(x - y)",
        ("x - y", "abs(x) - y"),
    ),
    Operation(
        "x_plus", "pair", "number", ("x plus {k}", "{k} more than x"), "x + {k}", ("x - {k}", "x * {k}"), {"k": SMALL}
    ),
    Operation(
        "y_times", "pair", "number", ("y times {k}", "{k} times y"), "y * {k}", ("y ** {k}", "y + {k}"), {"k": FACTORS}
    ),
)
