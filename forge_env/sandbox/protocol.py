"""What every sandbox engine provides: requests, answers, and the protocol itself.

    async with open_engine("docker") as engine:
        sandbox = await engine.acquire()
        result = await sandbox.run_python("print(1 + 1)")
        await engine.release(sandbox)

Two kinds of failure, never mixed: what the *program* did is in the `ExecResult`; what the *engine* did is a
`SandboxError` (an `InfrastructureError`), after which the sandbox is discarded.
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
"""Of the filtering proxy, on a sandbox's own loopback."""
ORIGIN_URL = f"http://127.0.0.1:{PROXY_PORT}"
"""Where programs reach `SandboxSpec.origin`."""
WORK = "/work"
"""The work folder, as programs in a sandbox see it."""
_READ_ONLY = (
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt/forge_env", "proc", "run", "sbin", "sys",
    "usr/bin", "usr/lib", "usr/lib32", "usr/lib64", "usr/libexec", "usr/local", "usr/sbin",
)  # fmt: skip
"""Never writable: what the runner itself is made of, and what the kernel shows."""
_OWN_FOLDERS = (WORK, f"{WORK}-judge", "/tmp")
_MOST = 2**31 - 1
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,. -]*\])?\s*([<>=!~]=?=?\s*[\w.*+!-]+\s*,?\s*)*", re.ASCII)
SANDBOXES_PER_CPU = 4
"""At once, by default: an episode holds its sandbox while the model thinks, so most are idle at any moment."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one call. Every call has all of them; there is no 'unlimited'.

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
    """What kind of sandbox to hand out.

    Examples:
        >>> import forge_env as fe
        >>> fe.SandboxSpec(packages=("numpy>=2",), allow=("api.example.com",)).network
        False
    """

    image: str = "python"
    """Name of a bundled image, or an image reference of the engine."""
    network: bool = False
    """Reach the network. Off unless a task needs it."""
    allow: tuple[str, ...] = ()
    """Hosts (`NAME`, `NAME:PORT`, `*.NAME`) that programs may reach over HTTP and HTTPS through a filtering proxy,
    which the usual variables name; everything else stays out of reach."""
    origin: str = ""
    """`HOST:PORT` of a server that programs reach at `ORIGIN_URL`, as if it ran beside them: proxy variables, which not
    every client reads, aren't needed for it."""
    base: str = ""
    """Where `image` is a folder: the image, `python` for the bundled one, that takes the place of those which its
    Dockerfile is `FROM`. Without a registry it is the way to build it."""
    writable: tuple[str, ...] = ()
    """Folders of the image, such as `/app`, that programs may write to as well, by absolute path. Every user finds
    them as they are in the image."""
    disk_mb: int = 64
    """Size of the work folder, and of each of `writable`, MiB."""
    memory_mb: int = 1024
    """Memory of the whole sandbox, MiB."""
    packages: tuple[str, ...] = ()
    """Python packages as pip takes them (`pytest`, `numpy>=2`), installed before from the index that this machine uses:
    inside there is no network."""
    preload: tuple[str, ...] = ()
    """Modules that each sandbox imports once, ahead: `run_python`, and `spawn(["python", "FILE.py", ...])`, then run in
    a copy of the process that has them. What starts your programs imports them, so name only modules that you trust;
    one that can't be imported is left to the program."""

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
        _check_size("disk_mb", self.disk_mb)  # 0 would be boundless to the kernel
        _check_size("memory_mb", self.memory_mb)
        if self.network and self.proxied:
            raise UsageError("network=True reaches every host, allow and origin only some", fix="choose one of them")

    @property
    def proxied(self) -> bool:
        """Whether programs reach anything, through the filtering proxy."""
        return bool(self.allow or self.origin)


