"""A filtering HTTP proxy, run in the engine's own process, for sandboxes that may reach only an allow-list of hosts.

The sandbox's network namespace has nothing but a loopback interface. Its runner opens a listening socket there and
passes the descriptor to the engine, which accepts the connections. The only way out is therefore a proxy that forwards
`CONNECT` and plain `http://` requests to listed hosts and answers 403 to all others. This works the same on every
engine and needs no bridge, firewall rule or second container.

A listed name may resolve to public addresses only: otherwise the owner of its DNS zone could point it at this machine,
its neighbours or a metadata service. The proxy connects to the same address that it checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import urlsplit

import h11

from forge_env.concurrency import Pace
from forge_env.errors import SandboxError
from forge_env.sandbox import SandboxSpec
from forge_env.sandbox.spec import PROXY_PORT, parse_host
from sandboxes.addresses import is_public

_MAX_HEAD = 16 * 1024
_HEAD_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 64
_RETRY_S = 1.0
_CHUNK = 1 << 16
_CONNECTION_S = 2e-3
"""Estimated seconds of event loop time for one connection, including its request and answer."""
_BYTE_S = 2e-9
"""Estimated seconds of event loop time for each byte."""
_HOP_BY_HOP = re.compile(rb"proxy-.*|connection|keep-alive|upgrade|host", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\r\n[ \t]")
"""Line endings that h11 accepts but a server could read as a separate line or as a continuation of the previous one."""


class AllowList:
    """Hosts that may be reached: `name`, `name:port` or `*.name` (any subdomain); without a port, 80 and 443.

    Args:
        entries: the hosts.
        origin: `HOST:PORT` of the server that answers requests addressed to the proxy itself or to no host; it is
            allowed too.

    Raises:
        UsageError: an entry is not of this form.
    """

    def __init__(self, entries: Iterable[str], origin: str = "") -> None:
        self._entries = [parse_host(entry) for entry in [*entries, *([origin] if origin else [])]]
        self._origin = (self._entries[-1][0], self._entries[-1][1][0]) if origin else None

    @classmethod
    def of(cls, spec: SandboxSpec) -> AllowList:
        """The allow-list of a sandbox's specification."""
        return cls(spec.allow, spec.origin)

    def destination(self, method: str, target: str) -> tuple[str, int, str]:
        """Destination of a request: host, port and path. Raises `ValueError`."""
        path = target.removeprefix(f"http://127.0.0.1:{PROXY_PORT}")
        if self._origin is not None and path.startswith("/") and method != "CONNECT":
            return *self._origin, path
        return _destination(method, target)

    def permits(self, host: str, port: int) -> bool:
        """Whether a connection to `host:port` is allowed. An IP address is allowed only if it is listed itself."""
        host = host.lower().rstrip(".")
        return any(
            port in ports and (host.endswith(name[1:]) if name.startswith("*.") else host == name)
            for name, ports in self._entries
        )

    def permits_address(self, address: str, port: int) -> bool:
        """Whether a permitted name may resolve to this address: it is public, or listed itself."""
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped:
            parsed = parsed.ipv4_mapped  # an IPv4-mapped address has the same destination
        return is_public(parsed) or self.permits(str(parsed), port)


class _PrivateAddressError(Exception):
    """A permitted name resolves to no permitted address."""


