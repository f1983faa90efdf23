"""Frames between the engine and the supervisor: two lengths, a JSON header, raw bytes.

    uint32 header length | uint32 body length | header (UTF-8 JSON object) | body

Nothing is ever unpickled, and both lengths are checked before the frame is read.
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
    """The peer does not follow this protocol."""


def pack(header: Header, body: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return PREFIX.pack(len(text), len(body)) + text + body


def pack_inside(header: Header, body: bytes = b"") -> bytes:
    """One frame between processes of the runner that trust each other; its header is marshalled, which is faster."""
    data = marshal.dumps(header)
    return PREFIX.pack(len(data), len(body)) + data + body


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class StandardStreams:
    """Standard input and output as the channel to an engine that attaches to them, with a socket's methods.

    For all other code in this process and its children, they are then /dev/null and stderr.
    """

    def __init__(self) -> None:
        self.descriptors = (os.dup(0), os.dup(1))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def fileno(self) -> int:
        """The descriptor to poll for input."""
        return self.descriptors[0]

    def recv(self, size: int) -> bytes:
        """At most `size` bytes; empty if the engine has closed the channel."""
        return os.read(self.descriptors[0], size)

    def sendall(self, data: bytes) -> None:
        """Write everything."""
        write_all(self.descriptors[1], data)


class FrameReader:
    """Splits a stream of chunks into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[Header, bytes]]:
        """Yield every frame that `chunk` completes. Raises `WireError` if the data is invalid."""
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