def _check_folders(folders: tuple[str, ...]) -> None:
    """`UsageError` where one can't be writable."""
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
    """Whether an absolute path is a folder's own, or of something in it."""
    return path == folder or path.startswith(f"{folder}/")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a call consumed."""

    wall_s: float = 0.0
    """Seconds by the clock."""
    cpu_s: float = 0.0
    """Seconds of CPU of all its processes."""
    peak_memory_mb: float = 0.0
    """Most memory at once, MiB."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a program ended. Everything here is the program's doing; the engine's faults are exceptions."""

    exit_code: int | None
    """Exit status, None when a signal ended the program."""
    signal: int | None = None
    """The signal that ended it."""
    stdout: str = ""
    """Standard output, in UTF-8; what isn't becomes replacement characters."""
    stderr: str = ""
    """Standard error, likewise."""
    timed_out: bool = False
    """A wall or CPU limit ended it."""
    out_of_memory: bool = False
    """A memory limit ended it."""
    truncated: bool = False
    """Output was longer than the limit; the middle is missing and marked."""
    usage: Usage = field(default_factory=Usage)
    """What it consumed."""

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
    """What it returned."""
    error: str | None = None
    """Exception class name; None when the call returned."""
    message: str = ""
    """Exception text, shortened."""


@dataclass(frozen=True, slots=True)
class CallsResult:
    """Outcomes of `Sandbox.run_calls`, one per call that was reached before the program ended."""

    outcomes: list[CallOutcome]
    """In the order of the calls."""
    execution: ExecResult
    """How the process ended that evaluated them."""


Outcome = Literal["passed", "failed", "skipped"]
How = Literal["apart", "counted"]
"""How tests are run: in a process that the judged code can't reach, or beside it and counted."""


