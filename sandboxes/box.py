"""A `Box` (one isolated machine with a runner inside) and the `Sandbox` that gives one user temporary access to it.

Each call becomes a request to the runner, and the runner's answer becomes a result of the sandbox protocol. Invalid
arguments raise `UsageError`; they are never reported as a failure of the program.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forge_env.errors import (
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxPathError,
    UsageError,
)
from forge_env.sandbox import (
    Archives,
    CallOutcome,
    CallsResult,
    ExecResult,
    How,
    Interpreter,
    Interpreters,
    Judging,
    Limits,
    OutputChunk,
    Process,
    Programs,
    Sandbox,
    SandboxSpec,
    TestsResult,
    Usage,
    phase,
)
from forge_env.sandbox.spec import is_below
from sandboxes.connection import Connection, Listener
from sandboxes.images.packages import bare_name
from sandboxes.network import AllowList, FilteringProxy, receive_listener
from sandboxes.runner import values
from sandboxes.runner.programs import IO_ERROR
from sandboxes.runner.wire import Header
from sandboxes.suite import suite_of, verdict_apart, verdict_beside

GRACE_S = 10.0
"""Seconds beyond a call's wall limit after which a silent runner counts as lost."""
SESSION_CPU_S = 24 * 3600.0
"""CPU limit of a session. Its commands have wall limits of their own, but its CPU time accumulates over all of them."""
MAX_PROCESSES = 480
"""Maximum `Limits.processes` (processes and threads) of one call; with more, the runner itself could no longer fork."""
FILE_LIMITS = Limits(wall_s=20.0, memory_mb=1024, file_size_mb=1024)
MAX_FILE = 128 << 20
_MAX_CLOCK_SKEW_S = 5.0
_FILES = dict.fromkeys(("write", "read", "folder", "pack", "unpack"), "files")
PHASES = {"argv": "command", "python": "python", "calls": "python", "judge": "tests", "counted": "tests", **_FILES}
"""Timeline phase of each kind of request."""


