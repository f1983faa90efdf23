"""Frames between the engine and the supervisor: two lengths, a JSON header, raw bytes.

    uint32 header length | uint32 body length | header (UTF-8 JSON object) | body

Nothing here is ever unpickled, and both lengths are bounded before anything is read.
"""

from __future__ import annotations

import json
import marshal
import os
import struct
from collections.abc import Iterator
from typing import Any

PREFIX = struct.Struct("!II")
MAX_HEADER = 16 << 20
MAX_BODY = 256 << 20

Header = dict[str, Any]


class WireError(ValueError):
    """The peer does not speak this protocol."""


def pack(header: Header, body: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return PREFIX.pack(len(text), len(body)) + text + body


def pack_inside(header: Header, body: bytes = b"") -> bytes:
    """One frame between processes of the runner that trust its sender: the header is marshalled, which is cheaper."""
    data = marshal.dumps(header)
    return PREFIX.pack(len(data), len(body)) + data + body


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class FrameReader:
    """Turns a stream of chunks back into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[Header, bytes]]:
        """Every frame that `chunk` completes. Raises `WireError` on nonsense."""
        self._buffer += chunk
        while len(self._buffer) >= PREFIX.size:
            header_length, body_length = PREFIX.unpack_from(self._buffer)
            if header_length > MAX_HEADER or body_length > MAX_BODY:
                raise WireError(f"frame of {header_length} + {body_length} bytes")
            end = PREFIX.size + header_length + body_length
            if len(self._buffer) < end:
                return
            split = PREFIX.size + header_length
            try:
                header = json.loads(self._buffer[PREFIX.size : split])
            except ValueError as error:
                raise WireError("frame header is not JSON") from error
            if not isinstance(header, dict):
                raise WireError("frame header is not an object")
            body = bytes(self._buffer[split:end])
            del self._buffer[:end]
            yield header, body
