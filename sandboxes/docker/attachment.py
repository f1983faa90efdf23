"""A runner's channel through the Docker API, over a container's streams, for daemons that can't see our files."""

from __future__ import annotations

import asyncio
import ssl
import struct
from typing import Any
from urllib.parse import urlsplit

from docker.transport import UnixHTTPAdapter

from forge_env.errors import SandboxError
from sandboxes.connection import Connection
from sandboxes.docker.daemon import Daemon

_STREAM = struct.Struct("!BxxxI")
"""Header of each piece of output: the descriptor it was written to, and its length."""
_STDERR = 2
_MAX_HEAD = 64 * 1024


async def attach(daemon: Daemon, container: str, connection: Connection) -> None:
    """Attach `connection` to the standard streams of a container that has not been started yet. Raises `SandboxError`.

    The daemon answers the request with 101 (https://docs.docker.com/reference/api/engine, ContainerAttach). After that,
    the bytes we write are standard input, and the bytes we receive are framed pieces of stdout and stderr.
    """
    loop = asyncio.get_running_loop()
    attached: asyncio.Future[None] = loop.create_future()
    api = daemon.client.api
    path = f"/v{api.api_version}/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1"

    def protocol() -> _Attachment:
        return _Attachment(path, connection, attached)

    try:
        adapter = api.get_adapter(api.base_url)
        if isinstance(adapter, UnixHTTPAdapter):
            transport, _ = await loop.create_unix_connection(protocol, adapter.socket_path)
        else:
            address = urlsplit(api.base_url)
            context = _tls(api) if address.scheme == "https" else None
            transport, _ = await loop.create_connection(protocol, address.hostname, address.port, ssl=context)
    except OSError as error:
        raise SandboxError(f"the connection to the Docker daemon was lost: {error}") from error
    try:
        await attached
    except BaseException:  # also when cancelled
        transport.abort()
        raise


def _tls(api: Any) -> ssl.SSLContext:
    """The TLS settings of the docker SDK: trusted authority and client certificate."""
    context = ssl.create_default_context(cafile=api.verify if isinstance(api.verify, str) else None)
    if not api.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if api.cert:
        context.load_cert_chain(*api.cert)
    return context


class _Attachment(asyncio.Protocol):
    """One hijacked connection to the daemon: stdout goes to `connection`, the end of stderr is kept for errors."""

    def __init__(self, path: str, connection: Connection, attached: asyncio.Future[None]) -> None:
        self._path = path
        self._connection = connection
        self._attached = attached
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        head = f"POST {self._path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0"
        transport.write(f"{head}\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._attached.done() and not self._answered():
            return
        while len(self._buffer) >= _STREAM.size:
            number, length = _STREAM.unpack_from(self._buffer)
            end = _STREAM.size + length
            if len(self._buffer) < end:
                return
            piece = bytes(self._buffer[_STREAM.size : end])
            del self._buffer[:end]
            if number == _STDERR:
                self._connection.stderr_received(piece)
            else:
                self._connection.data_received(piece)

    def _answered(self) -> bool:
        """Whether the daemon's answer is complete and the attachment succeeded."""
        assert self._transport is not None
        head, end, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not end and len(head) < _MAX_HEAD:
            return False
        status = head.split(b"\r\n")[0].decode("latin-1")
        if status.split(" ")[1:2] != ["101"]:
            self._attached.set_exception(SandboxError(f"Docker refused to attach to a container: {status} {rest!r}"))
            self._transport.abort()
            return False
        self._buffer = bytearray(rest)
        self._connection.connection_made(self._transport)
        self._attached.set_result(None)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._attached.done():
            self._attached.set_exception(
                SandboxError(f"the Docker daemon closed the connection: {exc or 'no reason given'}")
            )
        self._connection.connection_lost(exc)
