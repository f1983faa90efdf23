"""What sandboxes and engines return: results of programs and of tests, and the sandboxes that are alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a call used."""

    wall_s: float = 0.0
    """Wall-clock seconds."""
    cpu_s: float = 0.0
    """CPU seconds of all its processes."""
    peak_memory_mb: float = 0.0
    """Peak memory, MiB."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The outcome of a program. Failures of the engine are exceptions instead."""

    exit_code: int | None
    """Exit status; None if a signal ended the program."""
    signal: int | None = None
    """The signal that ended the program."""
    stdout: str = ""
    """Standard output, decoded as UTF-8 with replacement characters."""
    stderr: str = ""
    """Standard error, decoded likewise."""
    timed_out: bool = False
    """The program was ended by a wall or CPU limit."""
    out_of_memory: bool = False
    """The program was ended by a memory limit."""
    truncated: bool = False
    """Output exceeded the limit, and its middle was replaced by a mark."""
    usage: Usage = field(default_factory=Usage)
    """Resources that the program used."""

    @property
    def ok(self) -> bool:
        """True if the program ended by itself with status 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The value that a call returned, or the name of the exception it raised.

    `value` is plain data (None, bool, int, float, str, bytes, list, tuple, dict, set and nestings), decoded
    outside the sandbox; an object of any other type is an error of type 'TypeError'.
    """

    value: Any = None
    """The returned value."""
    error: str | None = None
    """Exception class name; None if the call returned."""
    message: str = ""
    """Exception text, shortened."""


@dataclass(frozen=True, slots=True)
class CallsResult:
    """Outcomes of `Sandbox.run_calls`, one for each call made before the program ended."""

    outcomes: list[CallOutcome]
    """In the order of the calls."""
    execution: ExecResult
    """The outcome of the process that made the calls."""


Outcome = Literal["passed", "failed", "skipped"]
How = Literal["apart", "counted"]
"""How tests are run: in a process that the judged code can't reach, or in the same process, with the tests counted."""


@dataclass(frozen=True, slots=True)
class TestsResult:
    """Verdict of `Sandbox.run_tests`, made outside the judged code's process."""

    __test__ = False  # not a test class

    passed: bool
    """At least one test ran, and none failed."""
    total: int
    """Number of tests that ran, without skipped ones."""
    failures: list[str]
    """One line for each failed test, at most 50."""
    execution: ExecResult
    """The outcome of the judged code's process."""
    how: How = "apart"
    """How the tests were run."""
    failed: int = 0
    """Tests that failed; all of them if there is no verdict, such as after a cheat."""
    doubts: list[str] = field(default_factory=list)
    """Reasons why a cheat could have passed; empty if there are none."""
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcome of each reported test by its id with parameters; empty if there is no verdict."""

    @property
    def cheat_proof(self) -> bool:
        """Whether the judged code could not have forged the verdict."""
        return not self.doubts

    @property
    def share(self) -> float:
        """Share of passed tests among those that ran, 0 to 1."""
        return (self.total - self.failed) / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of output of a running program."""

    stream: str
    """`stdout` or `stderr`."""
    data: bytes
    """The bytes as written."""


@dataclass(frozen=True, slots=True)
class RunningSandbox:
    """A sandbox alive on this machine."""

    id: str
    image: str
    owner_pid: int | None
    """Id of the owning process; None if that runs on another machine."""
    abandoned: bool
    """The owner is certainly dead: the next reaping removes the sandbox."""
    started: float | None = None
    """Seconds since the epoch."""
