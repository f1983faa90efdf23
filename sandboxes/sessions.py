"""The engine's side of what lives on between calls: shells, Python sessions, background programs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from forge_env.errors import SandboxError, UsageError
from forge_env.sandbox import ExecResult, Limits, Process, Session
from sandboxes.answers import exec_result, limits_header
from sandboxes.arguments import encoded
from sandboxes.images.runner.wire import Header

if TYPE_CHECKING:
    from sandboxes.connection import Connection

GRACE_S = 10.0
SESSION_CPU_S = 24 * 3600.0
"""A session's commands are bounded in wall time, one by one; its CPU time adds up over all of them."""


class _Persistent:
    """A persistent process in a box, by the number of the request that opened it."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._ended = False

    async def _ask(self, header: Header, body: bytes = b"", *, wait_s: float = 0.0) -> tuple[ExecResult, Header]:
        answer, output = await self._connection.request(
            {**header, "session": self._number}, body, timeout=wait_s + GRACE_S
        )
        if "error" in answer:
            raise SandboxError(str(answer["error"]))
        self._ended = bool(answer.get("ended"))
        result, _ = exec_result(answer, output)
        return result, answer

    async def _end(self) -> None:
        if self._ended or not self._connection.alive:
            return
        self._connection.notify({"op": "kill", "target": self._number})
        await self._ask({"op": "take", "wait_s": GRACE_S}, wait_s=GRACE_S)


class BoxSession(_Persistent, Session):
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
            result, _ = await self._ask(header, encoded(source, "the source"), wait_s=limits.wall_s)
        return result

    async def close(self) -> None:  # noqa: D102
        await self._end()


class BoxProcess(_Persistent, Process):
    """A background program."""

    async def write(self, data: bytes, *, end: bool = False) -> None:  # noqa: D102
        header: Header = {"op": "feed", "session": self._number, "close": end}
        await self._connection.request(header, data, timeout=GRACE_S)

    async def read(self) -> tuple[str, str]:  # noqa: D102
        result, _ = await self._ask({"op": "take"})
        return result.stdout, result.stderr

    async def wait(self, timeout: float) -> ExecResult | None:  # noqa: D102
        result, _ = await self._ask({"op": "take", "wait_s": timeout}, wait_s=timeout)
        return result if self._ended else None

    async def kill(self) -> None:  # noqa: D102
        await self._end()


async def open_persistent(connection: Connection, kind: str, program: Header, *, limits: Limits | None = None) -> int:
    """Start a session or background process; returns its number."""
    limits = replace(limits or Limits(), cpu_s=SESSION_CPU_S)
    header: Header = {"op": "open", "kind": kind, "argv": [], **program, "limits": limits_header(limits)}
    answer, _ = await connection.request(header, timeout=GRACE_S)
    return int(answer["id"])
