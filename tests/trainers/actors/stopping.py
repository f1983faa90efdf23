"""A process that is there and does nothing."""

from __future__ import annotations

import os
import signal
import time

import psutil

PATIENCE_S = 60.0


def stop(pid: int) -> None:
    """Send SIGSTOP to `pid` and wait until each of its threads stands still.

    `os.kill` returns when the signal is sent. On a busy machine the process may answer some calls before its threads
    have seen it.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while any(psutil.Process(thread.id).status() != psutil.STATUS_STOPPED for thread in psutil.Process(pid).threads()):
        assert time.monotonic() < deadline, f"process {pid} goes on after SIGSTOP"
        time.sleep(0.001)
