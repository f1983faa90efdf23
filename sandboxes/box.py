"""One isolated machine with a runner in it, and the `Sandbox` that is handed out for a while on top of it."""

from __future__ import annotations

import asyncio
import posixpath
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from forge_env.errors import SandboxError, UsageError
from forge_env.sandbox import CallOutcome, CallsResult, ExecResult, Limits, Sandbox, SandboxSpec, Usage
from sandboxes.connection import Connection
from sandboxes.images.runner import values
from sandboxes.images.runner.programs import IO_ERROR
from sandboxes.images.runner.wire import Header

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
        self.uses = 0

    @abstractmethod
    async def destroy(self) -> None:
        """End it and everything in it; safe to call twice."""

    async def reset(self) -> list[str]:
        """Kill and wipe everything the last user left. Returns what is not as it was (empty: clean)."""
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
        if isinstance(argv, str) or not argv:
            raise UsageError("argv must be a non-empty list", fix="for a shell line use ['bash', '-c', line]")
        header: Header = {"kind": "argv", "argv": list(argv), "env": dict(env or {}), "cwd": cwd}
        result, _ = await self._run(header, limits, stdin=stdin)
        return result

    async def run_python(  # noqa: D102
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        data = {checked_path(name): text.encode("utf-8", "surrogatepass") for name, text in (files or {}).items()}
        result, _ = await self._run({"kind": "python"}, limits, code=code, stdin=stdin, files=data)
        return result

    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Limits | None = None) -> CallsResult:  # noqa: D102
        execution, stream = await self._run({"kind": "calls", "calls": list(calls)}, limits, code=code)
        frames = values.unpack_frames(stream)[: len(calls)]
        return CallsResult([_outcome(frame) for frame in frames], execution)

    async def write_file(self, path: str, data: bytes) -> None:  # noqa: D102
        result, _ = await self._run({"kind": "write"}, FILE_LIMITS, files={checked_path(path): data})
        _raise_io_error(result, path)

    async def read_file(self, path: str) -> bytes:  # noqa: D102
        header: Header = {"kind": "read", "path": checked_path(path), "max_bytes": MAX_FILE}
        result, data = await self._run(header, FILE_LIMITS)
        _raise_io_error(result, path)
        return data

    async def _run(
        self,
        header: Header,
        limits: Limits | None,
        *,
        code: str = "",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
    ) -> tuple[ExecResult, bytes]:
        limits = limits or Limits()
        code_bytes, stdin_bytes = code.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "surrogatepass")
        header.update(
            op="run",
            limits=limits_header(limits),
            code=len(code_bytes),
            stdin=len(stdin_bytes),
            files=[[name, len(data)] for name, data in (files or {}).items()],
        )
        body = b"".join((code_bytes, stdin_bytes, *(files or {}).values()))
        async with self._turn:
            if self.box is None:
                raise SandboxError("this sandbox was released", fix="acquire another one")
            answer, output = await self.box.connection.request(header, body, timeout=limits.wall_s + GRACE_S)
        return _result(answer, output)


def limits_header(limits: Limits) -> Header:
    """The limits as the runner reads them."""
    return {name: getattr(limits, name) for name in Limits.__slots__}


def checked_path(path: str) -> str:
    """A relative path that stays inside the work folder, normalised. Raises `UsageError`."""
    clean = posixpath.normpath(path)
    if not path or posixpath.isabs(path) or clean == ".." or clean.startswith("../") or "\0" in path:
        raise UsageError(f"{path!r} is not inside the work folder", fix="use a relative path without '..'")
    return clean


def _result(answer: Header, output: bytes) -> tuple[ExecResult, bytes]:
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


def _outcome(frame: object) -> CallOutcome:
    """One frame of the value channel; candidate code may have written anything there."""
    if isinstance(frame, dict) and set(frame) == {"v"}:
        try:
            return CallOutcome(value=values.decode(frame["v"]))
        except (values.MalformedValueError, RecursionError):
            return CallOutcome(error="TypeError", message="not a plain value")
    if isinstance(frame, dict) and isinstance(frame.get("e"), str):
        return CallOutcome(error=frame["e"][:200], message=str(frame.get("m", ""))[:2000])
    return CallOutcome(error="TypeError", message="not a plain value")


def _raise_io_error(result: ExecResult, path: str) -> None:
    if result.ok:
        return
    number, _, reason = result.stderr.partition(" ")
    if result.exit_code == IO_ERROR and number.isdigit():
        raise OSError(int(number), reason.rpartition(": ")[0] or reason, path)
    raise OSError(5, "timed out" if result.timed_out else "the file could not be reached", path)
