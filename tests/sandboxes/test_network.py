"""The allow-list: what programs reach through the filtering proxy, and that nothing else is reached."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import pytest_asyncio

from forge_env.errors import UsageError
from forge_env.sandbox import SandboxEngine, SandboxSpec
from sandboxes.network import _MAX_CONNECTIONS, AllowList, FilteringProxy

FETCH = (
    "import urllib.request, urllib.error\n"
    "try:\n    with urllib.request.urlopen('http://127.0.0.1:{port}/{path}', timeout=5) as answer:\n"
    "        print(answer.status, answer.read().decode())\n"
    "except urllib.error.HTTPError as error:\n    print(error.code, error.read().decode())\n"
)
CONNECT = (
    "import socket\ns = socket.create_connection(('127.0.0.1', 3128), timeout=5)\n"
    "s.sendall(b'CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n')\n"
    "print(s.recv(100).split(b'\\r\\n')[0].decode())\n"
    "s.sendall(b'GET /through HTTP/1.1\\r\\n\\r\\n')\nprint(s.makefile('rb').read().decode())\n"
)
DIRECT = "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)\n"


@pytest_asyncio.fixture(loop_scope="module")
async def server() -> AsyncIterator[int]:
    """An HTTP server on the host's loopback that answers with the path it was asked for; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(path), path))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_only_what_is_listed_is_reached(engine: SandboxEngine, server: int) -> None:
    async with engine.session(SandboxSpec(allow=(f"127.0.0.1:{server}",))) as sandbox:
        assert (await sandbox.run_python(FETCH.format(port=server, path="a?b=c"))).stdout == "200 /a?b=c\n"
        tunnelled = (await sandbox.run_python(CONNECT.format(port=server))).stdout
        assert tunnelled.startswith("HTTP/1.1 200")
        assert tunnelled.rstrip().endswith("/through")
        other = 1 if server != 1 else 2
        assert (await sandbox.run_python(FETCH.format(port=other, path=""))).stdout.startswith("403 ")
        assert "403" in (await sandbox.run_python(CONNECT.format(port=other))).stdout
        assert "ConnectionRefusedError" in (await sandbox.run_python(DIRECT.format(port=server))).stderr


@pytest.mark.asyncio(loop_scope="module")
async def test_connections_end_with_the_lease(engine: SandboxEngine, server: int) -> None:
    spec = SandboxSpec(allow=(f"127.0.0.1:{server}",))
    for _ in range(2):
        async with engine.session(spec) as sandbox:
            shell = await sandbox.python()
            code = "import socket\ns = socket.create_connection(('127.0.0.1', 3128))\nprint(s.getpeername()[1])"
            assert (await shell.run(code)).stdout == "3128\n"
    assert "poisoned" not in engine.stats()


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_list_there_is_no_proxy(engine: SandboxEngine) -> None:
    async with engine.session() as sandbox:
        assert "refused" in (await sandbox.run_python(DIRECT.format(port=3128))).stderr.lower()
        assert "proxy" not in (await sandbox.exec(["env"])).stdout.lower()
    with pytest.raises(UsageError, match="is not a host"):
        SandboxSpec(allow=("http://example.org/",))


def test_names() -> None:
    allowed = AllowList(["example.org", "*.packages.test", "10.0.0.1:8000", "[::1]:80"])
    assert allowed.permits("example.org", 443)
    assert allowed.permits("EXAMPLE.org.", 80)
    assert allowed.permits("a.b.packages.test", 443)
    assert allowed.permits("10.0.0.1", 8000)
    assert allowed.permits("::1", 80)
    for host, port in (
        ("example.org", 22),
        ("evil-example.org", 443),
        ("example.org.evil.test", 443),
        ("packages.test", 443),
        ("10.0.0.1", 80),
        ("10.0.0.2", 8000),
    ):
        assert not allowed.permits(host, port)
    for bad in ("", "*", "*.", "a/b", "a:b", "a:0", "a:70000", "::1", "a*b"):
        with pytest.raises(UsageError):
            AllowList([bad])
    with pytest.raises(UsageError):
        SandboxSpec(network=True, allow=("a",))


def test_a_name_leads_to_public_addresses_only() -> None:
    allowed = AllowList(["example.org", "10.0.0.5:8000"])
    for address in ("93.184.216.34", "2606:2800:220:1::1"):
        assert allowed.permits_address(address, 80)
    private = ("127.0.0.1", "169.254.169.254", "10.0.0.5", "100.64.0.1", "0.0.0.0", "224.0.0.1")
    for address in (*private, "::1", "fe80::1%lo", "fd00::1", "::ffff:127.0.0.1", "2002:7f00:1::"):
        assert not allowed.permits_address(address, 80)
    assert allowed.permits_address("10.0.0.5", 8000)


