"""What every sandbox engine provides.

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
from typing import TYPE_CHECKING, Any, Self

from forge_env.sandbox.types import CallsResult, ExecResult, Limits, SandboxSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType


class Sandbox(ABC):
    """One clean, isolated machine. Valid from `acquire` to `release`."""

    @abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
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
        stdin: str = "",
        files: Mapping[str, str] | None = None,
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
    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file into the work folder (relative paths only)."""

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Read a file of the work folder; `FileNotFoundError` when there is none."""


class SandboxEngine(ABC):
    """Makes sandboxes, keeps warm ones, and leaves nothing behind."""

    name: str

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Why this engine can't work on this machine (with what would allow it), or None when it can."""

    @classmethod
    def reap_abandoned(cls) -> int:
        """Remove what dead owners left on this machine; returns how many things. Quick, and starts nothing."""
        return 0

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
