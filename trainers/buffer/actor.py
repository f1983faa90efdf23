"""The replay buffer as an actor: a process of its own, which rollouts add to and trainers fetch from."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from trainers.actors.actor import ForgeActor, concurrent_endpoint
from trainers.actors.remote import result
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import Batch, BufferSettings, BufferStats, G, Outcome, Reservation, Ticket

T = TypeVar("T")


class ReplayBuffer(ForgeActor):
    """A `LocalReplayBuffer` behind endpoints; `RemoteReplayBuffer` gives it the buffer's own methods.

    Calls overlap, and those that wait hold up no other. `call` names a waiting call for `withdraw`.

    Args:
        settings: of the buffer.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._waiting: dict[str, asyncio.Task[Any]] = {}

    @concurrent_endpoint
    async def setup(self) -> None:
        """Make the buffer; its rules may be somebody's own and fail."""
        self._buffer: LocalReplayBuffer[Any] = LocalReplayBuffer(self._settings)

    @concurrent_endpoint
    async def admit(self, call: str = "") -> Ticket | None:
        """See `GroupBuffer`; None when withdrawn."""
        return await self._until_withdrawn(call, self._buffer.admit())

    @concurrent_endpoint
    async def add(self, group: Any, ticket: Ticket | None = None, call: str = "") -> Outcome | None:
        """See `GroupBuffer`; None when withdrawn."""
        return await self._until_withdrawn(call, self._buffer.add(group, ticket))

    @concurrent_endpoint
    async def discard(self, ticket: Ticket) -> None:
        """See `GroupBuffer`."""
        await self._buffer.discard(ticket)

    @concurrent_endpoint
    async def sample(self, curr_policy_version: int, call: str = "") -> Batch[Any] | None:
        """See `GroupBuffer`; None when withdrawn."""
        return await self._until_withdrawn(call, self._buffer.sample(curr_policy_version))

    @concurrent_endpoint
    async def reserve(self, curr_policy_version: int, call: str = "") -> Reservation | None:
        """See `GroupBuffer`; None when withdrawn."""
        return await self._until_withdrawn(call, self._buffer.reserve(curr_policy_version))

    @concurrent_endpoint
    async def fetch(self, step: int) -> Batch[Any]:
        """See `GroupBuffer`."""
        return await self._buffer.fetch(step)

    @concurrent_endpoint
    async def release(self, version: int) -> None:
        """See `GroupBuffer`."""
        await self._buffer.release(version)

    @concurrent_endpoint
    async def evict(self, curr_policy_version: int) -> int:
        """See `GroupBuffer`."""
        return await self._buffer.evict(curr_policy_version)

    @concurrent_endpoint
    async def clear(self) -> None:
        """See `GroupBuffer`."""
        await self._buffer.clear()

    @concurrent_endpoint
    async def restart(self, version: int) -> None:
        """See `GroupBuffer`."""
        await self._buffer.restart(version)

    @concurrent_endpoint
    async def undo(self, granted: Any) -> None:
        """See `LocalReplayBuffer`."""
        await self._buffer.undo(granted)

    @concurrent_endpoint
    async def stats(self) -> BufferStats:
        """See `GroupBuffer`."""
        return await self._buffer.stats()

    @concurrent_endpoint
    async def state_dict(self) -> dict[str, Any]:
        """See `GroupBuffer`."""
        return await self._buffer.state_dict()

    @concurrent_endpoint
    async def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `GroupBuffer`."""
        await self._buffer.load_state_dict(saved)

    @concurrent_endpoint
    async def withdraw(self, call: str) -> None:
        """Whoever made that call no longer waits for it."""
        if (task := self._waiting.get(call)) is not None:
            task.cancel()

    async def _until_withdrawn(self, call: str, work: Coroutine[Any, Any, T]) -> T | None:
        if not call:
            return await work
        task = self._waiting[call] = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        finally:
            del self._waiting[call]
            task.cancel()


class RemoteReplayBuffer(Generic[G]):
    """A `GroupBuffer` over the actor. It can be sent to other actors, whose calls then go to the buffer directly."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def admit(self) -> Ticket:
        """See `GroupBuffer`."""
        ticket: Ticket = await self._wait("admit")
        return ticket

    async def add(self, group: G, ticket: Ticket | None = None) -> Outcome:
        """See `GroupBuffer`; raises as `LocalReplayBuffer.add` does."""
        if ticket is not None:
            outcome: Outcome = await result(self._actor.add.call_one(group, ticket))
        else:
            outcome = await self._wait("add", group, None)
        return outcome

    async def discard(self, ticket: Ticket) -> None:
        """See `GroupBuffer`."""
        await result(self._actor.discard.call_one(ticket))

    async def sample(self, curr_policy_version: int) -> Batch[G]:
        """See `GroupBuffer`; raises as `LocalReplayBuffer.sample` does."""
        batch: Batch[G] = await self._wait("sample", curr_policy_version)
        return batch

    async def reserve(self, curr_policy_version: int) -> Reservation:
        """See `GroupBuffer`; raises as `LocalReplayBuffer.sample` does."""
        reserved: Reservation = await self._wait("reserve", curr_policy_version)
        return reserved

    async def fetch(self, step: int) -> Batch[G]:
        """See `GroupBuffer`; raises as `LocalReplayBuffer.fetch` does."""
        batch: Batch[G] = await result(self._actor.fetch.call_one(step))
        return batch

    async def release(self, version: int) -> None:
        """See `GroupBuffer`; raises as `LocalReplayBuffer.release` does."""
        await result(self._actor.release.call_one(version))

    async def evict(self, curr_policy_version: int) -> int:
        """See `GroupBuffer`."""
        dropped: int = await result(self._actor.evict.call_one(curr_policy_version))
        return dropped

    async def clear(self) -> None:
        """See `GroupBuffer`."""
        await result(self._actor.clear.call_one())

    async def restart(self, version: int) -> None:
        """See `GroupBuffer`."""
        await result(self._actor.restart.call_one(version))

    async def stats(self) -> BufferStats:
        """See `GroupBuffer`."""
        stats: BufferStats = await result(self._actor.stats.call_one())
        return stats

    async def state_dict(self) -> dict[str, Any]:
        """See `GroupBuffer`."""
        state: dict[str, Any] = await result(self._actor.state_dict.call_one())
        return state

    async def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `GroupBuffer`; raises as `LocalReplayBuffer.load_state_dict` does."""
        await result(self._actor.load_state_dict.call_one(saved))

    async def _wait(self, endpoint: str, *arguments: Any) -> Any:
        """A call that may wait. Cancelled here, it is withdrawn there, and undone if it had just been granted."""
        call = uuid.uuid4().hex
        pending = asyncio.ensure_future(result(getattr(self._actor, endpoint).call_one(*arguments, call=call)))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            await result(self._actor.withdraw.call_one(call))
            granted = await pending
            if isinstance(granted, Ticket | Reservation | Batch):
                await result(self._actor.undo.call_one(granted))
            raise
