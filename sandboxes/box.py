"""One isolated machine with a runner in it, and the `Sandbox` that is handed out for a while on top of it."""

from __future__ import annotations

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence

from forge_env.errors import SandboxError
from forge_env.sandbox import (
    CallsResult,
    ExecResult,
    Limits,
    OutputChunk,
    Process,
    Sandbox,
    SandboxSpec,
    Session,
    TestsResult,
)
from sandboxes.answers import call_outcome, exec_result, limits_header, raise_io_error, tests_result
from sandboxes.arguments import checked_path, command, encoded, surroundings
from sandboxes.connection import Connection, Listener
from sandboxes.images.runner import values
from sandboxes.images.runner.wire import Header
from sandboxes.network import AllowList, FilteringProxy, receive_listener
from sandboxes.sessions import BoxProcess, BoxSession, open_persistent

GRACE_S = 10.0
"""Seconds a runner may be late beyond a call's wall limit before it counts as lost."""
FILE_LIMITS = Limits(wall_s=20.0, memory_mb=1024, file_size_mb=1024)
MAX_FILE = 128 << 20
_MAX_CLOCK_SKEW_S = 5.0


class Box(ABC):
    """A container, or a set of namespaces, with its runner."""

    def __init__(self, name: str, spec: SandboxSpec, connection: Connection) -> None:
        self.name = name
        self.spec = spec
        self.connection = connection
        self.proxy: FilteringProxy | None = None
        self.uses = 0

    async def join(self, channel: socket.socket) -> None:
        """Take over our end of the channel and wait for the runner's first word. Raises `SandboxError`."""
        channel.setblocking(False)
        try:
            if self.spec.allow:
                self.proxy = FilteringProxy(await receive_listener(channel), AllowList(self.spec.allow))
                await self.proxy.start()
            await asyncio.get_running_loop().create_unix_connection(lambda: self.connection, sock=channel)
        except BaseException:  # cancelled too: the channel is nobody else's yet
            channel.close()
            raise
        await self.connection.ready

    def hang_up(self) -> None:
        """Close what leads to it: the runner ends itself."""
        self.connection.close()
        if self.proxy is not None:
            self.proxy.close()

    @abstractmethod
    async def destroy(self) -> None:
        """End it and everything in it; safe to call twice."""

    async def reset(self) -> list[str]:
        """Kill and wipe everything the last user left. Returns what is not as it was (empty: clean)."""
        if self.proxy is not None:
            self.proxy.drop_connections()
        header, _ = await self.connection.request({"op": "reset"}, timeout=GRACE_S)
        dirty = [str(item) for item in header.get("dirty", ["no report"])]
        if abs(time.time() - float(header.get("time", 0.0))) > _MAX_CLOCK_SKEW_S:
            dirty.append("clock")
        return dirty


class BoxSandbox(Sandbox):
    """A box for as long as one user holds it. Calls of one sandbox run one after the other."""

    def __init__(self, box: Box) -> None:
        self.box: Box | None = box
        self._turn = asyncio.Lock()

    def detach(self) -> Box | None:
        """End this user's access; returns the box the first time."""
        box, self.box = self.box, None
        return box

    async def exec(  # noqa: D102
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        header: Header = {"kind": "argv", **command(argv, env, cwd)}
        _, result, _ = await self._run(header, limits, stdin=stdin)
        return result

    async def stream(  # noqa: D102
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> AsyncIterator[OutputChunk | ExecResult]:
        chunks: asyncio.Queue[OutputChunk | None] = asyncio.Queue()
        header: Header = {"kind": "argv", **command(argv, env, cwd), "stream": True}

        def listen(number: int, data: bytes) -> None:
            chunks.put_nowait(OutputChunk("stdout" if number == 1 else "stderr", data))

        call = asyncio.ensure_future(self._run(header, limits, stdin=stdin, listener=listen))
        call.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            yield (await call)[1]
        finally:
            call.cancel()

    async def run_python(  # noqa: D102
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        data = {checked_path(name): encoded(text, name) for name, text in (files or {}).items()}
        _, result, _ = await self._run({"kind": "python"}, limits, code=code, stdin=stdin, files=data)
        return result

    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:  # noqa: D102
        _, execution, stream = await self._run({"kind": "calls", "calls": list(calls)}, limits, code=code)
        frames = values.unpack_frames(stream)[: len(calls)]
        return CallsResult([call_outcome(frame) for frame in frames], execution)

    async def write_file(self, path: str, data: bytes) -> None:  # noqa: D102
        await self.write_files({path: data})

    async def write_files(self, files: Mapping[str, bytes]) -> None:  # noqa: D102
        data = {checked_path(path): content for path, content in files.items()}
        _, result, _ = await self._run({"kind": "write"}, FILE_LIMITS, files=data)
        raise_io_error(result, ", ".join(files))

    async def read_file(self, path: str) -> bytes:  # noqa: D102
        header: Header = {"kind": "read", "path": checked_path(path), "max_bytes": MAX_FILE}
        _, result, data = await self._run(header, FILE_LIMITS)
        raise_io_error(result, path)
        return data

    async def run_tests(self, code: str, tests: str, *, limits: Limits | None = None) -> TestsResult:  # noqa: D102
        header: Header = {"op": "judge", "kind": "judge"}
        answer, execution, stream = await self._run(header, limits, code=code, tail=tests.encode("utf-8", "replace"))
        return tests_result(execution, stream, answer.get("judge", {}))

    async def shell(self, *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Session:  # noqa: D102
        connection = self._held().connection
        return BoxSession(connection, await open_persistent(connection, "shell", surroundings(env, cwd)))

    async def python(self, *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Session:  # noqa: D102
        connection = self._held().connection
        return BoxSession(connection, await open_persistent(connection, "session", surroundings(env, cwd)))

    async def spawn(  # noqa: D102
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> Process:
        connection = self._held().connection
        number = await open_persistent(connection, "process", command(argv, env, cwd), limits=limits)
        return BoxProcess(connection, number)

    def _held(self) -> Box:
        if self.box is None:
            raise SandboxError("this sandbox was released", fix="acquire another one")
        return self.box

    async def _run(
        self,
        header: Header,
        limits: Limits | None,
        *,
        code: str = "",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        tail: bytes = b"",
        listener: Listener | None = None,
    ) -> tuple[Header, ExecResult, bytes]:
        """Send a request and wait: the answer's header, the result, and the bytes of the value channel."""
        limits = limits or Limits()
        code_bytes, stdin_bytes = encoded(code, "the code"), encoded(stdin, "stdin")
        header.setdefault("op", "run")
        header.update(
            limits=limits_header(limits),
            code=len(code_bytes),
            stdin=len(stdin_bytes),
            files=[[name, len(data)] for name, data in (files or {}).items()],
        )
        body = b"".join((code_bytes, stdin_bytes, *(files or {}).values(), tail))
        async with self._turn:
            connection, timeout = self._held().connection, limits.wall_s + GRACE_S
            answer, output = await connection.request(header, body, timeout=timeout, listener=listener)
        return answer, *exec_result(answer, output)
