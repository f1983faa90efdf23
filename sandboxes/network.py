"""An allow-list for sandboxes that need some of the network: a filtering HTTP proxy, run by the engine's own process.

The sandbox keeps its network namespace with nothing but a loopback in it. Its runner opens a listening socket there
and hands the descriptor to the engine, which accepts the connections: the only way out is a proxy that forwards
`CONNECT` and plain `http://` requests to the hosts on the list and answers 403 to everything else. No bridge, no
firewall rule, no second container, and the same on every engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from forge_env.errors import SandboxError, UsageError

PROXY_PORT = 3128
"""On the sandbox's own loopback."""
DEFAULT_PORTS = (80, 443)
_MAX_HEAD = 16 * 1024
_HEAD_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 64
_CHUNK = 1 << 16
_HOP_BY_HOP = (b"proxy-", b"connection:", b"keep-alive:", b"host:")


class AllowList:
    """Hosts that may be reached: `name`, `name:port` or `*.name` (any name below); without a port, 80 and 443.

    Raises:
        UsageError: an entry is not of this form.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = [_parse(entry) for entry in entries]

    def permits(self, host: str, port: int) -> bool:
        """Whether a connection to `host:port` is allowed. An address is allowed only where it is listed itself."""
        host = host.lower().rstrip(".")
        return any(
            port in ports and (host.endswith(name[1:]) if name.startswith("*.") else host == name)
            for name, ports in self._entries
        )


def _parse(entry: str) -> tuple[str, tuple[int, ...]]:
    ports: tuple[int, ...]
    name, colon, port = entry.lower().rpartition(":") if not entry.endswith("]") else (entry, "", "")
    if not colon:
        name, ports = entry.lower(), DEFAULT_PORTS
    elif port.isdigit() and 0 < int(port) < 1 << 16:
        ports = (int(port),)
    else:
        name = ""
    if ":" in name and not (name.startswith("[") and name.endswith("]")):
        name = ""
    name = name.strip("[]").rstrip(".")
    if not name or "/" in name or "*" in name.removeprefix("*.") or name == "*.":
        raise UsageError(f"{entry!r} is not a host to allow", fix="write NAME, NAME:PORT or *.NAME")
    return name, ports


class FilteringProxy:
    """Serves one sandbox.

    Args:
        listener: a listening socket in the sandbox's network namespace.
        allowed: what may be reached.
    """

    def __init__(self, listener: socket.socket, allowed: AllowList) -> None:
        self._listener = listener
        self._allowed = allowed
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.refused = 0

    async def start(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=self._listener, limit=_MAX_HEAD)

    def drop_connections(self) -> None:
        """End what is open: it belongs to a user who has gone."""
        for task in list(self._connections):
            task.cancel()

    def close(self) -> None:
        """Stop."""
        self.drop_connections()
        if self._server is not None:
            self._server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._forward(head, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that says nothing sensible, or hangs up: its connection ends
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()

    async def _forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, _, headers = head.partition(b"\r\n")
        try:
            method, target, _ = request.decode("ascii").split(" ")
            host, port, path = _destination(method, target)
        except ValueError:
            writer.write(_answer("400 Bad Request", "not a proxy request"))
            return
        if not self._allowed.permits(host, port):
            self.refused += 1
            writer.write(_answer("403 Forbidden", f"{host}:{port} is not on this sandbox's allow-list"))
            return
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                upstream_reader, upstream = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            writer.write(_answer("502 Bad Gateway", f"{host}:{port}: {error or 'timed out'}"))
            return
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                upstream.write(_rewritten(method, path, host, port, headers))
            await asyncio.gather(_copy(reader, upstream), _copy(upstream_reader, writer))
        finally:
            upstream.transport.abort()


async def receive_listener(channel: socket.socket) -> socket.socket:
    """The listening socket that a runner with a proxy sends before its first frame."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(channel, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(channel)
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    if not fds:
        raise SandboxError("the sandbox ended before it was ready")
    return socket.socket(fileno=fds[0])


def _destination(method: str, target: str) -> tuple[str, int, str]:
    """Host, port and path that a proxy request names. Raises `ValueError`."""
    if method == "CONNECT":
        parts, path = urlsplit(f"//{target}"), ""
        if parts.port is None:
            raise ValueError(target)
    else:
        parts = urlsplit(target)
        if parts.scheme != "http":
            raise ValueError(target)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not parts.hostname:
        raise ValueError(target)
    return parts.hostname, parts.port or 80, path


def _rewritten(method: str, path: str, host: str, port: int, headers: bytes) -> bytes:
    """The request as the server expects it: one to a connection, and the host that was checked."""
    kept = [line for line in headers.split(b"\r\n") if line and not line.lower().startswith(_HOP_BY_HOP)]
    named = host if port == 80 else f"{host}:{port}"
    lines = [f"{method} {path} HTTP/1.1".encode(), f"Host: {named}".encode(), b"Connection: close", *kept]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _answer(status: str, text: str) -> bytes:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
