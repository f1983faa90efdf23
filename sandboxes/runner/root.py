"""File system and network of a sandbox, set up by the program that starts the runner (`launch.py`, `boot.py`)."""

from __future__ import annotations

import _socket  # `socket` would take a third of the start time
import fcntl
import os
import struct
from collections.abc import Iterable

from . import kernel

INODES_PER_MB = 64
DEVICES = ("null", "zero", "full", "random", "urandom")
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_HARD = kernel.MS_NOSUID | kernel.MS_NODEV


def mount_kernel_folders(root: str) -> None:
    """Mount a fresh /proc, and a /dev with harmless devices. `finish_devices` makes the latter read-only."""
    kernel.mount("proc", f"{root}/proc", "proc", _HARD | kernel.MS_NOEXEC)
    kernel.mount("dev", f"{root}/dev", "tmpfs", kernel.MS_NOSUID, "size=64k,mode=0755")
    for name in DEVICES:
        write(f"{root}/dev/{name}", "")
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", None, kernel.MS_BIND)
    for link, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{link}")
    os.mkdir(f"{root}/dev/shm")


def mount_folders(root: str, folders: Iterable[tuple[str, int, str]]) -> None:
    """Mount writable folders in memory: each one's path below `root`, MiB, and options such as `mode=0700`."""
    for folder, size_mb, options in folders:
        data = f"size={size_mb}m,nr_inodes={size_mb * INODES_PER_MB},{options}"
        kernel.mount("sandbox", f"{root}/{folder}", "tmpfs", _HARD, data)


def finish_devices(root: str) -> None:
    """Make /dev read-only, once everything below it is mounted."""
    kernel.mount(None, f"{root}/dev", None, kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID)


def pivot(root: str) -> None:
    """Make `root` the root and detach the old one, so that no path leads to it."""
    os.chdir(root)
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")


def raise_loopback() -> None:
    """Bring up the new namespace's loopback interface, and don't let closed connections keep ports busy."""
    any_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(any_socket.fileno(), _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))
    write("/proc/sys/net/ipv4/tcp_max_tw_buckets", "0")


def write(path: str, text: str) -> None:
    """Write a file, such as one of /proc."""
    with open(path, "wb") as file:
        file.write(text.encode())
