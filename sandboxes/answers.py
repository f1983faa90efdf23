"""From the runner's answers to the protocol's results."""

from __future__ import annotations

from forge_env.errors import UsageError
from forge_env.sandbox import CallOutcome, ExecResult, Limits, TestsResult, Usage
from sandboxes.images.runner import values
from sandboxes.images.runner.programs import IO_ERROR
from sandboxes.images.runner.wire import Header

_EIO = 5
MAX_PROCESSES = 480
"""Most processes and threads that one call may ask for: beyond it the runner itself could no longer fork."""


def limits_header(limits: Limits) -> Header:
    """The limits as the runner reads them."""
    if limits.processes > MAX_PROCESSES:
        raise UsageError(f"processes={limits.processes} is more than a sandbox has", fix=f"use {MAX_PROCESSES} or less")
    return {name: getattr(limits, name) for name in Limits.__slots__}


def exec_result(answer: Header, output: bytes) -> tuple[ExecResult, bytes]:
    """The result, and the bytes of the value channel."""
    stdout, stderr, _ = answer["parts"]
    usage = Usage(wall_s=answer["wall_s"], cpu_s=answer["cpu_s"], peak_memory_mb=answer["peak_kb"] / 1024)
    result = ExecResult(
        exit_code=answer["exit_code"],
        signal=answer["signal"],
        stdout=output[:stdout].decode("utf-8", "replace"),
        stderr=output[stdout : stdout + stderr].decode("utf-8", "replace"),
        timed_out=answer["timed_out"],
        out_of_memory=answer["out_of_memory"],
        truncated=answer["truncated"],
        usage=usage,
    )
    return result, output[stdout + stderr :]


def call_outcome(frame: object) -> CallOutcome:
    """One frame of the value channel; candidate code may have written anything there."""
    if isinstance(frame, dict) and set(frame) == {"v"}:
        try:
            return CallOutcome(value=values.decode(frame["v"]))
        except (values.MalformedValueError, RecursionError):
            return CallOutcome(error="TypeError", message="not a plain value")
    if isinstance(frame, dict) and isinstance(frame.get("e"), str):
        return CallOutcome(error=frame["e"][:200], message=str(frame.get("m", ""))[:2000])
    return CallOutcome(error="TypeError", message="not a plain value")


def tests_result(execution: ExecResult, stream: bytes, judge: Header) -> TestsResult:
    """The verdict of the tests' process; without one, nothing has passed."""
    frames = values.unpack_frames(stream)
    if len(frames) == 1 and isinstance(verdict := frames[0], dict):
        failures = [str(line) for line in verdict["failures"]]
        passed = verdict["passed"] is True and not failures and verdict["total"] > 0
        return TestsResult(passed, int(verdict["total"]), failures, execution)
    why = "timed out" if execution.timed_out else str(judge.get("stderr", "")).strip()[-500:]
    return TestsResult(False, 0, [f"the tests came to no verdict: {why}"], execution)


def raise_io_error(result: ExecResult, path: str) -> None:
    """Raise the `OSError` that a file request met inside the sandbox."""
    if result.ok:
        return
    number, _, reason = result.stderr.partition(" ")
    if result.exit_code == IO_ERROR and number.isdigit():
        raise OSError(int(number), reason.rpartition(": ")[0] or reason, path)
    raise OSError(_EIO, "timed out" if result.timed_out else "the file could not be reached", path)
