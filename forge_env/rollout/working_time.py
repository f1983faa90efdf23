"""Working time: wall time without the time spent waiting for what many episodes share.

async with WorkingTime(60.0) as working:      # a limit of 60 working seconds
    ...
    with waiting():                           # anywhere inside, also in child tasks
        await rate_limit.acquire()
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, Self


class WorkingTime:
    """A time limit whose clock stands while anything inside waits; `TimeoutError` when it has run out."""

    __slots__ = ("_left", "_limit_s", "_since", "_timeout", "_token", "_waits", "waited_s")

    def __init__(self, limit_s: float | None) -> None:
        self.waited_s = 0.0
        """Seconds waited so far; waits that overlap count once."""
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(limit_s)
        self._waits = 0
        self._token: Token[WorkingTime | None] | None = None

    @property
    def expired(self) -> bool:
        """Whether the limit was reached."""
        return self._timeout.expired()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock in this block."""
        loop = asyncio.get_running_loop()
        self._waits += 1
        if self._waits == 1:
            self._since, due = loop.time(), self._timeout.when()
            self._left = None if due is None else due - self._since
            self._reschedule(None)
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0:
                now = loop.time()
                self.waited_s += now - self._since
                self._reschedule(None if self._left is None else now + self._left)

    def _reschedule(self, when: float | None) -> None:
        if self._limit_s is not None and not self.expired and self._token is not None:
            self._timeout.reschedule(when)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._token = _CURRENT.set(self)
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
            self._token = None
        await self._timeout.__aexit__(*error)


_CURRENT: ContextVar[WorkingTime | None] = ContextVar("working_time", default=None)


def waiting() -> AbstractContextManager[None]:
    """A block in which the clock of the surrounding `WorkingTime`, if any, stands."""
    current = _CURRENT.get()
    return nullcontext() if current is None else current.pause()
