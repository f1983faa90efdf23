"""The protocol between tests and the code they judge: one request at a time, values by copy, objects by number.

Both ends encode with an `Encoder`. Plain values cross as copies. A mutable container (list, dict, deque, ...) gets a
number when it first crosses; later messages carry the sender's changes to it, so that both ends see one container.
Everything else is a reference by number, which each end defines.
"""

from __future__ import annotations

import builtins
import collections
import copy
import functools
import importlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import values
from .wire import write_all

_Refer = Callable[[Any], Any]
_MUTABLE: dict[str, type] = {
    "l": list,
    "d": dict,
    "s": set,
    "a": bytearray,
    "o": collections.OrderedDict,
    "n": collections.Counter,
    "e": collections.defaultdict,
    "q": collections.deque,
}
"""Containers that are synchronized, by tag."""
_AS_THEY_ARE = {str, bool, type(None)}
_TAGS = {kind: tag for tag, kind in _MUTABLE.items()}
_ANONYMOUS = -1
"""Number of a container that crosses as a copy."""


class ProtocolError(Exception):
    """The other end closed the channel or sent something malformed."""


def send(fd: int, data: Any) -> None:
    """Write one frame. Raises `NotPlainDataError` if it is too long."""
    frame = values.pack_frame(data)
    if len(frame) - values.LENGTH.size > values.MAX_TOTAL:
        raise values.NotPlainDataError(f"a message of {len(frame)} bytes is over the limit of {values.MAX_TOTAL}")
    write_all(fd, frame)


def receive(fd: int) -> dict[str, Any]:
    """Read one frame, a JSON object. Raises `ProtocolError`."""
    (length,) = values.LENGTH.unpack(_read(fd, values.LENGTH.size))
    if length > values.MAX_TOTAL:
        raise ProtocolError("a message is too long")
    try:
        data = json.loads(_read(fd, length))
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a message is not JSON") from error
    if not isinstance(data, dict):
        raise ProtocolError("a message is not an object")
    return data


def _read(fd: int, size: int) -> bytes:
    chunks: list[bytes] = []
    while size:
        chunk = os.read(fd, size)
        if not chunk:
            raise ProtocolError("the process ended")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


class _Replica:
    """A container that both ends have, and its items after the last synchronization."""

    __slots__ = ("_agreed", "container")

    def __init__(self, container: Any) -> None:
        self.container = container
        self._agreed: list[Any] | None = None

    def agree(self) -> None:
        """Record the current items as known to both ends."""
        self._agreed = self._items()

    def is_changed(self) -> bool:
        """Whether the items changed since the last synchronization; nested containers have their own replicas."""
        agreed, items = self._agreed, self._items()
        return agreed is None or len(agreed) != len(items) or not all(map(operator.is_, agreed, items))

    def _items(self) -> list[Any]:
        container = self.container
        return [*container, *container.values()] if isinstance(container, dict) else list(container)


