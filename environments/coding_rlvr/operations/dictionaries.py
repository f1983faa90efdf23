"""Operations on a dictionary `d` from letters to numbers, and operations that make one."""

from __future__ import annotations

from collections.abc import Sequence

from environments.coding_rlvr.operations.base import FACTORS, LETTERS, SMALL, Operation


def _keep(
    name: str, phrases: tuple[str, ...], test: str, slips: tuple[str, ...], **params: Sequence[object]
) -> Operation:
    body = "{{{{key: value for key, value in d.items() if {}}}}}"
    return Operation(
        name,
        "dictionary",
        "dictionary",
        phrases,
        body.format(test),
        [body.format(slip) for slip in slips],
        dict(params),
    )


def _each(
    name: str, phrases: tuple[str, ...], value: str, slips: tuple[str, ...], **params: Sequence[object]
) -> Operation:
    body = "{{{{key: {} for key, value in d.items()}}}}"
    return Operation(
        name,
        "dictionary",
        "dictionary",
        phrases,
        body.format(value),
        [body.format(slip) for slip in slips],
        dict(params),
    )


def _to(
    gives: str, name: str, phrases: tuple[str, ...], value: str, slips: tuple[str, ...], **params: Sequence[object]
) -> Operation:
    return Operation(name, "dictionary", gives, phrases, value, slips, dict(params))


CHANGES = (
    _keep(
        "keep_values_above",
        ("keep the entries with a value above {k}", "keep the items whose value is greater than {k}"),
        "value > {k}",
        ("value < {k}", "key > {k}"),
        k=SMALL,
    ),
    _keep(
        "keep_values_below",
        ("keep the entries with a value below {k}", "keep the items whose value is less than {k}"),
        "value < {k}",
        ("value > {k}", "key < {k}"),
        k=SMALL,
    ),
    _keep(
        "drop_key",
        ("drop the key '{c}'", "remove the entry '{c}'"),
        "key != '{c}'",
        ("key == '{c}'", "value != '{c}'"),
        c=LETTERS,
    ),
    _each(
        "add_values",
        ("add {k} to each value", "increase every value by {k}"),
        "value + {k}",
        ("value - {k}", "key + {k}"),
        k=SMALL,
    ),
    _each(
        "multiply_values",
        ("multiply each value by {k}", "scale every value by {k}"),
        "value * {k}",
        ("value ** {k}", "key * {k}"),
        k=FACTORS,
    ),
)

RESULTS = (
    _to(
        "number",
        "sum_values",
        ("the sum of its values", "the total of all values"),
        "sum(d.values())",
        ("sum(d)", "len(d)"),
    ),
    _to(
        "number",
        "largest_value",
        ("its largest value", "the maximum of its values"),
        "max(d.values())",
        ("max(d)", "min(d.values())"),
    ),
    _to("number", "entries", ("the number of entries", "how many keys it has"), "len(d)", ("sum(d)", "d.len()")),
    _to(
        "number",
        "lookup",
        ("the value of '{c}' or {k} if missing", "the value for key '{c}', by default {k}"),
        "d.get('{c}', {k})",
        ("d['{c}']", "d.get({k}, '{c}')"),
        c=LETTERS,
        k=SMALL,
    ),
    _to(
        "letters",
        "sorted_keys",
        ("its sorted keys", "the list of keys in sorted order"),
        "sorted(d)",
        ("list(d)", "d.sort()"),
    ),
    _to(
        "numbers",
        "sorted_values",
        ("its sorted values", "the list of values in sorted order"),
        "sorted(d.values())",
        ("sorted(d)", "d.values()"),
    ),
)

DICTIONARIES = (*CHANGES, *RESULTS)

MAKERS = (
    Operation(
        "square_table",
        "numbers",
        "dictionary",
        ("a dictionary from each number to its square", "a table of each value and its square"),
        "{{x: x * x for x in xs}}",
        ("{{x * x: x for x in xs}}", "[x * x for x in xs]"),
    ),
    Operation(
        "count_table",
        "numbers",
        "dictionary",
        ("a dictionary from each number to its count", "how often each number occurs, as a dictionary"),
        "{{x: xs.count(x) for x in xs}}",
        ("{{x: len(xs) for x in xs}}", "xs.count(x)"),
    ),
)
