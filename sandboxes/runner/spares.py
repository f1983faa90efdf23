"""Spare children, forked before their requests arrive, to hide the latency of a fork.

A spare is forked only while no user code runs in the sandbox, and is taken by the next program of its slot. Programs
running in the same slot share its user, and could stop it, change its limits or kill it. A program therefore always
gets a spare that no other program could reach.
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

    The child's own ends of the two pipes stay open here as well. Otherwise its end would be reported three times, by
    each pipe and by the zygote, and the first two reports would interrupt the child while it ends.
    """

    ticket: int
    job: socket.socket
    stdout: int
    stderr: int
    kept: tuple[int, int]

    def close(self) -> None:
        """Close all descriptors."""
        self.job.close()
        for fd in (self.stdout, self.stderr, *self.kept):
            os.close(fd)


class Spares:
    """At most one spare per slot."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._waiting: dict[int, Spare] = {}
        self._tickets = 0

    def take(self, slot: int) -> Spare:
        """A child for a request: the slot's spare, or a new one."""
        return self._waiting.pop(slot, None) or self._fork(slot)

    def fill(self) -> None:
        """Fork missing spares, unless user code is running."""
        if not self._supervisor.jobs:
            for slot in self._supervisor.zygotes:
                if slot not in self._waiting:
                    self._waiting[slot] = self._fork(slot)

    def renew(self) -> None:
        """Replace the waiting spares by new ones."""
        for spare in self._waiting.values():
            spare.close()  # the spare ends once its request socket is closed
        self._waiting.clear()
        self.fill()

    def ended(self, ticket: int) -> None:
        """Replace a spare that has died."""
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
