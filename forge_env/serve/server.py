"""An application behind an address of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from forge_env.errors import UsageError
from forge_env.serve.limits import MAX_BODY, MAX_HEADERS

TOO_MUCH = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""Answered below the application, which hasn't seen the request."""
NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Of this machine, as a client of it writes them."""
SHUTDOWN_S = 5.0
"""How long connections have to end when the server does."""
HEAD_S = 10.0
"""Seconds that a client may take to send a request's address and headers."""
MAX_UNREAD = 2 * MAX_HEADERS
"""Bytes of a request that are neither body nor paid for by it: address, headers, the frames of chunks."""
FRAME_BYTES = 8
"""Bytes of frames that each byte of a body pays for."""
MAX_SILENT = 1000
"""Connections that haven't sent a request yet; of more, the oldest is closed."""
MAX_PIPELINED = 16
"""Requests that one connection may send before the first is answered."""


async def serve(
    app: ASGIApp, host: str, port: int, *, ready: Callable[[int], None] = lambda port: None, lifespan: bool = True
) -> None:
    """Serve until cancelled.

    Args:
        app: the application.
        host: to listen at.
        port: likewise; 0 lets the system choose one.
        ready: is told the port.
        lifespan: whether the application wants to know of its start and end.

    Raises:
        UsageError: the address can't be used.
    """
    import uvicorn

    silent: dict[asyncio.Protocol, None] = {}

    class Server(uvicorn.Server):
        def capture_signals(self) -> contextlib.nullcontext[None]:  # type: ignore[override]
            """Signals are those of whoever serves: uvicorn would raise them again, once it has ended."""
            return contextlib.nullcontext()

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:  # from here on a client's connection waits, and isn't refused
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UsageError(
            f"can't listen on {host}, port {port}: {error.strerror or error}", fix="choose another --port, or --host"
        ) from error

    # Connections inherit it. asyncio would set it, but not for a socket that doesn't name its protocol; without it the
    # body of an answer waits for the client to acknowledge the head, 40 ms.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # Pings find clients that are gone without a word; a step that takes long doesn't hold them up.
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        lifespan="on" if lifespan else "off",
        ws="auto",  # none where websockets is not installed: only `forge-env serve` needs them
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        ws_max_size=MAX_BODY,
        ws_max_queue=1,
        ws_per_message_deflate=False,  # many messages of zeros fit in a few bytes
        http=_protocol(silent),
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


def _protocol(silent: dict[asyncio.Protocol, None]) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with limits on what comes before an application sees a request.

    Args:
        silent: its connections that haven't sent a whole head yet, the oldest first.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    except ImportError:  # h11 bounds a head itself
        from uvicorn.protocols.http.h11_impl import H11Protocol as Base  # type: ignore[assignment]

    class Bounded(Base):
        _counts = hasattr(Base, "on_body")
        _unread = 0
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_there()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._counts:
                self._unread += len(data)
            super().data_received(data)
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            if self.cycle is not None and not self.cycle.response_complete:
                self._head_is_there()
            else:
                self._await_head()
            if self._unread > MAX_UNREAD or len(getattr(self, "pipeline", ())) > MAX_PIPELINED:
                self.transport.write(TOO_MUCH)
                self.transport.close()

        def on_message_begin(self) -> None:
            self._unread = 0
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            self._unread = max(0, self._unread - FRAME_BYTES * len(body))
            super().on_body(body)

        def handle_websocket_upgrade(self, *event: object) -> None:
            self._head_is_there()
            super().handle_websocket_upgrade(*event)

        def _await_head(self) -> None:
            """Close the connection unless a request's head comes soon."""
            if self._deadline is None:
                self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)
                silent[self] = None
                if len(silent) > MAX_SILENT:
                    next(iter(silent)).transport.abort()  # type: ignore[attr-defined]

        def _head_is_there(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
                silent.pop(self, None)

    return Bounded


class OwnPages:
    """Refuses what pages of other sites make a browser send to a server that asks for no password.

    A page can reach the server under a name of its own that resolves to the server's address (DNS rebinding), so a
    request must be addressed (`Host`) to an address, to a name of this machine, or to one that the server was given.
    A page that sends it (`Origin`) must be one of this machine or of the server itself. Other programs send no
    `Origin`.

    Args:
        app: what is guarded.
        names: that it was given.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {_name(f"//{name}") for name in ("localhost", socket.gethostname(), *names)} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 421 or 403, or hand on."""
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else None
        refused = headers and _refused(headers, self._names)
        if not refused:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refused[1]})
        else:
            await PlainTextResponse(refused[1] + "\n", refused[0])(scope, receive, send)


def _refused(headers: Headers, names: Collection[str]) -> tuple[int, str] | None:
    host, origin = _name(f"//{headers.get('host', '')}"), headers.get("origin")
    if host not in names and not _is_address(host):
        return 421, "the server has no such name: use its address, or start it with --name HOST"
    if origin is not None and _name(origin) not in {*NAMES, host}:
        return 403, "pages of other sites have no access"
    return None


def _name(url: str) -> str:
    """The host of an address as `NAMES` writes it, or an empty string."""
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
