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


class StandardStreams:
    """Standard input and output as the channel to an engine that attaches to them, with the methods of a socket.

    From then on they are /dev/null and stderr for everybody else.
    """

    def __init__(self) -> None:
        self.descriptors = (os.dup(0), os.dup(1))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def fileno(self) -> int:
        """What becomes readable."""
        return self.descriptors[0]

    def recv(self, size: int) -> bytes:
        """At most `size` bytes; empty when the engine has hung up."""
        return os.read(self.descriptors[0], size)

    def sendall(self, data: bytes) -> None:
        """Write everything."""
        write_all(self.descriptors[1], data)


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
