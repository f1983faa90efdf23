"""The supervisor: holds the channel to the engine and every byte of the requests, and never forks user code.

One epoll loop. A request is handed to an idle child over a socket of its own; its output comes back over two
pipes, values over a third that only judged programs have. Deadlines are the loop's own timeout.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from . import kernel
from .capture import Capture
from .config import RunnerConfig
from .values import MAX_TOTAL
from .wire import FrameReader, Header, pack
from .zygote import COMMAND, EVENT, MAX_MESSAGE

_CHUNK = 1 << 20
_CHANNEL_KINDS = ("calls", "read")
_SIGKILL, _SIGXCPU = 9, 24


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
class Job:
    """A request under way."""

    id: int
    ticket: int
    slot: int
    started: float
    deadline: float
    stdout: Capture
    stderr: Capture
    channel: int = -1
    channel_limit: int = 0
    values: bytearray = field(default_factory=bytearray)
    timed_out: bool = False
    killed: bool = False
    flooded: bool = False


class Supervisor:
    """State of the supervisor process."""

    def __init__(self, config: RunnerConfig, engine: socket.socket, zygote: socket.socket) -> None:
        self.config = config
        self.engine = engine
        self.zygote = zygote
        self.reader = FrameReader()
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.jobs: dict[int, Job] = {}
        self.spares: dict[int, Spare] = {}
        self.tickets = 0
        self.oom_kills = _oom_kills()
        self.resets: list[int] = []

    def run(self) -> None:
        """Serve until the engine is gone."""
        kernel.set_dumpable(False)
        self._watch(self.engine.fileno(), self._from_engine)
        self._watch(self.zygote.fileno(), self._from_zygote)
        self._spare(0)
        self._send({"ready": os.getpid()})
        while True:
            for fd, _ in self.poll.poll(self._timeout()):
                if handler := self.handlers.get(fd):
                    handler()
            self._enforce_deadlines()

    # ---- plumbing -------------------------------------------------------------------------------------

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None):
            self.poll.unregister(fd)

    def _send(self, header: Header, body: bytes = b"") -> None:
        try:
            self.engine.sendall(pack(header, body))
        except OSError:
            os._exit(0)  # the engine is gone: everything here goes with it

    def _timeout(self) -> float:
        if not self.jobs:
            return -1.0
        return max(0.0, min(job.deadline for job in self.jobs.values()) - time.monotonic())

    def _from_engine(self) -> None:
        try:
            chunk = self.engine.recv(_CHUNK)
        except OSError:
            chunk = b""
        if not chunk:
            os._exit(0)
        for header, body in self.reader.feed(chunk):
            operation = header["op"]
            if operation == "run":
                self._start(header, body)
            elif operation == "kill":
                self._kill_request(header["id"])
            elif operation == "reset":
                self._reset(header["id"])
            elif operation == "ping":
                self._send({"id": header["id"], "time": time.time()})

    # ---- requests -------------------------------------------------------------------------------------

    def _spare(self, slot: int) -> Spare:
        """Have a child forked ahead of its request."""
        theirs: list[int] = []
        ours, job = socket.socketpair()
        stdout, stdout_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stderr, stderr_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        theirs = [job.detach(), stdout_end, stderr_end]
        os.set_blocking(stdout_end, True)
        os.set_blocking(stderr_end, True)
        self.tickets += 1
        self._command(b"S", slot, self.tickets, theirs)
        for fd in theirs:
            os.close(fd)
        self.spares[slot] = Spare(self.tickets, ours, stdout, stderr)
        return self.spares[slot]

    def _command(self, operation: bytes, slot: int, ticket: int, fds: list[int] | None = None) -> None:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.zygote.sendmsg([COMMAND.pack(operation, slot, ticket)], passed)

    def _start(self, header: Header, body: bytes) -> None:
        slot = header.get("slot", 0)
        spare = self.spares.get(slot) or self._spare(slot)
        del self.spares[slot]
        limits, now = header["limits"], time.monotonic()
        output = limits["output_bytes"]
        job = Job(
            header["id"], spare.ticket, slot, now, now + limits["wall_s"],
            Capture(spare.stdout, output), Capture(spare.stderr, output),
        )  # fmt: skip
        passed: list[int] = []
        if size := header.get("stdin"):
            passed.append(_stdin(body[header.get("code", 0) : header.get("code", 0) + size]))
        if header["kind"] in _CHANNEL_KINDS:
            job.channel, writing = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(job.channel, False)
            job.channel_limit = header.get("max_bytes", MAX_TOTAL)
            passed.append(writing)
            self._watch(job.channel, lambda: self._channel(job))
        self._deliver(spare, pack(header, body), passed)
        for fd in passed:
            os.close(fd)
        self.jobs[job.ticket] = job
        self._watch(spare.stdout, lambda: self._output(job, job.stdout))
        self._watch(spare.stderr, lambda: self._output(job, job.stderr))

    def _deliver(self, spare: Spare, frame: bytes, passed: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
        try:
            sent = spare.job.sendmsg([frame], rights)
            if sent < len(frame):
                spare.job.sendall(memoryview(frame)[sent:])
        except OSError:
            pass  # the child is gone already; its exit is on the way
        spare.job.close()

    def _output(self, job: Job, capture: Capture) -> None:
        chunk = capture.read()
        if chunk == b"":
            self._unwatch(capture.fd)
        elif capture.dropped > self.config.drain_mb << 20 and not job.flooded:
            job.flooded = True
            self._kill(job)

    def _channel(self, job: Job) -> None:
        try:
            chunk = os.read(job.channel, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self._unwatch(job.channel)
        elif len(job.values) + len(chunk) <= job.channel_limit + 4:
            job.values += chunk
        else:  # what came so far stays whole frames; the rest is refused with the program
            self._unwatch(job.channel)
            self._kill(job)

    def _kill(self, job: Job) -> None:
        job.killed = True
        self._command(b"K", job.slot, job.ticket)

    def _kill_request(self, request: int) -> None:
        for job in self.jobs.values():
            if job.id == request:
                self._kill(job)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for job in self.jobs.values():
            if now >= job.deadline:
                job.timed_out = True
                job.deadline = now + 1.0  # ask again, should a kill ever be lost
                self._kill(job)

    def _reset(self, request: int) -> None:
        self.resets.append(request)
        for job in self.jobs.values():
            self._kill(job)
        if not self.jobs:
            self._command(b"W", 0, 0)

    # ---- from the zygote ------------------------------------------------------------------------------

    def _from_zygote(self) -> None:
        message = self.zygote.recv(MAX_MESSAGE)
        if not message:
            os._exit(1)
        operation, ticket, status, cpu_us, peak_kb, strays = EVENT.unpack_from(message)
        if operation == b"X":
            self._exited(ticket, status, cpu_us, peak_kb, strays)
        elif operation == b"W":
            dirty = json.loads(message[EVENT.size :])
            for request in self.resets:
                self._send({"id": request, "dirty": dirty, "time": time.time()})
            self.resets.clear()

    def _exited(self, ticket: int, status: int, cpu_us: int, peak_kb: int, strays: int) -> None:
        job = self.jobs.pop(ticket, None)
        if job is None:
            self._replace_spare(ticket)
            return
        for capture in (job.stdout, job.stderr):
            capture.drain()
            self._unwatch(capture.fd)
            os.close(capture.fd)
        if job.channel >= 0:
            self._finish_channel(job)
        self._answer(job, status, cpu_us, peak_kb, strays)
        if job.slot == 0 and 0 not in self.spares:
            self._spare(0)
        if self.resets and not self.jobs:
            self._command(b"W", 0, 0)

    def _finish_channel(self, job: Job) -> None:
        while len(job.values) <= job.channel_limit:
            try:
                chunk = os.read(job.channel, _CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                break
            job.values += chunk
        self._unwatch(job.channel)
        os.close(job.channel)

    def _replace_spare(self, ticket: int) -> None:
        """An idle child was killed along with its user's processes: fork another."""
        for slot, spare in list(self.spares.items()):
            if spare.ticket == ticket:
                spare.close()
                del self.spares[slot]
                self._spare(slot)

    def _answer(self, job: Job, status: int, cpu_us: int, peak_kb: int, strays: int) -> None:
        exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        stdout, stderr = job.stdout.text(), job.stderr.text()
        out_of_memory = exit_code == 1 and stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError")
        if signal == _SIGKILL and not job.killed:
            before, self.oom_kills = self.oom_kills, _oom_kills()
            out_of_memory = self.oom_kills > before
        self._send(
            {
                "id": job.id,
                "exit_code": exit_code,
                "signal": signal,
                "timed_out": job.timed_out or signal == _SIGXCPU,
                "out_of_memory": out_of_memory,
                "truncated": bool(job.stdout.dropped or job.stderr.dropped),
                "wall_s": time.monotonic() - job.started,
                "cpu_s": cpu_us / 1e6,
                "peak_kb": peak_kb,
                "strays": strays,
                "parts": [len(stdout), len(stderr), len(job.values)],
            },
            stdout + stderr + bytes(job.values),
        )


def _stdin(data: bytes) -> int:
    """Standard input as a file in memory: never blocks whoever writes it."""
    writable = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(writable, view) :]
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)


def _oom_kills() -> int:
    """How many processes of this container the kernel killed for memory (cgroup v1 or v2); 0 where unknown."""
    for path in ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events"):
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0
