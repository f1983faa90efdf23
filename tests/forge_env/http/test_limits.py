"""Limits of requests: what is refused, in which form, and what it costs others."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from forge_env.concurrency import BURST_S, SHARE, Pace
from forge_env.http import connections, limits
from forge_env.http.limits import (
    CROWD_S,
    MAX_BODY,
    MAX_HEADERS,
    MAX_HELD,
    MAX_NESTING,
    MAX_OPEN,
    MAX_REFUSED,
    MAX_STRUCTURE,
    Client,
    Hosts,
    LoopShare,
    RefusedRequestError,
    RequestLimits,
    check_structure,
    structure,
)
from tests.forge_env.serve.serving import running, serving, until

# --- structure

TEXT = st.text(st.characters(codec="utf-8")) | st.text(alphabet='"\\,:[]{}nu/ ')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=6),
    max_leaves=40,
)


def counted(value: Any) -> tuple[int, int, int]:
    """`(values and keys, empty arrays and objects, levels)` of a parsed value."""
    if not isinstance(value, dict | list):
        return 1, 0, 0
    inside = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return (
        1 + keys + sum(each[0] for each in inside),
        (not value) + sum(each[1] for each in inside),
        1 + max((each[2] for each in inside), default=0),
    )


@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([(",", ":"), (" ,\n", "\t: ")]))
def test_structure_of_any_value(value: Any, ascii_only: bool, indent: int | None, separators: tuple[str, str]) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=separators).encode()
    items, empty, depth = counted(json.loads(text))
    assert structure(text) == (items - 1 + empty, depth)
    assert check_structure(text) >= items - 1 + empty


@given(VALUES, st.integers(0, 60), st.integers(0, 6))
def test_what_is_accepted_is_within_the_limits_and_nothing_else_is_refused(value: Any, most: int, levels: int) -> None:
    text = json.dumps(value).encode()
    items, empty, depth = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_STRUCTURE", most)
        patch.setattr(limits, "MAX_NESTING", levels)
        try:
            check_structure(text)
            accepted = True
        except RefusedRequestError:
            accepted = False
    assert accepted == (items - 1 + empty <= most and depth <= levels)


def slowly(body: bytes) -> int:
    """The same count, byte by byte."""
    count, inside, escaped = 0, False, False
    for byte in body:
        if escaped:
            escaped = False
        elif inside:
            inside, escaped = byte != ord('"'), byte == ord("\\")
        elif byte == ord('"'):
            inside = True
        elif byte in b",:[{":
            count += 1
    return count


@given(st.lists(st.sampled_from([b'"', b"\\", b",", b":", b"[", b"]", b"{", b"}", b"1", b"n", b"\xc3\xa9", b" "])))
def test_a_text_that_is_no_json_is_bounded_up_to_its_mistake(parts: list[bytes]) -> None:
    body = b"".join(parts)
    try:
        json.loads(body)
        read = len(body)
    except json.JSONDecodeError as error:
        read = len(body.decode()[: error.pos].encode())
    assert structure(body)[0] >= slowly(body[:read])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" + b"1," * MAX_STRUCTURE + b"1]", "more than 120,000 commas, colons and opening brackets"),
        (b"[" + b"[]," * MAX_STRUCTURE + b"1]", "more than 120,000"),
        (b'["' + b'","' * MAX_STRUCTURE + b'"]', "more than 120,000"),
        (b"[" * 101 + b'"' * 5 * MAX_STRUCTURE, "more than 120,000"),
        (b"[" * (MAX_NESTING + 1) + b"]" * (MAX_NESTING + 1), "nested more than 100 levels deep"),
        (b'{"a":[' * 60 + b"1" + b"]}" * 60, "nested more than 100 levels deep"),
        (b"[" * 110_000, "nested more than 100 levels deep"),
        (json.dumps([1]).encode("utf-16"), "not JSON in UTF-8"),
    ],
)
def test_structure_beyond_the_limits_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(RefusedRequestError, match=why):
        check_structure(body)


def test_a_long_text_full_of_brackets_is_no_structure() -> None:
    body = json.dumps({"code": 'x["\\"], {[' * 700_000}).encode()
    assert check_structure(body) == 2
    assert structure(body) == (2, 1)


# --- requests, without a network


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body; refuse an empty one."""
    body = b""
    if scope["method"] == "POST":
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message["body"]
    await JSONResponse(len(body), 200 if body != b"null" else 400)(scope, receive, send)


