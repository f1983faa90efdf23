"""State of running requests in the supervisor, and the captured part of their output."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

from .wire import Header

SIGKILL, SIGXCPU = 9, 24
FOREVER = float("inf")
_CHUNK = 1 << 16
_RUNNER_BYTES = 64 << 20
"""More address space than any process of the runner has."""


class Capture:
    """Reads a pipe to its end and keeps at most `limit` bytes of it, half from the start and half from the end."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.bound(limit)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def bound(self, limit: int) -> None:
        """Keep at most `limit` bytes from now on."""
        self.limit = limit
        self.head_size = max(1, limit // 2)
        self.tail_size = max(1, limit - self.head_size)

    @property
    def dropped(self) -> int:
        """Number of bytes that were not kept."""
        return self.total - len(self.head) - min(len(self.tail), self.tail_size)

    def read(self) -> bytes | None:
        """Read available bytes. Returns b"" at end of file, and None if nothing is available yet."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return None
        self.total += len(chunk)
        room = self.head_size - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            self.tail += chunk[room:]
        else:
            self.tail += chunk
        if len(self.tail) > self.tail_size + 4 * _CHUNK:
            del self.tail[: len(self.tail) - self.tail_size]
        return chunk

    def drain(self, budget: int = 1 << 22) -> None:
        """Read the rest after the writers have ended, or at most `budget` bytes if a writer is left."""
        stop = self.total + budget
        while self.total < stop and self.read():
            pass

    def text(self) -> bytes:
        """The kept bytes, with a line that marks the gap."""
        tail = self.tail[-self.tail_size :] if len(self.tail) > self.tail_size else self.tail
        if not self.dropped:
            return bytes(self.head + tail)
        return bytes(self.head) + b"\n[... %d bytes left out ...]\n" % self.dropped + bytes(tail)


@dataclass
class Turn:
    """One command of a session, or one wait for a background process."""

    id: int
    started: float
    deadline: float
    timed_out: bool = False


@dataclass
class Job:
    """A running request. One-shot requests are answered when their child ends, sessions once per turn."""

    id: int
    ticket: int
    slot: int
    kind: str
    started: float
    deadline: float
    stdout: Capture
    stderr: Capture
    kept: tuple[int, ...] = ()
    """The child's ends of its output pipes, see `Spare`."""
    attended: float = 0.0
    """Monotonic time from which output is read as it comes; before, a short program is only read at its end."""
    channel: int = -1
    """Our end of the value channel (a pipe) or of the session's command channel (a socket)."""
    values: bytearray = field(default_factory=bytearray)
    values_limit: int = 0
    values_exceeded: bool = False
    timed_out: bool = False
    killed: bool = False
    flooded: bool = False
    starved: bool = False
    """Killed because the sandbox's memory was used up."""
    stream: bool = False
    stdin: int = -1
    """Write end of a background process's standard input."""
    pending_input: bytearray = field(default_factory=bytearray)
    close_input: bool = False
    turn: Turn | None = None
    partner: Job | None = None
    """The other job of a split judgement: kind `serve` holds the answer, kind `tests` the verdict."""
    report: Header | None = None
    """Description of the child's end, once it has ended."""

    @property
    def persistent(self) -> bool:
        """Whether it outlives the request that opened it."""
        return self.kind in ("shell", "session", "process")

    def next_deadline(self) -> float:
        """Monotonic time of the next action that this job needs."""
        return min(self.deadline, self.attended, self.turn.deadline if self.turn else FOREVER)

    def collect_values(self, reading: int, limit: int) -> None:
        """Use a pipe as the value channel, and read at most `limit` bytes from it."""
        os.set_blocking(reading, False)
        self.channel, self.values_limit = reading, limit

    def read_values(self) -> bytes | None:
        """Read available values. Returns b"" at the end or beyond the limit, and None if nothing is available yet."""
        try:
            chunk = os.read(self.channel, _CHUNK)
        except BlockingIOError:
            return None
        self.values_exceeded = len(self.values) + len(chunk) > self.values_limit + 4
        if self.values_exceeded:
            return b""
        self.values += chunk
        return chunk

    def describe(self, status: int, cpu_us: int, peak_kb: int) -> Header:
        """Description of the child's end, as fields for the engine."""
        signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        return {
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": signal,
            "timed_out": self.timed_out or signal == SIGXCPU,
            "out_of_memory": self.starved,
            "wall_s": time.monotonic() - self.started,
            "cpu_s": cpu_us / 1e6,
            "peak_kb": peak_kb,
            "ended": True,
        }

    def close(self) -> None:
        """Close our descriptors."""
        for fd in (self.stdout.fd, self.stderr.fd, self.channel, self.stdin, *self.kept):
            if fd >= 0:
                os.close(fd)
        self.channel = self.stdin = -1
        self.kept = ()


class MemoryWatch:
    """Memory of the whole sandbox: out-of-memory kills of its cgroup, or a sum over processes without a cgroup."""

    PERIOD_S = 0.1

    def __init__(self, limit_mb: int) -> None:
        self._seen = _oom_kills()
        self._limit = limit_mb << 20
        self._page = os.sysconf("SC_PAGE_SIZE")
        self.due = time.monotonic() + self.PERIOD_S if limit_mb else FOREVER

    def killed_one(self) -> bool:
        """Whether the kernel has killed a process of this container since the last call."""
        before, self._seen = self._seen, _oom_kills()
        return self._seen > before

    def exhausted(self, now: float) -> bool:
        """Whether the programs together exceed their limit. Checks at most every `PERIOD_S` seconds."""
        if now < self.due:
            return False
        self.due = now + self.PERIOD_S
        private, mapped = 0, 0
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        for pid in pids:
            try:
                with open(f"/proc/{pid}/statm") as file:
                    size, resident, shared = map(int, file.read().split()[:3])
            except OSError:
                continue
            private += (resident - shared) * self._page
            mapped += size * self._page
        # Anonymous shared memory is in no process's private pages, and may be missing from all page tables.
        return private > self._limit or (mapped > self._limit and private + _shared_bytes(pids) > self._limit)


def _shared_bytes(pids: list[str]) -> int:
    """Bytes of all shared mappings without a file, each counted once, however many processes map it."""
    sizes: dict[str, int] = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                for line in file:
                    if line.endswith("/dev/zero (deleted)\n"):
                        start, _, rest = line.partition("-")
                        sizes[line.split()[4]] = int(rest.split(" ", 1)[0], 16) - int(start, 16)
        except PermissionError:  # an undumpable program; the runner's own processes are too, but small
            with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
                size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                sizes[pid] = size if size > _RUNNER_BYTES else 0
        except OSError:
            continue
    return sum(sizes.values())


def _oom_kills() -> int:
    """Out-of-memory kills counted by cgroup v1 or v2; 0 if they can't be read."""
    for path in ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events"):
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0
