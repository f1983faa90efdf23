"""The judged code's end of the channel: imports modules, makes calls and serves the tests' requests on objects.

Nothing here is trusted: judged code runs in this process and may change any of it. It never learns what tests expect.
"""

from __future__ import annotations

import _thread
import copy
import importlib
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from . import testing, values
from .objects import (
    CLASSES_OF,
    SPECIAL_METHODS,
    Encoder,
    ProtocolError,
    abstract_names,
    library_name,
    library_value,
    receive,
    register,
    send,
)

if TYPE_CHECKING:
    import asyncio

SOLUTION = "solution"
"""Module name of judged code that is one text."""
_MAX_OUTPUT = 1 << 18
_MAX_WRITES = 10_000
_BUILT_IN: tuple[type, ...] = (int, float, complex, str, bytes, tuple, frozenset)
"""Immutable types; an object of a derived class is sent together with its plain value."""
_CONTAINERS: tuple[type, ...] = (list, dict, set, bytearray)
_OF_EVERY_MODULE = {
    "__all__", "__builtins__", "__cached__", "__dir__", "__file__", "__getattr__", "__loader__", "__name__",
    "__package__", "__path__", "__spec__",
}  # fmt: skip


def serve(code: str, channel: int) -> NoReturn:
    """Serve the tests until they close the channel. `code` is the source of the module `solution`."""
    sys.path[1:1] = testing.source_roots(os.getcwd())[1:]
    server = _Server(code, channel)
    sys.stdout, sys.stderr = _Output(sys.stdout, 0, server.output), _Output(sys.stderr, 1, server.output)
    server.serve()


class _Output:
    """A text stream that also collects what is written, for tests that capture output."""

    def __init__(self, stream: Any, number: int, collected: list[list[Any]]) -> None:
        self._stream = stream
        self._number = number
        self._collected = collected

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        written: int = self._stream.write(text)
        if len(self._collected) < _MAX_WRITES:
            self._collected.append([self._number, text[:_MAX_OUTPUT]])
        return written


