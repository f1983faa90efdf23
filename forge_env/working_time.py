"""Working time: wall time without the time spent waiting for resources shared by episodes.

async with WorkingTime(60.0) as working:      # a limit of 60 working seconds
    ...
    with waiting():                           # anywhere inside, also in child tasks
        await rate_limit.acquire()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, Self

from forge_env.errors import GIVEN_UP, EnvironmentBugError, environment_code


class WorkingTime:
    """A time limit whose clock stops while anything inside waits; raises `TimeoutError` when it is reached."""

    __slots__ = ("_left", "_outer", "_since", "_timeout", "_token", "_waits", "limit_s", "waited_s")

    def __init__(self, limit_s: float | None) -> None:
        self.waited_s = 0.0
        """Seconds spent waiting so far; overlapping waits count once."""
        self.limit_s = limit_s
        self._outer: WorkingTime | None = None
        self._timeout = asyncio.timeout(limit_s)
        self._waits = 0
        self._token: Token[WorkingTime | None] | None = None

    @property
    def expired(self) -> bool:
        """Whether the limit was reached."""
        return self._timeout.expired()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock within this context."""
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

    @contextmanager
    def pause_all(self) -> Iterator[None]:
        """Stop this clock and those of enclosing limits."""
        with nullcontext() if self._outer is None else self._outer.pause_all(), self.pause():
            yield

    def _reschedule(self, when: float | None) -> None:
        if self.limit_s is not None and not self._timeout.expired() and self._token is not None:
            self._timeout.reschedule(when)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._outer = _CURRENT.get()
        self._token = _CURRENT.set(self)
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
            self._token = None
        await self._timeout.__aexit__(*error)


_CURRENT: ContextVar[WorkingTime | None] = ContextVar("working_time", default=None)


def waiting() -> AbstractContextManager[None]:
    """Context in which the clocks of all enclosing `WorkingTime` limits stop."""
    current = _CURRENT.get()
    return nullcontext() if current is None else current.pause_all()


# --- time limit of an environment's code

_CODE: ContextVar[WorkingTime | None] = ContextVar("code_time", default=None)


@asynccontextmanager
async def limited_code(what: str, task_id: str, limit_s: float) -> AsyncIterator[None]:
    """Run `environment_code` with a time limit, after which the code is cancelled.

    Args:
        limit_s: working seconds, without code that has separate limits, such as tools (`limited_elsewhere`).

    Raises:
        EnvironmentBugError: the code failed or timed out; after a time-out it names the current function and line.
    """
    if (given_up := GIVEN_UP.get()) is None:
        given_up = []
    clock = WorkingTime(limit_s)
    tokens = GIVEN_UP.set(given_up), _CODE.set(clock)
    try:
        async with clock:
            with environment_code(what, task_id, limit_s=limit_s):
                yield
    except TimeoutError as error:
        if not clock.expired:
            raise
        location = given_up[0] if given_up else what
        bug = EnvironmentBugError(
            f"{what} has not ended after {limit_s:g} s on task {task_id!r}: it is in {location}",
            fix="end the loop there, or raise code_timeout_s",
        )
        bug.place = f"{location} has not ended"
        raise bug from error
    finally:
        GIVEN_UP.reset(tokens[0])
        _CODE.reset(tokens[1])


def limited_elsewhere() -> AbstractContextManager[None]:
    """Context for calls that have separate limits (tools, endpoints) and don't count as the environment's code."""
    clock = _CODE.get()
    return nullcontext() if clock is None else clock.pause()
