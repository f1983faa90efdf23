"""Checks of comparisons that judged objects decide.

A test that compares an object of the judged code with something calls that object's method. `class Anything` with an
`__eq__` that returns True would pass `assert stack.pop() == 2`. So a comparison that comes out in the judged code's
favour is repeated in a copy of its process, among decoys in random order: the same comparison with other constants. An
object that doesn't distinguish the real constant from the decoys fails the test. A comparison without a constant to
vary is a doubt, which the verdict reports.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mirrors import Solution

CHECKED = frozenset(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub"))
"""Special methods whose results are checked."""
_DECOYS = 31
_EACH = 6
"""Decoys for each argument of a call."""
_MAY_AGREE = 1
"""Decoys that an honest object may equal too (9 and 14 modulo 5). More of them are a doubt."""
_SHARE = 3
_SHARE_OF_NUMBERS = 4
"""An object that equals more than one decoy in this many is not honest, even if it ignores case or some fields."""
_ALWAYS, _THEN = 32, 0.25
"""Number of comparisons that are all checked, and the fraction checked after them."""
_MAX_DOUBTS = 20
_ORIGIN = "\0origin"
_OTHER_ORIGIN = "\0other origin"
"""Set on an object that a class returned for different arguments."""
_COMPARED = "\0compared"
"""Set on an object that a comparison returned: method, left and right operand."""
_VIEWS: dict[type, type[set[Any] | list[Any]]] = {type({}.keys()): set, type({}.values()): list, type({}.items()): list}
_chance = random.SystemRandom()


class _Call:
    """The operation of the judged code, with plain arguments, that created an object."""

    __slots__ = ("arguments", "is_class", "name", "named", "operation", "target")

    def __init__(
        self, operation: str, target: Any, name: str, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        self.operation, self.target, self.name = operation, target, name
        self.arguments, self.named = tuple(arguments), dict(named)
        self.is_class = operation == "call" and isinstance(target, type)

    def again(self, solution: Solution) -> Any:
        """Execute it again."""
        from .mirrors import number_of

        earlier = origin(self.target)
        target = earlier.again(solution) if earlier and not self.is_class else self.target
        return solution.ask(self.operation, number_of(target), self.name, *self.arguments, **self.named)

    def variants(self) -> Iterator[list[_Call]]:
        """For each argument, a list of the same call with that argument changed."""
        for position, value in enumerate(self.arguments):
            changed = alternatives(value, _EACH)
            yield [
                self._with((*self.arguments[:position], item, *self.arguments[position + 1 :]), {}) for item in changed
            ]
        for key, value in self.named.items():
            yield [self._with(self.arguments, {key: item}) for item in alternatives(value, _EACH)]
        earlier = origin(self.target) if not isinstance(self.target, type) else None
        for calls in earlier.variants() if earlier else ():
            yield [_After(self, call) for call in calls]

    def _with(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> _Call:
        return _Call(self.operation, self.target, self.name, arguments, {**self.named, **named})


class _After(_Call):
    """A call on the object that another call returns."""

    __slots__ = ("_before",)

    def __init__(self, call: _Call, before: _Call) -> None:
        super().__init__(call.operation, call.target, call.name, call.arguments, call.named)
        self._before = before

    def again(self, solution: Solution) -> Any:
        from .mirrors import number_of

        target = self._before.again(solution)
        return solution.ask(self.operation, number_of(target), self.name, *self.arguments, **self.named)


def remember(made: Any, target: Any, arguments: Sequence[Any], named: Mapping[str, Any], *, special: str = "") -> None:
    """Record how a mirrored object was created, if the arguments are plain."""
    from .mirrors import Mirror

    if isinstance(made, Mirror) and all(map(_is_plain, (*arguments, *named.values()))):
        call = _Call("special" if special else "call", target, special, arguments, named)
        earlier = made.__dict__.setdefault(_ORIGIN, call)
        if (earlier.arguments, earlier.named) != (call.arguments, call.named):
            made.__dict__[_OTHER_ORIGIN] = True


def origin(value: Any) -> _Call | None:
    """The operation that created a mirrored object, if it is recorded."""
    call = getattr(value, "__dict__", {}).get(_ORIGIN)
    return call if isinstance(call, _Call) else None


def checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The special method `name` with checks of its results."""
    from .mirrors import Mirror

    def compare(self: Any, other: Any) -> Any:
        if (plain := _VIEWS.get(type(other))) is not None:
            other = plain(other)
        if not isinstance(other, Mirror) and not _is_plain(other, Mirror):
            if isinstance(other, Iterator) and type(other).__module__ == "builtins":
                type(self).__dict__["\0solution"].doubts.note(f"{type(self).__name__}: compared with an iterator")
                return method(self, other)
            return NotImplemented  # `pytest.approx`, `mock.ANY`, classes of the tests: the other operand decides
        answer = method(self, other)
        if other is self and answer is True:
            equals_itself(self, name)
        if isinstance(answer, Mirror):
            answer.__dict__[_COMPARED] = (name, self, other)
        elif answer is not NotImplemented and other is not self:
            doubts: Doubts = type(self).__dict__["\0solution"].doubts
            if type(answer) in (bool, int, float, str):
                if answer:
                    doubts.check(name, self, other)
            else:
                doubts.note(f"{type(self).__name__}: a comparison returned a {type(answer).__name__}")
        return answer

    def combine(self: Any, other: Any) -> Any:
        answer = method(self, other)
        if type(other) in (int, float):
            remember(answer, self, (other,), {}, special=name)
            if type(answer) in (int, float):
                type(self).__dict__["\0solution"].doubts.check_sum(name, self, other, answer)
        return answer

    return combine if name.removeprefix("__r").strip("_") in ("add", "sub") else compare


