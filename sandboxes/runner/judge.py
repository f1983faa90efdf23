"""Split judgement: tests in one process, the code they judge in another, plain values in between.

The tests import `solution` and find stand-ins that forward calls. What comes back is decoded to exact plain types,
or is a handle to an object that stays on the other side: a handle forwards methods, never operators, so that no
object of the solution can answer a comparison in its own favour. The verdict leaves over a descriptor that the
solution's process does not have.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
import types
import unittest
from typing import Any, NoReturn

from . import values
from .wire import write_all

MAX_MESSAGE = 2000
_MAX_FAILURES = 50
_EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not name.startswith("Stop")
}
"""What crosses as itself. Not StopIteration: `for got in map(f, inputs)` would end and compare nothing."""
_EXCEPTIONS.pop("ExceptionGroup", None)  # it can't be made of a message
_BEFORE_MESSAGE: dict[type[Exception], tuple[Any, ...]] = {
    UnicodeDecodeError: ("utf-8", b"", 0, 0),
    UnicodeEncodeError: ("utf-8", "", 0, 0),
    UnicodeTranslateError: ("", 0, 0),
}
"""What some exceptions want besides."""
_NONSENSE = "the solution answered nonsense"


class SolutionError(Exception):
    """The solution raised something that is not a built-in exception."""


class SolutionGoneError(BaseException):
    """The solution's process ended, or answered nonsense: no `assertRaises(Exception)` may take it for a result."""


def _send(fd: int, data: Any) -> None:
    write_all(fd, values.pack_frame(data))


def _receive(fd: int) -> Any:
    (length,) = values.LENGTH.unpack(_read(fd, values.LENGTH.size))
    if length > values.MAX_TOTAL:
        raise SolutionGoneError("the solution's answer is too long")
    data = _read(fd, length)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SolutionGoneError(_NONSENSE) from error


def _read(fd: int, size: int) -> bytes:
    chunks = b""
    while len(chunks) < size:
        chunk = os.read(fd, size - len(chunks))
        if not chunk:
            raise SolutionGoneError("the solution ended")
        chunks += chunk
    return chunks


# ---- the solution's side --------------------------------------------------------------------------------


def serve(code: str, channel: int) -> NoReturn:
    """Define the code, then answer calls until the tests hang up."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    objects: list[Any] = []
    try:
        exec(compile(code, "solution.py", "exec"), module.__dict__)
    except BaseException as error:  # noqa: BLE001  whatever the code raises is the tests' to hear of
        _send(channel, {"error": f"{type(error).__name__}: {error}"[:MAX_MESSAGE]})
        os._exit(1)
    names = {name: _encode(value, objects) for name, value in vars(module).items() if not name.startswith("__")}
    _send(channel, {"names": names})
    while True:
        try:
            request = _receive(channel)
        except SolutionGoneError:  # here it is the tests that are through
            os._exit(0)
        try:
            answer = {"v": _encode(_perform(request, objects), objects)}
        except BaseException as error:  # noqa: BLE001  SystemExit too is an answer
            answer = {"e": [kind.__name__ for kind in type(error).__mro__], "m": text_of(error)}
        sys.stdout.flush()
        _send(channel, answer)


def _perform(request: Any, objects: list[Any]) -> Any:
    target = objects[request["o"]]
    if "a" in request:
        return getattr(target, request["a"])

    def back(data: Any) -> Any:
        return objects[data["o"]] if isinstance(data, dict) and set(data) == {"o"} else values.decode(data)

    return target(*map(back, request["args"]), **{name: back(item) for name, item in request["kwargs"].items()})


def _encode(value: Any, objects: list[Any]) -> Any:
    """A plain value, or a handle to what stays here."""
    try:
        return values.encode(value)
    except (values.NotPlainDataError, RecursionError):
        objects.append(value)
        return {"o": len(objects) - 1, "k": callable(value)}


def text_of(error: BaseException) -> str:
    """The message of an exception, shortened; none where it can't be told."""
    try:
        return str(error)[:MAX_MESSAGE]
    except BaseException:  # noqa: BLE001  a hostile __str__
        return ""


# ---- the tests' side ------------------------------------------------------------------------------------


