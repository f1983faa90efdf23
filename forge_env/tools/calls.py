"""Run an environment's tool calls, such that a call that has ended can't affect later calls or episodes.

A sync function that timed out continues in its thread, so that it leaves nothing half done; it is interrupted when its
episode ends. Its context, and that of the threads and tasks it started, still holds its `CallScope`, by which `submit`
recognises it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from forge_env.errors import InfrastructureError, ToolError
from forge_env.interrupts import requested
from forge_env.tools.schema import CURRENT_CALL, CallScope, Tool, ToolResult, unknown_tool
from forge_env.types import ToolCall

CALLS_S: ContextVar[list[float] | None] = ContextVar("calls_s", default=None)


@contextmanager
def measured_calls(seconds: list[float]) -> Iterator[None]:
    """Inside the block, append the duration of each tool call in seconds to `seconds`, in the order of the calls."""
    token = CALLS_S.set(seconds)
    try:
        yield
    finally:
        CALLS_S.reset(token)


class ToolCalls:
    """Runs the tool calls of one environment's episodes."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._episode = 0
        self._counts: Counter[str] = Counter()
        self._turn_of_threads = asyncio.Lock()
        self._straggler: CallScope | None = None  # the last abandoned call whose thread was still running; at most one

    @property
    def all_ended(self) -> bool:
        """Whether the threads of all abandoned calls have ended."""
        return self._straggler is None or not self._straggler.runs_on

    def end_episode(self) -> None:
        """End the episode: its calls have no effect any more (`check`), and one that still runs is interrupted."""
        self._episode += 1
        self._counts.clear()
        if self._straggler is not None and self._straggler.thread is not None:
            self._straggler.thread.break_off()

    async def wait_for_straggler(self, timeout_s: float) -> None:
        """Wait for a call of an earlier episode. `InfrastructureError`: it still runs after `timeout_s` seconds."""
        if self._straggler is not None and not await self._straggler.ended(timeout_s):
            name = type(self._owner).__name__
            raise InfrastructureError(
                f"a tool call of {name} that timed out is still running", fix="make a new environment"
            )

    def check(self, what: str) -> None:
        """Check that the calling code may do `what`. `ToolError`: its call was abandoned, or its episode has ended."""
        scope = CURRENT_CALL.get()
        if scope is None or scope.owner is not self._owner:
            return
        if scope.given_up or scope.episode != self._episode:
            raise ToolError(f"this tool call has ended: it can't {what}")

    async def run(
        self, tools: Mapping[str, Tool], call: ToolCall, task_id: str, limit_s: float, seconds: list[float], place: int
    ) -> ToolResult:
        """Run one call, subject to `max_calls`. Functions in threads run one at a time.

        Args:
            limit_s: time limit of a tool that has none of its own.
            seconds: durations of a message's calls; receives this call's duration at index `place`.
        """
        name = call.function.name
        if (tool := tools.get(name)) is None:
            return unknown_tool(call, tools)
        self._counts[name] += 1
        if tool.max_calls is not None and self._counts[name] > tool.max_calls:
            return ToolResult(f"Error: {name} can be called {tool.max_calls} times only", error=True)
        started = time.perf_counter()
        scope = CallScope(self._owner, self._episode)
        async with self._turn_of_threads if tool.in_thread else nullcontext():  # an episode's state needs no locks
            limit_s = limit_s if tool.timeout_s is None else tool.timeout_s
            # after an interrupt request, don't wait for a thread that may never end
            if tool.in_thread and self._straggler and not await self._straggler.ended(0 if requested() else limit_s):
                seconds[place] = round(time.perf_counter() - started, 4)
                return ToolResult(f"Error: {name} can't run: a call that timed out is still running", error=True)
            token = CURRENT_CALL.set(scope)
            try:
                return await tool.answer(call.function.arguments, scope, timeout_s=limit_s, task_id=task_id)
            except BaseException:  # the caller was cancelled, so the answer is dropped
                scope.given_up = True
                raise
            finally:
                CURRENT_CALL.reset(token)
                seconds[place] = round(time.perf_counter() - started, 4)
                if tool.in_thread and scope.runs_on:
                    scope.given_up = True
                    self._straggler = scope