@dataclass(frozen=True, slots=True)
class TestsResult:
    """Verdict of `Sandbox.run_tests`, made outside the judged code's process."""

    __test__ = False  # not a test class

    passed: bool
    """At least one test ran, and none failed."""
    total: int
    """Tests that ran; those that were skipped not."""
    failures: list[str]
    """One line per failed test, of at most 50."""
    execution: ExecResult
    """How the judged code's process ended."""
    how: How = "apart"
    """Which of the two ways it was."""
    failed: int = 0
    """Tests that failed; all of them if there is no verdict, such as after a cheat."""
    doubts: list[str] = field(default_factory=list)
    """Reasons why a cheat could have passed; empty if there are none."""
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcome of each test that was reported, by its id with parameters; empty if there is no verdict."""

    @property
    def cheat_proof(self) -> bool:
        """Whether the judged code could not have forged the verdict."""
        return not self.doubts

    @property
    def share(self) -> float:
        """Of the tests that ran, how many passed: 0 to 1."""
        return (self.total - self.failed) / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of output while a program runs."""

    stream: str
    """`stdout` or `stderr`."""
    data: bytes
    """Bytes as they were written."""


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
        """Run a program. Files of the work folder persist between calls of one sandbox; processes don't.

        Args:
            argv: the program and its arguments.
            stdin: what it reads.
            env: variables besides the sandbox's own.
            cwd: where it starts, relative to the work folder.
            limits: of this call; None: the defaults of `Limits`.
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
        """Run `code` as `__main__` in a fresh interpreter, with `files` written to the work folder first.

        Args:
            code: the program.
            stdin: what it reads.
            files: by path in the work folder.
            limits: of this call; None: the defaults of `Limits`.
        """

    @abstractmethod
    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:
        """Define `code`, then evaluate each expression of `calls` in its namespace.

        Values come back over a channel of their own and are compared by the caller, outside: nothing that
        judges the code is ever inside the sandbox.

        Args:
            code: definitions.
            calls: expressions, such as `f(1)`.
            limits: of this call; None: the defaults of `Limits`.
        """

    @abstractmethod
    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the work folder, text as UTF-8.

        Args:
            path: relative to the work folder.
            data: what it holds from then on.

        Raises:
            SandboxPathError: the path is not a relative one inside the work folder, nor an absolute one inside a folder
                of `SandboxSpec.writable`.
            SandboxFileError: there is something else of that name, or no room.
        """

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Read a file of the work folder.

        Args:
            path: relative to the work folder.

        Raises:
            SandboxPathError: as for `write_file`.
            SandboxFileNotFoundError: there is none; it is a `FileNotFoundError`.
            SandboxFileError: it can't be read; it is an `OSError`.
        """

    async def read_text(self, path: str) -> str:
        """`read_file` as text; what is not UTF-8 becomes replacement characters.

        Args:
            path: relative to the work folder.
        """
        return (await self.read_file(path)).decode("utf-8", "replace")

    async def write_text(self, path: str, text: str) -> None:
        """`write_file` of text.

        Args:
            path: relative to the work folder.
            text: what it holds from then on.
        """
        await self.write_file(path, text.encode("utf-8", "surrogatepass"))

    async def write_files(self, files: Mapping[str, str | bytes]) -> None:
        """Write several files into the work folder.

        Args:
            files: by path, text or bytes.
        """
        for path, data in files.items():
            await self.write_file(path, data)

    async def read_files(self, path: str = ".") -> dict[str, bytes]:
        """Every file below a folder of the work folder, by its path relative to that folder, 128 MiB at most.

        Links and special files are left out, and what lies deeper than a path can say. What a program has locked with
        `chmod 0` is read nevertheless, and keeps its mode.

        Args:
            path: relative to the work folder.

        Raises:
            SandboxPathError: as for `write_file`.
            SandboxFileError: there is no such folder, it can't be reached, or it holds too much.
        """
        raise UsageError(f"{type(self).__name__} reads single files only")

    async def copy_in(self, folder: str | Path, path: str = ".") -> None:
        """Copy the files of a local folder into a folder of the work folder. Links are not followed.

        Args:
            folder: of this machine.
            path: relative to the work folder.

        Raises:
            UsageError: there is no such local folder.
            SandboxFileError: there is no room, or something else of that name.
        """
        files, programs = await asyncio.to_thread(_files_below, Path(folder))
        await self.write_files({posixpath.join(path, name): data for name, data in files.items()})
        if programs:
            names = [posixpath.join(".", path, name) for name in programs]
            await self.exec(["xargs", "-0", "chmod", "+x"], stdin="\0".join(names))

    async def copy_out(self, path: str, folder: str | Path) -> None:
        """Copy a folder of the work folder to a new local folder.

        Args:
            path: relative to the work folder.
            folder: of this machine.

        Raises:
            UsageError: the local folder exists and holds something.
            SandboxFileError: as for `read_files`.
        """
        target = await asyncio.to_thread(_new_folder, folder)
        await asyncio.to_thread(_write_below, target, await self.read_files(path))

    async def pack(self, folders: Sequence[str], *, leave_out: Sequence[str] = ()) -> bytes:
        """Folders of `SandboxSpec.writable` as a tar archive, with links, modes and empty folders; 128 MiB at most.

        Args:
            folders: by absolute path.
            leave_out: what is below these paths.

        Raises:
            SandboxPathError: one is not writable.
            SandboxFileError: there is no such folder, or it holds too much.
        """
        raise UsageError(f"{type(self).__name__} packs no folders")

    async def unpack(self, archive: bytes, *, instead_of: Sequence[str] = ()) -> None:
        """Put what was `pack`ed, in another sandbox perhaps, where it was.

        Args:
            archive: what `pack` gave.
            instead_of: folders that are emptied before, so that what isn't in the archive isn't there.

        Raises:
            SandboxPathError: one of these is not writable.
            SandboxFileError: it is no such archive, there is no room, or something else of that name.
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
        """Judge code by tests: unittest cases, `test_*` functions, plain asserts, or whatever needs pytest.

        `apart`: tests and code run in processes of their own. Tests reach objects of the judged code through mirrors,
        results come back as plain values, and the verdict leaves over a channel that the code can't reach.
        `counted`: tests that patch, derive from judged classes or read files run in one process with the code, several
        times, each time with some tests replaced by twins that honest code fails. docs/sandboxes.md describes both.

        Args:
            code: one module, which the tests import as `solution`.
            tests: one text that tests `code`, or test files by path, with what they import (`conftest.py` too). They
                replace judged files of the same path.
            files: the judged files by path; a package in `src/` is found as well. A `conftest.py` or settings of
                pytest among them are left out.
            packages: what the tests need from the index: checked against the sandbox's `SandboxSpec.packages`.
            how: the way; by default `apart`, unless the tests' text needs more. The judged code has no say in it.
            limits: of each process.

        Raises:
            UsageError: tests that can't be read, or packages that the sandbox was not acquired with.
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
        """`exec`, with output as it comes: chunks up to `output_bytes`, then the result.

        Args:
            argv: the program and its arguments.
            stdin: what it reads.
            env: variables besides the sandbox's own.
            cwd: where it starts, relative to the work folder.
            limits: of this call; None: the defaults of `Limits`.
        """
        raise UsageError(f"{type(self).__name__} does not stream")

    async def shell(
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, limits: Limits | None = None
    ) -> Session:
        """A bash whose variables, functions and folder live on from one command to the next.

        Of `limits`, memory, processes, files and descriptors hold for the session.

        Args:
            env: variables besides the sandbox's own.
            cwd: where it starts, relative to the work folder.
            limits: of the session.
        """
        raise UsageError(f"{type(self).__name__} has no shell sessions")

    async def python(
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, limits: Limits | None = None
    ) -> Session:
        """A Python whose names live on from one cell to the next; the last expression's value is printed.

        `limits` as of `shell`.

        Args:
            env: variables besides the sandbox's own.
            cwd: where it starts, relative to the work folder.
            limits: of the session.
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
        """Start a program that runs on in the background until it ends, is killed, or the sandbox is released.

        Args:
            argv: the program and its arguments.
            env: variables besides the sandbox's own.
            cwd: where it starts, relative to the work folder.
            limits: of the program.
        """
        raise UsageError(f"{type(self).__name__} has no background processes")


