"""The thread that a tool's plain function runs in: what of it goes on after the call was given up."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class CallScope:
    """One call of a tool, in one episode of one environment."""

    owner: object
    episode: int
    given_up: bool = False
    """Its answer is dropped: it timed out, or was cancelled."""
    thread: Future[Any] | None = None
    """Done when the thread that runs its function is."""

    @property
    def runs_on(self) -> bool:
        """Whether its thread has not ended."""
        return self.thread is not None and not self.thread.done()

    async def ended(self, timeout_s: float) -> bool:
        """Wait for its thread; False when it still runs after `timeout_s` seconds."""
        if self.thread is not None and self.runs_on:
            waiting = asyncio.wrap_future(self.thread)
            await asyncio.wait([waiting], timeout=timeout_s)
            waiting.cancel()  # where the loop is closed before the thread ends
        return not self.runs_on


CURRENT_CALL: ContextVar[CallScope | None] = ContextVar("current_tool_call", default=None)
"""The call that the running code belongs to; None outside of tools."""
