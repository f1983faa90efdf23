"""What the episodes of one event loop share: made by the first that needs it, ended some time after the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
LINGER_S = 30.0
"""Seconds that it is kept for the next episode."""


class Shared(Generic[K, T]):
    """Values by key, each kept open by a task of its own: many libraries close only in the task that opened.

    A value that ends or fails is made anew for the next that asks. What is still open when the event loop ends is
    closed with it (`asyncio.run` cancels the task and waits for it).
    """

    def __init__(self, make: Callable[[K], AbstractAsyncContextManager[T]], *, linger_s: float = LINGER_S) -> None:
        self._make = make
        self._linger_s = linger_s
        self._kept: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[K, _Kept[T]]] = WeakKeyDictionary()

    @asynccontextmanager
    async def use(self, key: K) -> AsyncIterator[T]:
        """The value of `key`. Whatever `make` raises when it is opened is raised here."""
        loop = asyncio.get_running_loop()
        here = self._kept.setdefault(loop, {})
        kept = here.get(key)
        if kept is None or kept.keeper.done():
            kept = here[key] = _Kept(self._make(key))
        kept.use()
        try:
            yield await asyncio.shield(kept.ready)
        finally:
            kept.leave(self._linger_s)

    def forget(self, key: K) -> None:
        """It is of no more use: the next that asks gets a new one."""
        if kept := self._kept.get(asyncio.get_running_loop(), {}).pop(key, None):
            kept.end()


class _Kept(Generic[T]):
    """One value, its task, and how many use it."""

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[T] = loop.create_future()
        self._unused = asyncio.Event()
        self._users = 0
        self._end: asyncio.TimerHandle | None = None
        self.keeper = asyncio.create_task(self._keep(manager))

    async def _keep(self, manager: AbstractAsyncContextManager[T]) -> None:
        try:
            async with manager as value:
                self.ready.set_result(value)
                await self._unused.wait()
        except BaseException as error:  # the boundary of a task: whoever waits raises it
            if self.ready.done():
                raise
            self.ready.set_exception(error)
            self.ready.exception()  # those that wait raise it; where none does, nothing is lost
            if isinstance(error, asyncio.CancelledError):
                raise

    def use(self) -> None:
        self._users += 1
        if self._end is not None:
            self._end.cancel()

    def leave(self, linger_s: float) -> None:
        self._users -= 1
        if not self._users:
            self._end = asyncio.get_running_loop().call_later(linger_s, self.end)

    def end(self) -> None:
        self._unused.set()