def _files_below(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """The regular files of a local folder by relative path, and which of them are programs."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", fix="name a local folder to copy")
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path: path.relative_to(folder).as_posix() for path in found}
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
        if folder.resolve() not in path.resolve().parents:  # a sandbox says what its files are called
            raise UsageError(f"a file of the sandbox is called {name!r}", fix="copy another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class Session(ABC):
    """A persistent interpreter. It ends with `close`, with the sandbox, by itself, or when nobody waits any more for
    what it runs, or a time-out can't stop it."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can run another command."""

    @abstractmethod
    async def run(self, source: str, *, limits: Limits | None = None) -> ExecResult:
        """Run one command or cell. Of `limits`, wall time and output apply per command.

        A time-out interrupts the command and keeps the session; one that resists ends with it (`alive` is False).

        Args:
            source: a command, or a cell.
            limits: of this call; None: the defaults of `Limits`.
        """

    @abstractmethod
    async def close(self) -> None:
        """End it and everything it started."""


class Process(ABC):
    """A program in the background."""

    @abstractmethod
    async def write(self, data: bytes, *, end: bool = False) -> None:
        """Feed its standard input; `end` closes it.

        Args:
            data: bytes.
            end: whether this is the last of it.
        """

    @abstractmethod
    async def read(self) -> tuple[str, str]:
        """Output and errors since the last time."""

    @abstractmethod
    async def wait(self, timeout: float) -> ExecResult | None:
        """How it ended, with the output not read yet; None when it has not within `timeout` seconds.

        Args:
            timeout: seconds.
        """

    @abstractmethod
    async def kill(self) -> None:
        """End it and everything it started."""


class SandboxEngine(ABC):
    """Makes sandboxes, keeps warm ones, and leaves nothing behind."""

    name: str
    """What it is registered as."""
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
    def storage(cls) -> str:
        """What it keeps on disk from one run to the next, and how much, for people; empty where it is nothing."""
        return ""

    @classmethod
    def running(cls) -> list[RunningSandbox]:
        """Sandboxes alive on this machine, whoever owns them."""
        return []

    async def build(self, image: str | SandboxSpec | None = None) -> str:
        """Build what an image needs where it is missing, without starting anything; returns what it is called.

        Args:
            image: as of `SandboxSpec.image`, or what kind of sandbox; None: the default one.

        Raises:
            SandboxUnavailableError: it can't be built; where a Dockerfile says how, with its line.
        """
        raise UsageError(f"the {self.name} engine has nothing to build")

    def check(self, spec: SandboxSpec) -> None:
        """`UsageError` where this engine can never hand out such a sandbox; asked before anything starts.

        Args:
            spec: what would be asked for.
        """
        return

    @abstractmethod
    async def start(self) -> None:
        """Build what is missing (images), reap what dead owners left, warm up."""

    @abstractmethod
    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """A clean sandbox; waits while all are taken. Raises `SandboxError` when none can be made.

        Args:
            spec: what kind; None: the default one.
        """

    @abstractmethod
    async def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back; it is wiped, checked and used again, or replaced.

        Args:
            sandbox: from `acquire`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Remove everything this engine made."""

    def stats(self) -> dict[str, Any]:
        """Counters for logs and displays."""
        return {}

    @asynccontextmanager
    async def session(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """`acquire` and `release` around a block.

        Args:
            spec: what kind; None: the default one.
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
