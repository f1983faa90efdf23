"""Serving with what the platform alone installs, and to processes of one user."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from forge_env.http import connections, server

WITHOUT_WEBSOCKETS = """
import asyncio, sys

sys.modules["websockets"] = sys.modules["wsproto"] = None

import httpx2
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from forge_env.http.server import serve


async def main():
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])
    port = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, "127.0.0.1", 0, ready=port.set_result))
    async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
        print((await client.get(f"http://127.0.0.1:{await port}/")).text)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


asyncio.run(main())
"""


def test_pages_are_served_where_websockets_is_not_installed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_WEBSOCKETS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr


REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
UPGRADE = (
    REQUEST + b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


async def accepting(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await PlainTextResponse("here")(scope, receive, send)
    else:
        await send({"type": "websocket.accept"})


@pytest.mark.parametrize("parser", ["httptools", "h11"])
async def test_each_connection_is_looked_up_once(parser: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if parser == "h11":
        monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    guarded, port = server.OwnUser(accepting), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.serve(guarded, "127.0.0.1", 0, ready=port.set_result, lifespan=False))
    opened = [await asyncio.open_connection("127.0.0.1", await port) for _ in range(3)]

    async def status(connection: int, request: bytes) -> bytes:
        reader, writer = opened[connection]
        writer.write(request + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: 4" in head:
            await reader.readexactly(4)
        return head[:12]

    assert await status(0, REQUEST) == b"HTTP/1.1 200"
    (tmp_path / "empty").touch()
    monkeypatch.setattr(connections, "TABLE", str(tmp_path / "empty"))
    assert await status(0, REQUEST) == b"HTTP/1.1 200"
    assert await status(1, REQUEST) == b"HTTP/1.1 403", "it was looked up when the table had no users"
    assert await status(0, UPGRADE) == b"HTTP/1.1 101"
    assert await status(2, UPGRADE) == b"HTTP/1.1 403"
    for _, writer in opened:
        writer.close()
    serving.cancel()
    await asyncio.wait([serving])
