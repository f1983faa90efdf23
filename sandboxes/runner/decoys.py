"""Checks of comparisons that judged objects decide.

A test that compares an object of the judged code with something calls that object's method. `class Anything` with an
`__eq__` that returns True would pass `assert stack.pop() == 2`. So a comparison with a constant takes place in a copy
of the judged process, among decoys in random order: the same comparison with other constants. The judged process
itself never gets the constant. An object that doesn't distinguish the real constant from the decoys fails the test.
All of them are drawn around a hidden constant, so that the real one isn't what the others have in common.

One gap remains and is reported as a doubt: an object that decides for itself whether it equals a plain value may do so
without ever computing that value.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mirrors import Solution

CHECKED = frozenset(
    f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "contains")
)
"""Special methods whose results are checked."""
_DECOYS = 31
_EACH = 6
"""Decoys for each argument of a call."""
_MAY_AGREE = 1
"""Decoys that an honest object may equal too (9 and 14 modulo 5). More of them are a doubt."""
_SHARE = 3
_SHARE_OF_NUMBERS = 4
"""An object that equals more than one decoy in this many is not honest, even if it ignores case or some fields."""
_ALWAYS, _THEN = 64, 0.25
"""Number of comparisons that are all checked, and the fraction checked after them, which is a doubt."""
_MAX_DOUBTS = 20
_ORIGIN = "\0origin"
_OTHER_ORIGIN = "\0other origin"
"""Set on an object that a class returned for different arguments."""
_COMPARED = "\0compared"
"""Set on an object that a comparison returned: method, left and right operand."""
_VIEWS: dict[type, type[set[Any] | list[Any]]] = {type({}.keys()): set, type({}.values()): list, type({}.items()): list}
_UNDECIDED = object()
"""The answer of a comparison that must be made in the judged process itself."""
_TEXT_METHODS = frozenset(
    name
    for name in vars(str)
    if name.startswith("is")
    or name in ("startswith", "endswith", "removeprefix", "removesuffix", "splitlines", "casefold")
)
"""Methods of `str` that other classes rarely have."""
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
            changed = around(value, _EACH)
            yield [
                self._with((*self.arguments[:position], item, *self.arguments[position + 1 :]), {}) for item in changed
            ]
        for key, value in self.named.items():
            yield [self._with(self.arguments, {key: item}) for item in around(value, _EACH)]
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
        doubts: Doubts = type(self).__dict__["\0solution"].doubts
        is_mirror = isinstance(other, Mirror)
        if not is_mirror and not _is_plain(other, Mirror):
            if isinstance(other, Iterator) and type(other).__module__ == "builtins":
                doubts.note(f"{type(self).__name__}: compared with an iterator")
                return method(self, other)
            return NotImplemented  # `pytest.approx`, `mock.ANY`, classes of the tests: the other operand decides
        is_due = other is not self and doubts.is_due()
        if is_due and not is_mirror and name == "__eq__":
            answer = doubts.equals(self, other)
            if answer is not _UNDECIDED:
                return answer
        verdict = doubts.compare_objects(self, other) if is_due and is_mirror and name == "__eq__" else None
        answer = method(self, other)
        if other is self and answer is True:
            equals_itself(self, name)
        if isinstance(answer, Mirror):
            answer.__dict__[_COMPARED] = (name, self, other)
        elif answer is not NotImplemented and other is not self:
            if type(answer) not in (bool, int, float, str):
                doubts.note(f"{type(self).__name__}: a comparison returned a {type(answer).__name__}")
            elif answer and verdict:
                doubts.apply(self, verdict)
            elif answer and is_due and not (is_mirror and name == "__eq__"):
                doubts.check(name, self, other)
        return answer

    def combine(self: Any, other: Any) -> Any:
        if type(other) in (int, float):
            doubts: Doubts = type(self).__dict__["\0solution"].doubts
            answer = doubts.combined(name, self, other) if doubts.is_due() else _UNDECIDED
            if answer is not _UNDECIDED:
                return answer
        answer = method(self, other)
        if type(other) in (int, float):
            remember(answer, self, (other,), {}, special=name)
        return answer

    def contains(self: Any, item: Any) -> Any:
        doubts: Doubts = type(self).__dict__["\0solution"].doubts
        if _is_plain(item) and doubts.is_due():
            answer = doubts.contains(self, item)
            if answer is not _UNDECIDED:
                return answer
        return method(self, item)

    if name == "__contains__":
        return contains
    return combine if name.removeprefix("__r").strip("_") in ("add", "sub") else compare


def looked_up(value: Any, name: str) -> None:
    """Note a doubt if an object that is not text has a method of `str`."""
    if name in _TEXT_METHODS and not isinstance(value, (str, bytes)):
        solution = type(value).__dict__["\0solution"]
        solution.doubts.note(f"{type(value).__name__}: has the method {name} of texts, without being a text")


def equals_itself(value: Any, name: str = "__eq__") -> None:
    """Check an object that was made with various arguments and is compared with itself. Raises `AssertionError`."""
    if name == "__ne__":
        raise AssertionError(f"the {type(value).__name__} object claims to differ from itself")
    if _OTHER_ORIGIN in value.__dict__:
        type(value).__dict__["\0solution"].doubts.check_only(value)


def check_truth(value: Any) -> None:
    """Check the comparison that returned this object, when a test uses its truth value. Raises `AssertionError`."""
    if (compared := value.__dict__.get(_COMPARED)) is not None:
        type(value).__dict__["\0solution"].doubts.check(*compared)


class _Verdict:
    """Consequence if two objects are equal: a failed test, or a doubt."""

    __slots__ = ("fails", "reason")

    def __init__(self, reason: str, *, fails: bool = False) -> None:
        self.reason, self.fails = reason, fails


class Doubts:
    """Checks the comparisons that judged objects decide in one run of tests, and collects doubts."""

    def __init__(self, solution: Solution) -> None:
        self._solution = solution
        self._compared = 0
        self.notes: list[str] = []

    def is_due(self) -> bool:
        """Whether to check the next comparison."""
        self._compared += 1
        if self._compared <= _ALWAYS:
            return True
        self.note(f"there are more than {_ALWAYS} comparisons by judged objects: of the rest, one in four is checked")
        return _chance.random() < _THEN

    def equals(self, left: Any, constant: Any) -> Any:
        """Whether an object equals a constant. Raises `AssertionError` if it equals the decoys as well."""
        others = around(constant, _DECOYS) if _is_plain(constant) else _altered(constant)
        answer, rest = self._among(left, "__eq__", constant, others)
        if type(answer) not in (bool, int, float, str) or not answer:
            return answer
        agreeing = sum(bool(item) for item in rest if item is not NotImplemented and item is not _UNDECIDED)
        if not others or agreeing > _MAY_AGREE:
            self.note(f"{type(left).__name__}: equals {agreeing} of {len(others)} values like {constant!r}"[:200])
        else:
            self._note_decision(left, constant)
        share = _SHARE_OF_NUMBERS if type(constant) in (int, float) else _SHARE
        if agreeing * share > len(others) + 1:
            raise AssertionError(f"the {type(left).__name__} object claims to equal {constant!r} and other values")
        return answer

    def combined(self, name: str, left: Any, number: float) -> Any:
        """The sum or difference of an object and a number. Raises `AssertionError` if it is the same for all."""
        answer, rest = self._among(left, name, number, around(number, _EACH))
        if type(answer) not in (int, float):
            return NotImplemented if answer is NotImplemented else _UNDECIDED
        if sum(item == answer for item in rest if type(item) in (int, float)) > _MAY_AGREE:
            raise AssertionError(f"{type(left).__name__}.{name} returns {answer!r} for every number")
        self._note_decision(left, number)
        return answer

    def contains(self, left: Any, item: Any) -> Any:
        """Whether an object contains a value. Raises `AssertionError` if it contains every text."""
        others = around(item, _EACH)
        answer, rest = self._among(left, "__contains__", item, others)
        if answer is True and others and all(other is True for other in rest):
            if isinstance(item, (str, bytes)):
                raise AssertionError(f"the {type(left).__name__} object claims to contain {item!r} and other values")
            self.note(f"{type(left).__name__}: contains every value like {item!r}"[:200])
        return answer

    def _note_decision(self, left: Any, constant: Any) -> None:
        self.note(f"{type(left).__name__}: decides itself how it compares with a {type(constant).__name__}")

    def _among(self, left: Any, name: str, real: Any, others: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The answers to an operation with `real`, and with the others, in random order in a copy of the process.

        An answer is `_UNDECIDED` if the operation raises or returns an object; all are if no copy can be made.
        """
        answers: dict[int, Any] = {}
        options = list(enumerate([real, *others]))
        _chance.shuffle(options)

        def ask() -> None:
            for number, item in options:
                answers[number] = self._answer(name, left, item)

        self._try(ask, left)
        return answers.pop(0, _UNDECIDED), list(answers.values())

    def _answer(self, name: str, left: Any, right: Any) -> Any:
        from .mirrors import Mirror, number_of

        try:
            answer = self._solution.ask("special", number_of(left), name, right)
        except Exception:  # noqa: BLE001  the judged code rejects this value
            return _UNDECIDED
        return _UNDECIDED if isinstance(answer, Mirror) else answer

    def check(self, name: str, left: Any, right: Any) -> None:
        """Repeat a comparison that came out true. Raises `AssertionError` if the decoys come out true as well."""
        from .mirrors import Mirror

        if not isinstance(right, Mirror) and name != "__ne__":
            self._note_decision(left, right)
        if name == "__ne__":
            self._try(lambda: self._check_unequal(left, right), left)
        elif name != "__eq__":
            self._try(lambda: self._check_order(name, left, right), left)
        elif not isinstance(right, Mirror):
            self._try(lambda: self._check_constant(left, right), left)
        elif verdict := self.compare_objects(left, right):
            self.apply(left, verdict)

    def compare_objects(self, left: Any, right: Any) -> _Verdict | None:
        """Compare an object with newly created ones, made with the same arguments and with others."""
        made, other = (right, left) if origin(right) else (left, right)
        verdicts: list[_Verdict | None] = []
        self._try(lambda: verdicts.append(self._compare_objects(made, other)), left)
        return verdicts[0] if verdicts else None

    def apply(self, left: Any, verdict: _Verdict) -> None:
        """Fail the test, or note a doubt, when two objects are equal. Raises `AssertionError`."""
        if verdict.fails:
            raise AssertionError(f"the {type(left).__name__} object {verdict.reason}")
        self.note(f"{type(left).__name__}: {verdict.reason}")

    def check_only(self, value: Any) -> None:
        """Create the object with other arguments. Raises `AssertionError` if it is always the same one."""
        if self.is_due():
            self._try(lambda: self._check_only(value), value)

    def _try(self, check: Callable[[], object], left: Any) -> None:
        """Run a check, which returns a doubt or raises, in a copy of the judged code's process."""
        if not self._solution.fork():
            self.note("a comparison could not be checked: the judged process could not be forked")
            return
        try:
            doubt = check()
        finally:
            self._solution.join()
        if isinstance(doubt, str):
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

    def _compare_objects(self, made: Any, other: Any) -> _Verdict | None:
        call = origin(made)
        variants = [calls for calls in call.variants() if calls] if call else []
        if call is None or not variants:
            return _Verdict("is equal to another object of the judged code, which could not be checked")
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
        if answers and all(map(all, answers.values())) and call.is_class:
            return _Verdict("claims to equal objects made with other arguments", fails=True)
        if real == [False]:
            fails = any(map(any, answers.values()))
            return _Verdict("was equal to an object, but not when that was created again", fails=fails)
        if not answers or any(sum(answer) > _MAY_AGREE for answer in answers.values()):
            return _Verdict("is equal to another object, also with some arguments changed")
        return None

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


