"""The allow-list: what programs reach through the filtering proxy, and that nothing else is reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge_env.errors import UsageError
from forge_env.sandbox import SandboxEngine, SandboxSpec
from sandboxes.network import AllowList

FETCH = (
    "import urllib.request, urllib.error\n"
    "try:\n    with urllib.request.urlopen('http://127.0.0.1:{port}/{path}', timeout=5) as answer:\n"
    "        print(answer.status, answer.read().decode())\n"
    "except urllib.error.HTTPError as error:\n    print(error.code, error.read().decode())\n"
)
CONNECT = (
    "import socket\ns = socket.create_connection(('127.0.0.1', 3128), timeout=5)\n"
    "s.sendall(b'CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\n')\nprint(s.recv(100).split(b'\\r\\n')[0].decode())\n"
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
        await engine.acquire(SandboxSpec(allow=("http://example.org/",)))


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