def refuse(scope: Scope, error: RefusedRequestError) -> JSONResponse:
    return JSONResponse([error.message, error.code], error.status)


class Caller:
    """Sends requests to the middleware as one client."""

    def __init__(self, app: Any = echo, client: Client | None = None, share: LoopShare | None = None) -> None:
        self.client = client or Client()
        self.limited = RequestLimits(app, identify=lambda scope: (self.client, None), refuse=refuse, share=share)
        self.largest = 0

    async def post(self, chunks: Iterator[bytes] | list[bytes], headers: dict[str, str] | None = None) -> Any:
        """`(status, parsed answer, headers)`, or None if the client hung up (the chunks ended with None)."""
        sent: list[Message] = []
        left = [*chunks] if isinstance(chunks, list) else chunks
        pending = iter(left)
        ahead = [next(pending, None)]

        async def receive() -> Message:
            self.largest = max(self.largest, self.client.held)
            chunk = ahead[0]
            if chunk is None:
                return {"type": "http.disconnect"}
            ahead[0] = next(pending, None)
            return {"type": "http.request", "body": chunk, "more_body": ahead[0] is not None}

        async def send(message: Message) -> None:
            sent.append(message)

        given_headers = {"transfer-encoding": "chunked", **(headers or {})}
        await self.limited(scope_of(given_headers), receive, send)
        if not sent:
            return None
        answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], json.loads(sent[1]["body"]), answered


def scope_of(headers: dict[str, str], kind: str = "http") -> Scope:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    head = {"path": "/", "raw_path": b"/", "query_string": b"", "headers": raw, "client": ("1.2.3.4", 5)}
    return {"type": kind, "method": "POST", **head}


async def test_a_body_within_the_limits_reaches_the_application_whole() -> None:
    caller = Caller()
    status, length, _ = await caller.post([b'["', b"x" * 1000, b'"]'])
    assert (status, length, caller.largest, caller.client.held) == (200, 1004, 1002, 0)


async def test_a_huge_body_is_dropped_while_it_arrives() -> None:
    caller = Caller()
    megabyte = b"x" * (1 << 20)
    status, (why, code), headers = await caller.post(megabyte for _ in range(400))
    assert (status, why, code) == (413, "the body has more than 8 MiB", "request_too_large")
    assert headers["connection"] == "close"
    assert caller.largest <= MAX_BODY
    assert caller.client.held == 0


async def test_a_body_that_says_how_long_it_is_is_never_held() -> None:
    caller = Caller()
    megabyte = b"x" * (1 << 20)
    status, _, _ = await caller.post((megabyte for _ in range(20)), {"content-length": str(20 << 20)})
    assert (status, caller.largest) == (413, 0)


@pytest.mark.parametrize("headers", [{"content-length": str(1 << 40)}, {"content-length": "9000000", "expect": "100-"}])
async def test_a_body_that_need_not_be_read_is_not(headers: dict[str, str]) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise AssertionError("it was read")

    assert (await Caller().post(chunks(), headers))[0] == 413


async def test_a_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.01)
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await Caller().limited(scope_of({"content-length": "5"}), receive, send)
    assert (sent[0]["status"], json.loads(sent[1]["body"])[1]) == (408, "request_timeout")


async def test_a_client_that_hangs_up_is_not_answered() -> None:
    caller = Caller()
    assert await caller.post(iter([]), {"content-length": "5"}) is None
    assert (caller.client.held, caller.client.open) == (0, 0)


async def test_what_one_client_holds_is_bounded() -> None:
    client = Client(held=MAX_HELD - 10)
    status, (why, _), _ = await Caller(client=client).post([b"x" * 11])
    assert (status, why) == (429, "open requests have 32 MiB together")
    assert (client.held, client.refused) == (MAX_HELD - 10, 0), "it may try again"


async def test_what_one_client_opens_is_bounded() -> None:
    opened = asyncio.Semaphore(0)
    answer = asyncio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        opened.release()
        await answer.wait()
        await echo(scope, receive, send)

    caller = Caller(waiting, Client(max_open=2))
    both = [asyncio.create_task(caller.post([b"1"])) for _ in range(2)]
    for _ in both:
        await opened.acquire()
    assert (await caller.post([b"1"]))[:2] == (429, ["2 requests are already open", "too_many_requests"])
    answer.set()
    assert [found[0] for found in await asyncio.gather(*both)] == [200, 200]
    assert caller.client.open == 0


