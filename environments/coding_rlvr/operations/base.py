"""What an operation is: one small step of a program, in English and in Python."""

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

COMMON = frozenset(
    (
        *(
            "keep_above",
            "keep_below",
            "keep_even",
            "keep_odd",
            "add_each",
            "subtract_each",
            "multiply_each",
            "square_each",
        ),
        *("sort_up", "backwards", "first", "skip", "total", "largest", "smallest", "count"),
        *("reverse", "upper", "lower", "head", "repeat", "append", "prepend", "length", "occurrences"),
        *("keep_values_above", "add_values", "sum_values", "largest_value", "entries", "sorted_keys", "lookup"),
        *("plus", "minus", "times", "square", "sum_of", "difference", "product", "larger", "smaller"),
        *("x_over_y", "x_over", "y_even", "add_up", "count_all", "add_squares", "multiples", "above"),
    )
)
"""Operations of levels 1 and 2; all others make a task two levels harder."""


@dataclass(frozen=True)
class Operation:
    """One step from a value of type `takes` to one of type `gives`.

    Args:
        name: unique among all operations.
        takes: type of the input: "numbers", "text", "dictionary", "number" or "pair" (x, y).
        gives: type of the result: one of the above, or "letters" (a list of strings).
        phrases: wordings. A verb phrase where the type stays ("reverse it"), a noun phrase where it
            changes ("the sum"); `{k}` and so on stand for parameters.
        expression: Python over the variable that holds the input (see `VARIABLES`).
        slips: expressions that a person who misunderstands the step would write. Never equivalent.
        params: name -> the values it may take; `{c}` and `{d}` are always different letters.
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
        """Whether it belongs to the harder levels only."""
        return self.name not in COMMON

    @property
    def is_noun(self) -> bool:
        """Whether the phrases name a value ("the sum") and not an action ("sort it")."""
        return self.takes != self.gives

    @cached_property
    def size(self) -> int:
        """How many different parameter settings there are."""
        return prod(len(values) for values in self.params.values())

    def draw(self, rng: Random) -> Params:
        """Parameters chosen evenly; letters of one operation differ from each other."""
        chosen: Params = {}
        for name, values in self.params.items():
            chosen[name] = rng.choice([value for value in values if value not in chosen.values()])
        return chosen


VARIABLES = {"numbers": "xs", "text": "s", "dictionary": "d", "number": "n", "pair": "x, y"}
"""Type -> the variable (or variables) that hold a value of it."""

OPENERS: dict[str, Sequence[str]] = {
    "numbers": ("Given a list of numbers xs", "Take the list of numbers xs", "For the list of numbers xs"),
    "text": ("Given a string s", "Take the text s", "For the string s"),
    "dictionary": ("Given a dictionary d", "Take the dictionary d", "For the dictionary d from letters to numbers"),
    "number": ("Given a number n", "Take the number n", "For the number n"),
    "pair": ("Given two numbers x and y", "Take the numbers x and y", "For the numbers x and y"),
}
"""Type -> wordings that introduce the input."""


def sample_arguments(kind: str, rng: Random) -> tuple[Any, ...]:
    """Arguments for a function whose input has type `kind`, small enough to be read at a glance."""
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
