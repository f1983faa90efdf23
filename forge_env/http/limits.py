"""Limits on requests, shared by all served applications and checked before anything is parsed.

`RequestLimits` is ASGI middleware. It reads a request's body as it arrives and refuses it as soon as a limit is
exceeded: bytes, time, open requests of one client, and the structure of the JSON, which determines how long parsing
takes. It passes the complete body to the application, which therefore never waits for the network.

If clients share an event loop and don't trust each other, a `LoopShare` also spaces out the requests of each client.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar
from weakref import WeakValueDictionary

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge_env.concurrency import Pace

MAX_BODY = 8 << 20
"""Maximum bytes of a body or of a WebSocket message."""
MAX_HELD = 4 * MAX_BODY
"""Maximum bytes of all open requests of one client."""
MAX_DRAINED = 1 << 30
"""Maximum bytes of a refused body that are read and dropped before its connection is closed: most clients read the
answer only after they have sent everything."""
MAX_HEADERS = 32 << 10
"""Maximum bytes of a request's path, query and headers."""
MAX_OPEN = 256
"""Maximum open requests and WebSockets of one client."""
MAX_STRUCTURE = 120_000
"""Maximum commas, colons and opening brackets outside of strings, an upper bound on the values and keys of the JSON."""
MAX_NESTING = 100
"""Maximum nesting of arrays and objects."""
MAX_REFUSED = 100
"""Consecutive refused requests after which a client is stopped."""
MAX_REASON = 1000
"""Maximum characters of the reason that the client of a refused request gets."""
BODY_S = 60.0
"""Seconds that a client may take to send a body."""
LARGE = 256 << 10
"""Bytes above which a body is parsed in a thread."""

CROWD_S = 5.0
"""Seconds after its last request during which a client counts as active."""
REQUEST_S = 2e-3
"""Estimated work for a request, including the connection, in seconds."""
BYTE_S = 3e-8
"""Estimated work per byte of a body, in seconds."""
DRAINED_BYTE_S = 5e-9
"""Estimated work per dropped byte, in seconds."""
STRUCTURE_S = 2e-6
"""Estimated work per comma, colon or opening bracket, in seconds."""

T = TypeVar("T")
_TEXT = bytes(byte for byte in range(256) if byte not in b'",:[]{}')
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b",:[{")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Translation of brackets to signed bytes: +1 or -1 level."""


class RefusedRequestError(Exception):
    """A request was refused. The client gets the reason in the format of its protocol.

    Attributes:
        message: the reason, at most `MAX_REASON` characters: it may quote the request.
        status: HTTP status. Clients retry only after 408, 409, 429 and 5xx.
        code: machine-readable kind of the error.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message[:MAX_REASON], status, code


def check_structure(body: bytes) -> int:
    """Check a JSON text in linear time before it is parsed; return an upper bound on its marks (see `structure`)."""
    if b"\0" in body:
        raise RefusedRequestError("the body is not JSON in UTF-8: it has NUL bytes")
    marks = body.translate(None, _NO_MARKS)  # usually few enough, even if those in strings are counted
    if len(marks) <= MAX_STRUCTURE and marks.count(b"[") + marks.count(b"{") <= MAX_NESTING:
        return len(marks)
    count, depth = structure(body)
    if depth > MAX_NESTING:
        raise RefusedRequestError(f"the body is nested more than {MAX_NESTING} levels deep")
    return count


def structure(body: bytes) -> tuple[int, int]:
    """Commas, colons and opening brackets of a JSON text outside of strings, at most `MAX_STRUCTURE`; its depth."""
    strings = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    if strings.count(b'"') > 2 * (MAX_STRUCTURE + 1):  # every string but one needs a comma, colon or bracket
        raise _too_much()
    outside = b"".join(strings.translate(None, _TEXT).split(b'"')[::2])
    count = sum(map(outside.count, (b",", b":", b"[", b"{")))
    if count > MAX_STRUCTURE:
        raise _too_much()
    steps = memoryview(outside.translate(_STEPS, b",:")).cast("b")
    return count, max(accumulate(steps[: 2 * count]), default=0)  # valid JSON has at most this many brackets


