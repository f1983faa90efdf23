"""Limits on what clients send, shared by all served applications and checked before anything is parsed.

`RequestLimits` is ASGI middleware. It reads a request's body while it arrives and refuses it as soon as a limit is
passed: bytes, time, requests of one client that are open at once, and the structure of its JSON, which decides how long
parsing takes. It hands the whole body to the application, so that nothing behind it waits for the network.

Where clients share one event loop and distrust each other, a `LoopShare` also spaces out the requests of each one.
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
"""Bytes of a body, or of a WebSocket message."""
MAX_HELD = 4 * MAX_BODY
"""Bytes of all open requests of one client."""
MAX_DRAINED = 1 << 30
"""Bytes of a refused body that are read and dropped before its connection is closed: most clients read no answer before
they have sent everything."""
MAX_HEADERS = 32 << 10
"""Bytes of a request's address and headers."""
MAX_OPEN = 256
"""Requests and WebSockets of one client that are open at once."""
MAX_STRUCTURE = 120_000
"""Commas, colons and opening brackets outside of strings: at least as many as the values and keys of the JSON."""
MAX_NESTING = 100
"""Levels of arrays and objects."""
MAX_REFUSED = 100
"""Refused requests in a row, after which a client is stopped."""
BODY_S = 60.0
"""Seconds that a client may take to send a body."""
LARGE = 256 << 10
"""Bytes beyond which a body is read in a thread."""

CROWD_S = 5.0
"""Seconds after its last request in which a client counts as one that asks too."""
REQUEST_S = 2e-3
"""Estimated work for a request, connection included, in seconds."""
BYTE_S = 3e-8
"""Estimated work for a byte of a body."""
DRAINED_BYTE_S = 5e-9
"""Estimated work for a byte that is dropped."""
STRUCTURE_S = 2e-6
"""Estimated work for a comma, colon or opening bracket."""

T = TypeVar("T")
_TEXT = bytes(byte for byte in range(256) if byte not in b'",:[]{}')
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b",:[{")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Brackets as signed bytes: one level up or down."""


class RefusedRequestError(Exception):
    """A request that gets no answer. Its program reads the reason in the form of the protocol that it speaks.

    Attributes:
        message: the reason.
        status: HTTP status. Clients retry after 408, 409, 429 and 5xx, and after no other.
        code: kind of the error, for programs.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


def check_structure(body: bytes) -> int:
    """Bound the structure of a JSON text before it is parsed, in linear time.

    Returns:
        At least the number of its commas, colons and opening brackets outside of strings. There are at most as many
        values and keys, plus one.

    Raises:
        RefusedRequestError: there are more than `MAX_STRUCTURE`, arrays and objects are nested more than `MAX_NESTING`
            levels deep, or it isn't UTF-8, which has no NUL bytes in JSON.
    """
    if b"\0" in body:
        raise RefusedRequestError("the body is not JSON in UTF-8: it has NUL bytes")
    marks = body.translate(None, _NO_MARKS)  # of most requests they are few, even with those in strings
    if len(marks) <= MAX_STRUCTURE and marks.count(b"[") + marks.count(b"{") <= MAX_NESTING:
        return len(marks)
    count, depth = structure(body)
    if depth > MAX_NESTING:
        raise RefusedRequestError(f"the body is nested more than {MAX_NESTING} levels deep")
    return count


def structure(body: bytes) -> tuple[int, int]:
    """The number of commas, colons and opening brackets outside of the strings of a JSON text, and its depth.

    Raises:
        RefusedRequestError: the number is above `MAX_STRUCTURE`.
    """
    strings = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    if strings.count(b'"') > 2 * (MAX_STRUCTURE + 1):  # each string but one has a comma, colon or bracket
        raise _too_much()
    outside = b"".join(strings.translate(None, _TEXT).split(b'"')[::2])
    count = sum(map(outside.count, (b",", b":", b"[", b"{")))
    if count > MAX_STRUCTURE:
        raise _too_much()
    steps = memoryview(outside.translate(_STEPS, b",:")).cast("b")
    return count, max(accumulate(steps[: 2 * count]), default=0)  # of JSON, these are all


