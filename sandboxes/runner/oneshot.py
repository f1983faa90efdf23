"""Requests answered when their program ends: programs, files, calls, and split judgement."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from .values import MAX_TOTAL
from .wire import Header, write_all

if TYPE_CHECKING:
    from .jobs import Job
    from .supervisor import Supervisor

_CHUNK = 1 << 16
_CHANNEL_KINDS = ("calls", "counted", "folder", "pack", "read")


class OneShots:
    """Supervisor operations that start one or two jobs and answer when they have ended."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    def run(self, header: Header, body: bytes) -> None:
        """Run a program or a file request."""
        passed: list[int] = []
        if size := header.get("stdin"):
            passed.append(_stdin(body[header["code"] : header["code"] + size]))
        reading = -1
        if header["kind"] in _CHANNEL_KINDS:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            passed.append(writing)
        job = self.supervisor.begin(header, body, passed, wall_s=header["limits"]["wall_s"])
        if reading >= 0:
            self._collect_values(job, reading, header.get("max_bytes", MAX_TOTAL))

    def judge(self, header: Header, body: bytes) -> None:
        """Run a split judgement: the solution in slot 0 and its tests in slot 1, exchanging plain values only."""
        solution_end, tests_end = socket.socketpair()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        tests_header, wall_s = header.pop("tests"), header["limits"]["wall_s"]
        split = header["code"] + sum(size for _, size in header["files"])
        begin = self.supervisor.begin
        solution = begin({**header, "kind": "serve"}, body[:split], [solution_end.detach()], wall_s=wall_s)
        judge_header = {**header, **tests_header, "kind": "tests"}
        tests = begin(judge_header, body[split:], [tests_end.detach(), writing], slot=1, wall_s=wall_s)
        self._collect_values(tests, reading, MAX_TOTAL)
        solution.partner, tests.partner = tests, solution

    def ended(self, job: Job, report: Header) -> None:
        """Handle the end of a job whose output has been read completely."""
        partner = job.partner
        if partner is None:
            self.supervisor.answer(job, job.id, report)
        elif partner.report is not None:
            self._judged(*((job, partner) if job.kind == "serve" else (partner, job)))
        elif job.kind == "tests":  # the verdict is complete, so the solution is no longer needed
            self.supervisor.kill(partner)

    def finish_channel(self, job: Job) -> None:
        """Read the rest of a value channel whose writers have ended."""
        while len(job.values) <= job.channel_limit:
            try:
                chunk = os.read(job.channel, _CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                break
            job.values += chunk

    def _judged(self, solution: Job, tests: Job) -> None:
        assert solution.report is not None
        assert tests.report is not None
        solution.values = tests.values
        judge = {"exit_code": tests.report["exit_code"], "stderr": tests.stderr.text().decode("utf-8", "replace")}
        timed_out = solution.timed_out or tests.timed_out
        self.supervisor.answer(solution, solution.id, {**solution.report, "timed_out": timed_out, "judge": judge})

    def _collect_values(self, job: Job, reading: int, limit: int) -> None:
        os.set_blocking(reading, False)
        job.channel, job.channel_limit = reading, limit

    def attend(self, job: Job) -> None:
        """Read a job's values as they arrive, from now on."""
        self.supervisor.watch(job.channel, lambda: self._channel(job))

    def _channel(self, job: Job) -> None:
        try:
            chunk = os.read(job.channel, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.supervisor.unwatch(job.channel)
        elif len(job.values) + len(chunk) <= job.channel_limit + 4:
            job.values += chunk
        else:  # keep the complete frames received so far, and kill the program
            self.supervisor.unwatch(job.channel)
            self.supervisor.kill(job)


def _stdin(data: bytes) -> int:
    """Standard input as a memory file, so that writing it never blocks."""
    writable = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        write_all(writable, data)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
