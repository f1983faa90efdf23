"""HTTP server for ASGI applications, with limits on connections and a check of hosts and origins."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from forge_env.errors import UsageError
from forge_env.http.connections import MAX_UNREAD, bounded_protocol, most_connections, peer_of
from forge_env.http.limits import MAX_BODY

NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine in addresses of local clients."""
SHUTDOWN_S = 5.0
"""Seconds that connections may take to end when the server shuts down."""
OTHER_USER = "This connection comes from another user of this machine.\n"


async def serve(
    app: ASGIApp, host: str, port: int, *, ready: Callable[[int], None] = lambda port: None, lifespan: bool = True
) -> None:
    """Serve until cancelled.

    Raises:
        UsageError: the server can't listen on this address.
    """
    import uvicorn

    backlog = max(1, most_connections() // 4)  # asyncio accepts as many at once, before any of them is counted

    class Server(uvicorn.Server):
        def capture_signals(self) -> contextlib.nullcontext[None]:  # type: ignore[override]
            """Leave signals to the caller of `serve`: uvicorn would raise them again after it has ended."""
            return contextlib.nullcontext()

    sock = _listen(host, port, backlog)  # from here on, clients' connections wait instead of being refused

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
        http=bounded_protocol(),
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


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise UsageError(
            f"can't listen on {host}, port {port}: {error.strerror or error}", fix="choose another --port, or --host"
        ) from error

    # Connections inherit this option. asyncio sets it only for sockets that name their protocol; without it, the body
    # of an answer waits 40 ms for the client to acknowledge the head.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class OwnPages:
    """ASGI middleware that refuses requests sent by web pages of other sites; the server has no password.

    A page can reach the server by a host name of its site that resolves to the server's address (DNS rebinding), so the
    `Host` header must be an IP address, a name of this machine, or one of `names`. A page that sends a request
    (`Origin`) must belong to this machine or to the server itself. Programs other than browsers send no `Origin`.

    Args:
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

    The application must be served by `serve` on 127.0.0.1. The kernel's table of connections, which is read once per
    connection, has the user of the other end. Connections that `ssh -L` forwards belong to the user who logged in.
    Only Linux has that table: elsewhere every user is answered, so the application must also ask for a secret.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 403, or pass the request on."""
        known = sys.platform == "linux"
        if not known or scope["type"] not in ("http", "websocket") or peer_of(scope).user in (os.geteuid(), 0):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse(OTHER_USER, 403, {"connection": "close"})(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": OTHER_USER})


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
