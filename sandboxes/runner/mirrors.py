"""The tests' end of the channel: stand-ins for the modules, classes and objects of the judged code.

A class of the judged code appears here as a class with the same name, bases and special methods. Operations on its
objects are executed in the judged code's process, and results come back as data, so the judged code never learns what a
test compares them with. The exceptions are comparisons and sums of its own objects, which the judged code executes
itself; `sandboxes.runner.decoys` checks those.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import json.encoder
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import decoys, values
from .objects import (
    SPECIAL_METHODS,
    Encoder,
    ProtocolError,
    abstract_names,
    library_class,
    library_name,
    receive,
    register,
    send,
)

_EXCEPTIONS = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}
_ENDS = {"__next__": StopIteration, "__anext__": StopAsyncIteration}
"""Methods that may raise an exception that ends a loop. From any other call it would end a test's
`for value in map(function, inputs)` early, so that nothing is compared."""
_PLAIN_TYPES = {kind.__name__: kind for kind in (int, float, complex, str, bytes, tuple, frozenset)}
_OTHER_BASES: dict[str, tuple[str, ...]] = {
    "builtins": ("list", "dict", "set", "bytearray"),
    "collections": ("OrderedDict", "Counter", "defaultdict", "deque"),
    "datetime": ("tzinfo",),
}
"""Classes of the standard library that mirrored classes derive from, for `isinstance`. The content of the objects is in
the judged code's process, where the methods are executed."""
_NUMBER = "\0number"
_MAX_OBJECTS = 1_000_000
_MAX_DOC = 10_000
"""Maximum characters of a docstring that crosses."""


class SolutionError(Exception):
    """The judged code raised an exception that is neither an `Exception` nor `SystemExit`."""


class SolutionGoneError(BaseException):
    """The judged code's process ended or sent an invalid message. Not an `Exception`: no test may expect it."""


