"""The replay buffer as an actor in a separate process, and its client for rollout workers and trainers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from trainers.actors.actor import ForgeActor, concurrent_endpoint
from trainers.actors.remote import result
from trainers.actors.withdrawal import Withdrawable, withdrawn_when_cancelled
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings, G

P = ParamSpec("P")
T = TypeVar("T")
Buffer = LocalReplayBuffer[Any]
GRANTS = ("admit", "sample", "reserve")
"""Methods whose result is taken back if their caller was cancelled."""


def _served(method: Callable[..., Coroutine[Any, Any, T]]) -> Any:
    """Create an endpoint that calls a method of the buffer; it returns None if the call was withdrawn."""

    async def serve(self: ReplayBuffer, *args: Any, call: str = "", **options: Any) -> T | None:
        return await self._calls.until_withdrawn(call, method(self._buffer, *args, **options))

    serve.__name__, serve.__qualname__ = method.__name__, f"ReplayBuffer.{method.__name__}"
    return concurrent_endpoint(serve)


class ReplayBuffer(ForgeActor):
    """A `LocalReplayBuffer` behind endpoints; `RemoteReplayBuffer` is its client with the buffer's methods.

    Calls run concurrently; a waiting call blocks no other. The argument `call` is an identifier for `withdraw`.

    Args:
        settings: settings of the buffer.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._calls = Withdrawable()

    @concurrent_endpoint
    async def setup(self) -> None:
        """Create the buffer. Not done in the constructor because a custom rule may raise an error."""
        self._buffer: Buffer = LocalReplayBuffer(self._settings)

    admit = _served(Buffer.admit)
    add = _served(Buffer.add)
    in_progress = _served(Buffer.in_progress)
    discard = _served(Buffer.discard)
    sample = _served(Buffer.sample)
    reserve = _served(Buffer.reserve)
    fetch = _served(Buffer.fetch)
    batch_sizes = _served(Buffer.batch_sizes)
    sequences = _served(Buffer.sequences)
    set_reference = _served(Buffer.set_reference)
    release = _served(Buffer.release)
    evict = _served(Buffer.evict)
    clear = _served(Buffer.clear)
    restart = _served(Buffer.restart)
    undo = _served(Buffer.undo)
    stats = _served(Buffer.stats)
    state_dict = _served(Buffer.state_dict)
    load_state_dict = _served(Buffer.load_state_dict)

    @concurrent_endpoint
    async def withdraw(self, call: str) -> None:
        """Cancel the call with this identifier, whose caller no longer waits for it."""
        self._calls.withdraw(call)


def _remote(
    method: Callable[Concatenate[Buffer, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RemoteReplayBuffer[Any], P], Coroutine[Any, Any, T]]:
    """Create a method that calls the same method of the actor's buffer, and raises the same errors.

    If the caller is cancelled, the remote call is withdrawn; a result that was already granted is taken back.
    """

    async def call(self: RemoteReplayBuffer[Any], /, *args: P.args, **options: P.kwargs) -> T:
        endpoint = getattr(self.actor, method.__name__)
        return await withdrawn_when_cancelled(
            lambda name: result(endpoint.call_one(*args, call=name, **options)),
            lambda name: result(self.actor.withdraw.call_one(name)),
            (lambda granted: result(self.actor.undo.call_one(granted))) if method.__name__ in GRANTS else None,
        )

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


class RemoteReplayBuffer(Generic[G]):
    """Client of a `ReplayBuffer` actor, with the `GroupBuffer` interface.

    It can be sent to other actors, which then call the buffer directly.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    admit = _remote(Buffer.admit)
    add = _remote(Buffer.add)
    in_progress = _remote(Buffer.in_progress)
    discard = _remote(Buffer.discard)
    sample = _remote(Buffer.sample)
    reserve = _remote(Buffer.reserve)
    fetch = _remote(Buffer.fetch)
    batch_sizes = _remote(Buffer.batch_sizes)
    sequences = _remote(Buffer.sequences)
    set_reference = _remote(Buffer.set_reference)
    release = _remote(Buffer.release)
    evict = _remote(Buffer.evict)
    clear = _remote(Buffer.clear)
    restart = _remote(Buffer.restart)
    stats = _remote(Buffer.stats)
    state_dict = _remote(Buffer.state_dict)
    load_state_dict = _remote(Buffer.load_state_dict)