class Remote:
    """A handle to an object of the solution."""

    __slots__ = ("_channel", "_number")

    def __init__(self, channel: int, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""

        def out(value: Any) -> Any:
            return {"o": value._number} if isinstance(value, Remote) else values.encode(value)

        sent = {"args": list(map(out, args)), "kwargs": {name: out(value) for name, value in kwargs.items()}}
        return _request(self._channel, {"o": self._number, **sent})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _request(self._channel, {"o": self._number, "a": name})

    def __bool__(self) -> bool:
        raise TypeError("an object of the solution has no truth value here")


def _request(channel: int, request: dict[str, Any]) -> Any:
    _send(channel, request)
    answer = _receive(channel)
    if isinstance(answer, dict) and "v" in answer:
        return _decode(answer["v"], channel)
    if not isinstance(answer, dict) or not isinstance(answer.get("e"), list):
        raise SolutionGoneError(_NONSENSE)
    for name in answer["e"]:
        if isinstance(name, str) and name in _EXCEPTIONS:
            kind = _EXCEPTIONS[name]
            raise kind(*_BEFORE_MESSAGE.get(kind, ()), str(answer.get("m", "")))
    raise SolutionError(str(answer.get("m", "")))


def _decode(data: Any, channel: int) -> Any:
    if isinstance(data, dict) and isinstance(data.get("o"), int):
        return Remote(channel, data["o"])
    try:
        return values.decode(data)
    except values.MalformedValueError as error:  # a ValueError, which a test may expect
        raise SolutionGoneError(_NONSENSE) from error


def run_tests(code: str, channel: int, verdict: int) -> None:
    """Run the tests against the solution behind `channel`; the verdict goes to `verdict`."""
    failures: list[str] = []
    total = 0
    try:
        module = _stand_in(channel)
        sys.modules["solution"] = module
        namespace = module.namespace
        namespace["__name__"] = "tests"
        exec(compile(code, "tests.py", "exec"), namespace)
        total, failures = _run_all(namespace)
    except BaseException as error:  # noqa: BLE001  a broken solution or test file is a verdict too
        failures.append(f"{type(error).__name__}: {text_of(error)}")
    _send(verdict, {"total": total, "failures": failures[:_MAX_FAILURES], "passed": not failures})


class _Solution(types.ModuleType):
    """What the tests import. The solution's `abs` must not become their own, nor a `math` that they have imported."""

    def __init__(self, members: dict[str, Any]) -> None:
        super().__init__("solution")
        self.__dict__.update(members)
        offered = [name for name in members if not name.startswith("__") and not hasattr(builtins, name)]
        self.namespace = {name: members[name] for name in offered}
        """Where the tests run."""

    @property
    def __all__(self) -> list[str]:
        """What `from solution import *` brings, asked for at that moment: nothing that the tests call otherwise."""
        tests, own = self.namespace, vars(self)
        return [name for name in tests if not name.startswith("_") and tests[name] is own.get(name)]


def _stand_in(channel: int) -> _Solution:
    ready = _receive(channel)
    if not isinstance(ready, dict) or not isinstance(ready.get("names"), dict):
        raise SolutionGoneError(str(ready.get("error") if isinstance(ready, dict) else "no names"))
    return _Solution({name: _decode(data, channel) for name, data in ready["names"].items()})


def _run_all(namespace: dict[str, Any]) -> tuple[int, list[str]]:
    """unittest cases, then `test_*` functions; plain asserts have run already and count as one test."""
    cases = [value for value in namespace.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    functions = {
        name: value
        for name, value in namespace.items()
        if name.startswith("test") and isinstance(value, types.FunctionType)
    }
    failures: list[str] = []
    total = 0
    if cases:
        loader = unittest.defaultTestLoader
        suite = unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in cases)
        result = unittest.TextTestRunner(stream=io.StringIO(), verbosity=0).run(suite)
        total += result.testsRun
        for test, trace in result.failures + result.errors:
            failures.append(f"{test}: {trace.strip().splitlines()[-1]}")
        failures += [f"{test}: unexpected success" for test in result.unexpectedSuccesses]
    for name, function in functions.items():
        total += 1
        try:
            function()
        except BaseException as error:  # noqa: BLE001  any exception fails the test
            failures.append(f"{name}: {type(error).__name__}: {text_of(error)}")
    return max(total, 1), failures
