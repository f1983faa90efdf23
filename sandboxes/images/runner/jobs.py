"""What the supervisor knows about a request under way."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field

from .capture import Capture
from .wire import Header

SIGKILL, SIGXCPU = 9, 24


@dataclass
class Spare:
    """A forked child that waits for a request: our ends of its request socket, stdout and stderr."""

    ticket: int
    job: socket.socket
    stdout: int
    stderr: int

    def close(self) -> None:
        """Close our ends."""
        self.job.close()
        os.close(self.stdout)
        os.close(self.stderr)


@dataclass
class Turn:
    """One exchange with a session, or the wait for a background process."""

    id: int
    started: float
    deadline: float
    timed_out: bool = False


@dataclass
class Job:
    """A request under way. One-shot requests are answered when their child ends, sessions turn by turn."""

    id: int
    ticket: int
    slot: int
    kind: str
    started: float
    deadline: float
    stdout: Capture
    stderr: Capture
    channel: int = -1
    """Our end of the value channel (a pipe) or of the session's command channel (a socket)."""
    channel_limit: int = 0
    values: bytearray = field(default_factory=bytearray)
    timed_out: bool = False
    killed: bool = False
    flooded: bool = False
    stream: bool = False
    stdin: int = -1
    """Writing end of a background process's standard input."""
    pending_input: bytearray = field(default_factory=bytearray)
    close_input: bool = False
    turn: Turn | None = None
    partner: Job | None = None
    """The other half of a split judgement: kind `serve` has the answer, kind `tests` the verdict."""
    report: Header | None = None
    """How it ended, once it has."""

    @property
    def persistent(self) -> bool:
        """Whether it lives on between requests."""
        return self.kind in ("shell", "session", "process")

    def next_deadline(self) -> float:
        """When something has to be done about it, on the monotonic clock."""
        return min(self.deadline, self.turn.deadline if self.turn else float("inf"))

    def describe(self, status: int, cpu_us: int, peak_kb: int, strays: int) -> Header:
        """How the child ended, as the engine reads it."""
        signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        return {
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": signal,
            "timed_out": self.timed_out or signal == SIGXCPU,
            "out_of_memory": False,
            "wall_s": time.monotonic() - self.started,
            "cpu_s": cpu_us / 1e6,
            "peak_kb": peak_kb,
            "strays": strays,
            "ended": True,
        }

    def close(self) -> None:
        """Close our descriptors."""
        for fd in (self.stdout.fd, self.stderr.fd, self.channel, self.stdin):
            if fd >= 0:
                os.close(fd)
        self.channel = self.stdin = -1


class MemoryWatch:
    """Counts the processes of this container that the kernel killed for want of memory."""

    def __init__(self) -> None:
        self._seen = _oom_kills()

    def killed_one(self) -> bool:
        """Whether there was one since the last question."""
        before, self._seen = self._seen, _oom_kills()
        return self._seen > before


def _oom_kills() -> int:
    """From cgroup v1 or v2; 0 where it can't be read."""
    for path in ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events"):
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0


def ended_for_memory(exit_code: int | None, stderr: bytes) -> bool:
    """A Python program that ended with an uncaught MemoryError."""
    return exit_code == 1 and stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError")