class Solution:
    """Client for the judged code's process.

    Args:
        channel: descriptor of the socket to its process.
        judged: full names of its modules.
        folder: folder of the test files.
        sync: whether tests inspect containers after passing them in. Otherwise changes to these are applied only from
            calls that return None.
    """

    def __init__(self, channel: int, judged: Iterable[str] = (), folder: str = "", sync: bool = True) -> None:
        self._channel = channel
        self._judged = set(judged)
        self._folder = folder
        self._sync = sync
        self._encoder = Encoder(0, self._refer, self._resolve)
        self._mirrors: dict[int, Any] = {}
        self._classes: dict[int, MirrorType] = {}
        self._locals: list[Any] = []
        self._local_numbers: dict[int, int] = {}
        self._attached: dict[int, set[str]] = {}
        """Attributes that the judged code has set on objects of the tests, by their number."""
        self._failed_inside: BaseException | None = None
        self._raised: list[Exception] = []
        self.doubts = decoys.Doubts(self)

    # --- modules

    def module(self, name: str) -> Module:
        """Import a judged module in its process. Raises the exceptions of the import."""
        described = self._raw({"op": "module", "name": name})
        try:
            number, names = int(described["o"]), [str(item) for item in described["names"]]
            stars = None if described["all"] is None else [str(item) for item in described["all"]]
        except (TypeError, KeyError, ValueError) as error:
            raise SolutionGoneError("the judged code sent an invalid message") from error
        module = Module(name)
        module.__dict__.update({_NUMBER: number, "\0solution": self, "\0names": names, "\0stars": stars})
        return module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a stand-in for a judged module (as an entry of `sys.meta_path`)."""
        if name not in self._judged:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = self.folders(name)  # test files may be inside the package
        return spec

    def folders(self, name: str) -> list[str]:
        """Folders of test files inside a judged package."""
        return [os.path.join(self._folder, *top, *name.split(".")) for top in ((), ("src",))]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Create the stand-in (as a loader)."""
        return self.module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is complete (as a loader)."""

    # --- requests

    def ask(self, operation: str, target: int, name: str = "", /, *arguments: Any, **named: Any) -> Any:
        """Execute an operation on an object and return its result. Raises the exceptions of the judged code."""
        try:
            request = self._encoder.request(operation, target, name, arguments, named)
        except RecursionError as error:
            raise TypeError("arguments that are nested too deeply") from error
        may_end = _ENDS.get(name) if operation in ("special", "await") else None
        try:
            return self._decode(self._raw(request, may_end))
        finally:
            self._encoder.settle()

    def each(self, target: Any, name: str, operands: Sequence[Any]) -> list[Any]:
        """Call a special method of an object once for each operand.

        An answer is a bool, number, text or NotImplemented as it is, a tuple with the truth of any other object, or
        None if the method raises.
        """
        answers = self.ask("each", number_of(target), name, *operands)
        if type(answers) is not list or len(answers) != len(operands) or not all(map(_is_answer, answers)):
            raise SolutionGoneError("the judged code sent an invalid message")
        return answers

    def _raw(self, request: dict[str, Any], may_end: type[BaseException] | None = None) -> Any:
        """Send a request and return the answer's data. Raises the exception that the answer reports."""
        answer = self._exchange(request)
        try:
            self._encoder.apply(answer, keep_own=answer.get("v") is not None and not self._sync)
        except values.MalformedValueError as error:
            raise SolutionGoneError("the judged code sent an invalid message") from error
        failed, self._failed_inside = self._failed_inside, None
        if failed is not None:
            raise failed
        if "error" in answer:
            raise self._error(answer, may_end)
        if "v" not in answer:
            raise SolutionGoneError("the judged code sent an invalid message")
        return answer["v"]

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer, serving the judged code's own requests meanwhile."""
        try:
            send(self._channel, {**request, **self._encoder.changes()})
            while True:
                answer = receive(self._channel)
                for number, text in answer.get("output", ()):
                    (sys.stderr if number else sys.stdout).write(str(text))
                if "op" not in answer:
                    return answer
                send(self._channel, self._serve(answer))
        except (ProtocolError, OSError) as error:
            raise SolutionGoneError(f"the judged code is gone: {error}") from error

    def _decode(self, data: Any) -> Any:
        try:
            return self._encoder.decode(data)
        except values.MalformedValueError as error:  # a ValueError, which a test may expect
            raise SolutionGoneError("the judged code sent an invalid message") from error

    def _error(self, answer: Mapping[str, Any], may_end: type[BaseException] | None) -> BaseException:
        if type(number := answer.get("raised")) is int and 0 <= number < len(self._raised):
            raised = self._raised[number]  # raised by the tests and not caught by the judged code
            if type(raised) is may_end or _may_cross(type(raised)):
                return raised
        arguments = self._decode({"t": answer.get("args", [])})
        message = str(answer.get("m", ""))
        if isinstance(name := answer["error"], str):
            kind = _EXCEPTIONS.get(name)
            if kind is not may_end and not _may_cross(kind):
                return SolutionError(f"{name}: {message}")
            assert kind is not None
            try:
                return kind(*arguments)
            except Exception:  # noqa: BLE001  arguments that this exception does not take
                return SolutionError(f"{name}: {message}")
        error = self._decode(name)
        if not isinstance(error, Exception):
            return SolutionError(message)
        error.args = arguments
        return error

    # --- objects

    def _refer(self, value: Any) -> Any:
        """A reference to a value of the tests that does not cross as data."""
        if isinstance(value, (Mirror, MirrorType, Module)):
            return {"o": number_of(value)}
        if (name := library_name(value)) is not None:
            return {"g": name}
        if isinstance(value, BaseException) and _EXCEPTIONS.get(type(value).__name__) is type(value):
            return {"e": [type(value).__name__, [self._encoder.encode(item) for item in value.args]]}
        if isinstance(value, types.TracebackType):
            return None
        if isinstance(value, type) and issubclass(value, BaseException):
            return self._refer(next(base for base in value.__mro__ if base.__module__ == "builtins"))
        number = self._local_numbers.get(id(value))
        if number is None:
            number = self._local_numbers[id(value)] = len(self._locals)
            self._locals.append(value)
        name = str(getattr(value, "__name__", type(value).__name__))
        doc = value.__doc__ if isinstance(value, types.FunctionType) else None
        return {"l": [number, name, _special_methods(value), abstract_names(type(value)), doc and doc[:_MAX_DOC]]}

    def _resolve(self, data: dict[str, Any]) -> Any:
        """The value of a reference from the judged code. Raises `MalformedValueError`."""
        ((tag, body),) = data.items()
        try:
            if tag == "o":
                return self._mirror(*body)
            if tag == "l":
                return self._locals[body]
            if tag == "g":
                return library_class(body)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise values.MalformedValueError("not an object") from error
        raise values.MalformedValueError("unknown tag")

    def _mirror(self, number: int, kind: int | None = None, *plain: Any) -> Any:
        if type(number) is not int or not 0 <= number < _MAX_OBJECTS:
            raise LookupError(number)
        if kind is None:
            return self._class(number)
        if number not in self._mirrors:
            mirrored = self._class(kind)
            base = mirrored.__dict__["\0plain"]
            content = (self._decode(plain[0]),) if plain and base is not None else ()
            if content and type(content[0]) is not base:
                raise ValueError("a plain value of another type")
            if (mirrored.__module__, mirrored.__name__) == ("builtins", "coroutine"):
                return self._run(number)
            mirror: Any = mirrored.__base__.__new__(mirrored, *content)  # type: ignore[arg-type]
            object.__setattr__(mirror, _NUMBER, number)
            self._mirrors[number] = mirror
            if isinstance(mirror, BaseException):  # otherwise its text would be empty until it is raised
                mirror.args = self._decode(self._raw(self._encoder.request("get", number, "args", (), {})))
        return self._mirrors[number]

    async def _run(self, number: int) -> Any:
        return self.ask("await", number)

    def _class(self, number: int) -> MirrorType:
        if number not in self._classes:
            described = self._raw({"op": "describe", "o": number})
            self._classes[number] = _mirror_class(self, number, described)
        return self._classes[number]

    # --- requests of the judged code about objects of the tests

    def _serve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request about an object that tests have passed in."""
        try:
            self._encoder.apply(dict(request))
            result = self._serve_one(request)
            return {"v": self._encoder.encode_all(result)[0], **self._encoder.changes()}
        except values.MalformedValueError as error:
            raise SolutionGoneError("the judged code sent an invalid message") from error
        except Exception as error:  # noqa: BLE001  the judged code handles exceptions of the tests' functions
            if isinstance(error, AssertionError):
                self._failed_inside = error  # fails the test even if the judged code suppresses it
            kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
            if isinstance(error, Mirror):
                return {"error": {"o": number_of(error)}}
            self._raised.append(error)
            return {"error": {"e": [kind.__name__, self._arguments(error)]}, "raised": len(self._raised) - 1}

    def _arguments(self, error: BaseException) -> list[Any]:
        try:
            return self._encoder.encode_all(*error.args)
        except (values.NotPlainDataError, RecursionError):
            return [str(error)]

    def _serve_one(self, request: Mapping[str, Any]) -> Any:
        local, name, operation = self._locals[request["o"]], str(request["name"]), request["op"]
        arguments, named = self._encoder.arguments(request)
        if operation == "special" and name in SPECIAL_METHODS:
            if name == "__call__":
                return local(*arguments, **named)
            return getattr(type(local), name)(local, *arguments, **named)
        attached = self._attached.setdefault(request["o"], set())
        of_function = isinstance(local, types.FunctionType)
        if operation == "vars":
            if not _is_open(local):
                raise AttributeError("__dict__")
            return dict(vars(local))
        if operation not in ("get", "set"):
            raise SolutionGoneError("the judged code sent an invalid message")
        if name.startswith("__") or not (_is_open(local) or (of_function and name != "pytestmark")):
            raise AttributeError(name)
        if operation == "set":
            attached.add(name)
            return setattr(local, name, *arguments)
        if of_function and name not in attached:  # its other attributes are private to the tests
            raise AttributeError(name)
        return getattr(local, name)

    # --- checks in a copy of the judged code's process

    def fork(self) -> bool:
        """Let a copy of the judged code answer until `join`. Returns False if no copy can be made."""
        if self._encoder.by_copy:
            return False
        try:
            self._raw({"op": "fork"})
        except Exception:  # noqa: BLE001  the process limit is reached, or a call is in progress
            return False
        self._before = (dict(self._mirrors), dict(self._classes))
        self._encoder.by_copy = True
        return True

    def join(self) -> None:
        """End the copy and return to the original process."""
        send(self._channel, {"op": "join"})
        self._encoder.by_copy = False
        self._mirrors, self._classes = self._before


def _is_answer(value: Any) -> bool:
    is_plain = value is None or value is NotImplemented or type(value) in (bool, int, float, str)
    return is_plain or (type(value) is tuple and list(map(type, value)) == [bool])


def _is_open(value: Any) -> bool:
    """Whether the judged code may see and set attributes of an object of the tests."""
    kind = type(value)
    is_test = isinstance(value, unittest.TestCase) or kind.__name__.startswith("Test")
    return not (isinstance(value, type) or kind.__module__ == "builtins" or is_test)


def _special_methods(value: Any) -> list[str]:
    """Names of the special methods that an object's class defines."""
    if isinstance(value, type):
        return ["__call__"]
    kind = type(value)
    methods = ((name, getattr(kind, name, None)) for name in SPECIAL_METHODS)
    return sorted(name for name, method in methods if method not in (None, getattr(object, name, None)))


