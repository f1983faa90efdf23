"""Judging code by tests.

*Apart*: tests in one process, the code they judge in another, plain values in between. The tests import the judged
modules and find stand-ins that forward calls. What comes back is decoded to exact plain types, or is a handle to an
object that stays on the other side: a handle forwards methods, never operators, so that no object of the solution can
answer a comparison in its own favour. The verdict leaves over a descriptor that the solution's process does not have.

*Counted*: one process for both. Each test is told of as it starts and as it ends, and the verdict is made outside from
what was told (see `sandboxes.suite`).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from . import testing, values
from .testing import MAX_MESSAGE, text_of
from .wire import write_all

if TYPE_CHECKING:
    from .child import Request

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
SOLUTION = "solution"
"""The name of code that is one text."""


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
    """Answer the tests, which ask for modules and calls, until they hang up. `code` is the module `solution`."""
    sys.path[1:1] = testing.source_roots(os.getcwd())[1:]
    objects: list[Any] = []
    while True:
        try:
            request = _receive(channel)
        except SolutionGoneError:  # here it is the tests that are through
            os._exit(0)
        try:
            answer = _module(request["m"], code, objects) if "m" in request else _perform(request, objects)
            answer = {"v": answer if "m" in request else _encode(answer, objects)}
        except BaseException as error:  # noqa: BLE001  SystemExit too is an answer
            answer = {"e": [kind.__name__ for kind in type(error).__mro__], "m": text_of(error)}
        sys.stdout.flush()
        _send(channel, answer)


def _module(name: str, code: str, objects: list[Any]) -> dict[str, Any]:
    """The names of a judged module, which is imported now; that of the one `code` is not a file."""
    if name == SOLUTION and code:
        module = types.ModuleType(SOLUTION)
        sys.modules[SOLUTION] = module
        exec(compile(code, f"{SOLUTION}.py", "exec"), module.__dict__)
    else:
        module = importlib.import_module(name)
    return {key: _encode(value, objects) for key, value in vars(module).items() if not key.startswith("__")}


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

    def __repr__(self) -> str:
        return "<an object of the judged code, which tests apart from it can't compare: how='counted' can>"


def _request(channel: int, request: dict[str, Any]) -> Any:
    return _decode(_answer(channel, request), channel)


def _answer(channel: int, request: dict[str, Any]) -> Any:
    """What the solution's process answers, or the exception that it tells of."""
    _send(channel, request)
    answer = _receive(channel)
    if isinstance(answer, dict) and "v" in answer:
        return answer["v"]
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


def run_tests(request: Request) -> None:
    """Run the tests against the code behind the request's channel; the verdict goes to its other descriptor."""
    header, channel = request.header, request.channel
    verdict = _Verdict()
    try:
        if request.code:
            _run_text(request.code, channel, verdict)
        else:
            sys.meta_path.append(_Finder(channel, header["judged"]))  # the last: it can't hide any other module
            run_suite(request, verdict, [os.getcwd()])
    except BaseException as error:  # noqa: BLE001  a broken solution or test file is a verdict too
        verdict.finish("", "failed", f"{type(error).__name__}: {text_of(error)}")
    _send(request.verdict, verdict.summary())


def run_suite(
    request: Request, recorder: testing.Recorder, roots: Sequence[str], watch: testing.Watch | None = None
) -> None:
    """Run the test files of a request, which lie in the current folder."""
    paths: list[str] = request.header["paths"]
    if request.header["pytest"]:
        testing.run_pytest(paths, recorder, roots)
    else:
        sys.path += roots
        testing.run_files({path: request.files[path] for path in paths}, recorder, watch)


class _Verdict(testing.Recorder):
    """Counts, and keeps a line for each failure."""

    def __init__(self) -> None:
        self.total = 0
        self.failures: list[str] = []
        self.failed = 0

    def finish(self, test: str, outcome: str, message: str = "") -> None:
        self.total += outcome != "skipped"
        if outcome == "failed":
            self.failed += 1
            self.failures.append(f"{test}: {message}" if test else message)

    def summary(self) -> dict[str, Any]:
        """The verdict as it is sent."""
        failures = [line[:MAX_MESSAGE] for line in self.failures[:_MAX_FAILURES]]
        return {"total": self.total, "failed": self.failed, "failures": failures}


