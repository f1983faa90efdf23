"""Owners of containers, processes and temporary folders, and whether they are still alive.

An owner is one process, written as `MACHINE.BOOT.PIDNS.PID.START`. A process id alone can be reused, and says nothing
on another machine or in another pid namespace. Resources of an owner that can't be checked from here are left alone.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import lru_cache
from pathlib import Path

import psutil

from forge_env.machine import boot_id

LABEL = "forge_env"
"""Label of every resource that this project creates; its value is the owner."""


@lru_cache(maxsize=1)
def _machine() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
        except OSError:
            continue
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]


@lru_cache(maxsize=1)
def _boot() -> str:
    return boot_id().replace("-", "")[:8] if sys.platform == "linux" else "0"


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino) if sys.platform == "linux" else "0"


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of process `pid`, or None if no such process is alive."""
    if sys.platform != "linux":
        return _start_second(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _start_second(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.NoSuchProcess:
        return None


def this_process() -> str:
    """The owner string of the calling process."""
    return of_process(os.getpid())


def of_process(pid: int) -> str:
    """The owner string of a process in the caller's pid namespace."""
    return ".".join((_machine(), _boot(), _pid_namespace(), str(pid), _start_time(pid) or "0"))


def is_dead(owner: str) -> bool:
    """Whether `owner` has certainly ended. False when that can't be determined."""
    parts = owner.split(".")
    if len(parts) != 5 or not parts[3].isdigit() or parts[0] != _machine():
        return False
    _, boot, namespace, pid, start = parts
    if boot != _boot():
        return True
    return namespace == _pid_namespace() and _start_time(int(pid)) != start


def pid_of(owner: str) -> int | None:
    """The owner's process id, or None if it started on another machine or before the last reboot."""
    parts = owner.split(".")
    known = len(parts) == 5 and parts[:2] == [_machine(), _boot()] and parts[3].isdigit()
    return int(parts[3]) if known else None