async def test_long_headers_are_refused() -> None:
    status, (why, _), _ = await Caller().post([b"1"], {"x": "y" * MAX_HEADERS})
    assert (status, why) == (431, "the address and the headers have more than 32 KiB")


async def test_structure_is_checked_before_the_application_sees_it() -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    deep = b"[" * 200 + b"]" * 200
    assert (await Caller(never).post([deep]))[:2] == (
        400,
        ["the body is nested more than 100 levels deep", "invalid_request"],
    )
    large = b"[" + b"[]," * MAX_STRUCTURE + b"1]"
    assert (await Caller(never).post([large]))[0] == 400, "also where it is checked in a thread"


async def test_a_client_that_only_sends_refused_requests_is_stopped() -> None:
    reasons: list[str] = []
    caller = Caller(client=Client(stop=reasons.append))
    for _ in range(MAX_REFUSED - 1):
        assert (await caller.post([b"null"]))[0] == 400
    assert (await caller.post([b"1"]))[0] == 200
    for _ in range(MAX_REFUSED - 1):
        await caller.post([b"null"])
        await caller.post([b"1"])
    assert reasons == [], "some of its requests are answered"
    for count in range(MAX_REFUSED):
        assert reasons == []
        await caller.post([b"null"] if count % 2 else [b"[" * 101 + b"]" * 101])
    assert reasons == ["its last 100 requests were refused"]


async def test_a_long_message_ends_its_websocket() -> None:
    sent: list[Message] = []
    seen: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.receive", "text": "x" * (MAX_BODY + 1)}

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(await receive())

    await Caller(app).limited(scope_of({}, "websocket"), receive, send)
    assert [message["type"] for message in seen] == ["websocket.disconnect"]
    assert (sent[0]["code"], sent[0]["reason"]) == (1009, "the body has more than 8 MiB")


def test_clients_are_told_apart_by_their_address() -> None:
    hosts = Hosts()
    one, error = hosts.identify({"client": ("1.2.3.4", 5)})
    assert error is None
    assert hosts.identify({"client": ("1.2.3.4", 6)})[0] is one
    assert hosts.identify({"client": ("1.2.3.5", 5)})[0] is not one
    assert (one.max_open, hosts.identify({"client": None})[0].open) == (MAX_OPEN, 0)


# --- shares of the event loop


@given(st.lists(st.floats(0, 2), max_size=30))
def test_work_beyond_the_burst_is_spaced_out(work: list[float]) -> None:
    async def charged() -> None:
        loop, pace, total = asyncio.get_running_loop(), Pace(), 0.0
        began = loop.time()
        for seconds in work:
            delay = pace.charge(seconds)
            assert delay >= (total - BURST_S) / SHARE - (loop.time() - began) - 1e-6
            assert delay <= max(0.0, (total - BURST_S) / SHARE) + 1e-6
            total += seconds

    asyncio.run(charged())


async def test_only_clients_among_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    share, hostile, other = LoopShare(), Client(), Client()
    for _ in range(1000):
        assert share.charge(hostile, 1.0) <= 0
    share.charge(other, 0.001)
    assert share.charge(other, 0.001) <= 0, "whoever asks for little waits for nobody"
    assert share.charge(hostile, 1.0) <= 0
    assert share.charge(hostile, 1.0) > 9
    now = loop.time() + CROWD_S + 1
    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", lambda: now)
        assert share.charge(hostile, 1.0) <= 0, "it is alone again"


# --- connections