def equals_itself(value: Any, name: str = "__eq__") -> None:
    """Check an object that was made with different arguments and is compared with itself. Raises `AssertionError`."""
    if name == "__ne__":
        raise AssertionError(f"the {type(value).__name__} object claims to differ from itself")
    if _OTHER_ORIGIN in value.__dict__:
        type(value).__dict__["\0solution"].doubts.check_only(value)


def check_truth(value: Any) -> None:
    """Check the comparison that returned this object, when a test uses its truth value. Raises `AssertionError`."""
    if (compared := value.__dict__.get(_COMPARED)) is not None:
        type(value).__dict__["\0solution"].doubts.check(*compared)


class Doubts:
    """Checks the comparisons that judged objects decide in one run of tests, and collects doubts."""

    def __init__(self, solution: Solution) -> None:
        self._solution = solution
        self._compared = 0
        self.notes: list[str] = []

    def check(self, name: str, left: Any, right: Any) -> None:
        """Repeat a comparison that came out true. Raises `AssertionError` if the decoys come out true as well."""
        from .mirrors import Mirror

        if not self._is_due():
            return
        if name == "__ne__":
            self._try(lambda: self._check_unequal(left, right), left)
        elif name != "__eq__":
            self._try(lambda: self._check_order(name, left, right), left)
        elif not isinstance(right, Mirror):
            self._try(lambda: self._check_constant(left, right), left)
        else:
            made, other = (right, left) if origin(right) else (left, right)
            self._try(lambda: self._check_objects(made, other), left)

    def check_sum(self, name: str, left: Any, right: Any, result: Any) -> None:
        """Repeat a sum or difference with other numbers. Raises `AssertionError` if the result is always the same."""
        if self._is_due():
            self._try(lambda: self._check_results(name, left, right, result), left)

    def check_only(self, value: Any) -> None:
        """Create the object with other arguments. Raises `AssertionError` if it is always the same one."""
        if self._is_due():
            self._try(lambda: self._check_only(value), value)

    def _is_due(self) -> bool:
        self._compared += 1
        return self._compared <= _ALWAYS or _chance.random() < _THEN

    def _try(self, check: Callable[[], str | None], left: Any) -> None:
        """Run a check, which returns a doubt or raises, in a copy of the judged code's process."""
        if not self._solution.fork():
            self.note("a comparison could not be checked: the judged process could not be forked")
            return
        try:
            doubt = check()
        finally:
            self._solution.join()
        if doubt:
            self.note(f"{type(left).__name__}: {doubt}")

    def note(self, note: str) -> None:
        """Add a doubt to the verdict."""
        if note not in self.notes and len(self.notes) < _MAX_DOUBTS:
            self.notes.append(note)

    def _holds(self, name: str, left: Any, right: Any) -> bool | None:
        """Whether a comparison is true in the copy; None if it raises."""
        from .mirrors import Mirror, number_of

        try:
            answer = self._solution.ask("special", number_of(left), name, right)
            if isinstance(answer, Mirror):
                answer = self._solution.ask("operate", number_of(answer), "truth")
            return answer is not NotImplemented and bool(answer)
        except Exception:  # noqa: BLE001  the judged code rejects this decoy
            return None

    def _check_constant(self, left: Any, constant: Any) -> None:
        agreeing, real = 0, None
        others = alternatives(constant, _DECOYS) if _is_plain(constant) else _altered(constant)
        options = [(False, item) for item in others] + [(True, constant)]
        _chance.shuffle(options)
        for is_real, item in options:
            holds = self._holds("__eq__", left, item)
            if is_real:
                real = holds
            else:
                agreeing += holds is True
        if len(options) == 1 or agreeing > _MAY_AGREE:
            self.note(f"{type(left).__name__}: equals {agreeing} of {len(options) - 1} values like {constant!r}"[:200])
        share = _SHARE_OF_NUMBERS if type(constant) in (int, float) else _SHARE
        if real is not True or agreeing * share > len(options):
            raise AssertionError(f"the {type(left).__name__} object claims to equal {constant!r} and other values")

    def _check_objects(self, made: Any, other: Any) -> str | None:
        """Create the object again with other arguments and compare it with the other one."""
        call = origin(made)
        variants = [calls for calls in call.variants() if calls] if call else []
        if call is None or not variants:
            return "the judged code decided whether two of its objects are equal, which could not be checked"
        trials = [(number, item) for number, calls in enumerate(variants) for item in calls] + [(-1, call)]
        _chance.shuffle(trials)
        answers: dict[int, list[bool]] = {}
        for number, trial in trials:
            try:
                again = trial.again(self._solution)
            except Exception:  # noqa: BLE001  the judged code rejects these arguments
                continue
            holds = self._holds("__eq__", other, again)
            if holds is not None:
                answers.setdefault(number, []).append(holds)
        real = answers.pop(-1, [])
        if real == [False]:
            return "two objects of the judged code were equal at first, but not when created again"
        if any(not any(answer) for answer in answers.values()):
            return None
        if answers and all(map(all, answers.values())) and call.is_class:
            raise AssertionError(f"the {type(other).__name__} object claims to equal objects made with other arguments")
        return "two objects of the judged code were equal, also with some arguments changed"

    def _check_unequal(self, left: Any, right: Any) -> None:
        if self._holds("__eq__", left, right) is True:
            raise AssertionError(f"the {type(left).__name__} object claims to be both equal and unequal")

    def _check_only(self, value: Any) -> None:
        call = origin(value)
        for variant in [item for calls in call.variants() for item in calls] if call else []:
            try:
                if variant.again(self._solution) is not value:
                    return
            except Exception:  # noqa: BLE001  the judged code rejects these arguments
                continue
        raise AssertionError(f"different arguments return the same {type(value).__name__} object")

    def _check_order(self, name: str, left: Any, right: Any) -> str | None:
        from .mirrors import Mirror

        opposite = {"__lt__": "__gt__", "__gt__": "__lt__", "__le__": "__gt__", "__ge__": "__lt__"}[name]
        if self._holds(opposite, left, right) is True:
            raise AssertionError(f"the {type(left).__name__} object claims to be both less and greater")
        if isinstance(right, Mirror) or type(right) not in (int, float):
            return None
        call = origin(left)
        variants = [item for calls in call.variants() for item in calls] if call else []
        for item in variants:
            try:
                if self._holds(name, item.again(self._solution), right) is not True:
                    return None
            except Exception:  # noqa: BLE001  the judged code rejects these arguments
                continue
        scale = max(abs(right), 1) * (-1 if name in ("__lt__", "__le__") else 1)
        if any(self._holds(name, left, right + scale * 10**power) is False for power in (0, 1, 3, 6, 12)):
            return None
        raise AssertionError(f"the {type(left).__name__} object claims to be less than every number, or greater")

    def _check_results(self, name: str, left: Any, right: Any, result: Any) -> None:
        from .mirrors import number_of

        same = 0
        for item in alternatives(right, _EACH):
            try:
                same += self._solution.ask("special", number_of(left), name, item) == result
            except Exception:  # noqa: BLE001  the judged code rejects this number
                continue
        if same > _MAY_AGREE:
            raise AssertionError(f"{type(left).__name__}.{name} returns {result!r} for every number")


