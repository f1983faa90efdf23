"""The sandbox protocol: the methods that every engine implements, and what follows from them.

    async with open_engine("docker") as engine:
        sandbox = await engine.acquire()
        result = await sandbox.run_python("print(1 + 1)")
        await engine.release(sandbox)

An engine implements five methods: `SandboxEngine.acquire` and `release`, `Sandbox.exec`, `read_file` and `write_file`.
It may override the others, and add capabilities (`forge_env.sandbox.capabilities`).

Failures of programs and of engines are kept apart. A failure of the *program* is part of its `ExecResult`. A failure
of the *engine* raises `SandboxError` (an `InfrastructureError`), after which the sandbox is discarded.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from forge_env.errors import SandboxFileError, SandboxFileNotFoundError, UsageError
from forge_env.sandbox.results import ExecResult
from forge_env.sandbox.spec import Limits, SandboxSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

MAX_LISTING = 1 << 20
"""Maximum bytes of a folder's listing in `Sandbox.read_files`."""
_COMMON = ("image", "network", "disk_mb", "memory_mb")
"""Fields of `SandboxSpec` that every engine accepts; the others need an engine that checks them itself."""


# Context of a call: context variables rather than arguments, so that environments need not know them.

TENANT: ContextVar[str] = ContextVar("sandbox_tenant", default="")
"""The environment (or other tenant) that sandboxes are acquired for; pools share them evenly among tenants."""
HOLDER: ContextVar[object | None] = ContextVar("sandbox_holder", default=None)
"""The `on_behalf_of` block, such as an episode's, that holds acquired sandboxes; None outside of any."""


class on_behalf_of:  # a class, since each open episode has one and a generator takes five times the memory
    """A block in which acquired sandboxes count for `tenant`."""

    __slots__ = ("__weakref__", "_holder_token", "_tenant", "_token")

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def __enter__(self) -> on_behalf_of:
        self._token = TENANT.set(self._tenant)
        self._holder_token = HOLDER.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        HOLDER.reset(self._holder_token)
        TENANT.reset(self._token)


SEEN: ContextVar[Callable[[str, float, float], object] | None] = ContextVar("sandbox_seen", default=None)
"""The callback that records sandbox phases, such as a timeline's; see `seen_by`."""


@contextmanager
def seen_by(tell: Callable[[str, float, float], object] | None) -> Iterator[None]:
    """Report the block's waits for sandboxes and calls of sandboxes to a callback.

    It gets the phase ("wait for one", "command", "python", "tests", "files", "session"), its start and its end, in
    seconds of `time.perf_counter`.
    """
    token = SEEN.set(tell)
    try:
        yield
    finally:
        SEEN.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Report this block to the callback of `seen_by`, if any, as a phase."""
    tell, begun = SEEN.get(), time.perf_counter()
    try:
        yield
    finally:
        if tell is not None:
            tell(name, begun, time.perf_counter())


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
        await self.write_files(files or {})
        return await self.exec(["python3", "-c", code], stdin=stdin, limits=limits)

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

        Links, special files, and files deeper than the longest possible path are left out. The bundled engines also
        read files locked with `chmod 0`, which keep their mode.

        Args:
            path: path relative to the work folder.

        Raises:
            SandboxPathError: as for `write_file`.
            SandboxFileError: the folder does not exist, can't be read, or is too large.
        """
        listing = await self.exec(["find", path, "-type", "f", "-print0"], limits=Limits(output_bytes=MAX_LISTING))
        if not listing.ok or listing.truncated:
            if listing.exit_code == 1:
                raise SandboxFileNotFoundError(errno.ENOENT, "no such folder", path)
            raise SandboxFileError(errno.EIO, "the folder can't be listed", path)
        names = listing.stdout.split("\0")[:-1]
        return {posixpath.relpath(name, path): await self.read_file(name) for name in names}

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


class SandboxEngine(ABC):
    """Creates sandboxes, keeps some of them warm, and leaves nothing behind."""

    name: str
    """The name it is registered under."""
    automatic = True
    """Whether `auto` may choose it."""

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

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why this engine can't run on this machine (with a way to allow it), or None if it can."""
        return None

    def unusable_reason(self) -> str | None:
        """Why this engine can't run with its options, which may refer to another machine, or None if it can."""
        return self.unavailable_reason()

    @classmethod
    def version(cls) -> str:
        """Version of the underlying software, for display; empty if there is none."""
        return ""

    def check(self, spec: SandboxSpec) -> None:
        """Raise `UsageError` if this engine can't provide such a sandbox. Called before anything is started.

        Args:
            spec: the specification to check.
        """
        for field in fields(spec):
            if field.name not in _COMMON and getattr(spec, field.name) != field.default:
                raise UsageError(f"the {self.name} engine has no {field.name!r}", fix="use the docker engine")

    async def start(self) -> None:
        """Build missing images, remove what dead owners left, and start warm sandboxes."""
        return

    async def close(self) -> None:
        """Remove everything that this engine created."""
        return

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


class Capability(ABC):
    """Base class of what a sandbox or an engine can do beyond the protocol (`forge_env.sandbox.capabilities`)."""

    can: ClassVar[str]
    """What it allows, for error messages: "can't ..."."""

    @classmethod
    def of(cls, provider: object) -> Self:
        """Return a sandbox or engine, typed as one with this capability. Raises `UsageError` if it doesn't have it."""
        if isinstance(provider, cls):
            return provider
        raise UsageError(f"{type(provider).__name__} can't {cls.can}", fix="use the sandbox engine docker or local")
