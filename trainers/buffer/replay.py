"""The replay buffer: whole groups, from admission to the moment their weights have reached the generators."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainers.buffer.window import select, slots

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A group's place in the buffer.

    Attributes:
        index: order of admission, also the group's data position.
        version: policy version of the generators when it was admitted.
        group: what was rolled out; None until then.
    """

    index: int
    version: int
    group: T | None = None


@dataclass(slots=True)
class BufferStats:
    """Counters since the start."""

    admitted: int = 0
    completed: int = 0
    trained: int = 0
    discarded: int = 0
    max_staleness: int = 0
    staleness: list[int] = field(default_factory=list)


class ReplayBuffer(Generic[T]):
    """Admits groups, keeps the complete ones, and hands out batches within the staleness bound.

    With `needed`, no more groups are admitted than the run can train on, so none is rolled out in vain.

    See `trainers.buffer.window` for the bound and its proof. Everything waits on one condition; nothing polls.
    """

    def __init__(
        self,
        per_step: int,
        max_off_policy_steps: int,
        *,
        first_index: int = 0,
        version: int = 0,
        needed: int | None = None,
    ) -> None:
        self.per_step = per_step
        self._needed = needed
        self.max_off_policy_steps = max_off_policy_steps
        self.version = version
        self.stats = BufferStats()
        self._next_index = first_index
        self._pending: list[Ticket[T]] = []
        self._in_training: list[Ticket[T]] = []
        self._changed = asyncio.Condition()

    @property
    def ready(self) -> int:
        """Groups complete and not yet trained on."""
        return sum(ticket.group is not None for ticket in self._pending)

    @property
    def rolling(self) -> int:
        """Groups admitted and not complete."""
        return len(self._pending) - self.ready

    @property
    def oldest(self) -> Ticket[T] | None:
        """The longest-admitted group that is not complete."""
        return next((ticket for ticket in self._pending if ticket.group is None), None)

    async def admit(self) -> Ticket[T]:
        """A place for a new group; waits while all slots are taken, or the run has all the groups it needs."""
        async with self._changed:
            await self._changed.wait_for(self._has_room)
            ticket: Ticket[T] = Ticket(self._next_index, self.version)
            self._next_index += 1
            self._pending.append(ticket)
            self.stats.admitted += 1
            return ticket

    def _has_room(self) -> bool:
        taken = len(self._pending) + len(self._in_training)
        enough = self._needed is not None and self.stats.admitted - self.stats.discarded >= self._needed
        return taken < slots(self.per_step, self.max_off_policy_steps) and not enough

    async def add(self, ticket: Ticket[T], group: T) -> None:
        """The group of `ticket` is complete."""
        async with self._changed:
            ticket.group = group
            self.stats.completed += 1
            self._changed.notify_all()

    async def discard(self, ticket: Ticket[T]) -> None:
        """The group of `ticket` came to nothing; its slot is free again."""
        async with self._changed:
            self._pending.remove(ticket)
            self.stats.discarded += 1
            self._changed.notify_all()

    async def sample(self, per_step: int | None = None) -> list[Ticket[T]]:
        """The groups of the next training step, in order of admission; waits until they can be given.

        Args:
            per_step: fewer than usual, where the run has no more to train on.
        """
        size = per_step or self.per_step
        async with self._changed:
            chosen: list[int] | None = None
            while chosen is None:
                states = [(ticket.version, ticket.group is not None) for ticket in self._pending]
                chosen = select(states, self.version, size, self.max_off_policy_steps)
                if chosen is None:
                    await self._changed.wait()
            batch = [self._pending[position] for position in chosen]
            self._pending = [ticket for ticket in self._pending if ticket not in batch]
            self._in_training += batch
            return batch

    async def release(self, batch: list[Ticket[T]]) -> None:
        """The weights trained on `batch` have reached the generators: its slots are free, the version is one up."""
        async with self._changed:
            self._in_training = [ticket for ticket in self._in_training if ticket not in batch]
            self.version += 1
            self.stats.trained += len(batch)
            self._changed.notify_all()