@pytest.fixture(params=["httptools", "h11"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of uvicorn's two parsers serves."""
    if request.param == "h11":
        monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)


@asynccontextmanager
async def listening(app: Any = echo) -> AsyncIterator[Callable[[], Any]]:
    """Opens connections to a server that echoes."""
    writers: list[asyncio.StreamWriter] = []

    async with running(Caller(app).limited, lifespan=False) as port:

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            return reader, writer

        try:
            yield connect
        finally:
            for writer in writers:
                writer.close()


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.usefixtures("parser")
async def test_a_head_without_an_end_is_refused() -> None:
    async with listening() as connect:
        for line in (b"X: " + b"y" * (1 << 20), b"X: y\r\n" * 100_000):
            reader, writer = await connect()
            writer.write(HEAD + line)
            answer = await ended(reader)
            assert answer in (b"", connections.TOO_MUCH)


@pytest.mark.usefixtures("parser")
async def test_bodies_of_one_connection_add_up() -> None:
    async with listening() as connect:
        reader, writer = await connect()
        body = b"1" * 100_000
        for _ in range(5):
            writer.write(HEAD + b"Content-Length: 100000\r\n\r\n" + body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(6) == b"100000"


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that is answered before the connection ends."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b""


@pytest.mark.usefixtures("parser")
async def test_frames_of_chunks_are_bounded() -> None:
    async with listening() as connect:
        reader, writer = await connect()
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 1_000_000)
        assert await ended(reader) in (b"", connections.TOO_MUCH)


@pytest.mark.usefixtures("parser")
async def test_who_sends_no_head_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    async with listening() as connect:
        for said in (b"", HEAD):
            reader, writer = await connect()
            writer.write(said)
            assert await ended(reader) == b""


@pytest.mark.usefixtures("parser")
async def test_silent_connections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_WAITING", 3)
    async with listening() as connect:
        readers = [(await connect())[0] for _ in range(4)]
        assert await ended(readers[0]) == b"", "the oldest"
        reader, writer = await connect()
        writer.write(HEAD + b"Content-Length: 1\r\nConnection: close\r\n\r\n1")
        assert (await ended(reader)).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, HEAD + b"Content-Length: 5\r\n\r\n1", HEAD + b"Content-Length: 1\r\n\r\n1"],
    ids=["nothing", "part of a head", "part of a body", "a request, whose answer has come"],
)
async def test_connections_leave_half_of_the_files_to_the_process(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    async with listening() as connect:
        readers = []
        for _ in range(4):
            reader, writer = await connect()
            writer.write(sent)
            readers.append(reader)
            if b"Length: 1" in sent:
                await reader.readuntil(b"\r\n\r\n")
        await ended(readers[0])
        assert readers[0].at_eof(), "the oldest"
        reader, writer = await connect()
        writer.write(HEAD + b"Content-Length: 1\r\nConnection: close\r\n\r\n1")
        assert (await ended(reader)).startswith(b"HTTP/1.1 200")


async def test_a_request_being_answered_is_not_closed_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    answer = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await answer.wait()
        await echo(scope, receive, send)

    async with listening(slow) as connect:
        asking = []
        for _ in range(2):
            reader, writer = await connect()
            writer.write(HEAD + b"Content-Length: 1\r\nConnection: close\r\n\r\n1")
            asking.append(reader)
        assert await ended((await connect())[0]) == b""
        answer.set()
        for reader in asking:
            assert (await ended(reader)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("soft", "most"), [(1024, 512), (1, 1), (10**6, 8192), (resource.RLIM_INFINITY, 8192)])
def test_how_many_may_connect(monkeypatch: pytest.MonkeyPatch, soft: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert connections.most_connections() == most


async def test_requests_that_nobody_waits_for_are_bounded() -> None:
    async with listening() as connect:
        reader, writer = await connect()
        writer.write((HEAD + b"Content-Length: 1\r\n\r\n1") * 1000)
        assert (await ended(reader)).count(b"HTTP/1.1 200") < 1000


# --- a served environment


@pytest.mark.slow
async def test_messages_of_a_served_environment_are_bounded() -> None:
    import websockets

    async with serving() as (url, sessions), websockets.connect(url.replace("http", "ws") + "/ws") as socket:
        await socket.send("[" * 101 + "]" * 101)
        told = json.loads(await socket.recv())["data"]
        assert (told["code"], "nested more than 100 levels deep" in told["message"]) == ("INVALID_JSON", True)

        async def send_much() -> None:
            await socket.send(json.dumps({"type": "step", "data": {"message": "x" * MAX_BODY}}))
            await socket.recv()

        with pytest.raises(websockets.ConnectionClosed) as closed:
            await send_much()
        assert closed.value.rcvd.code == 1009
    await until(lambda: len(sessions) == 0)


@pytest.mark.parametrize("path", ["/reset", "/step", "/close", "/mcp"])
async def test_bodies_of_a_served_environment_are_bounded(path: str) -> None:
    import httpx2

    async def body() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * (1 << 20)

    async with serving() as (url, _), httpx2.AsyncClient(timeout=60, trust_env=False) as client:
        found = await client.post(url + path, content=body())
        assert found.status_code == 413
        told = found.json()
        assert "8 MiB" in (told["error"]["message"] if path == "/mcp" else told["detail"])