class _Server:
    def __init__(self, code: str, channel: int) -> None:
        self._code = code
        self._channel = channel
        self._encoder = Encoder(1, self._refer, self._resolve)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._locals: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = _thread.RLock()
        self.output: list[list[Any]] = []

    def serve(self) -> NoReturn:
        """Serve requests until the tests close the channel or end a fork."""
        while (request := self._receive()).get("op") != "join":
            if request.get("op") == "fork":
                self._fork()
            else:
                self._answer(request)
        os._exit(0)

    def _fork(self) -> None:
        """Let a copy of this process answer until the tests send `join`; its changes are then lost."""
        try:
            pid = os.fork()
        except OSError as error:
            self._send(self._failure(error))
            return
        if pid:
            _, status = os.waitpid(pid, 0)
            if status:
                os._exit(1)  # closes the channel, since the tests wait for an answer that won't come
            return
        self._encoder.by_copy = True
        self._send({"v": None})

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            self._encoder.apply(request)
            if request["op"] == "module":
                answer = {"v": self._module(request["name"])}
            elif request["op"] == "describe":
                answer = {"v": self._describe(self._objects[request["o"]])}
            else:
                arguments, named = self._encoder.arguments(request)
                operate = self._run if request["op"] == "await" else _OPERATIONS[request["op"]]
                result = operate(self._objects[request["o"]], request["name"], *arguments, **named)
                answer = {"v": self._encoder.encode_all(result)[0]}
        except BaseException as error:  # noqa: BLE001  SystemExit is reported too
            answer = self._failure(error)
        with self._turn:
            self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        sys.stdout.flush()
        message.update(self._encoder.changes())
        if self.output:
            message["output"] = list(self.output)
            self.output.clear()
        try:
            send(self._channel, message)
        except values.NotPlainDataError as error:
            send(self._channel, self._failure(error))

    def _failure(self, error: BaseException) -> dict[str, Any]:
        is_custom = type(error).__module__ != "builtins"
        # Unlike its `args`, the reduced form of an OSError includes the file name.
        items = error.__reduce__()[1] if isinstance(error, OSError) and not is_custom else error.args
        try:
            arguments = self._encoder.encode_all(*items)
        except (values.NotPlainDataError, RecursionError):
            arguments = []
        if "raised" in getattr(error, "__dict__", ()) and type(raised := error.__dict__["raised"]) is _Raised:
            return {"error": type(error).__name__, "raised": raised.number, "args": arguments}
        return {
            "error": self._refer(error) if is_custom else type(error).__name__,
            "args": arguments,
            "m": testing.text_of(error),
        }

    # --- requests

    def _module(self, name: str) -> dict[str, Any]:
        """Import a module and return its number and names; `solution` is executed from its source text if given."""
        if name == SOLUTION and self._code:
            module = types.ModuleType(SOLUTION)
            sys.modules[SOLUTION] = module
            exec(compile(self._code, f"{SOLUTION}.py", "exec", dont_inherit=True), module.__dict__)
        else:
            module = importlib.import_module(name)
        names = [name for name in list(vars(module)) if isinstance(name, str) and name not in _OF_EVERY_MODULE]
        public = getattr(module, "__all__", None)
        stars = [str(name) for name in public] if isinstance(public, (list, tuple)) else None
        return {"o": self._number(module), "names": names, "all": stars}

    def _run(self, awaitable: Any, name: str) -> Any:
        import asyncio  # imports hundreds of modules, and is rarely needed

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)

        async def run() -> Any:
            return await awaitable

        return self._loop.run_until_complete(run())

    # --- objects by number

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    def _refer(self, value: Any) -> Any:
        if isinstance(value, _Local):
            return {"l": object.__getattribute__(value, "_number")}
        if isinstance(value, type):
            shared = library_name(value, CLASSES_OF)
            return {"g": shared} if shared is not None else {"o": [self._number(value)]}
        reference = [self._number(value), self._number(type(value))]
        kind, plain = _base(value)
        if kind in _BUILT_IN:
            reference.append(self._encoder.encode(plain))
        return {"o": reference}

    def _resolve(self, data: dict[str, Any]) -> Any:
        ((tag, body),) = data.items()
        if tag == "o":
            return self._objects[body]
        if tag == "g":
            return library_value(body)
        if tag == "e":
            return library_value(f"builtins.{body[0]}")(*map(self._encoder.decode, body[1]))
        number = body[0]
        if number not in self._locals:
            self._locals[number] = _local(self, *body)
        return self._locals[number]

    def _describe(self, kind: type) -> dict[str, Any]:
        """Describe a class for the tests' end, which creates a mirror class from the description."""
        special: dict[str, str] = {}
        methods: list[str] = []
        plain = next((base for base in kind.__mro__ if base in (*_BUILT_IN, *_CONTAINERS)), None)
        for base in kind.__mro__:
            if (
                base is object
                or base in _BUILT_IN
                or (base.__module__ == "builtins" and issubclass(base, BaseException))
            ):
                continue
            for name, member in list(vars(base).items()):
                if name in SPECIAL_METHODS and name not in special:
                    special[name] = "none" if member is None else "plain" if base in _CONTAINERS else "own"
                elif isinstance(member, types.FunctionType) and not name.startswith("__"):
                    methods.append(name)
        return {
            "name": kind.__name__,
            "qualname": kind.__qualname__,
            "module": kind.__module__,
            "bases": [self._refer(base) for base in kind.__bases__ if base is not object],
            "special": special,
            "methods": methods,
            "plain": plain.__name__ if plain else None,
            "abstract": abstract_names(kind),
            "doc": kind.__doc__ if isinstance(kind.__doc__, str) else None,
        }

    # --- objects of the tests

    def ask(self, operation: str, number: int, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Ask the tests, which are waiting for an answer of this process, for an operation. Threads take turns."""
        with self._turn:
            self._send(self._encoder.request(operation, number, name, arguments, named))
            while "op" in (answer := self._receive()):
                self._answer(answer)
            self._encoder.apply(answer)
            if "error" in answer:
                error = self._encoder.decode(answer["error"])
                if "raised" in answer:
                    error.__dict__["raised"] = _Raised(answer["raised"])
                raise error
            return self._encoder.decode(answer["v"])

    def _receive(self) -> dict[str, Any]:
        try:
            return receive(self._channel)
        except ProtocolError:
            os._exit(0)


def outcome(target: Any, name: str, operand: Any) -> Any:
    """Call a special method and return its answer in the form of `mirrors.Solution.each`."""
    try:
        answer = _bound(target, name)(operand)
        return answer if answer is NotImplemented or type(answer) in (bool, int, float, str) else (bool(answer),)
    except BaseException:  # noqa: BLE001  also SystemExit
        return None


_OPERATORS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "len": len,
    "iter": iter,
    "contains": operator.contains,
}
"""Operators that tests apply to classes, by name."""
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "call": lambda target, _, /, *arguments, **named: target(*arguments, **named),
    "method": lambda target, name, /, *arguments, **named: getattr(target, name)(*arguments, **named),
    "special": lambda target, name, /, *arguments, **named: _bound(target, name)(*arguments, **named),
    "each": lambda target, name, *operands: [outcome(target, name, operand) for operand in operands],
    "operate": lambda target, name, *arguments: _OPERATORS[name](target, *arguments),
    "isinstance": lambda target, _, value: isinstance(value, target),
    "issubclass": lambda target, _, value: issubclass(value, target),
    "value": lambda target, _: _base(target)[1],
    "copied": lambda target, name: getattr(copy, name)(target),
}
"""Operations that tests may ask for, as functions of an object, a name and arguments."""


def _bound(target: Any, name: str) -> Any:
    """Return an object's special method, looked up on its class as the interpreter does."""
    return getattr(type(target), name).__get__(target)


_TO_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    str: str.__str__,
    complex: complex.__complex__,
    dict: lambda value: dict(dict.items(value)),
}


