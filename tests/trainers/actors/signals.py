"""Signals that have arrived when the call returns: on a busy machine a process goes on for a while after `os.kill`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Set

import psutil

PATIENCE_S = 60.0


def stop(pid: int) -> None:
    """Send SIGSTOP to `pid` and wait until each of its threads stands still."""
    os.kill(pid, signal.SIGSTOP)
    _wait(pid, {psutil.STATUS_STOPPED})


def kill(pid: int) -> None:
    """Send SIGKILL to `pid` and wait until nothing of it runs any more."""
    os.kill(pid, signal.SIGKILL)
    _wait(pid, {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


def _wait(pid: int, states: Set[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not _states(pid) <= states:
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.001)


def _states(pid: int) -> set[str]:
    """Of each thread; none of a process that is gone."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(int(thread)).status())
    return found
