"""Server of the pages on the loopback interface, which closes open event streams when it stops."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from forge_env.errors import UsageError
from forge_env.http.limits import Hosts, RequestLimits
from forge_env.http.server import OwnUser, serve
from forge_env.machine import cache_dir
from forge_env.view.app import Pages
from forge_env.view.index import CACHE_FIX
from forge_env.view.server import Guard, refusal

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


def check_cache(cache: Path) -> None:
    """Create the folder of the indexes. `UsageError`: it can't be written."""
    folder = cache / "view"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the cache folder {folder} can't be used: {error.strerror}", fix=CACHE_FIX) from error


async def serve_pages(
    pages: Pages, port: int, *, ready: Callable[[str], None] = lambda address: None, cache: Path | None = None
) -> None:
    """Serve until cancelled.

    Args:
        ready: called with the address, token included.

    Raises:
        UsageError: the port is taken, or the cache folder can't be used.
    """
    check_cache(cache or cache_dir())
    secret = secrets.token_urlsafe(32)
    known: list[int] = []
    limited = RequestLimits(pages.application(), identify=Hosts().identify, refuse=refusal)
    guard = Guard(OwnUser(limited), secret, lambda: known[0])

    def listening(chosen: int) -> None:
        known.append(chosen)
        ready(f"http://{LOOPBACK}:{chosen}/?token={secret}")

    serving = asyncio.ensure_future(serve(guard, LOOPBACK, port, ready=listening, lifespan=False))
    loading = asyncio.ensure_future(asyncio.to_thread(pages.load))
    try:
        await asyncio.shield(serving)
    finally:
        pages.ending.set()  # ends event streams, for which the server would otherwise wait
        serving.cancel()
        await asyncio.gather(serving, loading, return_exceptions=True)
        pages.indexer.close()
