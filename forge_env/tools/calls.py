"""Running an environment's tool calls, so that one that is over can't reach into what comes after it.

A plain function that timed out goes on in its thread, so that it leaves nothing half done; when its episode is over,
it is broken off. Its context, and that of whatever it started in threads and tasks, still holds its `CallScope`, by
which `submit` knows it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from forge_env.concurrency import gather_or_cancel
from forge_env.errors import InfrastructureError, ToolError
from forge_env.interrupts import requested
from forge_env.tools.schema import CURRENT_CALL, CallScope, Tool, ToolResult, unknown_tool
from forge_env.types import ToolCall

CALLS_S: ContextVar[list[float] | None] = ContextVar("calls_s", default=None)


@contextmanager
def measured_calls(seconds: list[float]) -> Iterator[None]:
    """Inside, the seconds of the tool calls of each message are added to `seconds`, in the order of the calls."""
    token = CALLS_S.set(seconds)
    try:
        yield
    finally:
        CALLS_S.reset(token)


class ToolCalls:
    """The calls of one environment's episodes."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._episode = 0
        self._counts: Counter[str] = Counter()
        self._turn_of_threads = asyncio.Lock()
        self._straggler: CallScope | None = None  # the last call given up while its thread ran: there is one at most

    @property
    def all_ended(self) -> bool:
        """Whether no thread of a call that was given up still runs."""
        return self._straggler is None or not self._straggler.runs_on

    def end_episode(self) -> None:
        """From here on no call made before has any effect (`check`); one that still runs is broken off."""
        self._episode += 1
        self._counts.clear()
        if self._straggler is not None and self._straggler.thread is not None:
            self._straggler.thread.break_off()

    async def wait_for_straggler(self, timeout_s: float) -> None:
        """`InfrastructureError`: a call of an earlier episode still runs after `timeout_s` seconds."""
        if self._straggler is not None and not await self._straggler.ended(timeout_s):
            name = type(self._owner).__name__
            raise InfrastructureError(
                f"a tool call of {name} that timed out has not ended", fix="make a new environment"
            )

    def check(self, what: str) -> None:
        """Refuse `what` to code of a call that was given up, or of an episode that is over: `ToolError`."""
        scope = CURRENT_CALL.get()
        if scope is None or scope.owner is not self._owner:
            return
        if scope.given_up or scope.episode != self._episode:
            raise ToolError(f"this tool call is over: it can't {what} any more")

    async def run_all(
        self, tools: Mapping[str, Tool], calls: Sequence[ToolCall], *, timeout_s: float, task_id: str
    ) -> list[ToolResult]:
        """The answers to the calls of one message, which run side by side (see `run`)."""
        seconds = [0.0] * len(calls)

        async def run(place: int, call: ToolCall) -> ToolResult:
            started = time.perf_counter()
            try:
                return await self.run(tools, call, timeout_s=timeout_s, task_id=task_id)
            finally:
                seconds[place] = round(time.perf_counter() - started, 4)

        try:
            return await gather_or_cancel([run(place, call) for place, call in enumerate(calls)])
        finally:
            if (measured := CALLS_S.get()) is not None:
                measured.extend(seconds)

    async def run(self, tools: Mapping[str, Tool], call: ToolCall, *, timeout_s: float, task_id: str) -> ToolResult:
        """The answer of the tool that is called, within its number of calls; functions in threads one at a time."""
        name, arguments = call.function.name, call.function.arguments
        if (tool := tools.get(name)) is None:
            return unknown_tool(call, tools)
        self._counts[name] += 1
        if tool.max_calls is not None and self._counts[name] > tool.max_calls:
            return ToolResult(f"Error: {name} can be called {tool.max_calls} times only", error=True)
        if not tool.in_thread:
            return await self._answer(tool, arguments, timeout_s, task_id)
        async with self._turn_of_threads:  # so that the state of an episode needs no locks
            limit_s = timeout_s if tool.timeout_s is None else tool.timeout_s
            # whoever was asked to end waits no second time for a thread that may never end
            if self._straggler is not None and not await self._straggler.ended(0 if requested() else limit_s):
                return ToolResult(f"Error: {name} can't run: a call that timed out has not ended", error=True)
            return await self._answer(tool, arguments, timeout_s, task_id)

    async def _answer(self, tool: Tool, arguments: str, timeout_s: float, task_id: str) -> ToolResult:
        scope = CallScope(self._owner, self._episode)
        token = CURRENT_CALL.set(scope)
        try:
            return await tool.answer(self._owner, arguments, timeout_s=timeout_s, task_id=task_id)
        except BaseException:  # its caller was cancelled: nobody hears the answer
            scope.given_up = True
            raise
        finally:
            CURRENT_CALL.reset(token)
            if scope.runs_on:
                scope.given_up = True
                self._straggler = scope
