"""What an engine or a sandbox can do beyond the protocol. Each capability is a base class that an engine opts into.

    class MySandbox(Sandbox, Judging): ...

    result = await Judging.of(sandbox).run_tests(code, tests)

The engines docker, local, kubernetes and e2b have all capabilities of a sandbox.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence

from forge_env.errors import UsageError
from forge_env.sandbox.protocol import Capability
from forge_env.sandbox.results import CallsResult, ExecResult, How, OutputChunk, RunningSandbox, TestsResult
from forge_env.sandbox.spec import Limits, SandboxSpec

# --- of sandboxes


class Judging(Capability):
    """A sandbox that judges code without trusting it: the verdict is made outside the code's process."""

    can = "judge code"

    @abstractmethod
    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:
        """Execute `code`, then evaluate each expression of `calls` in its namespace.

        Values come back over a separate channel and are compared by the caller, outside the sandbox: nothing that
        judges the code is ever inside.

        Args:
            code: definitions.
            calls: expressions, such as `f(1)`.
            limits: limits of this call; None: the defaults of `Limits`.
        """

    async def run_tests(
        self,
        code: str | None = None,
        tests: str | Mapping[str, str | bytes] = "",
        *,
        files: Mapping[str, str | bytes] | None = None,
        packages: Sequence[str] = (),
        how: How | None = None,
        limits: Limits | None = None,
    ) -> TestsResult:
        """Judge code by tests: unittest cases, `test_*` functions, plain asserts, or tests that need pytest.

        `apart`: tests and code run in separate processes. Tests reach objects of the judged code through mirrors,
        results come back as plain values, and the verdict is sent over a channel that the code can't reach.
        `counted`: tests that patch, derive from judged classes or read files run in one process with the code, several
        times, each time with some tests replaced by twins that honest code fails
        (docs/sandboxes/judging.md).

        Args:
            code: a single module, which the tests import as `solution`.
            tests: either one text that tests `code`, or test files by path, with files they import (`conftest.py` too).
                They replace judged files of the same path.
            files: the judged files by path; a package in `src/` is importable as well. A `conftest.py` or pytest
                settings among them are left out.
            packages: packages that the tests need, checked against the sandbox's `SandboxSpec.packages`.
            how: `apart` or `counted`; by default `apart`, unless the text of the tests needs `counted`. The judged code
                has no influence on it.
            limits: limits of each process.

        Raises:
            UsageError: the tests can't be parsed, the sandbox was acquired without one of the packages, or this engine
                runs calls only.
        """
        raise UsageError(f"{type(self).__name__} can't run tests", fix="use the sandbox engine docker or local")


class Archives(Capability):
    """A sandbox whose folders can be moved to another one, with links, modes and empty folders."""

    can = "make archives"

    @abstractmethod
    async def pack(self, folders: Sequence[str], *, leave_out: Sequence[str] = ()) -> bytes:
        """Archive folders of `SandboxSpec.writable` as tar, with links, modes and empty folders; 128 MiB at most.

        Args:
            folders: absolute paths.
            leave_out: paths to leave out, with everything below them.

        Raises:
            SandboxPathError: a folder is not writable.
            SandboxFileError: a folder does not exist, or is too large.
        """

    @abstractmethod
    async def unpack(self, archive: bytes, *, instead_of: Sequence[str] = ()) -> None:
        """Extract an archive of `pack` to its original paths, in the same or another sandbox.

        Args:
            archive: the result of `pack`.
            instead_of: folders to empty first, so that they hold only the archive's files.

        Raises:
            SandboxPathError: one of these is not writable.
            SandboxFileError: it is not such an archive, there is no space left, or a path exists and is not a file.
        """


