"""Decoys: what a judged object can learn about a constant from the values that it is compared with."""

from __future__ import annotations

import copy
import datetime
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from sandboxes.runner.decoys import Doubts, around, origin, remember
from sandboxes.runner.mirrors import _NUMBER, Mirror
from sandboxes.runner.solution import outcome

DRAWS = 100


class Copies:
    """Stand-in for the judged code's process; each fork has a copy of the judged object."""

    def __init__(self, judged: Any) -> None:
        self.judged = judged

    def fork(self) -> bool:
        self.copy = copy.deepcopy(self.judged)
        return True

    def join(self) -> None:
        pass

    def each(self, target: Any, name: str, operands: Iterable[Any]) -> list[Any]:
        return [outcome(self.copy, name, operand) for operand in operands]

    def ask(self, operation: str, number: int, name: str, *arguments: Any) -> Any:
        """Return the arguments, in place of an object created with them."""
        return arguments


def mirror(*arguments: Any) -> Any:
    """Create a mirrored object whose recorded call has these arguments."""
    kind = type("Judged", (Mirror,), {"\0plain": None})
    made = kind()
    made.__dict__[_NUMBER] = 0
    remember(made, type("Class", (), {_NUMBER: 0}), arguments, {})
    return made


def passes(judged: Any, constant: Any) -> bool:
    """Whether `assert judged == constant` passes."""
    solution: Any = Copies(judged)
    try:
        answer, _ = Doubts(solution).compare("__eq__", mirror(), constant)
    except AssertionError:
        return False
    return answer is True


# --- decoys don't reveal the real constant


def middle(options: Sequence[Any]) -> list[float]:
    """Closeness of each value to the median."""
    ordered = sorted(options)
    return [-abs(ordered.index(option) - len(options) / 2) for option in options]


def likeness(options: Sequence[Any]) -> list[float]:
    """Number of items that each value has in common with the others."""
    columns = [Counter(map(repr, column)) for column in zip(*options, strict=True)]
    return [sum(column[repr(item)] for column, item in zip(columns, option, strict=True)) for option in options]


def most_often(score: Callable[[Sequence[Any]], list[float]], draw: Callable[[], list[Any]]) -> int:
    """Number of draws in which the first option has the highest score."""
    hits = 0
    for _ in range(DRAWS):
        options = draw()
        ranked = [(value, random.random()) for value in score(options)]
        hits += ranked[0] == max(ranked)
    return hits


@pytest.mark.parametrize("score", [middle, lambda options: options, lambda options: [-option for option in options]])
@pytest.mark.parametrize("constant", [12, 0, -7, 2.5, 0.1])
def test_a_number_is_not_in_the_middle_of_its_decoys(constant: float, score: Any) -> None:
    assert len(set(around(constant, 31)) - {constant}) == 31
    assert most_often(score, lambda: [constant, *around(constant, 31)]) < DRAWS / 6  # 1 in 32 is expected


@pytest.mark.parametrize("constant", ["hello", "b2-c3", [3, 4, 5], ("a", 1), (1, 0, 1, 1, 0, 0), [[1, 2], [3, 4]]])
def test_a_constant_is_not_what_its_decoys_have_in_common(constant: Any) -> None:
    others = around(constant, 31)
    assert constant not in others
    assert len(others) > 28
    assert all(type(other) is type(constant) and len(other) == len(constant) for other in others)
    assert most_often(likeness, lambda: [constant, *around(constant, 31)]) < DRAWS / 6


@pytest.mark.parametrize("arguments", [(7, 11), ("ab", 3, 5), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7)])
def test_arguments_of_an_object_are_not_what_those_of_others_have_in_common(arguments: tuple[Any, ...]) -> None:
    def draw() -> list[Any]:
        call = origin(mirror(*arguments))
        assert call is not None
        return [trial.arguments for _, trial in call.trials()]

    options = draw()
    assert options[0] == arguments
    assert len(set(options)) == len(options) > 10
    assert most_often(likeness, draw) < DRAWS / 3  # 1 in 12 is expected


