"""What every child inherits from its zygote, and whether it is still what it was."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from typing import Any


class State:
    """A snapshot of the calling process, to compare with later."""

    def __init__(self) -> None:
        self._mounts = open("/proc/self/mountinfo")  # noqa: SIM115  kept: the kernel tells of changes through it
        self._mount_events = select.poll()
        self._mount_events.register(self._mounts.fileno(), select.POLLPRI)
        self._mount_events.poll(0)
        self._baseline_mounts = self._read_mounts()
        self._baseline = self._look()

    def changes(self) -> list[str]:
        """The names of what is different now."""
        now = self._look()
        changed = [name for name, value in now.items() if value != self._baseline[name]]
        if self._mount_events.poll(0) and self._read_mounts() != self._baseline_mounts:
            changed.append("mounts")
        return changed

    def _read_mounts(self) -> str:
        self._mounts.seek(0)
        return self._mounts.read().replace("//deleted", "")  # the engine removes the socket's folder once connected

    def _look(self) -> dict[str, Any]:
        return {
            "environment": os.environ.copy(),
            "limits": [resource.getrlimit(number) for number in range(resource.RLIMIT_NICE)],
            "host name": os.uname().nodename,
            "signals": [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)],
            "module path": sys.path.copy(),
        }
