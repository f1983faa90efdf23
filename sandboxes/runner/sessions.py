"""Persistent processes: shells, Python sessions, background programs.

A shell or Python session has a command channel besides its output. A command is written to it, and the command's
status is read from it; output captured in between is the command's. Output between two commands counts for the next
one, as in a terminal.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING

from .jobs import FOREVER, Capture, Job, Turn
from .wire import Header, write_all

if TYPE_CHECKING:
    from .supervisor import Supervisor

INTERRUPT_GRACE_S = 2.0
"""Seconds that an interrupted session has to respond before it is killed."""
_INPUT_CHUNK = 1 << 16


class Sessions:
    """The supervisor's operations on persistent jobs."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.ended_jobs: dict[int, Job] = {}

    def open(self, header: Header, body: bytes) -> None:
        """Start a session or background process, numbered by its request."""
        passed: list[int] = []
        stdin, channel = -1, -1
        if header["kind"] == "process":
            reading, stdin = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(stdin, False)
            passed.append(reading)
        else:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            channel = ours.detach()
            passed.append(theirs.detach())
        job = self.supervisor.begin(header, body, passed)
        job.stdin, job.channel = stdin, channel
        if channel >= 0:
            self.supervisor.watch(channel, lambda: self._done(job))
        self.supervisor.send({"id": header["id"]})

    def turn(self, header: Header, body: bytes) -> None:
        """Run one command in a session."""
        job = self._find(header)
        if job is None:
            return
        now = time.monotonic()
        job.turn = Turn(header["id"], now, now + header["limits"]["wall_s"])
        job.stream = bool(header.get("stream"))
        for capture in (job.stdout, job.stderr):
            capture.bound(header["limits"]["output_bytes"])
        try:
            os.set_blocking(job.channel, True)
            write_all(job.channel, body.replace(b"\0", b"") + b"\0")
            os.set_blocking(job.channel, False)
        except OSError:
            pass  # it has just ended, and `ended` sends the answer

    def feed(self, header: Header, body: bytes) -> None:
        """Queue bytes for a background process's standard input, and close it if requested."""
        job = self._find(header)
        if job is None:
            return
        if job.stdin >= 0:
            job.pending_input += body
            job.close_input |= bool(header.get("close"))
            self._write_input(job)
        self.supervisor.send({"id": header["id"]})

    def take(self, header: Header, _: bytes) -> None:
        """Answer with the output since the last answer, either at once or when the process has ended."""
        job = self._find(header)
        if job is None:
            return
        now = time.monotonic()
        turn = Turn(header["id"], now, now + header.get("wait_s", 0.0))
        if turn.deadline > now:
            job.turn = turn
        else:
            self._answer_turn(job, turn, exit_code=None)

    def overdue(self, job: Job, turn: Turn, now: float) -> None:
        """Handle an expired turn: interrupt the command, and if that has no effect, kill the session."""
        if job.kind == "process":
            job.turn = None
            self._answer_turn(job, turn, exit_code=None)
        elif not turn.timed_out:
            turn.timed_out = True
            turn.deadline = now + INTERRUPT_GRACE_S
            self.supervisor.command(b"I", job.slot, job.ticket)
        else:
            turn.deadline = FOREVER
            self.supervisor.kill(job)

    def ended(self, job: Job) -> None:
        """Handle the end of a persistent job's process."""
        self.ended_jobs[job.id] = job
        if job.turn is not None:
            turn, job.turn = job.turn, None
            assert job.report is not None
            job.report["timed_out"] = turn.timed_out
            self.supervisor.answer(job, turn.id, job.report)

    def _find(self, header: Header) -> Job | None:
        """The live job that a request names. If it has ended, the request is answered with its final report."""
        for job in self.supervisor.jobs.values():
            if job.id == header["session"]:
                return job
        gone = self.ended_jobs.get(header["session"])
        if gone is not None and gone.report is not None:
            self.supervisor.answer(gone, header["id"], gone.report)
            gone.stdout, gone.stderr = Capture(-1, 2), Capture(-1, 2)  # the final output is returned only once
        else:
            self.supervisor.send({"id": header["id"], "error": "no such session"})
        return None

    def _done(self, job: Job) -> None:
        """Read a session's status for its command: decimal digits and a NUL."""
        try:
            message = os.read(job.channel, 64)
        except BlockingIOError:
            return
        if not message:
            self.supervisor.unwatch(job.channel)
            return
        if job.turn is None or not message.endswith(b"\0"):
            return
        digits = message.rstrip(b"\0").rpartition(b"\0")[2]
        turn, job.turn = job.turn, None
        for capture in (job.stdout, job.stderr):
            capture.drain()
        self._answer_turn(job, turn, exit_code=int(digits) & 0xFF if digits.isdigit() else 1)

    def _answer_turn(self, job: Job, turn: Turn, exit_code: int | None) -> None:
        report = {
            "exit_code": exit_code,
            "signal": None,
            "timed_out": turn.timed_out,
            "out_of_memory": False,
            "wall_s": time.monotonic() - turn.started,
            "cpu_s": 0.0,
            "peak_kb": 0,
            "ended": False,
        }
        self.supervisor.answer(job, turn.id, report)
        job.stdout, job.stderr = (Capture(capture.fd, capture.limit) for capture in (job.stdout, job.stderr))

    def _write_input(self, job: Job) -> None:
        """Write as much as the pipe takes, and the rest when it has room."""
        try:
            while job.pending_input:
                del job.pending_input[: os.write(job.stdin, job.pending_input[:_INPUT_CHUNK])]
        except BlockingIOError:
            if job.stdin not in self.supervisor.handlers:
                self.supervisor.watch(job.stdin, lambda: self._write_input(job), select.EPOLLOUT)
            return
        except OSError:  # the process has closed its end
            job.pending_input.clear()
        self.supervisor.unwatch(job.stdin)
        if job.close_input:
            os.close(job.stdin)
            job.stdin = -1