class Box:
    """A container or a set of namespaces, together with its runner.

    Args:
        name: name in messages.
        spec: what it provides.
        remove: removes the machine, whose runner is about to exit.
    """

    def __init__(self, name: str, spec: SandboxSpec, remove: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.name = name
        self.spec = spec
        self.connection = Connection()
        self.proxy: FilteringProxy | None = None
        self.uses = 0
        self._remove = remove
        self._removal: asyncio.Task[None] | None = None
        self._skew = 0.0
        """How far this machine's clock was ahead of the sandbox's at start, in seconds."""

    async def join(self, channel: socket.socket) -> None:
        """Take ownership of our end of the channel and wait until the runner is ready. Raises `SandboxError`."""
        channel.setblocking(False)
        try:
            if self.spec.proxied:
                self.proxy = FilteringProxy(await receive_listener(channel), AllowList.of(self.spec))
                await self.proxy.start()
            await asyncio.get_running_loop().create_unix_connection(lambda: self.connection, sock=channel)
        except BaseException:  # also when cancelled: nothing else owns the channel yet
            channel.close()
            raise
        await self.ready()

    async def ready(self) -> None:
        """Wait for the runner's ready message. Raises `SandboxError`."""
        self._skew = time.time() - float((await self.connection.ready)["time"])

    async def destroy(self) -> None:
        """Destroy the box and everything in it. Safe to call twice."""
        self.connection.close()
        if self.proxy is not None:
            self.proxy.close()
        if self._removal is None:
            self._removal = asyncio.create_task(self._remove())
        await asyncio.shield(self._removal)

    async def reset(self) -> list[str]:
        """Kill and wipe everything the last user left. Returns the differences from a clean box (empty: clean)."""
        if self.proxy is not None:
            self.proxy.drop_connections()
        header, _ = await self.connection.request({"op": "reset"}, timeout=GRACE_S)
        if self.proxy is not None:  # connections that programs opened before they were killed
            self.proxy.drop_connections()
        dirty = [str(item) for item in header.get("dirty", ["no report"])]
        if abs(time.time() - float(header.get("time", 0.0)) - self._skew) > _MAX_CLOCK_SKEW_S:
            dirty.append("clock")
        return dirty


class BoxSandbox(Sandbox, Judging, Archives, Interpreters, Programs):
    """One user's access to a box. Calls on one sandbox run one at a time."""

    def __init__(self, box: Box) -> None:
        self.box: Box | None = box
        """None once released, which revokes this user's access."""
        self._turn = asyncio.Lock()

    async def exec(  # noqa: D102
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = "",
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
        stdin: str | bytes = "",
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
        stdin: str | bytes = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        data = self._files(files or {})
        _, result, _ = await self._run({"kind": "python"}, limits, code=code, stdin=stdin, files=data)
        return result

    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:  # noqa: D102
        _, execution, stream = await self._run({"kind": "calls", "calls": list(calls)}, limits, code=code)
        frames = values.unpack_frames(stream)[: len(calls)]
        return CallsResult([call_outcome(frame) for frame in frames], execution)

    async def write_file(self, path: str, data: str | bytes) -> None:  # noqa: D102
        await self.write_files({path: data})

    async def write_files(self, files: Mapping[str, str | bytes]) -> None:  # noqa: D102
        await self._file_request({"kind": "write"}, ", ".join(files), files=self._files(files))

    async def read_file(self, path: str) -> bytes:  # noqa: D102
        return await self._file_request({"kind": "read", "path": self._path(path), "max_bytes": MAX_FILE}, path)

    async def read_files(self, path: str = ".") -> dict[str, bytes]:  # noqa: D102
        header: Header = {"kind": "folder", "path": self._path(path), "max_bytes": MAX_FILE}
        data = await self._file_request(header, path)
        parts = list(values.split(data))
        return {name.decode(): content for name, content in zip(parts[::2], parts[1::2], strict=True)}

    async def pack(self, folders: Sequence[str], *, leave_out: Sequence[str] = ()) -> bytes:  # noqa: D102
        paths = [self._path(folder) for folder in folders]
        header: Header = {"kind": "pack", "paths": paths, "leave_out": list(leave_out), "max_bytes": MAX_FILE}
        return await self._file_request(header, ", ".join(folders))

    async def unpack(self, archive: bytes, *, instead_of: Sequence[str] = ()) -> None:  # noqa: D102
        header: Header = {"kind": "unpack", "paths": [self._path(folder) for folder in instead_of]}
        await self._file_request(header, "an archive", stdin=archive)

    async def run_tests(  # noqa: D102
        self,
        code: str | None = None,
        tests: str | Mapping[str, str | bytes] = "",
        *,
        files: Mapping[str, str | bytes] | None = None,
        packages: Sequence[str] = (),
        how: How | None = None,
        limits: Limits | None = None,
    ) -> TestsResult:
        installed = self._held().spec.packages
        if missing := [name for name in packages if name not in installed and name not in map(bare_name, installed)]:
            fix = f"acquire it with SandboxSpec(packages={[*installed, *missing]})"
            raise UsageError(f"this sandbox was acquired without {', '.join(missing)}", fix=fix)
        test_files = tests if isinstance(tests, str) else checked_files(tests)
        suite = suite_of(code, test_files, checked_files(files or {}), how)
        if suite.how == "counted":
            executions = []
            for run in suite.runs:
                header, all_files = suite.beside_header(run)
                _, execution, stream = await self._run(header, limits, files=all_files)
                executions.append((execution, stream))
            return verdict_beside(executions, suite)
        header, tail = suite.apart_header()
        text = (code or "") if isinstance(tests, str) else ""
        answer, execution, stream = await self._run(header, limits, code=text, files=suite.judged, tail=tail)
        return verdict_apart(execution, stream, str(answer.get("judge_stderr", "")))

    async def shell(  # noqa: D102
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, limits: Limits | None = None
    ) -> Interpreter:
        return BoxInterpreter(*await self._open("shell", surroundings(env, cwd), limits))

    async def python(  # noqa: D102
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, limits: Limits | None = None
    ) -> Interpreter:
        return BoxInterpreter(*await self._open("session", surroundings(env, cwd), limits))

    async def spawn(  # noqa: D102
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> Process:
        program = command(argv, env, cwd)
        program["here"] = bool(self._held().spec.preload) and is_script(program["argv"], program["env"])
        return BoxProcess(*await self._open("process", program, limits))

    async def _open(self, kind: str, program: Header, limits: Limits | None = None) -> tuple[Connection, int]:
        """Start a session or background process. Returns its connection and the number that identifies it there."""
        connection = self._held().connection
        limits = replace(limits or Limits(), cpu_s=SESSION_CPU_S)
        header: Header = {"op": "open", "kind": kind, "argv": [], **program, "limits": limits_header(limits)}
        answer, _ = await connection.request(header, timeout=GRACE_S)
        return connection, int(answer["id"])

    def _path(self, path: str) -> str:
        return checked_path(path, () if self.box is None else self.box.spec.writable)

    def _files(self, files: Mapping[str, str | bytes]) -> dict[str, bytes]:
        return {self._path(path): encoded(content, path) for path, content in files.items()}

    def _held(self) -> Box:
        if self.box is None:
            raise SandboxError("this sandbox was released", fix="acquire another one")
        return self.box

    async def _file_request(
        self, header: Header, what: str, *, files: Mapping[str, bytes] | None = None, stdin: bytes = b""
    ) -> bytes:
        """Send a request about the files `what`. Returns the bytes of the value channel. Raises `SandboxFileError`."""
        _, result, data = await self._run(header, FILE_LIMITS, files=files, stdin=stdin)
        if result.ok:
            return data
        number, _, reason = result.stderr.partition(" ")
        if result.exit_code == IO_ERROR and number.isdigit():
            kind = SandboxFileNotFoundError if int(number) == errno.ENOENT else SandboxFileError
            raise kind(int(number), reason, what)
        raise SandboxFileError(errno.EIO, "timed out" if result.timed_out else "the file could not be reached", what)

    async def _run(
        self,
        header: Header,
        limits: Limits | None,
        *,
        code: str = "",
        stdin: str | bytes = "",
        files: Mapping[str, bytes] | None = None,
        tail: bytes = b"",
        listener: Listener | None = None,
    ) -> tuple[Header, ExecResult, bytes]:
        """Send a request and wait. Returns the answer's header, the result, and the bytes of the value channel."""
        limits = limits or Limits()
        code_bytes, stdin_bytes = encoded(code, "the code", str), encoded(stdin, "stdin")
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
            with phase(PHASES[header["kind"]]):
                answer, output = await connection.request(header, body, timeout=timeout, listener=listener)
        return answer, *exec_result(answer, output)


# --- persistent processes: shells, Python sessions, background programs


class _Persistent:
    """A persistent process in a box, identified by the number of the request that opened it."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._ended = False

    async def _ask(self, header: Header, body: bytes = b"", *, wait_s: float = 0.0) -> ExecResult:
        header["session"] = self._number
        answer, output = await self._connection.request(header, body, timeout=wait_s + GRACE_S)
        if "error" in answer:
            raise SandboxError(str(answer["error"]))
        self._ended = bool(answer.get("ended"))
        return exec_result(answer, output)[0]

    async def _end(self) -> None:
        if self._ended or not self._connection.alive:
            return
        self._connection.notify({"op": "kill", "target": self._number})
        await self._ask({"op": "take", "wait_s": GRACE_S}, wait_s=GRACE_S)


class BoxInterpreter(_Persistent, Interpreter):
    """A shell or Python session."""

    def __init__(self, connection: Connection, number: int) -> None:
        super().__init__(connection, number)
        self._turn = asyncio.Lock()

    @property
    def alive(self) -> bool:  # noqa: D102
        return not self._ended and self._connection.alive

    async def run(self, source: str, *, limits: Limits | None = None) -> ExecResult:  # noqa: D102
        limits = limits or Limits()
        async with self._turn:
            if self._ended:
                raise UsageError("this session has ended", fix="check 'alive' and open another one")
            header: Header = {"op": "turn", "limits": limits_header(limits)}
            code = encoded(source, "the source", str)
            try:
                with phase("session"):
                    return await self._ask(header, code, wait_s=limits.wall_s)
            except asyncio.CancelledError:  # the command would keep running and mix its output with the next one's
                self._ended = True
                self._connection.notify({"op": "kill", "target": self._number})
                raise

    async def close(self) -> None:  # noqa: D102
        await self._end()


class BoxProcess(_Persistent, Process):
    """A background program."""

    async def write(self, data: bytes, *, end: bool = False) -> None:  # noqa: D102
        header: Header = {"op": "feed", "session": self._number, "close": end}
        await self._connection.request(header, data, timeout=GRACE_S)

    async def read(self) -> tuple[str, str]:  # noqa: D102
        result = await self._ask({"op": "take"})
        return result.stdout, result.stderr

    async def wait(self, timeout: float) -> ExecResult | None:  # noqa: D102
        result = await self._ask({"op": "take", "wait_s": timeout}, wait_s=timeout)
        return result if self._ended else None

    async def kill(self) -> None:  # noqa: D102
        await self._end()


# --- from callers' arguments to requests


def surroundings(env: Mapping[str, str] | None, cwd: str | None) -> Header:
    """Environment variables and working directory of a program, as request fields. Raises `UsageError`."""
    for name, value in (env or {}).items():
        if not _text(name) or not name or "=" in name or not _text(value):
            raise UsageError(
                f"environment variable {name!r} = {value!r} is not valid",
                fix="use strings without NUL, and no '=' in the name",
            )
    if cwd is not None and not _text(cwd):
        raise UsageError(f"working directory {cwd!r} is not valid", fix="use a string without NUL")
    return {"env": dict(env or {}), "cwd": cwd}


def command(argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> Header:
    """A program with its arguments, environment and working directory, as request fields. Raises `UsageError`."""
    if isinstance(argv, str | bytes) or not argv:
        raise UsageError("argv must be a non-empty list", fix="for a shell line use ['bash', '-c', line]")
    for item in argv:
        if not _text(item):
            raise UsageError(f"argument {item!r} of {argv[0]!r} is not valid", fix="use strings without NUL")
    return {"argv": list(argv), **surroundings(env, cwd)}


def is_script(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the command runs a Python file by path, with no interpreter options or variables that affect Python."""
    if any(name == "PATH" or name.startswith("PYTHON") for name in env):  # selects another interpreter or configures it
        return False
    return argv[0] in ("python", "python3") and len(argv) > 1 and not argv[1].startswith("-")


def encoded(text: str | bytes, what: str, kind: Any = str | bytes) -> bytes:
    """Code, input or a file's content, encoded for the runner. Raises `UsageError` unless it is of the `kind`."""
    if not isinstance(text, kind):
        fix = "use a string" if kind is str else "use text or bytes"
        raise UsageError(f"{what} is of type {type(text).__name__}", fix=fix)
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def checked_files(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """Files by checked path, encoded for the runner. Raises `SandboxPathError` and `UsageError`."""
    return {checked_path(path): encoded(content, path) for path, content in files.items()}


def checked_path(path: str, writable: Sequence[str] = ()) -> str:
    """The normalised path: a relative one inside the work folder, or an absolute one in a `writable` folder.

    Raises `SandboxPathError`.
    """
    clean = posixpath.normpath(path)
    if "\0" not in path and any(is_below(clean, folder) for folder in writable):
        return clean
    if not path or posixpath.isabs(path) or clean == ".." or clean.startswith("../") or "\0" in path:
        raise SandboxPathError(f"{path!r} is not inside the work folder", fix="use a relative path without '..'")
    return clean


def _text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def limits_header(limits: Limits) -> Header:
    """The limits as a request field. Raises `UsageError` for more processes than `MAX_PROCESSES`."""
    if limits.processes > MAX_PROCESSES:
        raise UsageError(f"processes={limits.processes} is more than a sandbox has", fix=f"use {MAX_PROCESSES} or less")
    return {name: getattr(limits, name) for name in Limits.__slots__}


# --- from runners' answers to results


def exec_result(answer: Header, output: bytes) -> tuple[ExecResult, bytes]:
    """The result of a call, and the bytes of the value channel."""
    stdout, stderr, _ = answer["parts"]
    usage = Usage(wall_s=answer["wall_s"], cpu_s=answer["cpu_s"], peak_memory_mb=answer["peak_kb"] / 1024)
    result = ExecResult(
        exit_code=answer["exit_code"],
        signal=answer["signal"],
        stdout=output[:stdout].decode("utf-8", "replace"),
        stderr=output[stdout : stdout + stderr].decode("utf-8", "replace"),
        timed_out=answer["timed_out"],
        out_of_memory=answer["out_of_memory"],
        truncated=answer["truncated"],
        usage=usage,
    )
    return result, output[stdout + stderr :]


def call_outcome(frame: object) -> CallOutcome:
    """The outcome in one frame of the value channel, which is untrusted: candidate code may have written to it."""
    if isinstance(frame, dict) and set(frame) == {"v"}:
        try:
            return CallOutcome(value=values.decode(frame["v"]))
        except (values.MalformedValueError, RecursionError):
            return CallOutcome(error="TypeError", message="not a plain value")
    if isinstance(frame, dict) and isinstance(frame.get("e"), str):
        message = frame.get("m")
        return CallOutcome(error=frame["e"][:200], message=message[:2000] if isinstance(message, str) else "")
    return CallOutcome(error="TypeError", message="not a plain value")
