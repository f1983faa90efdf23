"""Requests to and answers from a sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forge_env.errors import UsageError

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one call. Every call has all of them; there is no 'unlimited'."""

    wall_s: float = 10.0
    """Wall-clock seconds."""
    cpu_s: float = 10.0
    """CPU seconds per process."""
    memory_mb: int = 512
    """Address space per process, MiB."""
    processes: int = 64
    """Processes and threads alive at once."""
    file_size_mb: int = 16
    """Largest single file, MiB."""
    open_files: int = 128
    """Open descriptors per process."""
    output_bytes: int = 64 * 1024
    """Bytes kept of stdout and of stderr: head and tail are kept, the middle is marked."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s"):
            if not (isinstance(value := getattr(self, name), (int, float)) and 0 < value <= _MOST):  # so nan fails
                raise UsageError(f"limit {name}={value!r} is not a time", fix="give a positive number of seconds")
        for name in ("memory_mb", "processes", "file_size_mb", "open_files", "output_bytes"):
            _check_size(name, getattr(self, name))


def _check_size(name: str, value: object) -> None:
    if not (isinstance(value, int) and 0 < value <= _MOST):
        raise UsageError(f"limit {name}={value!r} is not a size", fix=f"give an integer from 1 to {_MOST}")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What kind of sandbox to hand out."""

    image: str = "python"
    """Name of a bundled image, or an image reference of the engine."""
    network: bool = False
    """Reach the network. Off unless a task needs it."""
    allow: tuple[str, ...] = ()
    """Hosts (`NAME`, `NAME:PORT`, `*.NAME`) that programs may reach over HTTP and HTTPS through a filtering proxy,
    which the usual variables name; everything else stays out of reach."""
    disk_mb: int = 64
    """Size of the writable work folder, MiB."""
    memory_mb: int = 1024
    """Memory of the whole sandbox, MiB."""

    def __post_init__(self) -> None:
        if isinstance(self.allow, str):
            raise UsageError(f"allow is the text {self.allow!r}", fix="pass a tuple of hosts")
        object.__setattr__(self, "allow", tuple(self.allow))
        _check_size("disk_mb", self.disk_mb)  # 0 would be boundless to the kernel
        _check_size("memory_mb", self.memory_mb)
        if self.network and self.allow:
            raise UsageError("network=True reaches everything, allow only some", fix="choose one of them")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a call consumed."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a program ended. Everything here is the program's doing; the engine's faults are exceptions."""

    exit_code: int | None
    """Exit status, None when a signal ended the program."""
    signal: int | None = None
    """The signal that ended it."""
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    """A wall or CPU limit ended it."""
    out_of_memory: bool = False
    truncated: bool = False
    """Output was longer than the limit; the middle is missing and marked."""
    usage: Usage = field(default_factory=Usage)

    @property
    def ok(self) -> bool:
        """True when the program ended by itself with status 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The value one call returned, or the name of the exception it raised.

    `value` is plain data (None, bool, int, float, str, bytes, list, tuple, dict, set and nestings), decoded
    outside the sandbox; an object of any other type is an error of type 'TypeError'.
    """

    value: Any = None
    error: str | None = None
    """Exception class name; None when the call returned."""
    message: str = ""
    """Exception text, shortened."""


@dataclass(frozen=True, slots=True)
class CallsResult:
    """Outcomes of `Sandbox.run_calls`, one per call that was reached before the program ended."""

    outcomes: list[CallOutcome]
    execution: ExecResult


@dataclass(frozen=True, slots=True)
class TestsResult:
    """Verdict of `Sandbox.run_tests`: from the tests' own process, which the judged code can't reach."""

    __test__ = False  # not a test class

    passed: bool
    """At least one test ran and none failed."""
    total: int
    """Tests that ran."""
    failures: list[str]
    """One line per failed test."""
    execution: ExecResult
    """How the judged code's process ended."""


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of output while a program runs."""

    stream: str
    """`stdout` or `stderr`."""
    data: bytes


@dataclass(frozen=True, slots=True)
class RunningSandbox:
    """A sandbox alive on this machine."""

    id: str
    image: str
    owner_pid: int | None
    """Process that owns it, None when it belongs to another machine."""
    abandoned: bool
    """Its owner is certainly dead: the next reaping removes it."""
    started: float | None = None
    """Seconds since the epoch."""
