"""Blocks of memory of other hosts, fetched over a connection of their own.

Messages copy a tensor several times on each side. Here its bytes go from the one mapping into the other: whoever has a
block serves it at its host's address, to those that show the secret which travels with the block's `Source`.

Each side moves a whole block in one call of the kernel, where nothing is encrypted: between two calls it would wait for
Python's lock, for up to 5 ms beside a thread that trains.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

from forge_env.job.addresses import Address
from forge_env.job.card import tls_context

PATIENCE_S = 60.0
"""A connection on which nothing moves for so long is given up."""
SECRET = 16
"""Bytes."""
NAME = struct.Struct("!Qq")
"""Of a block: its number and its stamp."""
TIMEVAL = struct.Struct("@ll")
CHUNK = 1 << 20
"""Bytes that are sent at once where they are encrypted."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a process serves its blocks.

    Attributes:
        address: of its server.
        secret: that is to be shown.
    """

    address: Address
    secret: bytes


class Server(socketserver.ThreadingTCPServer):
    """Sends blocks of this process to whoever shows the secret; ends with the process.

    Args:
        address: of this host, as the others reach it; its port is another one.
        find: gives the memory of a block by its number and its stamp, or None.

    Raises:
        OSError: nobody can listen there.
        ForgeError: the certificates can't be used.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: Address, find: Callable[[int, int], memoryview | None]) -> None:
        self.find = find
        self.context = tls_context(address, serving=True)
        [(self.address_family, *_, place), *_] = socket.getaddrinfo(address.plain_host, 0, type=socket.SOCK_STREAM)
        super().__init__((str(place[0]), 0), _Request)
        self.source = Source(address._replace(port=self.server_address[1]), secrets.token_bytes(SECRET))
        forever = partial(self.serve_forever, poll_interval=PATIENCE_S)  # nobody ends it but the process's end
        threading.Thread(target=forever, name="forge-env-blocks", daemon=True).start()


class _Request(socketserver.BaseRequestHandler):
    """One connection, in a thread of its own: one block."""

    server: Server

    def handle(self) -> None:
        connection: socket.socket = self.request
        with (
            suppress(OSError),  # whoever asked is gone, or a stranger
            _secured(connection, self.server.context, "") as peer,
        ):
            asked = bytearray(SECRET + NAME.size)
            receive(peer, memoryview(asked))
            block = None
            if hmac.compare_digest(asked[:SECRET], self.server.source.secret):
                block = self.server.find(*NAME.unpack_from(asked, SECRET))
            if block is not None:
                send(peer, block)


def _secured(connection: socket.socket, context: ssl.SSLContext | None, host: str) -> socket.socket:
    """The connection, encrypted where there are certificates; `host` is whom the client has asked for."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is None:
        connection.settimeout(None)  # with one, Python would call the kernel for every bit that there is room for
        patience = TIMEVAL.pack(int(PATIENCE_S), int(PATIENCE_S % 1 * 1e6))
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, direction, patience)
        return connection
    connection.settimeout(PATIENCE_S)
    return context.wrap_socket(connection, server_side=not host, server_hostname=host or None)


@cache
def serve(find: Callable[[int, int], memoryview | None]) -> Source | None:
    """Serve this process's blocks from here on; None where all processes of the run are on this machine."""
    from trainers.actors.processes import host_address  # takes seconds: Monarch

    address = host_address()
    return None if address is None else Server(address, find).source


def fetch(source: Source, number: int, stamp: int, into: memoryview) -> None:
    """Fill memory with a block of another host; blocks this thread.

    Args:
        source: of the process that has the block.
        number: of the block.
        stamp: of the block.
        into: memory of its size, of bytes.

    Raises:
        FileNotFoundError: that process has let go of it.
        OSError: it can't be reached, or ended meanwhile.
    """
    address = source.address
    context = tls_context(address, serving=False)
    with (
        socket.create_connection((address.plain_host, address.port), PATIENCE_S) as connection,
        _secured(connection, context, address.plain_host) as peer,
    ):
        peer.sendall(source.secret + NAME.pack(number, stamp))
        receive(peer, into)


def send(peer: socket.socket, block: memoryview) -> None:
    """Send all of a block."""
    if not isinstance(peer, ssl.SSLSocket):
        peer.sendall(block)
        return
    for start in range(0, len(block), CHUNK):  # one write of gigabytes is refused
        peer.sendall(block[start : start + CHUNK])


def receive(peer: socket.socket, into: memoryview) -> None:
    """Fill memory with what is sent.

    Raises:
        FileNotFoundError: nothing is.
        ConnectionError: too little is.
        TimeoutError: nothing comes, and the connection stays.
    """
    got, flags = 0, 0 if isinstance(peer, ssl.SSLSocket) else socket.MSG_WAITALL
    while got < len(into):
        try:
            count = peer.recv_into(into[got:], 0, flags)
        except BlockingIOError as error:
            raise TimeoutError(f"nothing has come for {PATIENCE_S:g} s") from error
        if not count:
            if not got:
                raise FileNotFoundError("the weights were dropped before they were read")
            raise ConnectionResetError(f"the connection ended after {got} of {len(into)} bytes")
        got += count
