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
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode

from forge_env.errors import UsageError
from forge_env.http.limits import Hosts, RefusedRequestError, RequestLimits
from forge_env.http.server import NAMES, OwnUser, serve
from forge_env.machine import cache_dir
from forge_env.view.app import Pages
from forge_env.view.index import CACHE_FIX

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

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
REFUSED = "Open the address that `forge-env view` printed: it has a token, which is new at every start.\n"


class Guard:
    """ASGI middleware that authorizes every request, and adds security headers to every response.

    Args:
        port: returns the port once it is known.
    """

    def __init__(self, app: Application, secret: str, port: Callable[[], int]) -> None:
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
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        port = self._port()
        cookie = f"forge_env_{port}"
        query = parse_qsl(scope["query_string"].decode("latin-1"), True, errors="surrogateescape")
        given = next((value for name, value in query if name == "token"), None)
        host = headers.get("host", "").lower()
        if host not in {f"{name}:{port}" for name in NAMES} | (set(NAMES) if port == 80 else set()):
            await _answer(send, 421, "Open this server at 127.0.0.1 and its own port; forward the same port number.\n")
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, "Only GET and HEAD are supported.\n", [("allow", "GET, HEAD")])
        elif len(scope.get("raw_path", b"")) + len(scope["query_string"]) > LONGEST_ADDRESS:
            await _answer(send, 414, "This address is too long.\n")
        elif given is not None and hmac.compare_digest(given.encode(errors="replace"), self._secret.encode()):
            rest = urlencode([(name, value) for name, value in query if name != "token"], errors="surrogateescape")
            path = "/" + scope.get("raw_path", b"/").decode("latin-1").lstrip("/\\")
            target = path + (f"?{rest}" if rest else "")
            cookie_header = f"{cookie}={self._secret}; Path=/; HttpOnly; SameSite=Lax"
            await _answer(send, 303, "", [("location", target), ("set-cookie", cookie_header)])
        elif not hmac.compare_digest(_cookie(headers.get("cookie", ""), cookie).encode(), self._secret.encode()):
            await _answer(send, 403, REFUSED)
        else:
            scope = {**scope, "path": os.fsdecode(unquote_to_bytes(scope.get("raw_path", b"/")))}
            await self._app(scope, receive, _with_headers(send))


def refusal(scope: Scope, error: RefusedRequestError) -> Application:
    """Create the response to a request beyond the limits of `forge_env.http.limits`."""

    async def refused(scope: Scope, receive: Receive, send: Send) -> None:
        await _answer(send, error.status, f"{error.message}.\n")

    return refused


def _cookie(header: str, name: str) -> str:
    for part in header.split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def _with_headers(send: Send) -> Send:
    async def answering(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return answering


async def _answer(send: Send, status: int, text: str, further: list[tuple[str, str]] | None = None) -> None:
    headers = {
        "content-type": "text/plain; charset=utf-8",
        "cache-control": "no-store",
        "connection": "close",
        **HEADERS,
        **dict(further or []),
    }
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": text.encode()})


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
