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

from . import kernel
from .capture import Capture
from .config import RunnerConfig
from .jobs import SIGKILL, Job, MemoryWatch, Spare, ended_for_memory
from .sessions import Sessions
from .values import MAX_TOTAL
from .wire import FrameReader, Header, pack
from .zygote import COMMAND, EVENT, MAX_MESSAGE

_CHUNK = 1 << 20
_CHANNEL_KINDS = ("calls", "read")
FOREVER = float("inf")


class Supervisor:
    """State of the supervisor process."""

    def __init__(self, config: RunnerConfig, engine: socket.socket, zygote: socket.socket) -> None:
        self.config = config
        self.engine = engine
        self.zygote = zygote
        self.reader = FrameReader()
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.jobs: dict[int, Job] = {}  # by ticket
        self.spares: dict[int, Spare] = {}  # by slot
        self.tickets = 0
        self.memory = MemoryWatch(config.memory_mb)
        self.resets: list[int] = []  # requests for a reset under way
        self.sessions = Sessions(self)
        self.operations: dict[str, Callable[[Header, bytes], None]] = {
            "run": self._run,
            "judge": self._judge,
            "open": self.sessions.open,
            "turn": self.sessions.turn,
            "feed": self.sessions.feed,
            "take": self.sessions.take,
            "kill": self._kill_request,
            "reset": self._reset,
        }

    def run(self) -> None:
        """Serve until the engine is gone."""
        kernel.set_dumpable(False)
        self.watch(self.engine.fileno(), self._from_engine)
        self.watch(self.zygote.fileno(), self._from_zygote)
        self._spare(0)
        self.send({"ready": os.getpid()})
        while True:
            for fd, _ in self.poll.poll(self._timeout()):
                if handler := self.handlers.get(fd):
                    handler()
            self._enforce_deadlines()

    # ---- plumbing -------------------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Call `handler` whenever `fd` is ready."""
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching; fine when it was not watched."""
        if self.handlers.pop(fd, None):
            self.poll.unregister(fd)

    def send(self, header: Header, body: bytes = b"") -> None:
        """One frame to the engine."""
        try:
            self.engine.sendall(pack(header, body))
        except OSError:
            os._exit(0)  # the engine is gone: everything here goes with it

    def command(self, operation: bytes, slot: int, ticket: int, fds: list[int] | None = None) -> None:
        """One message to the zygote."""
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.zygote.sendmsg([COMMAND.pack(operation, slot, ticket)], passed)

    def _timeout(self) -> float:
        if not self.jobs:
            return -1.0
        soonest = min(self.memory.due, *(job.next_deadline() for job in self.jobs.values()))
        return -1.0 if soonest == FOREVER else max(0.0, soonest - time.monotonic())

    def _from_engine(self) -> None:
        try:
            chunk = self.engine.recv(_CHUNK)
        except OSError:
            chunk = b""
        if not chunk:
            os._exit(0)
        for header, body in self.reader.feed(chunk):
            self.operations[header["op"]](header, body)

    # ---- requests -------------------------------------------------------------------------------------

    def _spare(self, slot: int) -> Spare:
        """Have a child forked ahead of its request."""
        ours, job = socket.socketpair()
        stdout, stdout_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stderr, stderr_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        theirs = [job.detach(), stdout_end, stderr_end]
        os.set_blocking(stdout_end, True)
        os.set_blocking(stderr_end, True)
        self.tickets += 1
        self.command(b"S", slot, self.tickets, theirs)
        for fd in theirs:
            os.close(fd)
        self.spares[slot] = Spare(self.tickets, ours, stdout, stderr)
        return self.spares[slot]

    def begin(self, header: Header, body: bytes, passed: list[int], *, slot: int = 0, wall_s: float = FOREVER) -> Job:
        """Hand a request and the child's descriptors to a child of `slot`."""
        spare = self.spares.get(slot) or self._spare(slot)
        del self.spares[slot]
        now, output = time.monotonic(), header["limits"]["output_bytes"]
        stdout, stderr = Capture(spare.stdout, output), Capture(spare.stderr, output)
        job = Job(header["id"], spare.ticket, slot, header["kind"], now, now + wall_s, stdout, stderr)
        job.stream = bool(header.get("stream"))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
        frame = pack(header, body)
        try:
            sent = spare.job.sendmsg([frame], rights)
            if sent < len(frame):
                spare.job.sendall(memoryview(frame)[sent:])
        except OSError:
            pass  # the child is gone already; its exit is on the way
        spare.job.close()
        for fd in passed:
            os.close(fd)
        self.jobs[job.ticket] = job
        for number, capture in enumerate((stdout, stderr), 1):
            self.watch(capture.fd, lambda number=number: self._output(job, number))  # type: ignore[misc]
        return job

    def _run(self, header: Header, body: bytes) -> None:
        passed: list[int] = []
        if size := header.get("stdin"):
            passed.append(_stdin(body[header["code"] : header["code"] + size]))
        reading = -1
        if header["kind"] in _CHANNEL_KINDS:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            passed.append(writing)
        job = self.begin(header, body, passed, wall_s=header["limits"]["wall_s"])
        if reading >= 0:
            self._collect_values(job, reading, header.get("max_bytes", MAX_TOTAL))

    def _judge(self, header: Header, body: bytes) -> None:
        """Split judgement: the solution as slot 0, its tests as slot 1, nothing between them but plain values."""
        solution_end, tests_end = socket.socketpair()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        split, wall_s = header["code"], header["limits"]["wall_s"]
        solution = self.begin({**header, "kind": "serve"}, body[:split], [solution_end.detach()], wall_s=wall_s)
        judge_header = {**header, "kind": "tests", "code": len(body) - split}
        tests = self.begin(judge_header, body[split:], [tests_end.detach(), writing], slot=1, wall_s=wall_s)
        self._collect_values(tests, reading, MAX_TOTAL)
        solution.partner, tests.partner = tests, solution

    def _collect_values(self, job: Job, reading: int, limit: int) -> None:
        os.set_blocking(reading, False)
        job.channel, job.channel_limit = reading, limit
        self.watch(reading, lambda: self._channel(job))

    def _output(self, job: Job, number: int) -> None:
        capture = job.stdout if number == 1 else job.stderr
        chunk = capture.read()
        if chunk == b"":
            self.unwatch(capture.fd)
        elif job.stream and chunk and capture.total <= capture.head_size + capture.tail_size:
            self.send({"id": job.id, "stream": number}, chunk)
        elif capture.dropped > self.config.drain_mb << 20 and not job.flooded:
            job.flooded = True
            self.kill(job)

    def _channel(self, job: Job) -> None:
        try:
            chunk = os.read(job.channel, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.unwatch(job.channel)
        elif len(job.values) + len(chunk) <= job.channel_limit + 4:
            job.values += chunk
        else:  # what came so far stays whole frames; the rest is refused with the program
            self.unwatch(job.channel)
            self.kill(job)

    def kill(self, job: Job) -> None:
        """Have a job's child killed with all it started."""
        job.killed = True
        self.command(b"K", job.slot, job.ticket)

    def _kill_request(self, header: Header, _: bytes) -> None:
        for job in self.jobs.values():
            if header["target"] in (job.id, job.turn.id if job.turn else None):
                self.kill(job)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        exhausted = bool(self.jobs) and self.memory.exhausted(now)
        for job in self.jobs.values():
            if exhausted and not job.killed:
                job.starved = True
                self.kill(job)
            if now >= job.deadline:
                job.timed_out = True
                job.deadline = now + 1.0  # ask again, should a kill ever be lost
                self.kill(job)
            elif job.turn and now >= job.turn.deadline:
                self.sessions.overdue(job, job.turn, now)

    def _reset(self, header: Header, _: bytes) -> None:
        self.resets.append(header["id"])
        self.sessions.ended_jobs.clear()
        for job in self.jobs.values():
            self.kill(job)
        if not self.jobs:
            self.command(b"W", 0, 0)

    # ---- from the zygote ------------------------------------------------------------------------------

    def _from_zygote(self) -> None:
        message = self.zygote.recv(MAX_MESSAGE)
        if not message:
            os._exit(1)
        operation, ticket, status, cpu_us, peak_kb, strays = EVENT.unpack_from(message)
        if operation == b"X":
            if job := self.jobs.pop(ticket, None):
                self._ended(job, job.describe(status, cpu_us, peak_kb, strays))
            else:
                self._replace_spare(ticket)
        elif operation == b"W":
            dirty = json.loads(message[EVENT.size :])
            for request in self.resets:
                self.send({"id": request, "dirty": dirty, "time": time.time()})
            self.resets.clear()

    def _ended(self, job: Job, report: Header) -> None:
        for capture in (job.stdout, job.stderr):
            capture.drain()
            self.unwatch(capture.fd)
        if job.channel >= 0:
            if not job.persistent:
                self._finish_channel(job)
            self.unwatch(job.channel)
        self.unwatch(job.stdin)
        job.close()
        if report["signal"] == SIGKILL and not job.killed:
            report["out_of_memory"] = self.memory.killed_one()
        job.report = report
        if job.persistent:
            self.sessions.ended(job)
        elif job.partner is None:
            self.answer(job, job.id, report)
        else:
            self._judged(job, job.partner)
        if self.jobs:
            return
        if 0 not in self.spares:  # never beside a program, which as the same user could stop it or lower its limits
            self._spare(0)
        if self.resets:
            self.command(b"W", 0, 0)

    def _judged(self, job: Job, partner: Job) -> None:
        if partner.report is None:
            if job.kind == "tests":  # the verdict is in: the solution has nothing more to say
                self.kill(partner)
            return
        solution, tests = (job, partner) if job.kind == "serve" else (partner, job)
        assert solution.report is not None
        assert tests.report is not None
        solution.values = tests.values
        judge = {"exit_code": tests.report["exit_code"], "stderr": tests.stderr.text().decode("utf-8", "replace")}
        timed_out = solution.timed_out or tests.timed_out
        self.answer(solution, solution.id, {**solution.report, "timed_out": timed_out, "judge": judge})

    def _finish_channel(self, job: Job) -> None:
        while len(job.values) <= job.channel_limit:
            try:
                chunk = os.read(job.channel, _CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                break
            job.values += chunk

    def _replace_spare(self, ticket: int) -> None:
        """An idle child was killed along with its user's processes: fork another."""
        for slot, spare in list(self.spares.items()):
            if spare.ticket == ticket:
                spare.close()
                del self.spares[slot]
                self._spare(slot)

    def answer(self, job: Job, request: int, report: Header) -> None:
        """Send the outcome of `request` with the output captured for it."""
        stdout, stderr = job.stdout.text(), job.stderr.text()
        outcome = {
            **report,
            "id": request,
            "truncated": bool(job.stdout.dropped or job.stderr.dropped),
            "parts": [len(stdout), len(stderr), len(job.values)],
        }
        if ended_for_memory(report["exit_code"], stderr):
            outcome["out_of_memory"] = True
        self.send(outcome, stdout + stderr + bytes(job.values))


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
