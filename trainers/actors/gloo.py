"""Make torch's gloo groups reject connections once they are complete.

Each gloo group of a process keeps a TCP socket listening as long as it exists, without any authentication. All ranks
are connected when the group's constructor returns, so from then on the kernel can drop every attempt to connect. A
socket filter (SO_ATTACH_FILTER) on the listening socket that passes no packet does this without privileges. Existing
connections between ranks are not affected.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from trainers.compat.torch import replace_gloo

GLOO_NETWORK = "GLOO_SOCKET_IFNAME"
"""Variable that names the network interface on which gloo listens; default: that of the host name's address."""
LOOPBACK = "lo"
SO_ATTACH_FILTER = 26
RETURN = struct.Struct("=HBBI")
"""Layout of a classic BPF instruction."""
BPF_RET = 0x06
logger = logging.getLogger(__name__)

_DROP = ctypes.create_string_buffer(RETURN.pack(BPF_RET, 0, 0, 0))
"""BPF program that passes 0 bytes of every packet."""
_PROGRAM = struct.pack("@HP", 1, ctypes.addressof(_DROP))
"""`struct sock_fprog` of linux/filter.h: one instruction."""


@cache
def close_complete_groups() -> None:
    """Make all gloo groups that this process creates from now on reject new connections. Imports torch."""
    from torch.distributed import ProcessGroupGloo

    class ClosedGloo(ProcessGroupGloo):
        """Gloo process group that accepts no connections after its construction."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            before = _listening()
            super().__init__(*args, **kwargs)
            for inode, descriptor in _listening().items():
                if inode not in before:
                    _refuse_connections(inode, descriptor)

    replace_gloo(ClosedGloo)


def _listening() -> dict[str, int]:
    """Descriptors of this process's listening TCP sockets, by inode."""
    result = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if (inode := os.readlink(entry)).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as each:
                    if _listens(each):
                        result[inode] = int(entry.name)
    return result


def _listens(each: socket.socket) -> bool:
    over_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
    return over_tcp and bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _refuse_connections(inode: str, descriptor: int) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, _PROGRAM)
    except OSError as error:  # a kernel without socket filters, such as gVisor's
        logger.warning("other users of this machine can connect to torch's %s: %s", inode, error.strerror)
