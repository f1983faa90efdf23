"""Calls that are ended in the process that answers them when whoever made them no longer waits."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from trainers.actors.remote import ActorDiedError

T = TypeVar("T")


class Withdrawable:
    """On the side that answers: calls under way, by the names that their callers gave them."""

    def __init__(self) -> None:
        self._calls: dict[str, asyncio.Task[Any]] = {}

    def withdraw(self, call: str) -> None:
        """Whoever made that call no longer waits for it."""
        if (task := self._calls.get(call)) is not None:
            task.cancel()

    async def until_withdrawn(self, call: str, work: Coroutine[Any, Any, T]) -> T | None:
        """Do `work`, which has come to its end when this returns; None when it was withdrawn."""
        if not call:
            return await work
        task = self._calls[call] = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        finally:
            del self._calls[call]
            task.cancel()


async def withdrawn_when_cancelled(
    make: Callable[[str], Awaitable[T]],
    withdraw: Callable[[str], Awaitable[object]],
    undo: Callable[[T], Awaitable[object]] | None = None,
    *,
    patience_s: float | None = None,
) -> T:
    """On the side that asks: make a call under a name; cancelled here, it is withdrawn there, and has ended.

    Args:
        make: makes the call under this name.
        withdraw: withdraws the call of this name.
        undo: takes back what was granted to it just then.
        patience_s: how long it may take to end there; an event loop that is held up never hears of it.
    """
    name = uuid.uuid4().hex
    pending: asyncio.Future[T] = asyncio.ensure_future(make(name))
    pending.add_done_callback(_seen)
    try:
        return await asyncio.shield(pending)
    except asyncio.CancelledError:
        try:
            with suppress(ActorDiedError, TimeoutError):  # where it died it has ended too
                async with asyncio.timeout(patience_s):
                    await withdraw(name)
                    granted = await pending
                    if granted is not None and undo is not None:
                        await undo(granted)
        finally:  # cancelled once more, too
            pending.cancel()
        raise


def _seen(call: asyncio.Future[Any]) -> None:
    """How a call ended that nobody waits for any more."""
    if not call.cancelled():
        call.exception()