class Encoder:
    """Encodes and decodes values for one end of the channel.

    Args:
        first: number of this end's first container; one end uses even numbers, the other odd ones.
        refer: encodes values that don't cross as data; raises `NotPlainDataError`.
        resolve: decodes the references of the other end's `refer`.
    """

    def __init__(self, first: int, refer: _Refer, resolve: _Refer) -> None:
        self._refer = refer
        self._resolve = resolve
        self._next = self._first = first
        self._replicas: dict[int, _Replica] = {}
        self._numbers: dict[int, int] = {}  # by id; the replica keeps the container alive
        self._filling = 0
        self.by_copy = False
        """While set, containers cross as independent copies."""
        self._apart: set[int] = set()
        """Containers that are no longer synchronized: neither end sends changes to them."""
        self._kept: dict[int, Any] = {}
        self._copies: dict[int, Any] = {}

    def encode(self, value: Any, depth: int = 0) -> Any:
        """`value` as JSON-compatible data."""
        kind = type(value)
        if kind in (str, int, float, bool, type(None), bytes, complex):
            return values.encode(value)
        if depth >= values.MAX_DEPTH:
            raise values.NotPlainDataError(f"nested deeper than {values.MAX_DEPTH}")
        if kind in _TAGS:
            return self._container(value, depth)
        if kind is tuple or kind is frozenset:
            return {"t" if kind is tuple else "z": self._encode_each(value, depth)}
        known = _encode_library(value, self.encode, depth)
        return self._refer(value) if known is None else {"x": known}

    def _container(self, container: Any, depth: int) -> Any:
        if self.by_copy:
            return {"m": [_ANONYMOUS, self._content(container, depth)]}
        if (number := self._numbers.get(id(container))) is not None:
            return {"m": [number]}
        number, self._next = self._next, self._next + 2
        replica = self._register(number, container)
        content = self._content(container, depth)
        replica.agree()
        return {"m": [number, content]}

    def encode_all(self, *items: Any) -> list[Any]:
        """Encode all items or none: after an error, no container counts as sent."""
        before = self._next
        try:
            return [self.encode(item) for item in items]
        except BaseException:
            for number in range(before, self._next, 2):
                self._forget(number)
            raise

    def request(
        self, operation: str, number: int, name: str, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Encode a request for an operation on an object of the other end."""
        sent = self.encode_all(*arguments, *named.values())
        kwargs = dict(zip(named, sent[len(arguments) :], strict=True))
        return {"op": operation, "o": number, "name": name, "args": sent[: len(arguments)], "kwargs": kwargs}

    def arguments(self, request: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Decode the positional and named arguments of a request from the other end."""
        named = request["kwargs"].items()
        return [self.decode(item) for item in request["args"]], {str(name): self.decode(item) for name, item in named}

    def _register(self, number: int, container: Any) -> _Replica:
        replica = self._replicas[number] = _Replica(container)
        self._numbers[id(container)] = number
        return replica

    def _forget(self, number: int) -> None:
        replica = self._replicas.pop(number, None)
        if replica is not None:
            del self._numbers[id(replica.container)]

    def _content(self, container: Any, depth: int) -> Any:
        tag = _TAGS[type(container)]
        if tag == "a":
            return {tag: container.hex()}
        if not isinstance(container, dict):
            items = self._encode_each(container, depth)
            return {tag: [container.maxlen, items] if tag == "q" else items}
        pairs = [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in container.items()]
        factory = getattr(container, "default_factory", None)
        return {tag: [self.encode(factory), pairs] if tag == "e" else pairs}

    def _encode_each(self, items: Iterable[Any], depth: int) -> list[Any]:
        kinds = set(map(type, items))
        if kinds <= _AS_THEY_ARE or (kinds <= {int, *_AS_THEY_ARE} and all(map(values.is_small, items))):
            return list(items)  # fast path, 20 times as fast
        return [self.encode(item, depth + 1) for item in items]

    def _decode_each(self, items: list[Any], depth: int) -> list[Any]:
        if set(map(type, items)) <= {int, *_AS_THEY_ARE}:
            return items
        return [self.decode(item, depth + 1) for item in items]

    def decode(self, data: Any, depth: int = 0) -> Any:
        """The value that `data` stands for. Raises `MalformedValueError`."""
        if not isinstance(data, dict) or len(data) != 1:
            if isinstance(data, (list, dict)):
                raise values.MalformedValueError("not a value")
            return values.decode(data)
        if depth > values.MAX_DEPTH:
            raise values.MalformedValueError("too deep")
        ((tag, body),) = data.items()
        try:
            if tag == "m":
                return self._decode_container(body, depth)
            if tag == "t":
                return tuple(self._decode_each(body, depth))
            if tag == "z":
                return frozenset(values.watched(self._decode_each(body, depth)))
            if tag == "x":
                return _decode_library(body, functools.partial(self.decode, depth=depth + 1))
            if tag in ("i", "f", "c", "b"):
                return values.decode(data)
        except (TypeError, ValueError, OverflowError, AttributeError, LookupError, ArithmeticError) as error:
            raise values.MalformedValueError(f"bad {tag!r}") from error
        return self._resolve(data)

    def _decode_container(self, body: Any, depth: int) -> Any:
        number, *content = body
        if not content:
            if number in self._kept:
                return self._copy_of(number, depth)
            local = self._replicas[number].container
            return self._as_changed(local, depth) if self._kept else local
        ((kind, body),) = content[0].items()
        container: Any = collections.deque(maxlen=body[0]) if kind == "q" else _MUTABLE[kind]()
        if number == _ANONYMOUS:
            self._fill(container, content[0], depth)
            return container
        if number in self._replicas or type(number) is not int or number % 2 == self._first % 2:
            raise values.MalformedValueError("the number of a container is invalid or in use")
        replica = self._register(number, container)
        self._fill(container, content[0], depth)
        replica.agree()
        return container

    def _copy_of(self, number: int, depth: int) -> Any:
        """A copy of this end's container with the other end's changes; the container itself stays unchanged."""
        if number not in self._copies:
            container, content = self._kept[number]
            copied = self._copies[number] = type(container)()
            self._fill(copied, content, depth)
        return self._copies[number]

    def _as_changed(self, value: Any, depth: int) -> Any:
        """`value`, or a copy if it contains containers whose changes this end did not apply."""
        if type(value) not in _TAGS or depth > values.MAX_DEPTH or isinstance(value, (set, bytearray)):
            return value
        number = next((number for number, (container, _) in self._kept.items() if container is value), None)
        if number is not None:
            return self._copy_of(number, depth)
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        changed = [(key, item) for key, old in items if (item := self._as_changed(old, depth + 1)) is not old]
        copied = copy.copy(value) if changed else value
        for key, item in changed:
            copied[key] = item
        return copied

    def settle(self) -> None:
        """Discard changes that were not applied, after decoding the answer that carried them."""
        self._kept, self._copies = {}, {}

    def _fill(self, container: Any, content: Any, depth: int) -> None:
        """Replace the items of a container. Requests made meanwhile, for a class or a hash, carry no changes."""
        self._filling += 1
        try:
            self._fill_now(container, content, depth)
        finally:
            self._filling -= 1

    def _fill_now(self, container: Any, content: Any, depth: int) -> None:
        ((tag, body),) = content.items()
        if _TAGS[type(container)] != tag:
            raise values.MalformedValueError("the type of a container changed")
        if tag == "a":
            container[:] = bytes.fromhex(body)
        elif isinstance(container, dict):
            if tag == "e":
                factory, body = body
                setattr(container, "default_factory", self.decode(factory))  # noqa: B010  of a defaultdict
            pairs = [(self.decode(key, depth + 1), self.decode(item, depth + 1)) for key, item in body]
            container.clear()
            for key, item in values.watched(pairs):
                container[key] = item
        else:
            items = self._decode_each(body[1] if tag == "q" else body, depth)
            container.clear()
            (container.update if tag == "s" else container.extend)(values.watched(items) if tag == "s" else items)

    def changes(self) -> dict[str, Any]:
        """Fields for the next message with the changes at this end since the last one; {} if there are none.

        Containers that only the encoder references are forgotten at both ends.
        """
        if self.by_copy or self._filling or not self._replicas:
            return {}
        message: dict[str, Any] = {"forget": sorted(self._apart & self._replicas.keys())} if self._apart else {}
        for number in message.get("forget", ()):
            self._forget(number)
        self._apart.clear()
        for number, replica in list(self._replicas.items()):
            if replica.is_changed():
                message.setdefault("changes", []).append([number, self._content(replica.container, 0)])
                replica.agree()
            if sys.getrefcount(replica.container) == _UNSHARED:
                self._forget(number)
                message.setdefault("forget", []).append(number)
        return message

    def apply(self, message: dict[str, Any], *, keep_own: bool = False) -> None:
        """Apply the changes of the other end. Raises `MalformedValueError`.

        Args:
            message: message that carries the changes.
            keep_own: keep containers that were made at this end unchanged, and stop synchronizing them. Until `settle`,
                they are decoded as copies with the changes.
        """
        try:
            for number, content in message.get("changes", ()):
                replica = self._replicas[number]
                if keep_own and number % 2 == self._first % 2:
                    self._kept[number] = (replica.container, content)
                    self._apart.add(number)
                    continue
                self._fill(replica.container, content, 0)
                replica.agree()
            for number in message.get("forget", ()):
                self._forget(number)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise values.MalformedValueError("bad changes") from error


def _references() -> int:
    replica = _Replica([])
    return sys.getrefcount(replica.container)


_UNSHARED = _references()
"""`sys.getrefcount` of a container that only its replica references."""

# --- values of the standard library and of numpy that cross by copy

_MODULES = {
    "Decimal": "decimal", "Fraction": "fractions", "UUID": "uuid", "PosixPath": "pathlib", "PurePosixPath": "pathlib",
    "datetime": "datetime", "date": "datetime", "time": "datetime", "timedelta": "datetime", "timezone": "datetime",
    "ZoneInfo": "zoneinfo", "range": "builtins", "slice": "builtins",
}  # fmt: skip
"""Types whose values cross by copy, and their modules, which are imported on demand."""
_LONGEST_NUMBER = 10_000


def _encode_library(value: Any, encode: Callable[..., Any], depth: int) -> list[Any] | None:
    kind: Any = type(value)
    name = kind.__name__
    if value is Ellipsis or value is NotImplemented:
        return [repr(value)]
    if getattr(sys.modules.get(_MODULES.get(name, "")), name, None) is kind:
        if name in ("datetime", "date", "time"):
            zone = getattr(value, "tzinfo", None)
            naive = value if zone is None else value.replace(tzinfo=None)
            return [name, naive.isoformat(), getattr(value, "fold", 0), encode(zone, depth + 1)]
        if name == "timezone":
            return [name, encode(value.utcoffset(None), depth + 1), value.tzname(None)]
        if name == "timedelta":
            return [name, value.days, value.seconds, value.microseconds]
        if name in ("range", "slice"):
            return [name, *(encode(item, depth + 1) for item in (value.start, value.stop, value.step))]
        return [name, str(value)]
    if kind.__module__ == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
        scalar = isinstance(value, numpy.generic)
        if (scalar or kind is numpy.ndarray) and value.dtype.kind in "biufc":
            return ["numpy", value.dtype.str, list(value.shape), scalar, value.tobytes().hex()]
    return None


def _decode_library(body: Any, decode: Callable[[Any], Any]) -> Any:
    name, *parts = body
    if name in ("Ellipsis", "NotImplemented"):
        return getattr(builtins, name)
    if name == "numpy":
        return _decode_array(*parts)
    kind = getattr(importlib.import_module(_MODULES[name]), name)
    if name in ("datetime", "date", "time"):
        text, fold, zone = parts
        value = kind.fromisoformat(text)
        return value if name == "date" else value.replace(fold=fold, tzinfo=decode(zone))
    if name == "timezone":
        plain = kind(decode(parts[0]))  # UTC if the offset is 0
        return plain if plain.tzname(None) == parts[1] else kind(decode(parts[0]), parts[1])
    if name == "timedelta":
        return kind(*map(int, parts))
    if name in ("range", "slice"):
        return kind(*map(decode, parts))
    if len(parts[0]) > _LONGEST_NUMBER:
        raise values.MalformedValueError("the text of a value is too long")
    return kind(parts[0])


def _decode_array(dtype: str, shape: Sequence[int], scalar: bool, data: str) -> Any:
    import numpy

    if numpy.dtype(dtype).kind not in "biufc":
        raise values.MalformedValueError("an array of objects")
    array = numpy.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()
    return array[()] if scalar else array


# --- functions and classes of the standard library, which both ends have

_FUNCTIONS_OF = ("builtins", "collections", "functools", "itertools", "json", "math", "operator")
CLASSES_OF = ("builtins", "collections", "collections.abc", "datetime", "decimal", "fractions", "numbers", "uuid")
"""Modules whose classes the judged code may return to the tests."""


def library_name(value: Any, classes_of: Iterable[str] = sys.stdlib_module_names) -> str | None:
    """`module.name` of a function or class of the standard library that the other end can look up."""
    is_class = isinstance(value, type)
    if not is_class and not isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
        return None
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    module = "operator" if module == "_operator" else module
    if isinstance(module, str) and module in (classes_of if is_class else _FUNCTIONS_OF):
        return f"{module}.{name}" if getattr(sys.modules.get(module), name, None) is value else None
    return None


def library_value(name: str) -> Any:
    """The function or class with this `library_name`. Raises `LookupError`."""
    module, _, attribute = name.rpartition(".")
    if module.partition(".")[0] not in sys.stdlib_module_names:
        raise LookupError(f"{name} is not in the standard library")
    return getattr(importlib.import_module(module), attribute)


def library_class(name: str) -> type:
    """A class of the standard library, by the name that the judged code sent. Raises `LookupError`."""
    if name.rpartition(".")[0] in CLASSES_OF and isinstance(kind := library_value(name), type):
        return kind
    raise LookupError(f"{name} is not a class that may be returned")


_ABSTRACT = {
    "collections.abc": ("Mapping", "MutableMapping", "Sequence", "MutableSequence", "Set", "MutableSet"),
    "io": ("IOBase", "RawIOBase", "BufferedIOBase", "TextIOBase"),
    "numbers": ("Number", "Complex", "Real", "Rational", "Integral"),
}


def abstract_names(kind: type) -> list[str]:
    """Abstract classes of the standard library that a class derives from or is registered with."""
    loaded = [(name, sys.modules[name], members) for name, members in _ABSTRACT.items() if name in sys.modules]
    return [
        f"{name}.{item}" for name, module, items in loaded for item in items if issubclass(kind, getattr(module, item))
    ]


def register(kind: type, names: Iterable[str]) -> None:
    """Register a class that mirrors a class of the other end with these abstract classes."""
    for name in names:
        module, _, item = str(name).rpartition(".")
        if item in _ABSTRACT.get(module, ()):
            getattr(importlib.import_module(module), item).register(kind)


_SPECIAL_NAMES = """
abs add aenter aexit aiter and anext await bool bytes call ceil complex contains delitem divmod enter eq exit float
floor floordiv format ge getitem gt hash iadd iand ifloordiv ilshift imatmul imod imul index int invert ior ipow irshift
isub iter itruediv ixor le len length_hint lshift lt matmul missing mod mul ne neg next or pos pow radd rand rdivmod
repr reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem str sub
truediv trunc xor
"""
SPECIAL_METHODS = frozenset(f"__{name}__" for name in _SPECIAL_NAMES.split())
"""Special methods that can be called remotely: those of operators, built-in functions and statements."""