# --- other constants


def _is_plain(value: Any, also: type | tuple[()] = ()) -> bool:
    """Whether a value crosses as data, so that it has variants. `also`: a class whose objects may be nested in it."""
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


def around(value: Any, count: int) -> list[Any]:
    """At most `count` alternatives that have no more in common with each other than with `value`."""
    near = alternatives(value, 4)
    if value is None or len(near) < 4:
        return alternatives(value, count)
    others = alternatives(_chance.choice(near), count + 1)
    return [item for item in others if item != value][:count]


def _endless(value: Any, tries: int = 200) -> Iterator[Any]:
    kind = type(value)
    if kind is bool:
        yield not value
    elif kind is int or kind is float:
        first = -1 if value == 1 else 1  # 1 may be a bit, so 0 comes first
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
    """`items` with one changed or removed, or with a new one if empty. `pairs`: items are those of a dict."""
    choice = _chance.random()
    if not items:
        return [["a", _chance.randint(0, 99)]] if pairs else [_chance.randint(0, 99)]
    position = _chance.randrange(len(items))
    if choice < 0.15 and items[position]:  # removing an empty item may change nothing, as in `mock.call`
        return items[:position] + items[position + 1 :]
    if pairs:
        key, value = items[position]
        changed: Any = [(alternatives(key, 1) or [key])[0], (alternatives(value, 1) or [0])[0]]
    else:
        are_bits = all(type(item) is int and item in (0, 1) for item in items)
        (changed,) = alternatives(items[position], 1 if are_bits else 1 + _chance.randrange(6))[-1:] or [0]
    return [*items[:position], changed, *items[position + 1 :]]
