"""Noticing that a child has ended: a descriptor for each, or SIGCHLD where the kernel has none (gVisor)."""

from __future__ import annotations

import os
import select
import signal


class Deaths:
    """Which of the watched children may have ended, through a `poll` object."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._pids: dict[int, int] = {}  # by descriptor
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
        """Watch a child that was just forked."""
        if self._wake >= 0:
            self._unnamed.add(pid)
            return
        fd = os.pidfd_open(pid)
        self._poll.register(fd, select.POLLIN)
        self._pids[fd] = pid

    def suspects(self, fd: int) -> list[int]:
        """The children that may have ended, now that `fd` is ready."""
        if fd == self._wake:
            os.read(fd, 4096)
            return list(self._unnamed)
        return [self._pids[fd]]

    def forget(self, fd: int, pid: int) -> None:
        """A child of whose end `fd` told was waited for."""
        self._unnamed.discard(pid)
        if fd != self._wake:
            self._poll.unregister(fd)
            os.close(fd)
            del self._pids[fd]
