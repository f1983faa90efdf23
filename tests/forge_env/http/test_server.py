"""Serving with what the platform alone installs."""

from __future__ import annotations

import subprocess
import sys

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
