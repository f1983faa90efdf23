"""The sandbox protocol: specifications, limits and results, and the interface of every engine.

    async with open_engine("docker") as engine:
        sandbox = await engine.acquire()
        result = await sandbox.run_python("print(1 + 1)")
        await engine.release(sandbox)

Failures of programs and of engines are kept apart. A failure of the *program* is part of its `ExecResult`. A failure
of the *engine* raises `SandboxError` (an `InfrastructureError`), after which the sandbox is discarded.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from forge_env.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

PROXY_PORT = 3128
"""Port of the filtering proxy, on a sandbox's own loopback."""
ORIGIN_URL = f"http://127.0.0.1:{PROXY_PORT}"
"""URL at which programs reach `SandboxSpec.origin`."""
WORK = "/work"
"""The work folder, as programs in a sandbox see it."""
_READ_ONLY = (
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt/forge_env", "proc", "run", "sbin", "sys",
    "usr/bin", "usr/lib", "usr/lib32", "usr/lib64", "usr/libexec", "usr/local", "usr/sbin",
)  # fmt: skip
"""Folders that are never writable: the runner's own files, and file systems of the kernel."""
_OWN_FOLDERS = (WORK, f"{WORK}-judge", "/tmp")
_MOST = 2**31 - 1
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,. -]*\])?\s*([<>=!~]=?=?\s*[\w.*+!-]+\s*,?\s*)*", re.ASCII)
SANDBOXES_PER_CPU = 4
"""Default number of sandboxes per CPU. An episode holds its sandbox while the model generates, so most are idle."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call. All of them apply to every call; none can be switched off.

    Examples:
        >>> import forge_env as fe
        >>> fe.Limits(wall_s=2.0).memory_mb
        512
    """

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
    """Bytes kept of stdout and of stderr each: the head and the tail, with a mark for the missing middle."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s"):
            if not (isinstance(value := getattr(self, name), (int, float)) and 0 < value <= _MOST):  # rejects nan too
                raise UsageError(f"limit {name}={value!r} is not a time", fix="give a positive number of seconds")
        for name in ("memory_mb", "processes", "file_size_mb", "open_files", "output_bytes"):
            _check_size(name, getattr(self, name))


def _check_size(name: str, value: object) -> None:
    if not (isinstance(value, int) and 0 < value <= _MOST):
        raise UsageError(f"limit {name}={value!r} is not a size", fix=f"give an integer from 1 to {_MOST}")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The kind of sandbox to acquire.

    Examples:
        >>> import forge_env as fe
        >>> fe.SandboxSpec(packages=("numpy>=2",), allow=("api.example.com",)).network
        False
    """

    image: str = "python"
    """Name of a bundled image, or an image reference of the engine."""
    network: bool = False
    """Allow network access. Off unless a task needs it."""
    allow: tuple[str, ...] = ()
    """Hosts (`NAME`, `NAME:PORT`, `*.NAME`) that programs may reach over HTTP and HTTPS, through a filtering proxy set
    in the usual environment variables. All other hosts are unreachable.
    """
    origin: str = ""
    """`HOST:PORT` of a server that programs reach at `ORIGIN_URL`, as if it ran in the sandbox. This works without
    proxy variables, which not every client reads.
    """
    base: str = ""
    """If `image` is a folder: the image, `python` for the bundled one, that replaces those named by `FROM` in its
    Dockerfile. This makes it possible to build without a registry.
    """
    writable: tuple[str, ...] = ()
    """Folders of the image, such as `/app`, that programs may write to as well, by absolute path. Each user of the
    sandbox finds them with the image's content.
    """
    disk_mb: int = 64
    """Size of the work folder, and of each of `writable`, MiB."""
    memory_mb: int = 1024
    """Memory of the whole sandbox, MiB."""
    packages: tuple[str, ...] = ()
    """Python packages as pip takes them (`pytest`, `numpy>=2`). They are installed before the sandbox starts, from the
    index configured on this machine, since the sandbox itself has no network.
    """
    preload: tuple[str, ...] = ()
    """Modules that each sandbox imports once, ahead of use. `run_python`, and `spawn(["python", "FILE.py", ...])`, then
    run in a copy of the process that has imported them. That process starts your programs, so list only modules that
    you trust. If a module can't be imported, programs meet the error themselves.
    """

    def __post_init__(self) -> None:
        named = {"allow": "hosts", "packages": "packages", "preload": "modules", "writable": "folders"}
        for name, what in named.items():
            if isinstance(value := getattr(self, name), str):
                raise UsageError(f"{name}={value!r} is a single string", fix=f"pass a tuple of {what}")
            object.__setattr__(self, name, tuple(value))
        for package in self.packages:
            if not (isinstance(package, str) and _REQUIREMENT.fullmatch(package)):
                fix = "name packages of the index, with versions if need be: 'numpy>=2'"
                raise UsageError(f"{package!r} is not a package", fix=fix)
        for module in self.preload:
            if not (isinstance(module, str) and all(part.isidentifier() for part in module.split("."))):
                raise UsageError(f"{module!r} is not a module", fix="name modules as in an import: 'openai'")
        _check_folders(self.writable)
        _check_size("disk_mb", self.disk_mb)  # 0 means unlimited to the kernel
        _check_size("memory_mb", self.memory_mb)
        if self.network and self.proxied:
            raise UsageError("network=True reaches every host, allow and origin only some", fix="choose one of them")

    @property
    def proxied(self) -> bool:
        """Whether programs reach hosts through the filtering proxy."""
        return bool(self.allow or self.origin)


