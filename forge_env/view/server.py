"""Server of the pages on the loopback interface: who may request them, and what a page may do.

Texts of agents are hostile, and so may be other pages in the same browser. The server therefore listens on the loopback
interface only, answers only requests for its own names (against DNS rebinding), accepts only GET and HEAD, and requires
a token that is part of the address it prints. The token is stored in a cookie named after the port, since cookies are
shared between ports. A page may not load external resources, run scripts other than the server's static files, or
create HTML from text.

A browser sends the cookie to every server at 127.0.0.1, on any port: also to one of another user, and to a later one
on this port. So every start makes a new token, and `forge_env.http.server.OwnUser` refuses connections of other users.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge_env.errors import UsageError
from forge_env.http.limits import Hosts, RefusedRequestError, RequestLimits
from forge_env.http.server import NAMES, OwnUser, serve
from forge_env.machine import cache_dir
from forge_env.view.app import Pages
from forge_env.view.index import CACHE_FIX

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
LONGEST_ADDRESS = 8_192
OTHER_HOST = "Open this server at 127.0.0.1 and its own port; forward the same port number.\n"
REFUSED = "Open the address that `forge-env view` printed: it has a token, which is new at every start.\n"


class Guard:
    """ASGI middleware that authorizes every request, and adds security headers to every response.

    Args:
        port: returns the port once it is known.
    """

    def __init__(self, app: ASGIApp, secret: str, port: Callable[[], int]) -> None:
        self._app = app
        self._secret = secret
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # without an answer, each would be logged as an error
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            refused.headers.update({"cache-control": "no-store", "connection": "close"})
            await refused(scope, receive, answer)
            return
        path = os.fsdecode(unquote_to_bytes(scope.get("raw_path", b"/")))
        await self._app({**scope, "path": path}, receive, answer)

    def _refused(self, scope: Scope) -> Response | None:
        """Return the response to a request that must not reach the application; None if it is authorized."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        port, raw_path = self._port(), scope.get("raw_path", b"/")
        hosts = {f"{name}:{port}" for name in NAMES} | (set(NAMES) if port == 80 else set())
        if headers.get("host", "").lower() not in hosts:
            return PlainTextResponse(OTHER_HOST, 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET and HEAD are supported.\n", 405, {"allow": "GET, HEAD"})
        if len(raw_path) + len(scope["query_string"]) > LONGEST_ADDRESS:
            return PlainTextResponse("This address is too long.\n", 414)
        query = parse_qsl(scope["query_string"].decode("latin-1"), True, errors="surrogateescape")
        cookie = f"forge_env_{port}"
        if any(name == "token" and self._is_secret(value) for name, value in query):
            rest = urlencode([(name, value) for name, value in query if name != "token"], errors="surrogateescape")
            target = "/" + raw_path.decode("latin-1").lstrip("/\\") + (f"?{rest}" if rest else "")
            given = f"{cookie}={self._secret}; Path=/; HttpOnly; SameSite=Lax"
            return Response(status_code=303, headers={"location": target, "set-cookie": given})
        if not self._is_secret(cookie_parser(headers.get("cookie", "")).get(cookie, "")):
            return PlainTextResponse(REFUSED, 403)
        return None

    def _is_secret(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._secret.encode())


def refusal(scope: Scope, error: RefusedRequestError) -> ASGIApp:
    """Create the response to a request beyond the limits of `forge_env.http.limits`."""
    return PlainTextResponse(f"{error.message}.\n", error.status, {"cache-control": "no-store", "connection": "close"})


# ---
# The server

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