def _too_much() -> RefusedRequestError:
    return RefusedRequestError(
        f"the body has more than {MAX_STRUCTURE:,} commas, colons and opening brackets outside of strings"
    )


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do `work` on a text of `size` bytes: in a thread if it is large, so that the event loop gets turns meanwhile."""
    return await asyncio.to_thread(work) if size > LARGE else work()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Client:
    """The open requests of one client, and what it has cost.

    Attributes:
        max_open: requests and WebSockets that may be open at once.
        stop: called after `MAX_REFUSED` refused requests in a row, with the reason.
        open: requests and WebSockets that are open.
        held: bytes of their bodies.
        refused: refused requests in a row, without those that may be tried again (429) or were given up (499).
        pace: spaces out its requests.
    """

    max_open: int = MAX_OPEN
    stop: Callable[[str], None] | None = None
    open: int = 0
    held: int = 0
    refused: int = 0
    pace: Pace = field(default_factory=Pace)

    @contextmanager
    def request(self) -> Iterator[None]:
        """An open request. `RefusedRequestError`: too many are open."""
        if self.open >= self.max_open:
            raise RefusedRequestError(f"{self.open} requests are open already", status=429, code="too_many_requests")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def hold(self, count: int) -> None:
        """Hold so many bytes more. `RefusedRequestError`: they would be more than `MAX_HELD`."""
        if self.held + count > MAX_HELD:
            why = f"open requests have {MAX_HELD >> 20} MiB together"
            raise RefusedRequestError(why, status=429, code="too_many_requests")
        self.held += count

    def answered(self, status: int) -> None:
        """Count an answer; stop a client that sends only requests that are refused."""
        if status < 400:
            self.refused = 0
        elif status < 500 and status not in (429, 499):
            self.refused += 1
            if self.refused >= MAX_REFUSED and self.stop is not None:
                self.stop(f"its last {MAX_REFUSED} requests were refused")


class Hosts:
    """Clients by the address that they connect from, while they have open requests.

    Args:
        max_open: requests and WebSockets that one of them may have open at once.
    """

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._clients: WeakValueDictionary[str, Client] = WeakValueDictionary()

    def identify(self, scope: Scope) -> tuple[Client, RefusedRequestError | None]:
        """The client of a request; none is refused."""
        host = (scope.get("client") or ("",))[0]
        client = self._clients.get(host) or Client(self._max_open)
        self._clients[host] = client
        return client, None


class LoopShare:
    """Divides the time of an event loop between clients.

    A client's work is estimated from what it sends. While it is alone it never waits; while others ask too, its
    requests are spaced out (`Pace`). A client that waits isn't read from.
    """

    def __init__(self) -> None:
        self._latest: Client | None = None
        self._latest_at = self._other_at = -math.inf
        """When the latest client, and any other, last asked."""

    def charge(self, client: Client, seconds: float) -> float:
        """Add to a client's work. Returns the seconds until it may begin; 0 or less: at once."""
        now = asyncio.get_running_loop().time()
        if client is not self._latest:
            self._latest, self._other_at = client, self._latest_at
        self._latest_at = now
        return client.pace.charge(seconds, alone=now - self._other_at > CROWD_S)

    async def turn(self, client: Client, seconds: float) -> None:
        """Wait until a client may have so much work done."""
        if (delay := self.charge(client, seconds)) > 0:
            await asyncio.sleep(delay)


class RequestLimits:
    """Refuses requests beyond the limits of this module.

    Args:
        app: the application.
        identify: the client that a request belongs to, and the reason if it is refused whatever it says.
        refuse: the answer to a refused request, in the form of the protocol.
        share: divides the event loop between clients; None: requests are served as they come.
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
        """Answer a refusal, or call the application."""
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
        """Read a request's body and have it answered."""
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
        """Read a body to its end. Returns whether the client is still there.

        Raises:
            RefusedRequestError: the body is refused. It was read and dropped, unless it is longer than `MAX_DRAINED`,
                or its client waits for leave to send it (`Expect`).
        """
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
            seconds -= time.monotonic() - began  # waiting for the share of another client isn't its fault
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
    """A body that arrives: its chunks, counted as held by its client, until it is refused."""

    def __init__(self, client: Client, error: RefusedRequestError | None) -> None:
        self.client = client
        self.error = error
        self.length = 0
        self._held = 0
        self._chunks: list[bytes] = []

    def check(self, length: int) -> None:
        """Refuse a body of so many bytes if that is too long."""
        if self.error is None and length > MAX_BODY:
            self.drop()
            self.error = _too_long()

    def add(self, chunk: bytes) -> None:
        """Keep another chunk; only count it if the body is refused."""
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
        """The whole body, which stays held."""
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

    def drop(self) -> None:
        """Hold nothing any more."""
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
    """Messages of a WebSocket; one that is too long ends it."""

    async def receiving() -> Message:
        message = await receive()
        if len(message.get("text") or message.get("bytes") or "") > MAX_BODY:
            reason = _too_long().message
            await send({"type": "websocket.close", "code": 1009, "reason": reason})
            return {"type": "websocket.disconnect", "code": 1009, "reason": reason}
        return message

    return receiving


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that was read, and then whatever comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return messages.pop() if messages else await receive()

    return receiving


def _counted(send: Send, client: Client) -> Send:
    """Tell a client of its answer's status."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            client.answered(message["status"])
        await send(message)

    return sending


def _closing(send: Send) -> Send:
    """Close the connection after an answer: what follows on it may be the rest of a refused body."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await send(message)

    return sending
