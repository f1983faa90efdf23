"""Inspecting processes through /proc, from a process that they can't inspect."""

from __future__ import annotations

import os
from pathlib import Path

_HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


class OwnChildren:
    """Direct children, including dead ones, of the calling single-threaded process. Reads one file per query."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        try:
            self._fd = os.open(f"/proc/{self._pid}/task/{self._pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # gVisor
            self._fd = -1

    def pids(self) -> list[int]:
        """Their process ids."""
        if self._fd < 0:
            return [pid for pid in visible() if _parent(pid) == self._pid]
        listing = b""
        while chunk := os.pread(self._fd, 1 << 16, len(listing)):
            listing += chunk
        return [int(pid) for pid in listing.split()]


def all_children(pid: int) -> list[int]:
    """Direct children of all of a process's threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    if not _HAS_CHILDREN:
        return [child for child in visible() if _parent(child) == pid]
    children: list[int] = []
    for thread in threads:
        try:
            children += [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return children


def tree(roots: list[int]) -> list[int]:
    """`roots` and their descendants, parents first."""
    pids = list(roots)
    for pid in pids:
        pids += all_children(pid)
    return pids


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def owner(pid: int) -> int:
    """Real user id of a process, or -1 if it is gone. (The owner of /proc/PID is root for undumpable processes.)"""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return -1


def visible() -> list[int]:
    """All visible process ids."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def wait(pid: int) -> None:
    """Reap a child. It may have been reaped already."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
