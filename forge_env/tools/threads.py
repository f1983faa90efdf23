"""The thread that a tool's plain function runs in: what of it goes on after the call was given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar


class CallScope:
    """One call of a tool, in one episode of one environment."""

    def __init__(self, owner: object, episode: int) -> None:
        self.owner = owner
        self.episode = episode
        self.given_up = False
        """Its answer is dropped: it timed out, or was cancelled."""
        self._thread: Future[None] | None = None

    def enters_thread(self) -> None:
        """A thread is about to run the function."""
        self._thread = Future()
        self._thread.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """In that thread, around the function."""
        assert self._thread is not None
        try:
            yield
        finally:
            self._thread.set_result(None)

    @property
    def runs_on(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread is not None and not self._thread.done()

    async def ended(self, timeout_s: float) -> bool:
        """Wait for its thread; False when it still runs after `timeout_s` seconds."""
        if self._thread is not None and self.runs_on:
            waiting = asyncio.wrap_future(self._thread)
            await asyncio.wait([waiting], timeout=timeout_s)
            waiting.cancel()  # where the loop is closed before the thread ends
        return not self.runs_on


CURRENT_CALL: ContextVar[CallScope | None] = ContextVar("current_tool_call", default=None)
"""The call that the running code belongs to; None outside of tools."""