class Interpreters(Capability):
    """A sandbox with interpreters that keep their state between calls."""

    can = "keep sessions of an interpreter"

    @abstractmethod
    async def shell(
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, limits: Limits | None = None
    ) -> Interpreter:
        """Start a bash session, which keeps variables, functions and working directory between commands.

        Of `limits`, those on memory, processes, files and descriptors apply to the session.

        Args:
            env: environment variables, in addition to the sandbox's own.
            cwd: working directory, relative to the work folder.
            limits: limits of the session.
        """

    @abstractmethod
    async def python(
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, limits: Limits | None = None
    ) -> Interpreter:
        """Start a Python session, which keeps names between cells and prints the value of a cell's last expression.

        `limits` apply as for `shell`.

        Args:
            env: environment variables, in addition to the sandbox's own.
            cwd: working directory, relative to the work folder.
            limits: limits of the session.
        """


class Programs(Capability):
    """A sandbox whose programs can run in the background, or yield their output while they run."""

    can = "run programs in the background"

    @abstractmethod
    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> Process:
        """Start a program in the background, where it runs until it ends, is killed, or the sandbox is released.

        Args:
            argv: the program and its arguments.
            env: environment variables, in addition to the sandbox's own.
            cwd: working directory, relative to the work folder.
            limits: limits of the program.
        """

    @abstractmethod
    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> AsyncIterator[OutputChunk | ExecResult]:
        """Run a program and yield its output as it comes: chunks up to `output_bytes`, then the result.

        Args:
            argv: the program and its arguments.
            stdin: its standard input.
            env: environment variables, in addition to the sandbox's own.
            cwd: working directory, relative to the work folder.
            limits: limits of this call; None: the defaults of `Limits`.
        """


class Interpreter(ABC):
    """A persistent interpreter.

    It ends with `close`, with the sandbox, by itself, when a running call is cancelled, or when a command does not
    respond to its time-out.
    """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the session can run another command."""

    @abstractmethod
    async def run(self, source: str, *, limits: Limits | None = None) -> ExecResult:
        """Run one command or cell. Of `limits`, wall time and output apply to each command.

        A time-out interrupts the command and keeps the session. If the command does not respond to the interrupt, the
        session ends with it (`alive` is False).

        Args:
            source: a command or a cell.
            limits: limits of this call; None: the defaults of `Limits`.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the session and all processes it started."""


class Process(ABC):
    """A program in the background."""

    @abstractmethod
    async def write(self, data: bytes, *, end: bool = False) -> None:
        """Write to the program's standard input; `end` closes it afterwards.

        Args:
            data: bytes to write.
            end: whether to close the input.
        """

    @abstractmethod
    async def read(self) -> tuple[str, str]:
        """Standard output and standard error since the last read."""

    @abstractmethod
    async def wait(self, timeout: float) -> ExecResult | None:
        """Wait for the program to end. Returns its result with all unread output, or None after `timeout` seconds.

        Args:
            timeout: seconds.
        """

    @abstractmethod
    async def kill(self) -> None:
        """End the program and all processes it started."""


# --- of engines


class Images(Capability):
    """An engine that builds images and keeps them on disk."""

    can = "build images"

    @abstractmethod
    async def build(self, image: str | SandboxSpec | None = None) -> str:
        """Build the missing parts of an image, without starting a sandbox. Returns the image's name.

        Args:
            image: an image as in `SandboxSpec.image`, or a specification; None: the default image.

        Raises:
            SandboxUnavailableError: it can't be built; for a Dockerfile, the error names the failed line.
        """

    @classmethod
    def prune(cls) -> list[str]:
        """Remove images of other versions that no sandbox uses. Returns their names; they are rebuilt when needed."""
        return []

    @classmethod
    def storage(cls) -> str:
        """Description and size of files kept on disk between runs, for display; empty if there are none."""
        return ""


class Inventory(Capability):
    """An engine that can list the sandboxes on this machine, and remove those of dead owners."""

    can = "list sandboxes"

    @classmethod
    @abstractmethod
    def running(cls) -> list[RunningSandbox]:
        """Sandboxes alive on this machine, of any owner."""

    @classmethod
    @abstractmethod
    def reap_abandoned(cls) -> int:
        """Remove the leftovers of dead owners on this machine. Returns their number. Quick, and starts nothing."""