# --- other constants


def _is_plain(value: Any, also: type | tuple[()] = ()) -> bool:
    """Whether a value crosses as data, so that variants can be made. `also`: a class whose objects may be inside."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset, deque):
        return all(_is_plain(item, also) or isinstance(item, also) for item in value)
    if kind in (dict, OrderedDict, Counter, defaultdict):
        return all(_is_plain(item, also) or isinstance(item, also) for item in (*value, *value.values()))
    return value is None or kind in (bool, int, float, str, bytes, complex) or kind.__name__ in _shifts_of(kind)


def alternatives(value: Any, count: int) -> list[Any]:
    """At most `count` values like `value`, different from it in a way that honest code would notice."""
    others: list[Any] = []
    for item in _endless(value):
        if len(others) == count:
            break
        if item != value and item not in others:
            others.append(item)
    return others


def _endless(value: Any, tries: int = 200) -> Iterator[Any]:
    kind = type(value)
    if kind is bool:
        yield not value
    elif kind is int or kind is float:
        first = -1 if value == 1 else 1  # 1 may be a bit: 0 first
        yield from (value + first * sign * step for step in range(1, 9) for sign in (1, -1))
        for size in range(1, tries):
            yield value + kind(_chance.choice((1, -1)) * _chance.randint(1, 10 + size * size))
    elif kind is complex:
        yield from (value + step for step in (1, -1, 1j, -1j, 2, 3j))
    elif kind is str:
        for _ in range(tries):
            yield _respelled(value)
    elif kind is bytes:
        for _ in range(tries):
            yield bytes(map(ord, _respelled(value.decode("latin-1")))) if value else bytes([_chance.randint(1, 255)])
    elif kind in (list, tuple, set, frozenset):
        for _ in range(tries):
            yield kind(_with_one_changed(list(value)))
    elif kind is dict:
        for _ in range(tries):
            yield dict(_with_one_changed([list(pair) for pair in value.items()], pairs=True))
    elif kind in (OrderedDict, Counter, defaultdict):
        for _ in range(tries):
            pairs = _with_one_changed([list(pair) for pair in value.items()], pairs=True)
            changed = value.copy()
            changed.clear()
            changed.update(dict(pairs))
            yield changed
    elif kind is deque:
        yield from (deque(_with_one_changed(list(value)), value.maxlen) for _ in range(tries))
    elif shift := _shifts_of(kind).get(kind.__name__):
        for step in (1, -1, 2, -2, *(_chance.randint(3, 999) for _ in range(tries))):
            try:
                yield shift(value, step)
            except (ArithmeticError, ValueError):  # out of its range
                continue
    elif value is None:
        yield from (0, 1, -1, "", "None", "null", False, True, (), 0.0, "0", b"", {"": None}, [None], (None,))


_SHIFTS: dict[str, dict[str, Callable[[Any, int], Any]]] = {
    "builtins": {"range": lambda value, step: range(value.start + step, value.stop + 2 * step, value.step)},
    "datetime": {
        "date": lambda value, step: value + type(value - value)(step),
        "datetime": lambda value, step: value + type(value - value)(step),
        "time": lambda value, step: value.replace(second=(value.second + step) % 60),
        "timedelta": lambda value, step: value + type(value)(step),
    },
    "decimal": {"Decimal": lambda value, step: value + step},
    "fractions": {"Fraction": lambda value, step: value + step},
    "pathlib": {
        "PosixPath": lambda value, step: value / str(step),
        "PurePosixPath": lambda value, step: value / str(step),
    },
    "uuid": {"UUID": lambda value, step: type(value)(int=(value.int + step) % 2**128)},
}
"""Functions that change a value of the standard library, by the module and name of its class."""


def _shifts_of(kind: type) -> dict[str, Callable[[Any, int], Any]]:
    return _SHIFTS.get(kind.__module__, {})


def _altered(value: Any) -> list[Any]:
    """Variants of a container with objects of the judged code, made without comparing these."""
    items = list(value.items()) if isinstance(value, dict) else list(value)
    other = _chance.randint(1000, 9999)
    item: Any = (other, other) if isinstance(value, dict) else other
    changed = [*[items[:index] + items[index + 1 :] for index in range(len(items))][:_EACH], [*items, item], [item]]
    if isinstance(value, deque):
        return [deque(new, value.maxlen) for new in changed]
    return [dict(new) if isinstance(value, dict) else type(value)(new) for new in changed]


_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def _respelled(text: str) -> str:
    """`text` with one letter or digit changed."""
    positions = [index for index, letter in enumerate(text) if letter.isalnum()]
    if not positions:
        return text + _chance.choice(_LETTERS)
    position = _chance.choice(positions)
    letter = text[position]
    new = str(_chance.randint(0, 9)) if letter.isdigit() else _chance.choice(_LETTERS)
    return text[:position] + (new.upper() if letter.isupper() else new) + text[position + 1 :]


def _with_one_changed(items: list[Any], *, pairs: bool = False) -> list[Any]:
    """`items` with one changed or left out; a new item if empty. `pairs`: the items of a dict."""
    choice = _chance.random()
    if not items:
        return [["a", _chance.randint(0, 99)]] if pairs else [_chance.randint(0, 99)]
    position = _chance.randrange(len(items))
    if choice < 0.15 and items[position]:  # without an empty one, `mock.call` is the same
        return items[:position] + items[position + 1 :]
    if pairs:
        key, value = items[position]
        changed: Any = [(alternatives(key, 1) or [key])[0], (alternatives(value, 1) or [0])[0]]
    else:
        are_bits = all(type(item) is int and item in (0, 1) for item in items)
        (changed,) = alternatives(items[position], 1 if are_bits else 1 + _chance.randrange(6))[-1:] or [0]
    return [*items[:position], changed, *items[position + 1 :]]