class Value:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other)


CONSTANTS: list[Any] = [
    True, None, "", "-", [], {}, set(), [True], [None, 1], {"a": True, "b": None}, OrderedDict(a=1), {3, 4}, b"x1",
    1e300, 10**5000, datetime.date.max, "你好",
]  # fmt: skip


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: type(constant).__name__)
def test_any_constant_is_compared(constant: Any) -> None:
    for _ in range(20):
        others = around(constant, 6)
        assert len(others) <= 6
        assert all(other != constant for other in others)
        assert passes(Value(constant), constant)


# --- wrong objects


class FirstSeen:
    def __eq__(self, other: object) -> bool:
        return bool(self.__dict__.setdefault("value", other) == other)


class Middle:
    """Equal to values near the median of those seen so far."""

    def __init__(self, near: int, after: int) -> None:
        self.near, self.after, self.seen = near, after, []  # type: ignore[var-annotated]

    def __eq__(self, other: object) -> bool:
        self.seen.append(other)
        ordered = sorted(self.seen)
        middle = ordered[len(ordered) // 2]
        return len(ordered) > self.after and bool(abs(middle - other) <= self.near)


class AtRandom:
    def __init__(self, share: float) -> None:
        self.share = share

    def __eq__(self, other: object) -> bool:
        return random.random() < self.share


@pytest.mark.parametrize("judged", [Middle(0, 0), Middle(2, 9), Middle(3, 16), AtRandom(0.25)])
def test_an_object_whose_answers_depend_on_the_order_or_chance_fails(judged: Any) -> None:
    assert sum(passes(judged, 12) for _ in range(DRAWS)) < DRAWS / 20  # 1 in 1000 is expected


@pytest.mark.parametrize("constant", [12, 2.5, "hello", [3, 4]])
def test_an_object_that_guesses_one_value_rarely_passes(constant: Any) -> None:
    assert sum(passes(FirstSeen(), constant) for _ in range(DRAWS)) < DRAWS / 6  # 1 in 32 is expected


class Difference:
    """The difference from the first number that it is combined with."""

    def __sub__(self, other: float) -> float:
        first: float = self.__dict__.setdefault("value", other)
        return first - other


def test_an_object_that_guesses_a_difference_rarely_passes() -> None:
    solution: Any = Copies(Difference())
    hits = [Doubts(solution).combine("__sub__", mirror(), 5.5)[0] == 0 for _ in range(DRAWS)]
    assert sum(hits) < DRAWS / 6  # 1 in 32 is expected


class Both:
    """Equal and unequal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return True


def test_an_object_that_is_equal_and_unequal_fails() -> None:
    solution: Any = Copies(Both())
    with pytest.raises(AssertionError, match="both equal and unequal"):
        Doubts(solution).compare("__ne__", mirror(), 12)


# --- right objects


class Modulo:
    def __init__(self, value: int, base: int) -> None:
        self.value, self.base = value, base

    def __eq__(self, other: object) -> bool:
        return bool((other - self.value) % self.base == 0)  # type: ignore[operator]


class Near:
    def __init__(self, value: float, tolerance: float) -> None:
        self.value, self.tolerance = value, tolerance

    def __eq__(self, other: object) -> bool:
        return bool(abs(other - self.value) <= self.tolerance)  # type: ignore[operator]


class Folded:
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return str(other).lower() == self.text.lower()


@pytest.mark.parametrize(
    ("judged", "constant"),
    [(Modulo(9, 5), 14), (Modulo(2, 4), 2), (Near(2.3333, 1e-3), 2.333), (Near(100, 4), 97), (Folded("aB"), "Ab")],
)
def test_right_objects_always_pass(judged: Any, constant: Any) -> None:
    assert all(passes(judged, constant) for _ in range(DRAWS))
