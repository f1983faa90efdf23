"""Where processes listen, as the kernel has it, and what another user of this machine gets there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

LISTENS = 1 << 16
"""In the flags of /proc/net/unix (__SO_ACCEPTCON)."""
ANOTHER_USER = 65534
CONNECT = f"""
import encodings.idna, json, os, socket, sys  # all before the user changes, who may not be able to read them

os.setgroups([])
os.setgid({ANOTHER_USER})
os.setuid({ANOTHER_USER})
result = []
for kind, address in json.loads(sys.argv[1]):
    try:
        if kind == "unix":
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(1)
                client.connect(address.replace("@", "\\0", 1) if address.startswith("@") else address)
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), 1).close()
        result.append("connected")
    except OSError as error:
        result.append(type(error).__name__)
print(json.dumps(result))
"""


class Listener(NamedTuple):
    """A socket that listens.

    Attributes:
        pid: of a process that has it open.
        kind: unix or tcp.
        address: a path, an abstract name with `@` before it, or HOST:PORT.
    """

    pid: int
    kind: str
    address: str


def listeners(processes: Iterable[psutil.Process]) -> set[Listener]:
    """Where processes listen, in this network namespace; processes that end meanwhile are left out."""
    unix = {}
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
        if int(flags, 16) & LISTENS and path:
            unix[inode] = path[0]
    result = set()
    for process in processes:
        try:
            ports = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            descriptors = list(Path(f"/proc/{process.pid}/fd").iterdir())
        except (OSError, psutil.NoSuchProcess):
            continue
        for descriptor in descriptors:
            with suppress(OSError):  # closed meanwhile
                inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
                if inode in unix:
                    result.add(Listener(process.pid, "unix", unix[inode]))
        result |= {Listener(process.pid, "tcp", f"{port.ip}:{port.port}") for port in ports}
    return result


def as_another_user(targets: Iterable[Listener]) -> dict[Listener, str]:
    """What a connection of another user ends with: `connected`, or the name of the error."""
    ordered = sorted(targets)
    addresses = json.dumps([(each.kind, each.address) for each in ordered])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CONNECT, addresses], check=True, capture_output=True, text=True
    )
    return dict(zip(ordered, json.loads(done.stdout), strict=True))
