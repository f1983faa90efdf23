"""An application behind an address of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from starlette.types import ASGIApp

from forge_env.errors import UsageError

SHUTDOWN_S = 5.0
"""How long connections have to end when the server does."""


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