@asynccontextmanager
async def proxy(*allowed: str) -> AsyncIterator[int]:
    """A proxy on the host's loopback, without a sandbox; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    served = FilteringProxy(listener, AllowList(allowed))
    await served.start()
    try:
        yield listener.getsockname()[1]
    finally:
        served.close()


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that answers with every byte it was sent; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_one_request_to_a_connection_and_the_host_that_was_checked() -> None:
    async with echo() as server, proxy(f"127.0.0.1:{server}") as port:
        target = b"http://127.0.0.1:%d/a" % server
        second = b"GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n"
        head = b"Host: other.test\r\nUpgrade: h2c\r\nX-Kept: 1\r\n"
        sent = await ask(port, b"GET " + target + b" HTTP/1.1\r\n" + head + b"\r\n" + second)
        named = b"Host: 127.0.0.1:%d" % server
        assert sent == b"GET /a HTTP/1.1\r\n" + named + b"\r\nConnection: close\r\nX-Kept: 1\r\n\r\n"
        sent = await ask(port, b"POST " + target + b" HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody" + second)
        assert sent.endswith(b"\r\n\r\nbody")


@pytest.mark.parametrize(
    "head",
    [
        "GET {url} HTTP/1.1\r\nHost: h\r\nX: a\nHost: other.test",
        "GET {url} HTTP/1.1\r\nHost: h\r\nX: a\r\n Host: other.test",
        "GET {url} HTTP/1.1\r\nHost: h\r\nHost : other.test",
        "GET {url} HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5",
        "GET {url} HTTP/1.1\r\nContent-Length: -4",
        "POST {url} HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST {url} HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 4",
        "GET {url} HTTP/1.1\r\nX\0: a",
        "GET {url} HTTP/1.1\r\nHost: h\r\nX: a\rHost: other.test",
        "GET {url} HTTP/1.1\r\nHost: h\r\nHost: other.test",
        "GET {url} HTTP/1.1\r\nNo-Host: a",
        "GET  {url} HTTP/1.1",
        "GET\t/\tHTTP/1.1\nHost:other.test\n\n {url} HTTP/1.1",
        "GET https://127.0.0.1/ HTTP/1.1",
        "GET / HTTP/1.1\r\nHost: 127.0.0.1",
        "GET http://127.0.0.1@other.test/ HTTP/1.1",
        "GET http://a\0b.test/ HTTP/1.1",
        f"GET http://{'a' * 64}.test/ HTTP/1.1",
        "CONNECT 127.0.0.1 HTTP/1.1",
        "CONNECT 127.0.0.1:0 HTTP/1.1",
        "CONNECT 127.0.0.1:99999 HTTP/1.1",
        "nonsense",
    ],
)
async def test_what_can_be_read_in_two_ways_is_not_forwarded(head: str) -> None:
    async with echo() as server, proxy(f"127.0.0.1:{server}", "*.test") as port:
        request = head.format(url=f"http://127.0.0.1:{server}/") + "\r\n"
        host = "Host: h\r\n" if "Host" not in head.partition("\r\n")[2] else ""
        assert (await ask(port, f"{request}{host}\r\n".encode())).startswith(b"HTTP/1.1 400 ")


async def test_a_body_that_breaks_off_reaches_nobody_as_a_whole_one() -> None:
    async with echo() as server, proxy(f"127.0.0.1:{server}") as port:
        head = b"POST http://127.0.0.1:%d/ HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n" % server
        assert await ask(port, head + b"half") == b""


async def test_a_listed_name_at_a_private_address_is_refused() -> None:
    async with echo() as server, proxy(f"localhost:{server}") as port:
        answer = await ask(port, b"CONNECT localhost:%d HTTP/1.1\r\nHost: h\r\n\r\n" % server)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"list the address itself" in answer
    async with echo() as server, proxy(f"localhost:{server}", f"127.0.0.1:{server}", f"[::1]:{server}") as port:
        answer = await ask(port, b"CONNECT localhost:%d HTTP/1.1\r\nHost: h\r\n\r\nhello" % server)
    assert answer == b"HTTP/1.1 200 Connection established\r\n\r\nhello"


async def test_connections_beyond_the_most_wait_their_turn() -> None:
    """A program that opens too many doesn't keep the event loop busy: they stay in the queue of its socket."""
    async with echo() as server, proxy(f"127.0.0.1:{server}") as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(_MAX_CONNECTIONS)]
        head = f"GET http://127.0.0.1:{server}/ HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        waiting = asyncio.create_task(ask(port, head))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        silent[0][1].close()
        assert b"GET / HTTP/1.1" in await waiting
        for _, writer in silent:
            writer.close()


async def test_connections_that_wait_end_with_their_user() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    served = FilteringProxy(listener, AllowList([]))
    await served.start()
    port = listener.getsockname()[1]
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(_MAX_CONNECTIONS + 5)]
    await asyncio.sleep(0)
    served.drop_connections()
    for reader, writer in connections:
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
    assert b"403" in await ask(port, b"GET http://example.org/ HTTP/1.1\r\nHost: h\r\n\r\n"), "the next user is served"
    served.close()


async def test_what_a_sandbox_sends_is_spaced_out() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    served = FilteringProxy(listener, AllowList([]))
    served._pace.charge(1000.0)  # its programs have sent very much
    await served.start()
    port = listener.getsockname()[1]
    await ask(port, b"GET http://example.org/ HTTP/1.1\r\n\r\n")  # accepted before the pace is asked
    waiting = asyncio.create_task(ask(port, b"GET http://example.org/ HTTP/1.1\r\n\r\n"))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    served.close()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
