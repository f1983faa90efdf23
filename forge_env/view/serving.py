"""Server of the pages on the loopback interface, which closes open event streams when it stops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from forge_env.http.limits import Hosts, RequestLimits
from forge_env.http.server import serve
from forge_env.view.app import Pages
from forge_env.view.server import Guard, refusal, token

LOOPBACK = "127.0.0.1"


def free_port(wanted: int) -> int:
    """Return the port if it is free; otherwise 0, which lets the system choose one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted))
        except OSError:
            return 0
    return wanted


async def serve_pages(
    pages: Pages, port: int, *, ready: Callable[[str], None] = lambda address: None, cache: Path | None = None
) -> None:
    """Serve until cancelled.

    Args:
        pages: the pages to serve.
        port: port number; 0 lets the system choose one.
        ready: called with the address, token included.
        cache: folder of the token; None: the user's cache folder.

    Raises:
        UsageError: the port is taken.
    """
    secret = token(cache)
    known: list[int] = []
    guard = Guard(pages.application(), secret, lambda: known[0])
    limited = RequestLimits(guard, identify=Hosts().identify, refuse=refusal)

    def listening(chosen: int) -> None:
        known.append(chosen)
        ready(f"http://{LOOPBACK}:{chosen}/?token={secret}")

    serving = asyncio.ensure_future(serve(limited, LOOPBACK, port, ready=listening, lifespan=False))
    loading = asyncio.ensure_future(asyncio.to_thread(pages.load))
    try:
        await asyncio.shield(serving)
    finally:
        pages.ending.set()  # ends event streams, for which the server would otherwise wait
        serving.cancel()
        await asyncio.gather(serving, loading, return_exceptions=True)
        pages.indexer.close()
