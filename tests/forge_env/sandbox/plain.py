"""A sandbox and an engine without isolation: for programs that are known to be harmless."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_env.sandbox import ExecResult, Sandbox, SandboxEngine, SandboxSpec, Usage

PATIENCE_S = 60


class PlainSandbox(Sandbox):
    """A folder and plain processes of this user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def exec(self, argv: Sequence[str], *, stdin: str | bytes = "", **_: Any) -> ExecResult:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=self.folder, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        talk = process.communicate(stdin.encode() if isinstance(stdin, str) else stdin)
        try:
            output = await asyncio.wait_for(talk, PATIENCE_S)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        return ExecResult(
            process.returncode, None, *(text.decode("utf-8", "replace") for text in output), usage=Usage()
        )

    async def read_file(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    async def write_file(self, path: str, data: str | bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(data.encode() if isinstance(data, str) else data)


class PlainEngine(SandboxEngine):
    """Hands out one and the same sandbox without cleaning it in between."""

    name = "plain"

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.released = 0

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        return self.sandbox

    async def release(self, sandbox: Sandbox) -> None:
        self.released += 1