def _base(value: Any) -> tuple[type | None, Any]:
    """The built-in type that the class of `value` is derived from, and the plain value of that type."""
    for base in type(value).__mro__:
        if base in _TO_PLAIN:
            return base, _TO_PLAIN[base](value)
        if base in (*_BUILT_IN, *_CONTAINERS):
            return base, base(base.__iter__(value))  # type: ignore[attr-defined]
    return None, None


class _Raised:
    """Marks an exception as raised by the tests, with its number there."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Local:
    """Base of the stand-ins for objects of the tests."""

    __slots__ = ("_names", "_number", "_server")
    _names: dict[str, Any]
    _number: int
    _server: _Server

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            try:
                return self._names[name]
            except KeyError:
                raise AttributeError(name) from None
        return self._server.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # as `functools.wraps` does to a function
            self._names[name] = value
        else:
            self._server.ask("set", self._number, name, value)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        attributes: dict[str, Any] = self._server.ask("vars", self._number, "")
        return attributes

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


_local_classes: dict[tuple[str, ...], type] = {}


def _local(
    server: _Server, number: int, name: str, special: list[str], abstract: list[str], doc: str | None = None
) -> Any:
    key = (name, *special, *abstract)
    if (kind := _local_classes.get(key)) is None:
        asking: dict[str, Any] = {method: _asking(method) for method in special}
        text = property(lambda self: self._names["__doc__"])
        kind = _local_classes[key] = type(name, (_Local,), {**asking, "__slots__": (), "__doc__": text})
        register(kind, abstract)
    local: Any = object.__new__(kind)
    names = {"__name__": name, "__qualname__": name, "__doc__": doc}
    for slot, value in (("_number", number), ("_server", server), ("_names", names)):
        object.__setattr__(local, slot, value)
    return local


def _asking(method: str) -> Callable[..., Any]:
    def ask(self: Any, /, *arguments: Any, **named: Any) -> Any:
        return self._server.ask("special", self._number, method, *arguments, **named)

    return ask
