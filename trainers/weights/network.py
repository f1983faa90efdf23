"""Transfer of memory blocks between hosts, over one connection per block.

Actor messages copy a tensor several times on each side. Here the bytes go directly from one mapping into the other: the
process that has a block serves it at its host's address, to clients that send the secret of the block's `Source`.

Without encryption, each side moves a whole block in one system call. Between two calls it would wait for Python's
global interpreter lock, up to 5 ms while another thread is training.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial

from forge_env.job.addresses import Address
from forge_env.job.card import tls_context

PATIENCE_S = 60.0
"""Timeout of a connection on which no bytes move."""
SECRET = 16
"""Length of the secret in bytes."""
NAME = struct.Struct("!Qq")
"""Identification of a block in a request: its number and its stamp."""
TIMEVAL = struct.Struct("@ll")
WATCH = 0
"""Number in a request that asks for no block; the connection then stays open until the process ends."""
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Options of every connection: a host that disappears is noticed within 20 s."""
CHUNK = 1 << 20
"""Bytes per write on an encrypted connection."""


@dataclass(frozen=True, slots=True)
class Source:
    """Address and secret with which to fetch blocks of a process."""

    address: Address
    secret: bytes = field(repr=False)


class Server(socketserver.ThreadingTCPServer):
    """Server of this process's blocks for clients that know the secret. It runs until the process ends.

    It uses a free port of the address, and `find` returns the memory of a block, given its number and stamp, or None.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: Address, find: Callable[[int, int], memoryview | None]) -> None:
        self.find = find
        self.context = tls_context(address, serving=True)
        [(self.address_family, *_, local), *_] = socket.getaddrinfo(address.plain_host, 0, type=socket.SOCK_STREAM)
        super().__init__((str(local[0]), 0), _Request)
        self.source = Source(address._replace(port=self.server_address[1]), secrets.token_bytes(SECRET))
        forever = partial(self.serve_forever, poll_interval=PATIENCE_S)  # never shut down
        threading.Thread(target=forever, name="forge-env-blocks", daemon=True).start()


class _Request(socketserver.BaseRequestHandler):
    """Handler of one connection, which transfers one block, in a thread of its own."""

    server: Server

    def handle(self) -> None:
        connection: socket.socket = self.request
        with (
            suppress(OSError),  # the client disconnected, or is not one of the run's processes
            _secured(connection, self.server.context, "") as peer,
        ):
            request = bytearray(SECRET + NAME.size)
            receive(peer, memoryview(request))
            if not hmac.compare_digest(request[:SECRET], self.server.source.secret):
                return
            number, stamp = NAME.unpack_from(request, SECRET)
            if number == WATCH:
                peer.settimeout(None)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(0, 0))
                peer.recv(1)  # until the client closes the connection
            elif (block := self.server.find(number, stamp)) is not None:
                send(peer, block)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _secured(connection: socket.socket, context: ssl.SSLContext | None, host: str) -> socket.socket:
    """Set up a connection, encrypted if `context` is given. `host` is the server's name on a client, "" on a server."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(connection)
    if context is None:
        # With a timeout of Python's, a transfer would take one system call for each part that fits into the socket's
        # buffer, so the timeout is set in the kernel.
        connection.settimeout(None)
        timeout = TIMEVAL.pack(int(PATIENCE_S), int(PATIENCE_S % 1 * 1e6))
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, direction, timeout)
        return connection
    connection.settimeout(PATIENCE_S)
    return context.wrap_socket(connection, server_side=not host, server_hostname=host or None)


@cache
def serve(find: Callable[[int, int], memoryview | None]) -> Source | None:
    """Start serving this process's blocks; None if all processes of the run are on this machine."""
    from trainers.actors.processes import host_address  # imports Monarch, which takes seconds

    address = host_address()
    return None if address is None else Server(address, find).source


def fetch(source: Source, number: int, stamp: int, into: memoryview) -> None:
    """Fetch a block of another host into memory of its size, in bytes. Blocks the calling thread.

    Raises:
        FileNotFoundError: the process has dropped or overwritten the block.
        OSError: the process can't be reached, or ended during the transfer.
    """
    address = source.address
    context = tls_context(address, serving=False)
    with (
        socket.create_connection((address.plain_host, address.port), PATIENCE_S) as connection,
        _secured(connection, context, address.plain_host) as peer,
    ):
        peer.sendall(source.secret + NAME.pack(number, stamp))
        receive(peer, into)


async def end_of(source: Source) -> None:
    """Wait until the process of a source on another host has ended or can't be reached."""
    address = source.address
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(
            address.plain_host, address.port, ssl=tls_context(address, serving=False)
        )
        try:
            _keep_alive(writer.get_extra_info("socket"))
            writer.write(source.secret + NAME.pack(WATCH, 0))
            await reader.read(1)
        finally:
            writer.close()


def send(peer: socket.socket, block: memoryview) -> None:
    """Send a whole block."""
    if not isinstance(peer, ssl.SSLSocket):
        peer.sendall(block)
        return
    for start in range(0, len(block), CHUNK):  # TLS refuses a single write of gigabytes
        peer.sendall(block[start : start + CHUNK])


def receive(peer: socket.socket, into: memoryview) -> None:
    """Receive bytes until `into` is full.

    Raises FileNotFoundError if the connection was closed before the first byte, and ConnectionError if later.
    """
    received, flags = 0, 0 if isinstance(peer, ssl.SSLSocket) else socket.MSG_WAITALL
    while received < len(into):
        try:
            count = peer.recv_into(into[received:], 0, flags)
        except BlockingIOError as error:
            raise TimeoutError(f"nothing was received for {PATIENCE_S:g} s") from error
        if not count:
            if not received:
                raise FileNotFoundError("the weights were dropped before they were read")
            raise ConnectionResetError(f"the connection ended after {received} of {len(into)} bytes")
        received += count
