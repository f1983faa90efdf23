"""Checks of comparisons that judged objects decide.

A test that compares an object of the judged code with something calls that object's method. `class Anything` with an
`__eq__` that returns True would pass `assert stack.pop() == 2`. So a comparison with a constant takes place in a copy
of the judged process, among decoys in random order: the same comparison with other constants. The judged process
itself gets the constant only after the copy has answered. An object that doesn't distinguish the real constant from the
decoys fails the test. So does one that equals some decoys, but different ones in a second copy with another order.

The decoys don't reveal the real constant: it is as likely as each of them to be the smallest, the median or the most
similar to the others (`around`). An object that equals an arbitrary one of 32 values passes 1 time in 32.

One gap remains and is reported as a doubt: an object that decides for itself whether it equals a plain value may do so
without ever computing that value.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .mirrors import Solution

CHECKED = frozenset(
    f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "contains")
)
"""Special methods whose results are checked."""
_DECOYS = 31
_EACH = 6
"""Decoys for a value looked up in a container, and approximately for each argument of a call."""
_TRIES = 200
"""Number of random changes of a value."""
_BATCH = 1 << 17
"""Approximate number of characters of constants in one message."""
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
_CONSEQUENCE = "\0consequence"
"""Set on an object that a comparison returned: the function to call with its truth value."""
_VIEWS: dict[type, type[set[Any] | list[Any]]] = {type({}.keys()): set, type({}.values()): list, type({}.items()): list}
_UNDECIDED = object()
"""The answer of a comparison that must be made in the judged process itself."""
_PLAIN_ANSWERS = (bool, int, float, str)
_Consequence = Callable[[bool], object]
"""Check to run on the truth value of the judged process's answer. Raises `AssertionError`."""
_Decision = tuple[Any, _Consequence]
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

    __slots__ = ("arguments", "earlier", "is_class", "name", "named", "operation", "target")

    def __init__(
        self, operation: str, target: Any, name: str, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        self.operation, self.target, self.name = operation, target, name
        self.arguments, self.named = tuple(arguments), dict(named)
        self.is_class = operation == "call" and isinstance(target, type)
        self.earlier = None if isinstance(target, type) else origin(target)
        """The operation that created the target."""

    def again(self, solution: Solution) -> Any:
        """Execute it again."""
        from .mirrors import number_of

        target = self.earlier.again(solution) if self.earlier else self.target
        return solution.ask(self.operation, number_of(target), self.name, *self.arguments, **self.named)

    def trials(self) -> list[_Trial]:
        """This call, then all combinations of a few values per argument, each with the indices of the changed."""
        values = self._values()
        columns = [[value] for value in values]
        wanted = max(1 + _EACH * len(values), 1 << min(len(values), 5))
        others = [around(value, _EACH) for value in values]
        growing = [number for number, items in enumerate(others) if items]
        _chance.shuffle(growing)
        while growing:
            number = min(growing, key=lambda item: len(columns[item]))
            size = len(columns[number])
            if math.prod(map(len, columns)) // size * (size + 1) > wanted:
                growing.remove(number)
                continue
            columns[number].append(others[number].pop())
            if not others[number]:
                growing.remove(number)
        trials = []
        for chosen in itertools.product(*map(enumerate, columns)):
            changed = {number for number, (place, _) in enumerate(chosen) if place}
            trials.append((changed, self._with(value for _, value in chosen)))
        return trials

    def _values(self) -> list[Any]:
        """Arguments of this call and of the operations before it."""
        return [*self.arguments, *self.named.values(), *(self.earlier._values() if self.earlier else ())]

    def _with(self, values: Iterator[Any]) -> _Call:
        """Return the same call with these `_values`."""
        changed = copy.copy(self)
        changed.arguments = tuple(next(values) for _ in self.arguments)
        changed.named = {name: next(values) for name in self.named}
        changed.earlier = self.earlier and self.earlier._with(values)
        return changed


_Trial = tuple[set[int], _Call]
"""Indices of the changed arguments, and the call."""


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
        if not isinstance(other, Mirror) and not _is_plain(other, Mirror):
            if isinstance(other, Iterator) and type(other).__module__ == "builtins":
                doubts.note(f"{type(self).__name__}: compared with an iterator")
                return method(self, other)
            return NotImplemented  # `pytest.approx`, `mock.ANY`, classes of the tests: the other operand decides
        answer, consequence = _UNCHECKED
        if other is self:
            consequence = functools.partial(equals_itself, self, name)
        else:
            answer, consequence = doubts.compare(name, self, other)
        if answer is not _UNDECIDED:
            return answer
        answer = method(self, other)
        if isinstance(answer, Mirror) and not isinstance(answer, (int, float, complex)):  # these have a `__bool__`
            answer.__dict__[_CONSEQUENCE] = consequence
        elif answer is not NotImplemented:
            if type(answer) not in _PLAIN_ANSWERS:
                doubts.note(f"{type(self).__name__}: a comparison returned a {type(answer).__name__}")
            consequence(bool(answer))
        return answer

    def combine(self: Any, other: Any) -> Any:
        if type(other) not in (int, float):
            return method(self, other)
        answer, consequence = type(self).__dict__["\0solution"].doubts.combine(name, self, other)
        if answer is _UNDECIDED:
            answer = method(self, other)
            consequence(type(answer) in (int, float))
        remember(answer, self, (other,), {}, special=name)
        return answer

    def contains(self: Any, item: Any) -> Any:
        answer, consequence = type(self).__dict__["\0solution"].doubts.contains(self, item)
        if answer is _UNDECIDED:
            answer = method(self, item)
            consequence(bool(answer))
        return answer

    if name == "__contains__":
        return contains
    return combine if name.removeprefix("__r").strip("_") in ("add", "sub") else compare


def looked_up(value: Any, name: str) -> None:
    """Note a doubt if an object that is not text has a method of `str`."""
    if name in _TEXT_METHODS and not isinstance(value, (str, bytes)):
        solution = type(value).__dict__["\0solution"]
        solution.doubts.note(f"{type(value).__name__}: has the method {name} of texts, without being a text")


def equals_itself(value: Any, name: str = "__eq__", truth: bool = True) -> None:
    """Check the result of comparing an object with itself. Raises `AssertionError`."""
    if name == "__ne__" and truth:
        raise AssertionError(f"the {type(value).__name__} object claims to differ from itself")
    if truth and _OTHER_ORIGIN in value.__dict__:
        type(value).__dict__["\0solution"].doubts.check_only(value)


def check_truth(value: Any, truth: bool) -> None:
    """Check the comparison that returned this object, when a test uses its truth value. Raises `AssertionError`."""
    value.__dict__.get(_CONSEQUENCE, _nothing)(truth)


def _nothing(truth: bool) -> None:
    """Consequence of a comparison that needs no further check."""


_UNCHECKED: _Decision = (_UNDECIDED, _nothing)


def _as_in_copy(left: Any, name: str, truth: bool) -> None:
    """Check that the judged process claims no equality, as its copy did not. Raises `AssertionError`."""
    if truth != (name == "__ne__"):
        raise AssertionError(f"the {type(left).__name__} object answers differently in a copy of its process")


def _claims(name: str, answer: Any) -> bool:
    """Whether an answer of `Solution.each` says that objects are equal; its truth value for other operations."""
    if answer is None or answer is NotImplemented:
        return False
    return bool(answer[0] if type(answer) is tuple else answer) != (name == "__ne__")


class _Verdict(NamedTuple):
    """Consequence if two objects are equal: a failed test or a doubt."""

    reason: str
    fails: bool = False


class Doubts:
    """Checks the comparisons that judged objects decide in one run of tests, and collects doubts."""

    def __init__(self, solution: Solution) -> None:
        self._solution = solution
        self._compared = 0
        self.notes: list[str] = []

    def _is_due(self) -> bool:
        """Whether to check the next comparison."""
        self._compared += 1
        if self._compared <= _ALWAYS:
            return True
        self.note(f"there are more than {_ALWAYS} comparisons by judged objects: of the rest, one in four is checked")
        return _chance.random() < _THEN

    def compare(self, name: str, left: Any, right: Any) -> _Decision:
        """Check a comparison before the judged process makes it. Raises `AssertionError`.

        Returns the answer, or `_UNDECIDED` if the judged process must be asked; and the check to run on its answer.
        """
        from .mirrors import Mirror

        if not self._is_due():
            return _UNCHECKED
        if name not in ("__eq__", "__ne__"):
            return _UNDECIDED, functools.partial(self._in_order, name, left, right)
        if isinstance(right, Mirror):
            return _UNDECIDED, self._with_object(name, left, right)
        others = around(right, _DECOYS) if _is_plain(right) else _altered(right)
        if (answers := self._among(left, name, right, others)) is None:
            return _UNCHECKED
        if claims_equal := _claims(name, answers[0]):
            self._distinguish(left, right, [_claims(name, answer) for answer in answers[1:]])
            self._repeat(left, name, right, others, answers)
        if answers[0] is NotImplemented or type(answers[0]) in _PLAIN_ANSWERS:
            return answers[0], _nothing
        return _UNCHECKED if claims_equal else (_UNDECIDED, functools.partial(_as_in_copy, left, name))

    def combine(self, name: str, left: Any, number: float) -> _Decision:
        """Check a sum or difference of an object and a number. Raises `AssertionError` if it ignores the number."""
        if not self._is_due() or (answers := self._among(left, name, number, around(number, _DECOYS))) is None:
            return _UNCHECKED
        if answers[0] is NotImplemented:
            return NotImplemented, _nothing
        if type(answers[0]) not in (int, float):
            return _UNDECIDED, functools.partial(_as_in_copy, left, name)
        same = sum(answer == answers[0] for answer in answers if type(answer) in (int, float)) - 1
        if same * _SHARE > len(answers):
            raise AssertionError(f"{type(left).__name__}.{name} returns {answers[0]!r} for other numbers too")
        self._note_decision(left, number)
        return answers[0], _nothing

    def contains(self, left: Any, item: Any) -> _Decision:
        """Check whether an object contains a value. Raises `AssertionError` if it claims to contain every text."""
        if not _is_plain(item) or not self._is_due():
            return _UNCHECKED
        name, is_text = "__contains__", isinstance(item, (str, bytes))
        others = around(item, _DECOYS if is_text else _EACH)
        if (answers := self._among(left, name, item, others)) is None:
            return _UNCHECKED
        if answers[0] is None:
            return _UNDECIDED, functools.partial(_as_in_copy, left, name)
        claims = [_claims(name, answer) for answer in answers]
        agreeing = sum(claims[1:])
        if is_text and others and all(claims):
            raise AssertionError(f"the {type(left).__name__} object claims to contain {_text(item)} and other values")
        if claims[0] and agreeing and (is_text or all(claims)):
            self.note(f"{type(left).__name__}: contains {agreeing} of {len(others)} values like {_text(item)}"[:200])
        if claims[0] and is_text:
            self._repeat(left, name, item, others, answers)
        return claims[0], _nothing

    def _distinguish(self, left: Any, constant: Any, decoys: Sequence[bool]) -> None:
        """Count the decoys that an object equals besides a constant. Raises `AssertionError` if there are too many."""
        agreeing, text = sum(decoys), _text(constant)
        if not decoys or agreeing > _MAY_AGREE:
            self.note(f"{type(left).__name__}: equals {agreeing} of {len(decoys)} values like {text}"[:200])
        else:
            self._note_decision(left, constant)
        share = _SHARE_OF_NUMBERS if type(constant) in (int, float) else _SHARE
        if agreeing * share > len(decoys) + 1:
            raise AssertionError(f"the {type(left).__name__} object claims to equal {text} and other values")

    def _repeat(self, left: Any, name: str, real: Any, others: Sequence[Any], answers: Sequence[Any]) -> None:
        """Repeat the comparisons if some decoys are equal. Raises `AssertionError` if any answer changes."""
        claims = [_claims(name, answer) for answer in answers]
        again = self._among(left, name, real, others) if sum(claims) > 1 else None
        if again is not None and claims != [_claims(name, answer) for answer in again]:
            raise AssertionError(f"the {type(left).__name__} object gives different answers to the same comparisons")

    def _note_decision(self, left: Any, constant: Any) -> None:
        self.note(f"{type(left).__name__}: decides itself how it compares with a {type(constant).__name__}")

    def _among(self, left: Any, name: str, real: Any, others: Sequence[Any]) -> list[Any] | None:
        """Execute an operation with `real` and with each of the others, in random order, in a copy of the process.

        Returns the answers as `Solution.each` does, that for `real` first; None if no copy can be made.
        """
        options = [real, *others]
        order = _chance.sample(range(len(options)), len(options))
        answers: dict[int, Any] = {}

        def ask() -> None:
            size = max(1, _BATCH // len(_text(real))) if _is_plain(real) else len(order)
            for start in range(0, len(order), size):
                places = order[start : start + size]
                asked = self._solution.each(left, name, [options[place] for place in places])
                answers.update({place: asked[number] for number, place in enumerate(places)})
            if name == "__ne__" and not _claims(name, answers[0]):
                self._check_unequal(left, real)

        return [answers[place] for place in range(len(options))] if self._in_copy(ask) else None

    def _with_object(self, name: str, left: Any, right: Any) -> _Consequence:
        """Return the check to run on a comparison with another object of the judged code."""
        if name == "__ne__":
            if (answers := self._among(left, name, right, ())) is None:
                return _nothing
            if not _claims(name, answers[0]):
                return functools.partial(_as_in_copy, left, name)
        verdict = self._compare_objects(name, left, right)

        def follow(truth: bool) -> None:
            if verdict is None or truth == (name == "__ne__"):
                return
            if verdict.fails:
                raise AssertionError(f"the {type(left).__name__} object {verdict.reason}")
            self.note(f"{type(left).__name__}: {verdict.reason}")

        return follow

    def _in_order(self, name: str, left: Any, right: Any, truth: bool) -> None:
        from .mirrors import Mirror

        if truth:
            if not isinstance(right, Mirror):
                self._note_decision(left, right)
            self._in_copy(lambda: self._check_order(name, left, right))

    def check_only(self, value: Any) -> None:
        """Create the object with other arguments. Raises `AssertionError` if it is always the same one."""
        if self._is_due():
            self._in_copy(lambda: self._check_only(value))

    def _in_copy(self, check: Callable[[], object]) -> bool:
        """Run a check in a copy of the judged code's process. Returns False if no copy can be made."""
        if not self._solution.fork():
            self.note("a comparison could not be checked: the judged process could not be forked")
            return False
        try:
            check()
        finally:
            self._solution.join()
        return True

    def note(self, note: str) -> None:
        """Add a doubt to the verdict."""
        if note not in self.notes and len(self.notes) < _MAX_DOUBTS:
            self.notes.append(note)

    def _claimed(self, name: str, left: Any, right: Any) -> bool | None:
        """Execute a comparison in the copy and return what it `_claims`; None if it raises."""
        (answer,) = self._solution.each(left, name, [right])
        return None if answer is None else _claims(name, answer)

    def _compare_objects(self, name: str, left: Any, right: Any) -> _Verdict | None:
        """Compare an object with newly created ones, made with the same arguments and with others."""
        made, other = (right, left) if origin(right) else (left, right)
        call = origin(made)
        trials = call.trials() if call else []
        if call is None or len(trials) < 2:
            return _Verdict("is equal to another object of the judged code, which could not be checked")
        answers = self._tried(name, other, trials)
        if answers is not None and answers[1:].count(None) == len(trials) - 1:  # all rejected: negative sizes?
            trials = call.trials()
            answers = self._tried(name, other, trials)
        if answers is None:
            return None
        real, varied = answers[0], [answer for answer in answers[1:] if answer is not None]
        if varied and all(varied) and call.is_class:
            return _Verdict("claims to equal objects made with other arguments", fails=True)
        if real is False:
            return _Verdict("was equal to an object, but not after that was created again", fails=any(varied))
        if any(varied) and self._tried(name, other, trials) not in (None, answers):
            return _Verdict("does not always equal the same objects", fails=True)
        if not varied or any(_is_ignored(number, trials, answers) for number in trials[-1][0]):
            return _Verdict("is equal to another object, also with some arguments changed")
        return None

    def _tried(self, name: str, other: Any, trials: Sequence[_Trial]) -> list[bool | None] | None:
        """Compare an object with those that the calls create, in random order, in a copy; None if no copy can be made.

        A result is None if the judged code rejects the arguments.
        """
        answers: list[bool | None] = [None] * len(trials)

        def ask() -> None:
            for number in _chance.sample(range(len(trials)), len(trials)):
                try:
                    answers[number] = self._claimed(name, other, trials[number][1].again(self._solution))
                except Exception:  # noqa: BLE001  the judged code rejects these arguments
                    continue

        return answers if self._in_copy(ask) else None

    def _check_unequal(self, left: Any, right: Any) -> None:
        if self._claimed("__eq__", left, right) is True:
            raise AssertionError(f"the {type(left).__name__} object claims to be both equal and unequal")

    def _check_only(self, value: Any) -> None:
        call = origin(value)
        for _, trial in call.trials()[1:] if call else []:
            try:
                if trial.again(self._solution) is not value:
                    return
            except Exception:  # noqa: BLE001  the judged code rejects these arguments
                continue
        raise AssertionError(f"different arguments return the same {type(value).__name__} object")

    def _check_order(self, name: str, left: Any, right: Any) -> None:
        from .mirrors import Mirror

        opposite = {"__lt__": "__gt__", "__gt__": "__lt__", "__le__": "__gt__", "__ge__": "__lt__"}[name]
        if self._claimed(opposite, left, right) is True:
            raise AssertionError(f"the {type(left).__name__} object claims to be both less and greater")
        if isinstance(right, Mirror) or type(right) not in (int, float):
            return
        call = origin(left)
        for _, trial in call.trials()[1:] if call else []:
            try:
                if self._claimed(name, trial.again(self._solution), right) is not True:
                    return
            except Exception:  # noqa: BLE001  the judged code rejects these arguments
                continue
        scale = max(abs(right), 1) * (-1 if name in ("__lt__", "__le__") else 1)
        if all(self._claimed(name, left, right + scale * 10**power) is not False for power in (0, 1, 3, 6, 12)):
            raise AssertionError(f"the {type(left).__name__} object claims to be less than every number, or greater")


def _is_ignored(number: int, trials: Sequence[_Trial], answers: Sequence[bool | None]) -> bool:
    """Whether objects are equal although they differ in the argument with this index."""
    changed = [answer for trial, answer in enumerate(answers) if trials[trial][0] == {number} and answer is not None]
    return sum(changed) > _MAY_AGREE or changed == [True]


def _text(constant: Any) -> str:
    try:
        return repr(constant)
    except ValueError:  # an integer with too many digits
        return "a large number"


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
    """Return at most `count` alternatives that don't reveal `value` among them.

    Numbers: `value` has a random position among consecutive numbers. Other types: `value` and each alternative
    differ in one item from the same hidden value.
    """
    if type(value) in (int, float):
        before = _chance.randint(0, count)
        numbers = [_moved(value, step - before) for step in range(count + 1)]
        return [number for number in _chance.sample(numbers, len(numbers)) if number != value]
    width = (count + 1) // 2
    if (hidden := _neighbour(value, width)) is None:
        return alternatives(value, count)
    others: list[Any] = []
    for _ in range(4 * count):
        item = _neighbour(hidden, width)
        if item != value and item not in others:
            others.append(item)
        if len(others) == count:
            break
    return others or alternatives(value, count)


def _moved(number: Any, step: int) -> Any:
    """Add `step` to a number in decimal, since the digits of a binary rounding error would reveal a decoy."""
    if type(number) is int or not math.isfinite(number):
        return number + step
    from decimal import Decimal

    return float(Decimal(repr(number)) + step)


def _neighbour(value: Any, width: int) -> Any:
    """Change one item of a value at random, a number by `width` at most; None if no item can be changed.

    `a` becomes `b` as often as `b` becomes `a`.
    """
    kind = type(value)
    step = _chance.choice((1, -1)) * _chance.randint(1, width)
    if kind is bool:
        return not value
    if kind in (int, float):
        return _moved(value, step)
    if kind is complex:
        return value + step * _chance.choice((1, 1j))
    if kind is str:
        return _respelled(value) if any(map(str.isalnum, value)) else None
    if kind is bytes:
        return text.encode("latin-1") if (text := _neighbour(value.decode("latin-1"), width)) else None
    if kind.__name__ in ("PosixPath", "PurePosixPath"):
        return value.with_name(name) if (name := _neighbour(value.name, width)) else None
    if shift := _shifts_of(kind).get(kind.__name__):
        try:
            return shift(value, step)
        except (ArithmeticError, ValueError):  # out of range
            return None
    return None if value is None else _neighbour_of_container(value, width)


def _neighbour_of_container(value: Any, width: int) -> Any:
    items = list(value.items()) if isinstance(value, dict) else list(value)
    change = _changed_pair if isinstance(value, dict) else _neighbour
    are_bits = all(type(item) is bool or (type(item) is int and item in (0, 1)) for item in items)
    for _ in range(8):
        changed = list(items)
        if are_bits:  # redraw all, since few values differ in only one bit
            changed = [bool(bit) if type(item) is bool else bit for item in items for bit in (_chance.randint(0, 1),)]
        places = [] if are_bits else _chance.sample(range(len(items)), min(len(items), 8))
        for place in sorted(places, key=lambda place: type(items[place]) is bool):  # bools last: one alternative
            if (item := change(items[place], width)) is not None:
                changed[place] = item
                break
        other = _rebuilt(value, changed)
        if len(other) == len(value) and other != value:
            return other
    return None


def _changed_pair(pair: tuple[Any, Any], width: int) -> tuple[Any, Any] | None:
    key, value = (_neighbour(item, width) for item in pair)
    if key is None and value is None:
        return None
    return pair[0] if key is None else key, pair[1] if value is None else value


def _rebuilt(value: Any, items: Sequence[Any]) -> Any:
    """Return a container like `value` with other items, which are pairs for a dict."""
    if type(value) in (OrderedDict, Counter, defaultdict):
        other = value.copy()
        other.clear()
        other.update(dict(items))
        return other
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


def _endless(value: Any) -> Iterator[Any]:
    kind = type(value)
    if kind is bool:
        yield not value
    elif kind is int or kind is float:
        first = -1 if value == 1 else 1  # 1 may be a bit, so 0 comes first
        yield from (value + first * sign * step for step in range(1, 9) for sign in (1, -1))
        for size in range(1, _TRIES):
            yield value + kind(_chance.choice((1, -1)) * _chance.randint(1, 10 + size * size))
    elif kind is complex:
        yield from (value + step for step in (1, -1, 1j, -1j, 2, 3j))
    elif kind is str:
        for _ in range(_TRIES):
            yield _respelled(value)
    elif kind is bytes:
        for _ in range(_TRIES):
            yield bytes(map(ord, _respelled(value.decode("latin-1")))) if value else bytes([_chance.randint(1, 255)])
    elif kind in (list, tuple, set, frozenset, deque):
        yield from (_rebuilt(value, _with_one_changed(list(value))) for _ in range(_TRIES))
    elif kind in (dict, OrderedDict, Counter, defaultdict):
        for _ in range(_TRIES):
            yield _rebuilt(value, _with_one_changed([list(pair) for pair in value.items()], pairs=True))
    elif shift := _shifts_of(kind).get(kind.__name__):
        for step in (1, -1, 2, -2, *(_chance.randint(3, 999) for _ in range(_TRIES))):
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
    return [_rebuilt(value, new) for new in changed]


_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_DIGITS = "0123456789"


def _respelled(text: str) -> str:
    """Change one letter or digit of a text: an ASCII one if possible, since replacements are ASCII."""
    positions = [index for index, letter in enumerate(text) if letter.isalnum() and letter.isascii()]
    positions = positions or [index for index, letter in enumerate(text) if letter.isalnum()]
    if not positions:
        return text + _chance.choice(_LETTERS)
    position = _chance.choice(positions)
    letter = text[position]
    new = _chance.choice([item for item in (_DIGITS if letter.isdigit() else _LETTERS) if item != letter.lower()])
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
