"""`forge-env worker`: let runs on other machines use this machine."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable

from forge_env.cli.command import Parser
from forge_env.errors import ForgeError, UsageError
from forge_env.interrupts import run_until_interrupted
from forge_env.job.addresses import Address
from forge_env.job.card import listen, serve_cards, tls_context
from forge_env.machine import needs_linux
from forge_env.plugins import load_plugin

VARIABLE = "FORGE_ENV_WORKER"
"""Environment variable with the worker's Monarch address, inherited by its processes."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Listen for runs that list this address in job.workers, and run the processes that they start here. Every "
        "client that can connect can run code as this user: use a private network, or tls:// (docs/hosts.md). Ctrl-C "
        "stops the worker and its processes."
    )
    parser.add_argument(
        "address",
        metavar="ADDRESS",
        help="tcp://HOST:PORT or tls://HOST:PORT; HOST is an address of this machine",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from forge_env.run.scratch import reap_scratch, scratch_folder

    if reason := needs_linux("training"):
        raise UsageError(reason, fix="start workers on Linux machines or in WSL")
    address = _numeric(Address.of(args.address))
    tls_context(address, serving=True)  # report errors now, before seconds of imports
    listen(address).close()
    start: Callable[[Address], str] = load_plugin("forge_env.workers", "monarch")
    reap_scratch()
    with scratch_folder():
        run_until_interrupted(_serve(address, start))
    return 0


async def _serve(address: Address, start: Callable[[Address], str]) -> None:
    monarch = os.environ[VARIABLE] = start(address)
    server = await serve_cards(address, monarch)
    if address.scheme == "tcp":
        print(f"{address} has no authentication: every client that can connect, also other users of this machine, can")
        print("run code as this user. On shared machines and networks, use tls:// (docs/hosts.md).")
    print(f"worker ready at {address}; Ctrl-C stops it", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        server.close()  # doesn't wait for connections, which runs keep open


def _numeric(address: Address) -> Address:
    """Replace the host of an address by its numeric IP address.

    Raises:
        UsageError: it is the unspecified address (all interfaces).
        ForgeError: the host name can't be resolved.
    """
    try:
        [(*_, socket_address), *_] = socket.getaddrinfo(address.plain_host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ForgeError(f"can't resolve {address.host}: {error.strerror}", fix="give an IP address") from error
    number = ipaddress.ip_address(socket_address[0])
    if number.is_unspecified:
        raise UsageError(
            f"{address} would listen on every network of this machine, and every client could run code",
            fix="give the address at which the run's other hosts reach this machine",
        )
    return address._replace(host=f"[{number}]" if number.version == 6 else str(number))
