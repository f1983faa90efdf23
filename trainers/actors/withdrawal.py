"""Withdrawal of remote calls: if the caller is cancelled, the call is cancelled in the actor's process too."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from trainers.actors.remote import ActorDiedError

T = TypeVar("T")


class Withdrawable:
    """Calls in progress on the actor's side, by the ids that their callers gave them."""

    def __init__(self) -> None:
        self._calls: dict[str, asyncio.Task[Any]] = {}

    def withdraw(self, call: str) -> None:
        """Cancel a call whose caller no longer waits for it."""
        if (task := self._calls.get(call)) is not None:
            task.cancel()

    async def until_withdrawn(self, call: str, work: Coroutine[Any, Any, T]) -> T | None:
        """Run `work` until it ends or is withdrawn; returns its result, or None if it was withdrawn."""
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
    """Make a call from the caller's side; if this is cancelled, withdraw the call and wait for its end.

    Args:
        make: makes the call with the given id.
        withdraw: withdraws the call with the given id.
        undo: called with the result if the call returned one although it was withdrawn, to release it.
        patience_s: maximum seconds to wait for a withdrawn call to end, since a blocked event loop can't cancel it;
            None: no limit.
    """
    name = uuid.uuid4().hex
    pending: asyncio.Future[T] = asyncio.ensure_future(make(name))
    pending.add_done_callback(_seen)
    try:
        return await asyncio.shield(pending)
    except asyncio.CancelledError:
        try:
            with suppress(ActorDiedError, TimeoutError):  # if the actor died, the call has ended too
                async with asyncio.timeout(patience_s):
                    await withdraw(name)
                    granted = await pending
                    if granted is not None and undo is not None:
                        await undo(granted)
        finally:  # also if cancelled again
            pending.cancel()
        raise


def _seen(call: asyncio.Future[Any]) -> None:
    """Retrieve a call's exception, so that asyncio doesn't log it if the call is no longer awaited."""
    if not call.cancelled():
        call.exception()
