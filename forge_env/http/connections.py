"""Connections of the HTTP server: limits that apply before an application sees a request, and the user of a client."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from starlette.types import Scope

from forge_env.http.limits import MAX_HEADERS

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
else:
    Base = object

TOO_MUCH = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""Raw response to a request that is refused before it reaches the application."""
HEAD_S = 10.0
"""Seconds that a client may take to send a request's path and headers."""
MAX_UNREAD = 2 * MAX_HEADERS
"""Maximum bytes of a request outside its body (path, headers, chunk frames), less the allowance for frames."""
FRAME_BYTES = 8
"""Bytes of chunk frames allowed per byte of body."""
MAX_CONNECTIONS = 8192
"""Maximum connections of a server that may open twice as many files; see `most_connections`."""
MAX_WAITING = 1000
"""Maximum connections that have no complete request; beyond that, the oldest is closed."""
MAX_PIPELINED = 16
"""Maximum requests that a connection may send before the first is answered."""
TABLE = "/proc/net/tcp"
"""The kernel's table of IPv4 connections."""
ESTABLISHED = "01"
PEER = "forge_env.peer"
"""Key of a connection's `Peer` in the `state` of its requests' scopes."""


def most_connections() -> int:
    """Maximum connections of a server: at most half of the files that this process may open.

    The other half is left to the process's own files: clients can't exhaust them by connecting.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft // 2))


class Peer:
    """The other end of a connection."""

    def __init__(self, client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> None:
        self._client = client
        self._server = server

    @cached_property
    def user(self) -> int | None:
        """User id of the process that opened it, if it uses IPv4 and is within this machine; otherwise None."""
        ends = [_in_table(*end) if end else "" for end in (self._client, self._server)]
        try:
            with open(TABLE, encoding="ascii") as table:
                for line in table:
                    fields = line.split()
                    if fields[1:3] == ends and fields[3] == ESTABLISHED:
                        return int(fields[7])
        except OSError:
            pass
        return None


def peer_of(scope: Scope) -> Peer:
    """The other end of a request's connection."""
    peer: Peer = scope["state"][PEER]
    return peer


def _in_table(host: str, port: int | None) -> str:
    """Address in the form of /proc/net/tcp."""
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


class _Bounded(Base):
    """Mix-in of uvicorn's HTTP protocols that limits the connections, and what they send outside of bodies."""

    waiting: ClassVar[dict[_Bounded, None]]
    """Connections of the server that have no complete request, the oldest first."""
    counts: ClassVar[bool]
    """Whether bytes outside of bodies are counted here. h11 limits the head itself."""
    _unread = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, PEER: Peer(self.client, self.server)}
        self._update()
        if len(self.waiting) > MAX_WAITING or len(self.connections) > most_connections():
            next(iter(self.waiting))._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.counts:
            self._unread += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        self._update()
        if self._unread > MAX_UNREAD or len(getattr(self, "pipeline", ())) > MAX_PIPELINED:
            self.transport.write(TOO_MUCH)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._unread = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.strip(b" \t"))  # httptools leaves blanks after the value, which aren't part of it

    def on_body(self, body: bytes) -> None:
        self._unread = max(0, self._unread - FRAME_BYTES * len(body))
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._update()

    def handle_websocket_upgrade(self, *event: object) -> None:
        self._leave()
        super().handle_websocket_upgrade(*event)

    def _update(self) -> None:
        """Record what is missing of a request. Its head must arrive within `HEAD_S` seconds."""
        has_head = self.cycle is not None and not self.cycle.response_complete
        if has_head and not self.cycle.more_body:
            self.waiting.pop(self, None)
        else:
            self.waiting.setdefault(self)
        if has_head:
            self._stop_clock()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _leave(self) -> None:
        self.waiting.pop(self, None)
        self._stop_clock()

    def _make_room(self) -> None:
        self._leave()
        self.connections.discard(self)
        self.transport.abort()

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bounded_protocol() -> type[asyncio.Protocol]:
    """Make the protocol of one server: one with the faster of the parsers that are installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Parser
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Parser  # type: ignore[assignment]

    class Connection(_Bounded, Parser):
        waiting: ClassVar[dict[_Bounded, None]] = {}
        counts = hasattr(Parser, "on_body")

    return Connection
