"""The replay buffer as an actor: a process of its own, which rollouts add to and trainers fetch from."""

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
"""Methods that hand something out, which is taken back when nobody waits for it any more."""


def _served(method: Callable[..., Coroutine[Any, Any, T]]) -> Any:
    """An endpoint that does what a method of the buffer does; None when it was withdrawn."""

    async def serve(self: ReplayBuffer, *args: Any, call: str = "", **options: Any) -> T | None:
        return await self._calls.until_withdrawn(call, method(self._buffer, *args, **options))

    serve.__name__, serve.__qualname__ = method.__name__, f"ReplayBuffer.{method.__name__}"
    return concurrent_endpoint(serve)


class ReplayBuffer(ForgeActor):
    """A `LocalReplayBuffer` behind endpoints; `RemoteReplayBuffer` gives it the buffer's own methods.

    Calls overlap, and those that wait hold up no other. `call` names a call for `withdraw`.

    Args:
        settings: of the buffer.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._calls = Withdrawable()

    @concurrent_endpoint
    async def setup(self) -> None:
        """Make the buffer; its rules may be somebody's own and fail."""
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
        """Whoever made that call no longer waits for it."""
        self._calls.withdraw(call)


def _remote(
    method: Callable[Concatenate[Buffer, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RemoteReplayBuffer[Any], P], Coroutine[Any, Any, T]]:
    """The same method of a buffer that is elsewhere; raises what it raises there.

    Cancelled here, the call is withdrawn there, and undone if it had just been granted.
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
    """A `GroupBuffer` over the actor. It can be sent to other actors, whose calls then go to the buffer directly."""

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
