"""A runner's channel through E2B's API: the standard streams of a command in the cloud sandbox."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from forge_env.sandbox import SandboxSpec
from sandboxes.connection import Connection
from sandboxes.docker.options import random_uid
from sandboxes.images.cache import runner_zip
from sandboxes.pool import SCRATCH_MB
from sandboxes.runner.config import RunnerConfig

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

RUNNER = "/opt/forge_env/runner.zip"
_ENCODE = """
import base64, os
while data := os.read(0, 1 << 16):
    os.write(1, base64.b64encode(data) + b"\\n")
"""
"""Writes standard input as lines of base64: E2B's client decodes a command's output as text."""
_CHUNK = 1 << 20


@functools.lru_cache(maxsize=1)
def program() -> bytes:
    """The zip file that is run in a cloud sandbox: `boot.py` and the runner."""
    return runner_zip({"__main__.py": Path(__file__).with_name("boot.py").read_bytes()})


def command(spec: SandboxSpec) -> str:
    """The shell command that runs it."""
    uid = random_uid(remapped=False)
    runner = RunnerConfig(isolation="uid", uid=uid, memory_mb=spec.memory_mb, preload=spec.preload)
    network = "open" if spec.network else "none"
    argv = ["python3", "-s", RUNNER, runner.dumps(), network, str(uid), str(spec.disk_mb), str(SCRATCH_MB)]
    return f"cd / && {shlex.join(argv)} | {shlex.join(['python3', '-s', '-c', _ENCODE])}"


async def attach(machine: AsyncSandbox, spec: SandboxSpec, connection: Connection) -> None:
    """Send the runner to a cloud sandbox, start it, and attach `connection`. Raises any error of E2B's client."""
    await machine.files.write(RUNNER, program(), user="root", use_octet_stream=True)
    attachment = _Attachment(connection)
    handle = await machine.commands.run(
        command(spec),
        background=True,
        user="root",
        stdin=True,
        timeout=0,
        envs={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
        on_stdout=attachment.received,
        on_stderr=attachment.complained,
        retain_output=False,
    )
    attachment.start(handle)


class _Attachment(asyncio.WriteTransport):
    """Transport that `Connection` writes to: the command's standard input."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._input = bytearray()
        self._written = asyncio.Event()
        self._aborted = asyncio.Event()
        self._line = ""
        self._serving: asyncio.Task[None] | None = None

    def start(self, handle: AsyncCommandHandle[None]) -> None:
        """Serve the connection until the command ends."""
        self._connection.connection_made(self)
        self._serving = asyncio.create_task(self._serve(handle))

    async def _serve(self, handle: AsyncCommandHandle[None]) -> None:
        sending = asyncio.create_task(self._send(handle))
        ending = asyncio.create_task(handle.wait())
        aborted = asyncio.create_task(self._aborted.wait())
        try:
            await asyncio.wait([sending, ending, aborted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, ending, aborted):
                task.cancel()
            for result in await asyncio.gather(sending, ending, return_exceptions=True):
                if isinstance(result, Exception):
                    self.complained(str(result))
            self._connection.connection_lost(None)
            with contextlib.suppress(asyncio.CancelledError):
                await handle.disconnect()

    async def _send(self, handle: AsyncCommandHandle[None]) -> None:
        """Send what was written, in order, as few requests as possible."""
        while await self._written.wait():
            data = bytes(self._input[:_CHUNK])
            del self._input[:_CHUNK]
            if not self._input:
                self._written.clear()
            await handle.send_stdin(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._input += data
        self._written.set()

    def received(self, text: str) -> None:
        """Pass on the complete lines of the command's output."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            try:
                self._connection.data_received(base64.b64decode(line, validate=True))
            except binascii.Error:
                self.complained(line)
                self.abort()

    def complained(self, text: str) -> None:
        """Keep the end of the command's errors for messages."""
        self._connection.stderr_received(text.encode())

    def abort(self) -> None:
        self._aborted.set()