def _may_cross(kind: type[BaseException] | None) -> bool:
    if kind is None:
        return False
    return kind is SystemExit or (
        issubclass(kind, Exception) and not issubclass(kind, (StopIteration, StopAsyncIteration, BaseExceptionGroup))
    )


class MirrorType(type):
    """A class of the judged code."""

    def __call__(cls, /, *arguments: Any, **named: Any) -> Any:
        """Make an object in the judged code's process."""
        made = _ask(cls, "call", "", *arguments, **named)
        decoys.remember(made, cls, arguments, named)
        return made

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _OF_CLASSES:
            raise AttributeError(name)
        return _ask(cls, "get", name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith(("__", "_abc_")):
            type.__setattr__(cls, name, value)
        else:
            _ask(cls, "set", name, value)

    def __getitem__(cls, item: Any) -> Any:
        return cls._operate("getitem", item)

    def __len__(cls) -> int:
        length: int = cls._operate("len")
        return length

    def __iter__(cls) -> Any:
        return cls._operate("iter")

    def __contains__(cls, item: Any) -> Any:
        return cls._operate("contains", item)

    def __bool__(cls) -> bool:
        return True

    def _operate(cls, name: str, *arguments: Any) -> Any:
        return _ask(cls, "operate", name, *arguments)

    def __instancecheck__(cls, instance: Any) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        return isinstance(instance, Mirror) and _ask(cls, "isinstance", "", instance) is True

    def __subclasscheck__(cls, subclass: type) -> bool:
        if type.__subclasscheck__(cls, subclass):
            return True
        known = isinstance(subclass, MirrorType)
        return known and _ask(cls, "issubclass", "", subclass) is True


class Mirror:
    """An object of the judged code."""

    def __init_subclass__(cls, **named: Any) -> None:
        if "\0plain" not in cls.__dict__:
            raise TypeError(f"{cls.__name__} derives from a judged class, which needs run_tests(how='counted')")

    def __init__(self, /, *arguments: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__") and name not in _READABLE) or name.startswith("\0"):
            raise AttributeError(name)
        decoys.looked_up(self, name)
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self, BaseException) and name in (
            "__traceback__",
            "__context__",
            "__cause__",
            "__notes__",
            "args",
        ):
            object.__setattr__(self, name, value)
        else:
            _ask(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delete", name)

    def __bool__(self) -> bool:
        has_length = any("__len__" in vars(kind) for kind in type(self).__mro__)  # `hasattr` also looks at MirrorType
        truth = not has_length or len(self) != 0
        decoys.check_truth(self, truth)
        return truth

    def __eq__(self, other: object) -> Any:
        if self is not other:
            return NotImplemented
        decoys.equals_itself(self)
        return True

    __hash__ = object.__hash__

    def __copy__(self) -> Any:
        return _ask(self, "copied", "copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return _ask(self, "copied", "deepcopy")

    def __repr__(self) -> str:
        if isinstance(self, BaseException):
            return BaseException.__repr__(self)
        return f"<{type(self).__name__} of the judged code>"


_OF_CLASSES = {"__members__", "__match_args__"}
"""Dunder attributes of classes that are looked up in the judged code's process."""
_READABLE = {
    "__cmp__",
    "__html__",
    "__json__",
    "__name__",
    "__qualname__",
    "__wrapped__",
    "__annotations__",
    "__cause__",
    "__notes__",
}


def number_of(value: Any) -> int:
    """The number of a mirrored object, class or module."""
    number: int = (type.__getattribute__ if isinstance(value, type) else object.__getattribute__)(value, "__dict__")[
        _NUMBER
    ]
    return number


def _solution_of(mirrored: Mirror | type) -> Solution:
    kind = mirrored if isinstance(mirrored, type) else type(mirrored)
    solution: Solution = type.__getattribute__(kind, "\0solution")
    return solution


def _ask(mirrored: Mirror | type, operation: str, name: str = "", /, *arguments: Any, **named: Any) -> Any:
    """Ask the solution for an operation on the original of a mirrored object or class."""
    return _solution_of(mirrored).ask(operation, number_of(mirrored), name, *arguments, **named)


def _mirror_class(solution: Solution, number: int, described: Any) -> MirrorType:
    """The class that mirrors a class of the judged code. Raises `SolutionGoneError` for an invalid description."""
    try:
        bases = [solution._encoder.decode(base) for base in described["bases"]]
        name, module = str(described["name"]), str(described["module"])
        plain = _PLAIN_TYPES.get(described["plain"])
        namespace: dict[str, Any] = {"\0plain": plain, "\0solution": solution, "__module__": module, "__test__": False}
        namespace["__qualname__"] = str(described["qualname"])
        for method in described["methods"]:
            namespace[str(method)] = _method(str(method))
        for method, origin in described["special"].items():
            if method in SPECIAL_METHODS:
                namespace[method] = None if origin == "none" else special_method(method, by_value=origin == "plain")
        first = [base for base in bases if isinstance(base, MirrorType) or base in _PLAIN_TYPES.values()]
        exceptions = [base for base in bases if base in _EXCEPTIONS.values()]
        if (exception := _library_exception(module, name)) is not None:
            first, exceptions = [], [exception]
        mirror = () if any(isinstance(base, MirrorType) for base in first) else (Mirror,)
        others = [base for base in bases if base.__name__ in _OTHER_BASES.get(base.__module__, ())]
        for method in {item for base in others for item in dir(base) if not item.startswith("__")} - {"fromkeys"}:
            namespace.setdefault(method, _method(method))
        namespace.update({"__doc__": _Doc(described["doc"]), _NUMBER: number})
        if others:
            vars(json.encoder)["c_make_encoder"] = None  # it reads the content of the mirror itself, which is empty
        mirrored = MirrorType(name, (*first, *mirror, *others, *exceptions), namespace)
        register(mirrored, described["abstract"])
        return mirrored
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise SolutionGoneError("the judged code sent an invalid message") from error


def _library_exception(module: str, name: str) -> type[Exception] | None:
    """An exception of the standard library, which tests may expect."""
    if module.partition(".")[0] not in sys.stdlib_module_names or module.partition(".")[0] == "unittest":
        return None
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) and _may_cross(kind) else None


class _Doc:
    """`__doc__` of a class and of its objects, which may have different ones, as functions do."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def __get__(self, mirror: Any, kind: Any = None) -> Any:
        return self._text if mirror is None else _ask(mirror, "get", "__doc__")


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, /, *arguments: Any, **named: Any) -> Any:
        decoys.looked_up(self, name)
        return _ask(self, "method", name, *arguments, **named)

    method.__name__ = name
    return method


def special_method(name: str, *, by_value: bool) -> Callable[..., Any]:
    """A special method that is executed in the judged code's process.

    `by_value`: a built-in container defines it, so comparisons run here, on a copy.
    """
    if by_value and name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
        return lambda self, other: getattr(_copy(self), name)(_copy(other))
    if name == "__await__":
        return _await
    if name == "__anext__":
        return _anext

    def method(self: Any, /, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "special", name, *arguments, **named)

    if name == "__exit__":
        return _exit
    if name in decoys.CHECKED and not (by_value and name == "__contains__"):
        return decoys.checked(name, method)
    if name == "__bool__":

        def truth(self: Any) -> Any:
            answer = method(self)
            decoys.check_truth(self, bool(answer))
            return answer

        return truth
    if name == "__call__":

        def call(self: Any, /, *arguments: Any, **named: Any) -> Any:
            made = method(self, *arguments, **named)
            decoys.remember(made, self, arguments, named)
            return made

        return call
    return method


def _copy(value: Any) -> Any:
    return _ask(value, "value") if isinstance(value, Mirror) else value


def _await(self: Any) -> Any:
    yield from ()
    return _ask(self, "await")


async def _anext(self: Any) -> Any:
    """The next item of an `async for`; only this method may end the loop."""
    solution = _solution_of(self)
    step = solution.ask("special", number_of(self), "__anext__")
    return solution.ask("await", number_of(step), "__anext__") if isinstance(step, Mirror) else await step


def _exit(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
    """Leave a context. It can't suppress a failed assertion or a skip of the tests."""
    answer = _ask(self, "special", "__exit__", kind, error, None)
    ours = isinstance(error, (AssertionError, unittest.SkipTest)) or not isinstance(error, (Exception, type(None)))
    return False if ours and not isinstance(error, Mirror) else answer


class Module(types.ModuleType):
    """A judged module. Attributes are looked up on access."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("\0") or (name.startswith("__") and name not in self.__dict__["\0names"]):
            raise AttributeError(name)
        solution: Solution = self.__dict__["\0solution"]
        try:
            return solution.ask("get", number_of(self), name)
        except AttributeError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        spec = sys.modules.get(f"{self.__dict__['__name__']}.{name}")
        if name.startswith("__") or (spec is not None and spec is value):
            self.__dict__[name] = value  # set by the import system
        else:
            self.__dict__["\0solution"].ask("set", number_of(self), name, value)

    def __dir__(self) -> list[str]:
        return list(self.__dict__["\0names"])

    def namespace(self) -> dict[str, Any]:
        """The module's attributes, except those named like built-ins, since `abs` of the tests must not be replaced."""
        names = [name for name in self.__dict__["\0names"] if not hasattr(builtins, name)]
        return {name: getattr(self, name) for name in names}

    @property
    def __all__(self) -> list[str]:
        """Names that `from module import *` imports: none that the importer already defines."""
        importer = sys._getframe(1).f_globals
        stars = self.__dict__["\0stars"]
        public = stars if stars is not None else [name for name in self.__dict__["\0names"] if not name.startswith("_")]
        return [name for name in public if name not in importer and not hasattr(builtins, name)]