def _too_much() -> RefusedRequestError:
    return RefusedRequestError(
        f"the body has more than {MAX_STRUCTURE:,} commas, colons and opening brackets outside of strings"
    )


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` on a text of `size` bytes; in a thread if it is large, so that it doesn't block the event loop."""
    return await asyncio.to_thread(work) if size > LARGE else work()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Client:
    """The open requests of one client, and the work it has caused.

    Attributes:
        stop: called with the reason after `MAX_REFUSED` consecutive refused requests.
        held: bytes of their bodies in memory.
        refused: consecutive refused requests, without those that may be retried (429) or whose client is gone (499).
    """

    max_open: int = MAX_OPEN
    stop: Callable[[str], None] | None = None
    open: int = 0
    held: int = 0
    refused: int = 0
    pace: Pace = field(default_factory=Pace)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as open inside the block. `RefusedRequestError`: too many are open."""
        if self.open >= self.max_open:
            raise RefusedRequestError(f"{self.open} requests are already open", status=429, code="too_many_requests")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def hold(self, count: int) -> None:
        """Count more bytes as held. `RefusedRequestError`: the total would exceed `MAX_HELD`."""
        if self.held + count > MAX_HELD:
            why = f"open requests have {MAX_HELD >> 20} MiB together"
            raise RefusedRequestError(why, status=429, code="too_many_requests")
        self.held += count

    def answered(self, status: int) -> None:
        """Count an answer by its status; stop the client after `MAX_REFUSED` consecutive refusals."""
        if status < 400:
            self.refused = 0
        elif status < 500 and status not in (429, 499):
            self.refused += 1
            if self.refused >= MAX_REFUSED and self.stop is not None:
                self.stop(f"its last {MAX_REFUSED} requests were refused")


class Hosts:
    """Clients by the address from which they connect, while they have open requests."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._clients: WeakValueDictionary[str, Client] = WeakValueDictionary()

    def identify(self, scope: Scope) -> tuple[Client, RefusedRequestError | None]:
        """Return the client of a request; it is never refused here."""
        host = (scope.get("client") or ("",))[0]
        client = self._clients.get(host) or Client(self._max_open)
        self._clients[host] = client
        return client, None


class LoopShare:
    """Divides the time of an event loop between clients.

    A client's work is estimated from the size of its requests. It never waits while it is the only active client;
    otherwise its requests are spaced out (`Pace`). Nothing is read from a client while it waits.
    """

    def __init__(self) -> None:
        self._latest: Client | None = None
        self._latest_at = self._other_at = -math.inf
        """Times of the last request of the latest client and of any other client."""

    def charge(self, client: Client, seconds: float) -> float:
        """Add work to a client's account. Returns the seconds until the work may begin; 0 or less: at once."""
        now = asyncio.get_running_loop().time()
        if client is not self._latest:
            self._latest, self._other_at = client, self._latest_at
        self._latest_at = now
        return client.pace.charge(seconds, alone=now - self._other_at > CROWD_S)

    async def turn(self, client: Client, seconds: float) -> None:
        """Wait until a client may have this many seconds of work done."""
        if (delay := self.charge(client, seconds)) > 0:
            await asyncio.sleep(delay)


class RequestLimits:
    """ASGI middleware that refuses requests beyond the limits of this module.

    Args:
        identify: returns the client of a request, and an error if the request is refused regardless of its body.
        refuse: makes the answer to a refused request in the format of the protocol.
        share: divides the event loop between clients; None: requests are served as they arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        identify: Callable[[Scope], tuple[Client, RefusedRequestError | None]],
        refuse: Callable[[Scope, RefusedRequestError], ASGIApp],
        share: LoopShare | None = None,
    ) -> None:
        self._app = app
        self._identify = identify
        self._refuse = refuse
        self._share = share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or answer with a refusal."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        client, error = self._identify(scope)
        delay = 0.0 if self._share is None else self._share.charge(client, REQUEST_S)
        try:
            with client.request():
                if delay > 0:
                    await asyncio.sleep(delay)
                if scope["type"] == "websocket":
                    _check_headers(scope)
                    await self._app(scope, _bounded(receive, send), send)
                else:
                    await self._answer(scope, receive, _counted(send, client), _Body(client, error))
        except RefusedRequestError as refused:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": refused.message})
            else:
                await self._refuse(scope, refused)(scope, receive, _closing(_counted(send, client)))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, body: _Body) -> None:
        """Read a request's body and pass it to the application."""
        headers = _check_headers(scope)
        if "content-length" not in headers and "transfer-encoding" not in headers:
            if body.error is not None:
                raise body.error
            await self._app(scope, receive, send)
            return
        try:
            if await self._read(body, headers, receive):
                text = body.joined()
                count = await off_loop(len(text), lambda: check_structure(text))
                if self._share is not None:
                    self._share.charge(body.client, count * STRUCTURE_S)
                await self._app(scope, _replayed(text, receive), send)
        finally:
            body.drop()

    async def _read(self, body: _Body, headers: Headers, receive: Receive) -> bool:
        """Read a body to its end. Returns False if the client disconnected."""
        length = headers.get("content-length", "")
        declared = int(length) if length.isdecimal() and len(length) < 20 else 0
        body.check(declared)
        if body.error is not None and (declared > MAX_DRAINED or "expect" in headers):
            raise body.error
        seconds, more = BODY_S, True
        while more and body.length <= MAX_DRAINED:
            began = time.monotonic()
            try:
                async with asyncio.timeout(seconds):
                    message = await receive()
            except TimeoutError:
                why = f"the body took more than {BODY_S:g} s to arrive"
                raise RefusedRequestError(why, status=408, code="request_timeout") from None
            seconds -= time.monotonic() - began  # waits for other clients' shares don't count
            if message["type"] == "http.disconnect":
                return False
            chunk, more = message.get("body", b""), message.get("more_body", False)
            body.add(chunk)
            if self._share is not None:
                await self._share.turn(body.client, len(chunk) * (BYTE_S if body.error is None else DRAINED_BYTE_S))
        if body.error is not None:
            raise body.error
        return True


class _Body:
    """A body being received: its chunks, counted as held by its client, until it is refused."""

    def __init__(self, client: Client, error: RefusedRequestError | None) -> None:
        self.client = client
        self.error = error
        self.length = 0
        self._held = 0
        self._chunks: list[bytes] = []

    def check(self, length: int) -> None:
        """Refuse the body if this length is above `MAX_BODY`."""
        if self.error is None and length > MAX_BODY:
            self.drop()
            self.error = _too_long()

    def add(self, chunk: bytes) -> None:
        """Store another chunk; if the body is refused, only count it."""
        self.length += len(chunk)
        self.check(self.length)
        if self.error is None:
            try:
                self.client.hold(len(chunk))
            except RefusedRequestError as error:
                self.drop()
                self.error = error
            else:
                self._held += len(chunk)
                self._chunks.append(chunk)

    def joined(self) -> bytes:
        """Return the whole body, which still counts as held."""
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

    def drop(self) -> None:
        """Release the chunks and the bytes held."""
        self._chunks.clear()
        self.client.held -= self._held
        self._held = 0


def _too_long() -> RefusedRequestError:
    return RefusedRequestError(f"the body has more than {MAX_BODY >> 20} MiB", status=413, code="request_too_large")


def _check_headers(scope: Scope) -> Headers:
    size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEADERS:
        why = f"the address and the headers have more than {MAX_HEADERS >> 10} KiB"
        raise RefusedRequestError(why, status=431, code="headers_too_large")
    return Headers(scope=scope)


def _bounded(receive: Receive, send: Send) -> Receive:
    """Wrap a WebSocket's `receive`: a message that is too long closes the connection."""

    async def receiving() -> Message:
        message = await receive()
        if len(message.get("text") or message.get("bytes") or "") > MAX_BODY:
            reason = _too_long().message
            await send({"type": "websocket.close", "code": 1009, "reason": reason})
            return {"type": "websocket.disconnect", "code": 1009, "reason": reason}
        return message

    return receiving


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body already read, and then the following messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return messages.pop() if messages else await receive()

    return receiving


def _counted(send: Send, client: Client) -> Send:
    """Wrap `send` so that the client's answers are counted by status."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            client.answered(message["status"])
        await send(message)

    return sending


def _closing(send: Send) -> Send:
    """Wrap `send` so that the connection closes after the answer: the rest of a refused body may follow on it."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await send(message)

    return sending
