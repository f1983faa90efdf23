"""Calls of actors' endpoints: their results and errors, their withdrawal, and clients made from an interface.

    class ReplayBuffer(Served, interface=LocalReplayBuffer): ...          # the actor; `setup` sets `self.served`
    class RemoteReplayBuffer(Client, interface=LocalReplayBuffer): ...    # its client, with the same methods

If the caller of a client's method is cancelled, its call is withdrawn: it is cancelled in the actor's process too.
Monarch is imported at the first call, so that a process can prepare for it; `Served` is in `trainers.actors.actor`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from forge_env.errors import ForgeError, InfrastructureError

T = TypeVar("T")


class ActorDiedError(InfrastructureError):
    """The called actor's process has ended, hangs, or can't be reached."""


class FurtherActorDiedError(InfrastructureError):
    """The called actor is alive and reports that another actor, which it had called, died."""


class RemoteError(ForgeError):
    """Replaces an error that can't be sent to another process; contains the error's type and text."""


def sendable(error: Exception) -> Exception:
    """Return the error itself if it can be sent to another process, otherwise a `RemoteError`."""
    import cloudpickle  # with which Monarch sends messages

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - its own methods may raise anything
        return RemoteError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    return error


async def result(call: Awaitable[Any]) -> Any:
    """Return a remote call's result; an error of the endpoint is raised here with its original type.

    Raises:
        ActorDiedError: the called process died. The call may or may not have been carried out.
        FurtherActorDiedError: the endpoint itself raised `ActorDiedError`.
    """
    from monarch.actor import ActorError

    try:
        return await call
    except ActorError as error:  # its text contains the other process's traceback
        if isinstance(error.exception, ActorDiedError):
            raise FurtherActorDiedError(error.exception.message, fix=error.exception.fix) from error
        if isinstance(error.exception, Exception):
            raise error.exception from error
        raise  # e.g. a task cancelled there, which must not cancel the caller
    except RuntimeError as error:  # Monarch's SupervisionError has no public name; an endpoint's own is an ActorError
        raise ActorDiedError(why_ended(str(error))) from error


async def agreed(call: Awaitable[Any]) -> Any:
    """Return the result of a call that all ranks answer alike, taken from the first; errors as in `result`."""
    _, value = next(iter((await result(call)).items()))
    return value


def why_ended(report: str) -> str:
    """Describe a death in words, from Monarch's report."""
    last = (report.strip().splitlines() or ["for no known reason"])[-1].strip()
    if killed := re.search(r"Killed\(sig=(\d+)\)", last):
        memory = " (which is also what the kernel sends when memory runs out)" if killed[1] == "9" else ""
        return f"its process was killed by signal {killed[1]}{memory}"
    if "timeout waiting for message" in last:
        return "its process has stopped, or its host is lost: it does not answer"
    return last


# --- objects served by actors


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
    """Base class of clients of a served object, with its methods; they can be sent to other actors."""

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
