"""What every sandbox engine provides: requests, answers, and the protocol itself.

    async with open_engine("docker") as engine:
        sandbox = await engine.acquire()
        result = await sandbox.run_python("print(1 + 1)")
        await engine.release(sandbox)

Two kinds of failure, never mixed: what the *program* did is in the `ExecResult`; what the *engine* did is a
`SandboxError` (an `InfrastructureError`), after which the sandbox is discarded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from forge_env.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

_MOST = 2**31 - 1
SANDBOXES_PER_CPU = 4
"""At once, by default: an episode holds its sandbox while the model thinks, so most are idle at any moment."""


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
            raise UsageError(f"allow={self.allow!r} is a single string", fix="pass a tuple of hosts")
        object.__setattr__(self, "allow", tuple(self.allow))
        _check_size("disk_mb", self.disk_mb)  # 0 would be boundless to the kernel
        _check_size("memory_mb", self.memory_mb)
        if self.network and self.allow:
            raise UsageError("network=True reaches every host, allow only some", fix="choose one of them")


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


# --- the protocol

TENANT: ContextVar[str] = ContextVar("sandbox_tenant", default="")
"""On whose behalf sandboxes are acquired, such as an environment's name: pools share them out evenly."""


class on_behalf_of:  # a class, since every open episode is in one, and a generator is five times as big
    """A block in which sandboxes that are acquired count for `tenant`."""

    __slots__ = ("_tenant", "_token")

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def __enter__(self) -> None:
        self._token = TENANT.set(self._tenant)

    def __exit__(self, *error: object) -> None:
        TENANT.reset(self._token)


class Sandbox(ABC):
    """One clean, isolated machine. Valid from `acquire` to `release`."""

    @abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a program. Files of the work folder persist between calls of one sandbox; processes don't."""

    @abstractmethod
    async def run_python(
        self,
        code: str,
        *,
        stdin: str | bytes = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run `code` as `__main__` in a fresh interpreter, with `files` written to the work folder first."""

    @abstractmethod
    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:
        """Define `code`, then evaluate each expression of `calls` in its namespace.

        Values come back over a channel of their own and are compared by the caller, outside: nothing that
        judges the code is ever inside the sandbox.
        """

    @abstractmethod
    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the work folder, text as UTF-8.

        Raises:
            SandboxPathError: the path is not a relative one inside the work folder.
            SandboxFileError: there is something else of that name, or no room.
        """

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Read a file of the work folder.

        Raises:
            SandboxPathError: as for `write_file`.
            SandboxFileNotFoundError: there is none; it is a `FileNotFoundError`.
            SandboxFileError: it can't be read; it is an `OSError`.
        """

    async def read_text(self, path: str) -> str:
        """`read_file` as text; what is not UTF-8 becomes replacement characters."""
        return (await self.read_file(path)).decode("utf-8", "replace")

    async def write_text(self, path: str, text: str) -> None:
        """`write_file` of text."""
        await self.write_file(path, text.encode("utf-8", "surrogatepass"))

    async def write_files(self, files: Mapping[str, str | bytes]) -> None:
        """Write several files into the work folder."""
        for path, data in files.items():
            await self.write_file(path, data)

    async def run_tests(self, code: str, tests: str, *, limits: Limits | None = None) -> TestsResult:
        """Judge `code` by `tests` (unittest cases, `test_*` functions or plain asserts that import `solution`).

        The two run in processes, with users or namespaces, of their own; calls cross between them as plain data, and
        the verdict leaves over a channel that `code` does not have.
        """
        raise UsageError(f"{type(self).__name__} can't run tests apart from the code they judge")

    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> AsyncIterator[OutputChunk | ExecResult]:
        """`exec`, with output as it comes: chunks up to `output_bytes`, then the result."""
        raise UsageError(f"{type(self).__name__} does not stream")

    async def shell(self, *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Session:
        """A bash whose variables, functions and folder live on from one command to the next."""
        raise UsageError(f"{type(self).__name__} has no shell sessions")

    async def python(self, *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Session:
        """A Python whose names live on from one cell to the next; the last expression's value is printed."""
        raise UsageError(f"{type(self).__name__} has no Python sessions")

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> Process:
        """Start a program that runs on in the background until it ends, is killed, or the sandbox is released."""
        raise UsageError(f"{type(self).__name__} has no background processes")


class Session(ABC):
    """A persistent interpreter. It ends with `close`, with the sandbox, by itself, or when a time-out can't stop it."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can run another command."""

    @abstractmethod
    async def run(self, source: str, *, limits: Limits | None = None) -> ExecResult:
        """Run one command or cell. Of `limits`, wall time and output apply per command.

        A time-out interrupts the command and keeps the session; one that resists ends with it (`alive` is False).
        """

    @abstractmethod
    async def close(self) -> None:
        """End it and everything it started."""


class Process(ABC):
    """A program in the background."""

    @abstractmethod
    async def write(self, data: bytes, *, end: bool = False) -> None:
        """Feed its standard input; `end` closes it."""

    @abstractmethod
    async def read(self) -> tuple[str, str]:
        """Output and errors since the last time."""

    @abstractmethod
    async def wait(self, timeout: float) -> ExecResult | None:
        """How it ended, with the output not read yet; None when it has not within `timeout` seconds."""

    @abstractmethod
    async def kill(self) -> None:
        """End it and everything it started."""


class SandboxEngine(ABC):
    """Makes sandboxes, keeps warm ones, and leaves nothing behind."""

    name: str
    automatic = True
    """Whether `auto` may choose it."""

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Why this engine can't work on this machine (with what would allow it), or None when it can."""

    def unusable_reason(self) -> str | None:
        """The same of this very engine, for one whose options lead to another machine."""
        return self.unavailable_reason()

    @classmethod
    def version(cls) -> str:
        """Version of what it runs on, for people; empty where there is nothing to name."""
        return ""

    @classmethod
    def reap_abandoned(cls) -> int:
        """Remove what dead owners left on this machine; returns how many things. Quick, and starts nothing."""
        return 0

    @classmethod
    def prune(cls) -> list[str]:
        """Remove the images of other versions that no sandbox uses; returns their names. They are built when needed."""
        return []

    @classmethod
    def running(cls) -> list[RunningSandbox]:
        """Sandboxes alive on this machine, whoever owns them."""
        return []

    async def build(self, image: str | None = None) -> str:
        """Build what `image` needs where it is missing, without starting anything; returns what it is called."""
        raise UsageError(f"the {self.name} engine has nothing to build")

    @abstractmethod
    async def start(self) -> None:
        """Build what is missing (images), reap what dead owners left, warm up."""

    @abstractmethod
    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """A clean sandbox; waits while all are taken. Raises `SandboxError` when none can be made."""

    @abstractmethod
    async def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back; it is wiped, checked and used again, or replaced."""

    @abstractmethod
    async def close(self) -> None:
        """Remove everything this engine made."""

    def stats(self) -> dict[str, Any]:
        """Counters for logs and displays."""
        return {}

    @asynccontextmanager
    async def session(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """`acquire` and `release` around a block."""
        sandbox = await self.acquire(spec)
        try:
            yield sandbox
        finally:
            await self.release(sandbox)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