def _check_folders(folders: tuple[str, ...]) -> None:
    """Raise `UsageError` if one of the folders can't be writable."""
    for folder in folders:
        if not isinstance(folder, str) or posixpath.normpath(folder) != folder or not folder.strip("/"):
            raise UsageError(f"writable: {folder!r} is not a folder", fix="give absolute paths such as '/app'")
        if not folder.startswith("/") or folder.startswith("//") or not folder.isprintable() or "," in folder:
            raise UsageError(f"writable: {folder!r} is not an absolute path", fix="give absolute paths such as '/app'")
        if any(is_below(folder, f"/{fixed}") or is_below(f"/{fixed}", folder) for fixed in _READ_ONLY):
            raise UsageError(f"writable: {folder!r} is never writable: the sandbox itself is there", fix="leave it out")
        others = [*_OWN_FOLDERS, *(other for other in folders if other is not folder)]
        if inside := [other for other in others if is_below(folder, other)]:
            raise UsageError(f"writable: {folder!r} is in {inside[0]!r}", fix="leave it out")


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path is `folder` itself or inside it."""
    return path == folder or path.startswith(f"{folder}/")


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


# --- the protocol


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
        """Run a program. Files in the work folder persist between calls of one sandbox; processes don't.

        Args:
            argv: the program and its arguments.
            stdin: its standard input.
            env: environment variables, in addition to the sandbox's own.
            cwd: working directory, relative to the work folder.
            limits: limits of this call; None: the defaults of `Limits`.
        """

    @abstractmethod
    async def run_python(
        self,
        code: str,
        *,
        stdin: str | bytes = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run `code` as `__main__` in a fresh interpreter, after writing `files` to the work folder.

        Args:
            code: the program.
            stdin: its standard input.
            files: files by path in the work folder.
            limits: limits of this call; None: the defaults of `Limits`.
        """

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

    @abstractmethod
    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the work folder, text as UTF-8.

        Args:
            path: path relative to the work folder.
            data: the file's new content.

        Raises:
            SandboxPathError: the path is neither a relative one inside the work folder, nor an absolute one inside a
                folder of `SandboxSpec.writable`.
            SandboxFileError: the path exists and is not a file, or there is no space left.
        """

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Read a file of the work folder.

        Args:
            path: path relative to the work folder.

        Raises:
            SandboxPathError: as for `write_file`.
            SandboxFileNotFoundError: it does not exist; also a `FileNotFoundError`.
            SandboxFileError: it can't be read; also an `OSError`.
        """

    async def read_text(self, path: str) -> str:
        """Read a file as UTF-8 text, with replacement characters for invalid bytes.

        Args:
            path: path relative to the work folder.
        """
        return (await self.read_file(path)).decode("utf-8", "replace")

    async def write_text(self, path: str, text: str) -> None:
        """Write text to a file.

        Args:
            path: path relative to the work folder.
            text: the file's new content.
        """
        await self.write_file(path, text.encode("utf-8", "surrogatepass"))

    async def write_files(self, files: Mapping[str, str | bytes]) -> None:
        """Write several files into the work folder.

        Args:
            files: text or bytes by path.
        """
        for path, data in files.items():
            await self.write_file(path, data)

    async def read_files(self, path: str = ".") -> dict[str, bytes]:
        """Read every file below a folder of the work folder, by path relative to that folder; 128 MiB at most.

        Links, special files, and files deeper than the longest possible path are left out. Files locked with `chmod 0`
        are read nevertheless, and keep their mode.

        Args:
            path: path relative to the work folder.

        Raises:
            SandboxPathError: as for `write_file`.
            SandboxFileError: the folder does not exist, can't be read, or is too large.
        """
        raise UsageError(f"{type(self).__name__} reads single files only")

    async def copy_in(self, folder: str | Path, path: str = ".") -> None:
        """Copy the files of a local folder into a folder of the work folder. Links are not followed.

        Args:
            folder: folder on this machine.
            path: path relative to the work folder.

        Raises:
            UsageError: the local folder does not exist.
            SandboxFileError: there is no space left, or a path exists and is not a file.
        """
        files, programs = await asyncio.to_thread(_files_below, Path(folder))
        await self.write_files({posixpath.join(path, name): data for name, data in files.items()})
        if programs:
            names = [posixpath.join(".", path, name) for name in programs]
            await self.exec(["xargs", "-0", "chmod", "+x"], stdin="\0".join(names))

    async def copy_out(self, path: str, folder: str | Path) -> None:
        """Copy a folder of the work folder to a new local folder.

        Args:
            path: path relative to the work folder.
            folder: folder on this machine.

        Raises:
            UsageError: the local folder exists and is not empty.
            SandboxFileError: as for `read_files`.
        """
        target = await asyncio.to_thread(_new_folder, folder)
        await asyncio.to_thread(_write_below, target, await self.read_files(path))

    async def pack(self, folders: Sequence[str], *, leave_out: Sequence[str] = ()) -> bytes:
        """Archive folders of `SandboxSpec.writable` as tar, with links, modes and empty folders; 128 MiB at most.

        Args:
            folders: absolute paths.
            leave_out: paths to leave out, with everything below them.

        Raises:
            SandboxPathError: a folder is not writable.
            SandboxFileError: a folder does not exist, or is too large.
        """
        raise UsageError(f"{type(self).__name__} packs no folders")

    async def unpack(self, archive: bytes, *, instead_of: Sequence[str] = ()) -> None:
        """Extract an archive of `pack` to its original paths, in the same or another sandbox.

        Args:
            archive: the result of `pack`.
            instead_of: folders to empty first, so that they hold only the archive's files.

        Raises:
            SandboxPathError: one of these is not writable.
            SandboxFileError: it is not such an archive, there is no space left, or a path exists and is not a file.
        """
        raise UsageError(f"{type(self).__name__} unpacks no archives")

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
        times, each time with some tests replaced by twins that honest code fails. docs/sandboxes.md describes both.

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
            UsageError: the tests can't be parsed, or the sandbox was acquired without one of the packages.
        """
        raise UsageError(f"{type(self).__name__} can't run tests")

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
        raise UsageError(f"{type(self).__name__} does not stream")

    async def shell(
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, limits: Limits | None = None
    ) -> Session:
        """Start a bash session, which keeps variables, functions and working directory between commands.

        Of `limits`, those on memory, processes, files and descriptors apply to the session.

        Args:
            env: environment variables, in addition to the sandbox's own.
            cwd: working directory, relative to the work folder.
            limits: limits of the session.
        """
        raise UsageError(f"{type(self).__name__} has no shell sessions")

    async def python(
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, limits: Limits | None = None
    ) -> Session:
        """Start a Python session, which keeps names between cells and prints the value of a cell's last expression.

        `limits` apply as for `shell`.

        Args:
            env: environment variables, in addition to the sandbox's own.
            cwd: working directory, relative to the work folder.
            limits: limits of the session.
        """
        raise UsageError(f"{type(self).__name__} has no Python sessions")

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
        raise UsageError(f"{type(self).__name__} has no background processes")


def _files_below(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """The regular files of a local folder by relative path, and the relative paths of executable ones."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", fix="name a local folder to copy")
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    return {name: path.read_bytes() for path, name in names.items()}, [
        name for path, name in names.items() if os.access(path, os.X_OK)
    ]