def _run_text(code: str, channel: int, recorder: testing.Recorder) -> None:
    module = _stand_in(SOLUTION, channel)
    sys.modules[SOLUTION] = module
    module.namespace["__name__"] = "tests"
    testing.run_source("tests.py", code, module.namespace, recorder)


class _Solution(types.ModuleType):
    """What the tests import. The solution's `abs` must not become their own, nor a `math` that they have imported."""

    def __init__(self, name: str, members: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(members)
        offered = [key for key in members if not hasattr(builtins, key)]
        self._offered = offered
        self.namespace = {key: members[key] for key in offered}
        """Where tests run that are one text: with the solution's names."""

    @property
    def __all__(self) -> list[str]:
        """What `from solution import *` brings, asked for at that moment: nothing that the importer calls otherwise."""
        there, own = sys._getframe(1).f_globals, vars(self)
        public = [key for key in self._offered if not key.startswith("_")]
        return [key for key in public if key not in there or there[key] is own.get(key)]


def _stand_in(name: str, channel: int) -> _Solution:
    names = _answer(channel, {"m": name})
    if not isinstance(names, dict):
        raise SolutionGoneError(_NONSENSE)
    members = {key: data for key, data in names.items() if not key.startswith("__")}
    return _Solution(name, {key: _decode(data, channel) for key, data in members.items()})


class _Finder:
    """Finds stand-ins for the judged modules, where nothing else has a module of that name."""

    def __init__(self, channel: int, judged: Iterable[str]) -> None:
        self._channel = channel
        self._judged = set(judged)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._judged:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _stand_in(spec.name, self._channel)

    def exec_module(self, module: types.ModuleType) -> None:
        return


# ---- both in one process --------------------------------------------------------------------------------


def run_counted(request: Request) -> NoReturn:
    """Run the tests beside the code they judge, and tell of each."""
    leave = os._exit
    header = request.header
    teller = _Teller(request.channel, header["nonce"])
    watch = testing.Watch()
    before = {**testing.fingerprint(), **testing.noted_imports(header["imports"])}
    sources = {path: request.files[path] for path in header["tests"]}
    run = [path for path in header["paths"] if path != testing.PYTEST_INI]
    if header["pytest"]:
        watch.reach_pytest(before, {os.path.abspath(path): sources[path] for path in run})
    if b"assert" not in sources.get(testing.PYTEST_INI, b""):  # else pytest may be told to read them by itself
        _hide(run, sources)
    run_suite(request, teller, testing.source_roots(os.getcwd()), watch)
    teller.end([*testing.changes(before), *filter(lambda path: _read_file(path) != sources[path], sources)])
    sys.stdout.flush()
    leave(0)  # no exit handler of the judged code runs


def _hide(paths: Iterable[str], sources: dict[str, bytes]) -> None:
    """Empty the files of tests, which are run from memory: judged code finds no answers in them."""
    for path in paths:
        os.truncate(path, 0)
        sources[path] = b""


def _read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


class _Teller(testing.Recorder):
    """Tells of every test at once, with a word that only this run knows."""

    __slots__ = ("_channel", "_finished", "_nonce", "_traced")

    def __init__(self, channel: int, nonce: str) -> None:
        self._channel = channel
        self._nonce = nonce
        self._finished = 0
        self._traced = False

    def start(self, test: str) -> None:
        self._tell(test, "started", "")

    def finish(self, test: str, outcome: str, message: str = "") -> None:
        self._finished += 1
        self._traced |= sys.gettrace() is not None or sys.getprofile() is not None
        self._tell(test, outcome, message[:200])

    def end(self, changed: Sequence[str]) -> None:
        """Every test was told of; `changed`: what of this process's own was tampered with."""
        changed = [*changed, *(["the trace function"] if self._traced else [])]
        self._tell(str(self._finished), "end", ", ".join(changed[:5]))

    def _tell(self, test: str, outcome: str, message: str) -> None:
        _send(self._channel, [self._nonce, test, outcome, message])