class FilteringProxy:
    """The proxy of one sandbox, at a listening socket in its network namespace."""

    def __init__(self, listener: socket.socket, allowed: AllowList) -> None:
        self._listener = listener
        self._allowed = allowed
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._pace = Pace()

    async def start(self) -> None:
        """Start accepting connections."""
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    def drop_connections(self) -> None:
        """Close all connections, including those not accepted yet: they belong to a previous user of the sandbox."""
        for task in list(self._connections):
            task.cancel()
        with suppress(OSError):  # no connection is pending, or the listener is closed
            while True:
                self._listener.accept()[0].close()

    def close(self) -> None:
        """Stop accepting and close all connections."""
        if self._accepting is not None:
            self._accepting.cancel()
        self.drop_connections()
        self._listener.close()

    async def _accept(self) -> None:
        """Accept connections one at a time. What exceeds the pace waits in the program's own backlog."""
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # out of file descriptors: try again when some have been closed
                self._room.release()
                await asyncio.sleep(_RETRY_S)
                continue
            task = loop.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._ended)
            await self._pace.turn(_CONNECTION_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._room.release()

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_HEAD)
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._forward(head, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client sent an invalid request or hung up: close its connection
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()

    async def _forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
        try:
            request = _understood(client, head)
            host, port, path = self._allowed.destination(request.method.decode(), request.target.decode())
        except (ValueError, h11.RemoteProtocolError) as error:
            _answer(client, writer, HTTPStatus.BAD_REQUEST, f"not a request that this proxy forwards: {error}")
            return
        if not self._allowed.permits(host, port):
            _answer(client, writer, HTTPStatus.FORBIDDEN, f"{host}:{port} is not on this sandbox's allow-list")
            return
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                upstream_reader, upstream = await self._connect(host, port)
        except _PrivateAddressError as error:
            _answer(client, writer, HTTPStatus.FORBIDDEN, str(error))
            return
        except (OSError, TimeoutError) as error:
            _answer(client, writer, HTTPStatus.BAD_GATEWAY, f"{host}:{port}: {error or 'timed out'}")
            return
        try:
            if request.method == b"CONNECT":
                writer.write(client.send(h11.Response(status_code=200, headers=[], reason=b"Connection established")))
                sending = self._copy(reader, upstream)
            else:
                sending = self._send(_rewritten(request, path, host, port), client, reader, upstream)
            async with asyncio.TaskGroup() as both:
                both.create_task(sending)
                both.create_task(self._copy(upstream_reader, writer))
        except* (OSError, h11.RemoteProtocolError):
            pass  # one side closed the connection: close the other too
        finally:
            upstream.transport.abort()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first permitted address that answers. Raises `OSError` or `_PrivateAddressError`."""
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in infos))
        permitted = [address for address in addresses if self._allowed.permits_address(address, port)]
        if not permitted:
            raise _PrivateAddressError(f"{host} is at {addresses[0]}, which is not public; list the address itself")
        for address in permitted[:-1]:
            try:
                return await asyncio.open_connection(address, port)
            except OSError:
                continue
        return await asyncio.open_connection(permitted[-1], port)

    async def _send(
        self, request: h11.Request, client: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward the request and its body. Bytes after the body were not checked, and are dropped."""
        server = h11.Connection(h11.CLIENT)
        writer.write(server.send(request) or b"")
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                writer.write(server.send(event) or b"")
                await writer.drain()
            else:
                client.receive_data(await self._read(reader))
        while await self._read(reader):
            pass
        writer.write_eof()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes until end of file."""
        while chunk := await self._read(reader):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """Read bytes at the rate allowed to one sandbox. Returns no bytes at end of file."""
        chunk = await reader.read(_CHUNK)
        await self._pace.turn(len(chunk) * _BYTE_S)
        return chunk


async def receive_listener(channel: socket.socket) -> socket.socket:
    """Receive the listening socket that a runner with a proxy sends before its first frame."""
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


def _understood(client: h11.Connection, head: bytes) -> h11.Request:
    """The parsed request. Raises `ValueError` if a server could parse it differently, or `RemoteProtocolError`."""
    if _AMBIGUOUS.search(head):
        raise ValueError("a line is folded, or does not end with CR LF")
    client.receive_data(head)
    request = client.next_event()
    if not isinstance(request, h11.Request):
        raise ValueError("it is empty")
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        raise ValueError("a body needs a Content-Length")
    return request


def _destination(method: str, target: str) -> tuple[str, int, str]:
    """Host, port and path of a proxy request. Raises `ValueError`."""
    if method == "CONNECT":
        parts, path = urlsplit(f"//{target}"), ""
        port = parts.port
        if parts.path or parts.query or parts.fragment:
            raise ValueError("CONNECT names more than a host and a port")
    else:
        parts = urlsplit(target)
        if parts.scheme != "http":
            raise ValueError("the target is not an http:// address")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        port = 80 if parts.port is None else parts.port
    host = (parts.hostname or "").rstrip(".")
    if not port or parts.username is not None:
        raise ValueError("the target is not HOST:PORT")
    if not _NAME.fullmatch(host):
        ipaddress.IPv6Address(host)  # raises `ValueError` unless it is IPv6, the only other valid form
    return host, port, path


def _rewritten(request: h11.Request, path: str, host: str, port: int) -> h11.Request:
    """The request to send to the server: for the checked host, on a connection used for this request only."""
    forwarded = [(name, value) for name, value in request.headers.raw_items() if not _HOP_BY_HOP.fullmatch(name)]
    host_header = f"[{host}]" if ":" in host else host
    host_header = host_header if port == 80 else f"{host_header}:{port}"
    headers = [(b"Host", host_header.encode()), (b"Connection", b"close"), *forwarded]
    return h11.Request(method=request.method, target=path, headers=headers)


def _answer(client: h11.Connection, writer: asyncio.StreamWriter, status: HTTPStatus, text: str) -> None:
    body = f"{text}\n".encode()
    headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("Connection", "close")]
    response = h11.Response(status_code=status, headers=headers, reason=status.phrase)
    for event in (response, h11.Data(data=body), h11.EndOfMessage()):
        writer.write(client.send(event) or b"")
