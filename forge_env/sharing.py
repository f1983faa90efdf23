"""Resources shared by the episodes of one event loop, opened on first use and closed some time after the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
LINGER_S = 30.0
"""Seconds that an unused resource stays open for the next episode."""


class Shared(Generic[K, T]):
    """Shared values by key, each held open by its own task, since many libraries must be closed by the opening task.

    A value that has ended or failed is opened again on the next use. Values still open when the event loop ends are
    closed with it (`asyncio.run` cancels their tasks and waits for them).
    """

    def __init__(self, make: Callable[[K], AbstractAsyncContextManager[T]], *, linger_s: float = LINGER_S) -> None:
        self._make = make
        self._linger_s = linger_s
        self._kept: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[K, _Kept[T]]] = WeakKeyDictionary()

    @asynccontextmanager
    async def use(self, key: K) -> AsyncIterator[T]:
        """Yield the value of `key`. Exceptions of `make` on opening it are raised here."""
        loop = asyncio.get_running_loop()
        values = self._kept.setdefault(loop, {})
        entry = values.get(key)
        if entry is None or entry.keeper.done():
            entry = values[key] = _Kept(self._make(key))
        entry.use()
        try:
            yield await asyncio.shield(entry.ready)
        finally:
            entry.leave(self._linger_s)

    def forget(self, key: K) -> None:
        """Close the value of `key`; the next use opens a new one."""
        if entry := self._kept.get(asyncio.get_running_loop(), {}).pop(key, None):
            entry.end()


class _Kept(Generic[T]):
    """One value, its task, and its number of users."""

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
        except BaseException as error:  # passed to the waiting tasks, which raise it
            if self.ready.done():
                raise
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved: asyncio doesn't log it if no task waits
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
