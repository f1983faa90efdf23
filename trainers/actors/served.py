"""Objects served by actors: methods of an interface as endpoints, and a client with the same methods.

    class ReplayBuffer(Served, interface=GroupBuffer): ...          # the actor; `setup` sets `self.served`
    class RemoteReplayBuffer(Client, interface=GroupBuffer): ...    # its client

`Served` is in `trainers.actors.actor`, so that this module doesn't import Monarch. If a caller is
cancelled, its call is withdrawn: it is cancelled in the actor's process too.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from trainers.actors.remote import ActorDiedError, result

T = TypeVar("T")


def methods_of(interface: type) -> dict[str, Callable[..., Any]]:
    """The public asynchronous methods that an interface declares, by name."""
    return {
        name: method
        for name, method in vars(interface).items()
        if inspect.iscoroutinefunction(method) and not name.startswith("_")
    }


def serving(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Method of an actor that calls the method `name` of the object it serves; returns None if it was withdrawn."""

    async def serve(self: Any, *args: Any, call: str = "", **options: Any) -> Any:
        return await self.calls.until_withdrawn(call, getattr(self.served, name)(*args, **options))

    serve.__name__ = serve.__qualname__ = name
    return serve


class Calls:
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
    pending.add_done_callback(_retrieve)
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


def _retrieve(call: asyncio.Future[Any]) -> None:
    """Retrieve a call's exception, so that asyncio doesn't log it if the call is no longer awaited."""
    if not call.cancelled():
        call.exception()


class Client:
    """Base class of clients of a served object; they can be sent to other actors, which then call it directly.

    A subclass is given the methods of its `interface`, which raise what the object raises.

    Args:
        actor: the actor that serves the object.
    """

    def __init_subclass__(cls, interface: type, granting: Collection[str] = ()) -> None:
        """Add the methods of `interface`; results of those in `granting` are passed to `undo` if withdrawn."""
        for name, method in methods_of(interface).items():
            setattr(cls, name, _calling(method, granting=name in granting))

    def __init__(self, actor: Any) -> None:
        self.actor = actor


def _calling(method: Callable[..., Any], *, granting: bool) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def call(self: Client, /, *args: Any, **options: Any) -> Any:
        endpoint = getattr(self.actor, method.__name__)
        return await withdrawn_when_cancelled(
            lambda name: result(endpoint.call_one(*args, call=name, **options)),
            lambda name: result(self.actor.withdraw.call_one(name)),
            (lambda granted: result(self.actor.undo.call_one(granted))) if granting else None,
        )

    return call
