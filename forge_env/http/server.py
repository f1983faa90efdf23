"""HTTP server for ASGI applications, with limits on connections and a check of hosts and origins."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import Callable, Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from forge_env.errors import UsageError
from forge_env.http.limits import MAX_BODY, MAX_HEADERS

TOO_MUCH = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""Raw response to a request that is refused before it reaches the application."""
NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine in addresses of local clients."""
SHUTDOWN_S = 5.0
"""Seconds that connections may take to end when the server shuts down."""
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
CONNECTIONS = "/proc/net/tcp"
"""The kernel's table of IPv4 connections."""
ESTABLISHED = "01"
OTHER_USER = "This connection comes from another user of this machine.\n"
MAX_PIPELINED = 16
"""Maximum requests that a connection may send before the first is answered."""


def most_connections() -> int:
    """Maximum connections of a server: at most half of the files that this process may open.

    The other half is left to the process's own files: clients can't exhaust them by connecting.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft // 2))


async def serve(
    app: ASGIApp, host: str, port: int, *, ready: Callable[[int], None] = lambda port: None, lifespan: bool = True
) -> None:
    """Serve until cancelled.

    Args:
        app: the application.
        host: address to listen on.
        port: port to listen on; 0 lets the system choose one.
        ready: called with the port once the server listens.
        lifespan: whether the application handles lifespan events.

    Raises:
        UsageError: the server can't listen on this address.
    """
    import uvicorn

    backlog = max(1, most_connections() // 4)  # asyncio accepts as many at once, before any of them is counted

    class Server(uvicorn.Server):
        def capture_signals(self) -> contextlib.nullcontext[None]:  # type: ignore[override]
            """Leave signals to the caller of `serve`: uvicorn would raise them again after it has ended."""
            return contextlib.nullcontext()

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:  # from here on, clients' connections wait instead of being refused
        sock = socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise UsageError(
            f"can't listen on {host}, port {port}: {error.strerror or error}", fix="choose another --port, or --host"
        ) from error

    # Connections inherit this option. asyncio sets it only for sockets that name their protocol; without it, the body
    # of an answer waits 40 ms for the client to acknowledge the head.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # Pings detect clients that vanished without closing; a long step doesn't delay them.
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        lifespan="on" if lifespan else "off",
        ws="auto",  # none if websockets is not installed: only `forge-env serve` needs them
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        ws_max_size=MAX_BODY,
        ws_max_queue=1,
        ws_per_message_deflate=False,  # many messages of zeros fit in a few bytes
        http=_protocol(),
        backlog=backlog,
        proxy_headers=False,  # clients could give other addresses than their own, and so evade limits
        h11_max_incomplete_event_size=MAX_UNREAD,
        timeout_graceful_shutdown=int(SHUTDOWN_S),
    )
    server = Server(config)
    ready(sock.getsockname()[1])
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        server.should_exit = True  # sessions are closed before it ends
        await running
        raise
    finally:
        sock.close()


def _protocol() -> type[asyncio.Protocol]:
    """Make a subclass of uvicorn's HTTP protocol with limits that apply before an application sees a request."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    except ImportError:  # h11 limits the head itself
        from uvicorn.protocols.http.h11_impl import H11Protocol as Base  # type: ignore[assignment]

    waiting: dict[Bounded, None] = {}  # connections that have no complete request, the oldest first

    class Bounded(Base):
        _counts = hasattr(Base, "on_body")
        _unread = 0
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._update()
            if len(waiting) > MAX_WAITING or len(self.connections) > most_connections():
                next(iter(waiting))._make_room()

        def connection_lost(self, exc: Exception | None) -> None:
            self._leave()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._counts:
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
                waiting.pop(self, None)
            else:
                waiting.setdefault(self)
            if has_head:
                self._stop_clock()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

        def _leave(self) -> None:
            waiting.pop(self, None)
            self._stop_clock()

        def _make_room(self) -> None:
            self._leave()
            self.connections.discard(self)
            self.transport.abort()

        def _stop_clock(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Bounded


class OwnPages:
    """ASGI middleware that refuses requests sent by web pages of other sites; the server has no password.

    A page can reach the server by a host name of its site that resolves to the server's address (DNS rebinding), so the
    `Host` header must be an IP address, a name of this machine, or one of `names`. A page that sends a request
    (`Origin`) must belong to this machine or to the server itself. Programs other than browsers send no `Origin`.

    Args:
        app: the application to guard.
        names: further names of the server.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {_name(f"//{name}") for name in ("localhost", socket.gethostname(), *names)} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 421 or 403, or pass the request on."""
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else None
        refused = headers and _refused(headers, self._names)
        if not refused:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refused[1]})
        else:
            await PlainTextResponse(refused[1] + "\n", refused[0])(scope, receive, send)


class OwnUser:
    """ASGI middleware that answers only processes of this user, or of root, on this machine.

    The server must listen on 127.0.0.1. The kernel's table of connections has the user of the other end. Connections
    that `ssh -L` forwards belong to the user who logged in.

    Args:
        app: the application to guard.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 403, or pass the request on."""
        if scope["type"] not in ("http", "websocket") or peer_user(scope) in (os.geteuid(), 0):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse(OTHER_USER, 403, {"connection": "close"})(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": OTHER_USER})


def peer_user(scope: Scope) -> int | None:
    """User id of the process at the other end of an IPv4 connection on this machine; None if there is none."""
    ends = [_in_table(*end) if end else "" for end in (scope["client"], scope["server"])]
    try:
        with open(CONNECTIONS, encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if fields[1:3] == ends and fields[3] == ESTABLISHED:
                    return int(fields[7])
    except OSError:
        pass
    return None


def _in_table(host: str, port: int) -> str:
    """Address in the form of /proc/net/tcp."""
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


def _refused(headers: Headers, names: Collection[str]) -> tuple[int, str] | None:
    host, origin = _name(f"//{headers.get('host', '')}"), headers.get("origin")
    if host not in names and not _is_address(host):
        return 421, "the server has no such name: use its address, or start it with --name HOST"
    if origin is not None and _name(origin) not in {*NAMES, host}:
        return 403, "pages of other sites have no access"
    return None


def _name(url: str) -> str:
    """Host of a URL in the form used in `NAMES`, or an empty string."""
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return ""
    return f"[{name}]" if ":" in name else name


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
