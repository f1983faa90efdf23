"""The supervisor: owns the channel to the engine and all request data, and never forks user code.

It runs a single epoll loop. A request is sent to an idle child over the child's own socket. Output comes back over two
pipes, and values over a third that only judged programs have. Deadlines are timeouts of the loop.

Each slot has at most one spare: a child forked before its request arrives, to hide the latency of a fork. Programs
running in the same slot share its user, and could stop it, change its limits or kill it. Spares are therefore forked
only while no user code runs in the sandbox: a program always gets a child that no other program could reach.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import kernel
from .jobs import FOREVER, SIGKILL, Capture, Job, MemoryWatch
from .sessions import Sessions
from .values import MAX_TOTAL
from .wire import FrameReader, Header, StandardStreams, pack, pack_inside, write_all
from .zygote import COMMAND, EVENT, MAX_MESSAGE

_CHUNK = 1 << 16
_CHANNEL_KINDS = ("calls", "counted", "folder", "pack", "read")
DRAIN_MB = 64
"""MiB of dropped output after which a flooding program is killed."""
ATTEND_S = 0.004
"""Seconds until output is read as it comes. A program that ends sooner leaves it in the pipes, to be read once."""


@dataclass
class Spare:
    """A forked child that waits for a request: our ends of its request socket, stdout and stderr.

    The child's ends of the two pipes stay open here as well. Otherwise its exit would be reported three times, by each
    pipe and by the zygote, and the first two reports would interrupt the child while it exits.
    """

    ticket: int
    job: socket.socket
    stdout: int
    stderr: int
    kept: tuple[int, int]

    def close(self) -> None:
        """Close all descriptors. The child ends once its request socket is closed."""
        self.job.close()
        for fd in (self.stdout, self.stderr, *self.kept):
            os.close(fd)


class Supervisor:
    """State of the supervisor process. `zygotes` are the channels to each slot's zygote; slots may share one."""

    def __init__(
        self, engine: socket.socket | StandardStreams, zygotes: dict[int, socket.socket], memory_mb: int
    ) -> None:
        self.engine = engine
        self.zygotes = zygotes
        self.reader = FrameReader()
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.jobs: dict[int, Job] = {}  # by ticket
        self.spares: dict[int, Spare] = {}  # by slot
        self.tickets = 0
        self.memory = MemoryWatch(memory_mb)
        self.resets: list[int] = []  # ids of pending reset requests
        self.wiping: set[int] = set()  # first slots of realms that are still being wiped
        self.dirty: list[str] = []
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
        """Serve until the engine closes the channel."""
        kernel.set_dumpable(False)
        self.watch(self.engine.fileno(), self._from_engine)
        for slot, zygote in self._realms().items():
            self.watch(zygote.fileno(), lambda slot=slot: self._from_zygote(slot))  # type: ignore[misc]
        self._fill_spares()
        self.send({"ready": os.getpid(), "time": time.time()})
        while True:
            for fd, _ in self.poll.poll(self._timeout()):
                if handler := self.handlers.get(fd):
                    handler()
            if self.jobs:
                self._enforce_deadlines()

    # ---- plumbing -------------------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Call `handler` whenever `fd` is ready."""
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`, if it is watched."""
        if self.handlers.pop(fd, None):
            self.poll.unregister(fd)

    def send(self, header: Header, body: bytes = b"") -> None:
        """Send one frame to the engine."""
        try:
            self.engine.sendall(pack(header, body))
        except OSError:
            os._exit(0)  # the engine is gone, and the sandbox ends with it

    def command(self, operation: bytes, slot: int, ticket: int, fds: Sequence[int] = ()) -> None:
        """Send one message to the zygote of `slot`."""
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.zygotes[slot].sendmsg([COMMAND.pack(operation, slot, ticket)], passed)

    def _realms(self) -> dict[int, socket.socket]:
        """The distinct channels of the zygotes, each by its first slot."""
        return {slot: end for slot, end in self.zygotes.items() if end not in list(self.zygotes.values())[:slot]}

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

    def _run(self, header: Header, body: bytes) -> None:
        """Run a program or a file request; answered when its child ends."""
        passed: list[int] = []
        if size := header.get("stdin"):
            passed.append(_stdin(body[header["code"] : header["code"] + size]))
        reading = -1
        if header["kind"] in _CHANNEL_KINDS:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            passed.append(writing)
        job = self.begin(header, body, passed, wall_s=header["limits"]["wall_s"])
        if reading >= 0:
            job.collect_values(reading, header.get("max_bytes", MAX_TOTAL))

    def _judge(self, header: Header, body: bytes) -> None:
        """Run a split judgement: the solution in slot 0 and its tests in slot 1, exchanging plain values only."""
        solution_end, tests_end = socket.socketpair()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        tests_header, wall_s = header.pop("tests"), header["limits"]["wall_s"]
        split = header["code"] + sum(size for _, size in header["files"])
        solution = self.begin({**header, "kind": "serve"}, body[:split], [solution_end.detach()], wall_s=wall_s)
        judge_header = {**header, **tests_header, "kind": "tests"}
        tests = self.begin(judge_header, body[split:], [tests_end.detach(), writing], slot=1, wall_s=wall_s)
        tests.collect_values(reading, MAX_TOTAL)
        solution.partner, tests.partner = tests, solution

    def begin(self, header: Header, body: bytes, passed: list[int], *, slot: int = 0, wall_s: float = FOREVER) -> Job:
        """Pass a request and its descriptors to a child of `slot`."""
        spare = self.spares.pop(slot, None) or self._fork(slot)
        now, output = time.monotonic(), header["limits"]["output_bytes"]
        stdout, stderr = Capture(spare.stdout, output), Capture(spare.stderr, output)
        job = Job(header["id"], spare.ticket, slot, header["kind"], now, now + wall_s, stdout, stderr, spare.kept)
        job.stream = bool(header.get("stream"))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
        frame = pack_inside(header, body)
        try:
            sent = spare.job.sendmsg([frame], rights)
            if sent < len(frame):
                spare.job.sendall(memoryview(frame)[sent:])
        except OSError:
            pass  # the child is gone, and its exit will be reported
        spare.job.close()
        for fd in passed:
            os.close(fd)
        self.jobs[job.ticket] = job
        if job.stream or job.persistent:
            self._attend(job)
        else:
            job.attended = now + ATTEND_S
        return job

    def _attend(self, job: Job) -> None:
        """Read a job's output as it arrives, from now on."""
        job.attended = FOREVER
        for number, capture in enumerate((job.stdout, job.stderr), 1):
            self.watch(capture.fd, lambda number=number: self._output(job, number))  # type: ignore[misc]
        if job.channel >= 0 and not job.persistent:
            self.watch(job.channel, lambda: self._values(job))

    def _output(self, job: Job, number: int) -> None:
        capture = job.stdout if number == 1 else job.stderr
        chunk = capture.read()
        if chunk == b"":
            self.unwatch(capture.fd)
        elif job.stream and chunk and capture.total <= capture.limit:
            self.send({"id": job.id, "stream": number}, chunk)
        elif capture.dropped > DRAIN_MB << 20 and not job.flooded:
            job.flooded = True
            self.kill(job)

    def _values(self, job: Job) -> None:
        chunk = job.read_values()
        if chunk == b"":
            self.unwatch(job.channel)
            if job.values_exceeded:  # keep the complete frames received so far
                self.kill(job)

    def kill(self, job: Job) -> None:
        """Have a job's child and all its descendants killed."""
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
            if now >= job.attended:
                self._attend(job)
            if exhausted and not job.killed:
                job.starved = True
                self.kill(job)
            if now >= job.deadline:
                job.timed_out = True
                job.deadline = now + 1.0  # repeat the kill in case it gets lost
                self.kill(job)
            elif job.turn and now >= job.turn.deadline:
                self.sessions.overdue(job, job.turn, now)

    def _reset(self, header: Header, _: bytes) -> None:
        self.resets.append(header["id"])
        self.sessions.ended_jobs.clear()
        for job in self.jobs.values():
            self.kill(job)
        self._wipe_when_quiet()

    def _wipe_when_quiet(self) -> None:
        if self.resets and not self.jobs and not self.wiping:
            for slot in self._realms():
                self.wiping.add(slot)
                self.command(b"W", slot, 0)

    # ---- from the zygotes -----------------------------------------------------------------------------

    def _from_zygote(self, slot: int) -> None:
        message = self.zygotes[slot].recv(MAX_MESSAGE)
        if not message:
            os._exit(1)
        operation, ticket, status, cpu_us, peak_kb = EVENT.unpack_from(message)
        if operation == b"X":
            if job := self.jobs.pop(ticket, None):
                self._ended(job, job.describe(status, cpu_us, peak_kb))
            else:
                self._drop_spares(ticket)
        elif operation == b"P":
            self._drop_spares()
        elif operation == b"W":
            self._wiped(slot, json.loads(message[EVENT.size :]))

    def _wiped(self, slot: int, dirty: list[str]) -> None:
        self.wiping.discard(slot)
        self.dirty += dirty
        if not self.wiping:
            for request in self.resets:
                self.send({"id": request, "dirty": self.dirty, "time": time.time()})
            self.resets.clear()
            self.dirty = []

    def _ended(self, job: Job, report: Header) -> None:
        for capture in (job.stdout, job.stderr):
            capture.drain()
            self.unwatch(capture.fd)
        if job.channel >= 0:
            while not job.persistent and job.read_values():
                pass
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
            self._half_ended(job, job.partner)
        self._fill_spares()
        self._wipe_when_quiet()

    def _half_ended(self, job: Job, partner: Job) -> None:
        """Answer a split judgement once both its jobs have ended."""
        solution, tests = (job, partner) if job.kind == "serve" else (partner, job)
        if solution.report and tests.report:
            solution.values = tests.values
            timed_out = solution.timed_out or tests.timed_out
            judge_stderr = tests.stderr.text().decode("utf-8", "replace")
            report = {**solution.report, "timed_out": timed_out, "judge_stderr": judge_stderr}
            self.answer(solution, solution.id, report)
        elif tests.report:  # the verdict is complete, so the solution is no longer needed
            self.kill(solution)

    def answer(self, job: Job, request: int, report: Header) -> None:
        """Send the outcome of `request` with the output captured for it."""
        stdout, stderr = job.stdout.text(), job.stderr.text()
        last_line = stderr.rstrip().rpartition(b"\n")[2]
        ran_out = report["exit_code"] == 1 and last_line.startswith(b"MemoryError")  # uncaught, in a Python program
        outcome = {
            **report,
            "id": request,
            "out_of_memory": report["out_of_memory"] or ran_out,
            "truncated": bool(job.stdout.dropped or job.stderr.dropped),
            "parts": [len(stdout), len(stderr), len(job.values)],
        }
        self.send(outcome, stdout + stderr + bytes(job.values))

    # ---- spares ---------------------------------------------------------------------------------------

    def _fill_spares(self) -> None:
        """Fork missing spares, unless user code is running."""
        if not self.jobs:
            for slot in self.zygotes:
                if slot not in self.spares:
                    self.spares[slot] = self._fork(slot)

    def _drop_spares(self, ticket: int | None = None) -> None:
        """Replace the spare that has died, or all of them."""
        for slot, spare in list(self.spares.items()):
            if ticket in (None, spare.ticket):
                spare.close()
                del self.spares[slot]
        self._fill_spares()

    def _fork(self, slot: int) -> Spare:
        ours, job = socket.socketpair()
        stdout, stdout_end = os.pipe2(os.O_CLOEXEC)
        stderr, stderr_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(stdout, False)
        os.set_blocking(stderr, False)
        self.tickets += 1
        self.command(b"S", slot, self.tickets, (job.fileno(), stdout_end, stderr_end))
        job.close()
        return Spare(self.tickets, ours, stdout, stderr, (stdout_end, stderr_end))


def _stdin(data: bytes) -> int:
    """Standard input as a memory file, so that writing it never blocks."""
    writable = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        write_all(writable, data)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
