"""Let torch's gloo groups accept no connections once they are complete.

Each gloo group of a process keeps a TCP socket listening as long as it lives, and asks nobody who connects for a
password. The ranks have found each other when the group's constructor returns, so from then on the kernel drops every
attempt to connect. That takes no privilege: a socket filter (SO_ATTACH_FILTER) on the listening socket, under which no
packet passes. Connections between ranks exist by then and are not affected.
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

GLOO_NETWORK = "GLOO_SOCKET_IFNAME"
"""By this variable gloo knows at which network to listen; without it, at the one that the host's name belongs to."""
LOOPBACK = "lo"
SO_ATTACH_FILTER = 26
RETURN = struct.Struct("=HBBI")
"""An instruction of the kernel's classic BPF."""
BPF_RET = 0x06
logger = logging.getLogger(__name__)

_DROP = ctypes.create_string_buffer(RETURN.pack(BPF_RET, 0, 0, 0))
"""Pass on 0 bytes of every packet."""
_PROGRAM = struct.pack("@HP", 1, ctypes.addressof(_DROP))
"""`struct sock_fprog` of linux/filter.h: one instruction."""


@cache
def close_complete_groups() -> None:
    """Close the listeners of all gloo groups that this process makes from here on; it imports torch."""
    from torch.distributed import distributed_c10d

    class ClosedGloo(distributed_c10d.ProcessGroupGloo):
        """torch's, which accepts no more connections once it is made."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            before = _listening()
            super().__init__(*args, **kwargs)
            for inode, descriptor in _listening().items():
                if inode not in before:
                    _refuse_connections(inode, descriptor)

    distributed_c10d.ProcessGroupGloo = ClosedGloo  # type: ignore[misc]


def _listening() -> dict[str, int]:
    """TCP sockets of this process that listen, by inode, each with a descriptor."""
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
    except OSError as error:  # a kernel without filters, as gVisor's
        logger.warning("other users of this machine can connect to torch's %s: %s", inode, error.strerror)
