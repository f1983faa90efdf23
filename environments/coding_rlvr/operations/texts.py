"""Operations on a string `s`."""

from __future__ import annotations

from collections.abc import Sequence

from environments.coding_rlvr.operations.base import COUNTS, LETTERS, Operation

TIMES = range(2, 6)


def _step(
    name: str, phrases: tuple[str, ...], value: str, slips: tuple[str, ...], **params: Sequence[object]
) -> Operation:
    return Operation(name, "text", "text", phrases, value, slips, dict(params))


def _to(
    gives: str, name: str, phrases: tuple[str, ...], value: str, slips: tuple[str, ...], **params: Sequence[object]
) -> Operation:
    return Operation(name, "text", gives, phrases, value, slips, dict(params))


STEPS = (
    _step("reverse", ("reverse it", "turn it backwards"), "s[::-1]", ("s.reverse()", "s[:-1]")),
    _step("upper", ("make it upper case", "convert it to capital letters"), "s.upper()", ("s.title()", "s.lower()")),
    _step("lower", ("make it lower case", "convert it to small letters"), "s.lower()", ("s.title()", "s.upper()")),
    _step(
        "head",
        ("take the first {k} characters", "keep the first {k} letters"),
        "s[:{k}]",
        ("s[{k}:]", "s[{k}]"),
        k=COUNTS,
    ),
    _step(
        "tail",
        ("take the last {k} characters", "keep the last {k} letters"),
        "s[-{k}:]",
        ("s[:{k}]", "s[-{k}]"),
        k=COUNTS,
    ),
    _step(
        "repeat", ("repeat it {k} times", "write it {k} times in a row"), "s * {k}", ("s + {k}", "s ** {k}"), k=TIMES
    ),
    _step("append", ("append '{c}'", "add '{c}' at the end"), "s + '{c}'", ("'{c}' + s", "s.append('{c}')"), c=LETTERS),
    _step(
        "prepend",
        ("put '{c}' in front", "add '{c}' at the start"),
        "'{c}' + s",
        ("s + '{c}'", "s.insert('{c}')"),
        c=LETTERS,
    ),
    _step(
        "replace",
        ("replace '{c}' by '{d}'", "change every '{c}' to '{d}'"),
        "s.replace('{c}', '{d}')",
        ("s.replace('{d}', '{c}')", "s.replace('{c}', '')"),
        c=LETTERS,
        d=LETTERS,
    ),
    _step(
        "remove",
        ("remove every '{c}'", "delete all '{c}'"),
        "s.replace('{c}', '')",
        ("s.remove('{c}')", "s.strip('{c}')"),
        c=LETTERS,
    ),
)

RESULTS = (
    _to("number", "length", ("its length", "how long it is"), "len(s)", ("s.len()", "len(s) - 1")),
    _to(
        "number",
        "occurrences",
        ("how often '{c}' occurs", "the number of '{c}' in it"),
        "s.count('{c}')",
        ("s.find('{c}')", "len('{c}')"),
        c=LETTERS,
    ),
    _to(
        "number",
        "position",
        ("the first position of '{c}' or -1", "where '{c}' first occurs, or -1"),
        "s.find('{c}')",
        ("s.count('{c}')", "s.index('{c}')"),
        c=LETTERS,
    ),
    _to(
        "letters",
        "sorted_letters",
        ("the sorted list of its letters", "its characters as a sorted list"),
        "sorted(s)",
        ("list(s)", "s.sort()"),
    ),
    _to("letters", "letters", ("the list of its letters", "its characters as a list"), "list(s)", ("sorted(s)", "[s]")),
    _to(
        "dictionary",
        "letter_counts",
        ("a dictionary from each letter to its count", "how often each letter occurs, as a dictionary"),
        "{{c: s.count(c) for c in s}}",
        ("{{c: s.find(c) for c in s}}", "s.count()"),
    ),
)

TEXTS = (*STEPS, *RESULTS)
