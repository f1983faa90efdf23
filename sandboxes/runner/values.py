"""Serialisation of plain data for the judging channel: exact types only, never pickle.

`encode` runs next to candidate code, which may forge anything: a forged value is simply a wrong (or right) answer.
`decode` runs outside the sandbox, so it must withstand any bytes. Depth and size are bounded, no class is looked up
by name, and hash collisions crafted to stall the reader are refused.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

MAX_DEPTH = 64
MAX_TOTAL = 4 << 20
"""Maximum bytes of all values of one request."""
LENGTH = struct.Struct("!I")
"""Length prefix of a frame of the channel."""
_SAFE_INT = 2**53
_HASHING_S, _HASHING_EACH_S = 0.05, 5e-6
"""CPU seconds allowed for hashing one container's keys: a base and a share per key. Honest keys take a twentieth."""


class NotPlainDataError(TypeError):
    """The value's type is not supported, or it is nested too deeply."""


class MalformedValueError(ValueError):
    """The bytes are not the output of `encode`."""


def is_small(value: Any) -> bool:
    """Whether an integer is encoded as a plain JSON number; true for values that are not integers."""
    return type(value) is not int or -_SAFE_INT < value < _SAFE_INT


def encode(value: Any, depth: int = 0) -> Any:
    """`value` as JSON-compatible data that `decode` turns back into the same types."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SAFE_INT < value < _SAFE_INT else {"i": hex(value)}
    if kind is float:
        return {"f": value.hex()}
    if depth >= MAX_DEPTH:
        raise NotPlainDataError(f"nested deeper than {MAX_DEPTH}")
    if kind is list:
        return [encode(item, depth + 1) for item in value]
    if kind is tuple:
        return {"t": [encode(item, depth + 1) for item in value]}
    if kind is dict:
        return {"d": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]}
    if kind is set or kind is frozenset:
        return {"z" if kind is frozenset else "s": [encode(item, depth + 1) for item in value]}
    if kind is bytes or kind is bytearray:
        return {"b" if kind is bytes else "a": value.hex()}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    raise NotPlainDataError(f"no plain value: {kind.__name__}")


def decode(data: Any, depth: int = 0) -> Any:
    """The value encoded in `data`. Raises `MalformedValueError`."""
    if data is None or isinstance(data, (bool, str, int)):
        return data
    if depth > MAX_DEPTH:
        raise MalformedValueError("too deep")
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise MalformedValueError("not a value")
    ((tag, body),) = data.items()
    try:
        return _decode_tagged(tag, body, depth + 1)
    except (TypeError, ValueError, OverflowError, AttributeError, LookupError) as error:
        raise MalformedValueError(f"bad {tag!r}") from error


def _decode_tagged(tag: str, body: Any, depth: int) -> Any:
    if tag == "i":
        return int(body, 16)
    if tag == "f":
        return float.fromhex(body)
    if tag == "c":
        return complex(float.fromhex(body[0]), float.fromhex(body[1]))
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "a":
        return bytearray.fromhex(body)
    if not isinstance(body, list):
        raise MalformedValueError("not a list")
    if tag == "d":
        pairs = [(decode(key, depth), decode(item, depth)) for key, item in body]
        return dict(watched(pairs))
    items = [decode(item, depth) for item in body]
    if tag == "t":
        return tuple(items)
    if tag not in ("s", "z"):
        raise MalformedValueError("unknown tag")
    return set(watched(items)) if tag == "s" else frozenset(watched(items))


def watched(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, but raise `MalformedValueError` if storing them takes longer than honest keys ever do.

    Integers hash predictably: thousands that collide, or whose probing paths are crowded, would cost quadratic time.
    The limit is on this thread's CPU time, so a busy machine does not matter.
    """
    start = time.thread_time()
    for count, item in enumerate(items):
        if count % 256 == 255 and time.thread_time() - start > _HASHING_S + count * _HASHING_EACH_S:
            raise MalformedValueError("keys that collide")
        yield item


def pack_frame(data: Any) -> bytes:
    """One length-prefixed JSON frame of the channel."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return LENGTH.pack(len(text)) + text


def split(stream: bytes) -> Iterator[bytes]:
    """Yield each length-prefixed part, up to the first that is cut off."""
    position = 0
    while position + LENGTH.size <= len(stream):
        (length,) = LENGTH.unpack_from(stream, position)
        position += LENGTH.size
        if position + length > len(stream):
            return
        yield stream[position : position + length]
        position += length


def unpack_frames(stream: bytes) -> list[Any]:
    """The frames of `stream`, up to the first that is cut off or malformed."""
    frames: list[Any] = []
    for text in split(stream):
        try:
            frames.append(json.loads(text))
        except (ValueError, RecursionError):
            break
    return frames
