"""An allow-list for sandboxes that need some of the network: a filtering HTTP proxy, run by the engine's own process.

The sandbox keeps its network namespace with nothing but a loopback in it. Its runner opens a listening socket there
and hands the descriptor to the engine, which accepts the connections: the only way out is a proxy that forwards
`CONNECT` and plain `http://` requests to the hosts on the list and answers 403 to everything else. No bridge, no
firewall rule, no second container, and the same on every engine.

A listed name leads to public addresses only: whoever controls its zone could otherwise point it at this machine, its
neighbours or a metadata service. The address that was checked is the one that is connected to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
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
_HOP_BY_HOP = (b"proxy-", b"connection:", b"keep-alive:", b"upgrade:", b"host:")
_METHOD = re.compile(r"[A-Z]{1,20}")
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")
"""Nothing that a server could read as two lines, or as a continuation of the one before."""


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

    def permits_address(self, address: str, port: int) -> bool:
        """Whether a permitted name may lead to this address: a public one, or one that is listed itself."""
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address):
            found = found.ipv4_mapped or found.sixtofour or found
        return (found.is_global and not found.is_multicast) or self.permits(str(found), port)


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


class _PrivateAddressError(Exception):
    """A permitted name that leads to no permitted address."""


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
        try:
            method, host, port, request, length = _understood(head)
        except ValueError as error:
            writer.write(_answer("400 Bad Request", f"not a request that this proxy forwards: {error}"))
            return
        if not self._allowed.permits(host, port):
            self._refuse(writer, f"{host}:{port} is not on this sandbox's allow-list")
            return
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                upstream_reader, upstream = await self._connect(host, port)
        except _PrivateAddressError as error:
            self._refuse(writer, str(error))
            return
        except (OSError, TimeoutError) as error:
            writer.write(_answer("502 Bad Gateway", f"{host}:{port}: {error or 'timed out'}"))
            return
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                upstream.write(request)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, upstream, length))
                both.create_task(_copy(upstream_reader, writer))
        except* OSError:
            pass  # one side broke off: so does the other
        finally:
            upstream.transport.abort()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first permitted address that answers. Raises `OSError`, or that there is none."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        permitted = [address for address in addresses if self._allowed.permits_address(address, port)]
        if not permitted:
            raise _PrivateAddressError(f"{host} is at {addresses[0]}, which is not public; list the address itself")
        for address in permitted[:-1]:
            try:
                return await asyncio.open_connection(address, port)
            except OSError:
                continue
        return await asyncio.open_connection(permitted[-1], port)

    def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        self.refused += 1
        writer.write(_answer("403 Forbidden", why))


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


def _understood(head: bytes) -> tuple[str, str, int, bytes, int | None]:
    """Method, host, port, the request to forward and the length of its body (None: a tunnel). Raises `ValueError`."""
    line, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    method, target, _ = line.decode("ascii").split(" ")
    if not _METHOD.fullmatch(method):
        raise ValueError("the method is none")
    if not all(_HEADER.fullmatch(header) for header in headers):
        raise ValueError("a header is malformed")
    host, port, path = _destination(method, target)
    if method == "CONNECT":
        return method, host, port, b"", None
    return method, host, port, _rewritten(method, path, host, port, headers), _body_length(headers)


def _destination(method: str, target: str) -> tuple[str, int, str]:
    """Host, port and path that a proxy request names. Raises `ValueError`."""
    if method == "CONNECT":
        parts, path = urlsplit(f"//{target}"), ""
        port = parts.port
        if parts.path or parts.query or parts.fragment:
            raise ValueError("CONNECT names more than a host and a port")
    else:
        parts = urlsplit(target)
        if parts.scheme != "http":
            raise ValueError("the target is no http:// address")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        port = 80 if parts.port is None else parts.port
    host = (parts.hostname or "").rstrip(".")
    if not port or parts.username is not None:
        raise ValueError("the target is not HOST:PORT")
    if not _NAME.fullmatch(host):
        ipaddress.IPv6Address(host)  # the only other form
    return host, port, path


def _body_length(headers: list[bytes]) -> int:
    """Bytes that follow the head: what comes after them would be a second request, which nobody checked."""
    fields = [(name.lower(), value.strip()) for name, _, value in (header.partition(b":") for header in headers)]
    if any(name == b"transfer-encoding" for name, _ in fields):
        raise ValueError("a body needs a Content-Length")
    lengths = {value for name, value in fields if name == b"content-length"} or {b"0"}
    if len(lengths) > 1 or not (length := lengths.pop()).isdigit():
        raise ValueError("the Content-Length is none")
    return int(length)


def _rewritten(method: str, path: str, host: str, port: int, headers: list[bytes]) -> bytes:
    """The head as the server expects it: one request to a connection, and the host that was checked."""
    kept = [line for line in headers if not line.lower().startswith(_HOP_BY_HOP)]
    named = f"[{host}]" if ":" in host else host
    named = named if port == 80 else f"{named}:{port}"
    lines = [f"{method} {path} HTTP/1.1".encode(), f"Host: {named}".encode(), b"Connection: close", *kept]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _answer(status: str, text: str) -> bytes:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None = None) -> None:
    """Hand on what is read until it ends; what comes after the first `most` bytes goes nowhere."""
    while chunk := await reader.read(_CHUNK):
        if most is not None:
            chunk = chunk[:most]
            most -= len(chunk)
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