def _new_folder(path: str | Path) -> Path:
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists", fix="name a folder that doesn't exist, or an empty one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_below(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        if folder.resolve() not in path.resolve().parents:  # the sandbox chooses its files' names
            raise UsageError(f"a file of the sandbox is called {name!r}", fix="copy another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class Session(ABC):
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


class SandboxEngine(ABC):
    """Creates sandboxes, keeps some of them warm, and leaves nothing behind."""

    name: str
    """The name it is registered under."""
    automatic = True
    """Whether `auto` may choose it."""

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Why this engine can't run on this machine (with a way to allow it), or None if it can."""

    def unusable_reason(self) -> str | None:
        """Why this engine can't run with its options, which may refer to another machine, or None if it can."""
        return self.unavailable_reason()

    @classmethod
    def version(cls) -> str:
        """Version of the underlying software, for display; empty if there is none."""
        return ""

    @classmethod
    def reap_abandoned(cls) -> int:
        """Remove the leftovers of dead owners on this machine. Returns their number. Quick, and starts nothing."""
        return 0

    @classmethod
    def prune(cls) -> list[str]:
        """Remove images of other versions that no sandbox uses. Returns their names; they are rebuilt when needed."""
        return []

    @classmethod
    def storage(cls) -> str:
        """Description and size of files kept on disk between runs, for display; empty if there are none."""
        return ""

    @classmethod
    def running(cls) -> list[RunningSandbox]:
        """Sandboxes alive on this machine, of any owner."""
        return []

    async def build(self, image: str | SandboxSpec | None = None) -> str:
        """Build the missing parts of an image, without starting a sandbox. Returns the image's name.

        Args:
            image: an image as in `SandboxSpec.image`, or a specification; None: the default image.

        Raises:
            SandboxUnavailableError: it can't be built; for a Dockerfile, the error names the failed line.
        """
        raise UsageError(f"the {self.name} engine has nothing to build")

    def check(self, spec: SandboxSpec) -> None:
        """Raise `UsageError` if this engine can't provide such a sandbox. Called before anything is started.

        Args:
            spec: the specification to check.
        """
        return

    @abstractmethod
    async def start(self) -> None:
        """Build missing images, remove what dead owners left, and start warm sandboxes."""

    @abstractmethod
    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Acquire a clean sandbox, waiting while none is available. Raises `SandboxError` if none can be created.

        Args:
            spec: kind of sandbox; None: the default one.
        """

    @abstractmethod
    async def release(self, sandbox: Sandbox) -> None:
        """Release a sandbox, which is wiped and checked, then reused or replaced.

        Args:
            sandbox: from `acquire`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Remove everything that this engine created."""

    def stats(self) -> dict[str, Any]:
        """Counters for logs and displays."""
        return {}

    @asynccontextmanager
    async def session(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """Acquire a sandbox for a block and release it afterwards.

        Args:
            spec: kind of sandbox; None: the default one.
        """
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
