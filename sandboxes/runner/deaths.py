"""Detects ended children: through a pidfd each, or SIGCHLD on kernels without pidfds (gVisor)."""

from __future__ import annotations

import os
import select
import signal


class Deaths:
    """Watches children and names those that may have ended, through a `poll` object."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._pids: dict[int, int] = {}  # keyed by descriptor
        self._unnamed: set[int] = set()
        self._wake = -1
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            self._wake, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            poll.register(self._wake, select.POLLIN)

    def watch(self, pid: int) -> None:
        """Watch a newly forked child."""
        if self._wake >= 0:
            self._unnamed.add(pid)
            return
        fd = os.pidfd_open(pid)
        self._poll.register(fd, select.POLLIN)
        self._pids[fd] = pid

    def suspects(self, fd: int) -> list[int]:
        """The children that may have ended, given that `fd` is ready."""
        if fd == self._wake:
            os.read(fd, 4096)
            return list(self._unnamed)
        return [self._pids[fd]]

    def forget(self, fd: int, pid: int) -> None:
        """Stop watching a child that was reaped after `fd` became ready."""
        self._unnamed.discard(pid)
        if fd != self._wake:
            self._poll.unregister(fd)
            os.close(fd)
            del self._pids[fd]
