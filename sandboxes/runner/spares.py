"""Children forked ahead of their requests, which hides what a fork costs.

A spare is forked only while nobody's code runs in the sandbox, and taken by the next program of its slot: what runs
beside it in the same slot shares its user and could stop it, change its limits or kill it. So whoever gets it gets it
untouched.
"""

from __future__ import annotations

import array
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .supervisor import Supervisor


@dataclass
class Spare:
    """A forked child that waits for a request: our ends of its request socket, stdout and stderr.

    The child's own ends of the two pipes are kept open here too: else its end would be told thrice, by each pipe and
    by the zygote, and the first two would interrupt it at ending.
    """

    ticket: int
    job: socket.socket
    stdout: int
    stderr: int
    kept: tuple[int, int]

    def close(self) -> None:
        """Close everything."""
        self.job.close()
        for fd in (self.stdout, self.stderr, *self.kept):
            os.close(fd)


class Spares:
    """At most one for each slot."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._waiting: dict[int, Spare] = {}
        self._tickets = 0

    def take(self, slot: int) -> Spare:
        """A child for a request: the one that waits, or a new one."""
        return self._waiting.pop(slot, None) or self._fork(slot)

    def fill(self) -> None:
        """Fork what is missing, unless somebody's code runs."""
        if not self._supervisor.jobs:
            for slot in self._supervisor.zygotes:
                if slot not in self._waiting:
                    self._waiting[slot] = self._fork(slot)

    def renew(self) -> None:
        """Fork those that wait anew."""
        for spare in self._waiting.values():
            spare.close()  # it ends when nobody can send it a request any more
        self._waiting.clear()
        self.fill()

    def ended(self, ticket: int) -> None:
        """A child that waited has died: fork another."""
        for slot, spare in list(self._waiting.items()):
            if spare.ticket == ticket:
                spare.close()
                del self._waiting[slot]
                self.fill()

    def _fork(self, slot: int) -> Spare:
        ours, job = socket.socketpair()
        stdout, stdout_end = os.pipe2(os.O_CLOEXEC)
        stderr, stderr_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(stdout, False)
        os.set_blocking(stderr, False)
        theirs = array.array("i", (job.detach(), stdout_end, stderr_end))
        self._tickets += 1
        self._supervisor.command(b"S", slot, self._tickets, theirs)
        os.close(theirs[0])
        return Spare(self._tickets, ours, stdout, stderr, (stdout_end, stderr_end))
