"""Keeping the head and the tail of an endless stream."""

from __future__ import annotations

import os

_CHUNK = 1 << 16


class Capture:
    """Reads one pipe; holds at most `limit` bytes of it, half from the beginning and half from the end."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.bound(limit)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def bound(self, limit: int) -> None:
        """Hold at most `limit` bytes from now on."""
        self.limit = limit
        self.head_size = max(1, limit // 2)
        self.tail_size = max(1, limit - self.head_size)

    @property
    def dropped(self) -> int:
        """Bytes that are not kept."""
        return self.total - len(self.head) - min(len(self.tail), self.tail_size)

    def read(self) -> bytes | None:
        """Take what is there; b"" at end of file, None when there is nothing yet."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return None
        self.total += len(chunk)
        room = self.head_size - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            self.tail += chunk[room:]
        else:
            self.tail += chunk
        if len(self.tail) > self.tail_size + 4 * _CHUNK:
            del self.tail[: len(self.tail) - self.tail_size]
        return chunk

    def drain(self, budget: int = 1 << 22) -> None:
        """Take what is left once the writers are gone, or at most `budget` bytes when one is not."""
        stop = self.total + budget
        while self.total < stop and self.read():
            pass

    def text(self) -> bytes:
        """The kept bytes, with a line that marks the gap."""
        tail = self.tail[-self.tail_size :] if len(self.tail) > self.tail_size else self.tail
        if not self.dropped:
            return bytes(self.head + tail)
        return bytes(self.head) + b"\n[... %d bytes left out ...]\n" % self.dropped + bytes(tail)
